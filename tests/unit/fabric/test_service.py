"""Tuples of running jobs."""

from kansoku.catalog import load_cluster
from kansoku.fabric.ecmp import smallest_k
from kansoku.fabric.service import QueuePair, tuple_of_queue_pair, tuples_of_run
from kansoku.model import ProcessGroup, RankFacts, RunFacts


def run_of(groups, nodes):
    ranks = tuple(
        RankFacts(
            rank=n, local_rank=local, world_size=len(nodes), node=node, pid=n, device=None,
            torch_version=None, python_version=None,
            groups=tuple(ProcessGroup(name=str(i), description=None, ranks=g)
                         for i, g in enumerate(groups) if n in g),
        )
        for n, (node, local) in enumerate(nodes)
    )  # fmt: skip
    return RunFacts(run="r", command=(), start_ns=0, end_ns=None, exit_code=None, slurm_job="1",
                    nodes=(), ranks=ranks)  # fmt: skip


def test_ring_neighbours_on_other_nodes_by_the_rail_of_their_gpu():
    cluster = load_cluster("sakuraone-h100")
    # Data-parallel pairs of the same local rank on two nodes; a tensor group inside a node.
    run = run_of([(0, 2), (1, 3), (0, 1)], [("c001", 0), ("c001", 7), ("c051", 0), ("c051", 7)])
    tuples = tuples_of_run(run, cluster)
    pairs = {(t.source, t.target) for t in tuples}
    assert pairs == {
        ("c001/mlx5_0", "c051/mlx5_0"), ("c051/mlx5_0", "c001/mlx5_0"),
        ("c001/mlx5_11", "c051/mlx5_11"), ("c051/mlx5_11", "c001/mlx5_11"),
    }  # fmt: skip
    assert len(tuples) == 4 * smallest_k(8)
    ports = [t.port for t in tuples if t.source == "c001/mlx5_0"]
    assert len(set(ports)) == len(ports)


def test_unknown_nodes_are_left_out():
    run = run_of([(0, 1)], [("laptop", 0), ("c051", 0)])
    assert tuples_of_run(run, load_cluster("sakuraone-h100")) == []


def test_a_queue_pair_becomes_its_tuple():
    pair = QueuePair(node="c001", device="mlx5_0", qpn=5, peer_qpn=6, peer_gid="fe80::2",
                     flow_label=0x4001, traffic_class=106, pid=9)  # fmt: skip
    found = tuple_of_queue_pair(pair, {"fe80::2": "c051/mlx5_0"})
    assert (found.source, found.target, found.port) == ("c001/mlx5_0", "c051/mlx5_0", 49152)
    assert tuple_of_queue_pair(pair, {}) is None

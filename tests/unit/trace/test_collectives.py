"""Collectives matched across ranks, by hand."""

import polars as pl
import pytest

from kansoku.model import ProcessGroup, RankFacts, RunFacts, table_schema
from kansoku.trace.blackbox import blocked_collectives, last_states
from kansoku.trace.clocks import estimate_clocks
from kansoku.trace.collectives import arrivals, bus_factor, collective_rows, summarise
from kansoku.trace.layout import group_keys, read_layout


def facts(*ranks):
    return RunFacts(
        run="r", command=(), start_ns=0, end_ns=None, exit_code=None, slurm_job=None, nodes=("n",),
        ranks=tuple(
            RankFacts(
                rank=number, local_rank=number, world_size=len(ranks), node="n", pid=number,
                device="cpu", torch_version=None, python_version=None,
                groups=tuple(ProcessGroup(name=n, description=d, ranks=r) for n, d, r in groups),
            )
            for number, groups in enumerate(ranks)
        ),
    )  # fmt: skip


def spans(*rows):
    """Rows: rank, kind, name, start, end or None, group, sequence, bytes."""
    schema = table_schema("spans")
    return pl.DataFrame(
        [
            {"run": "r", "rank": rank, "step": 0, "kind": kind, "name": name, "start_ns": start,
             "duration_ns": None if end is None else end - start, "id": n, "group": group,
             "sequence": sequence, "bytes": size, "thread": 1}
            for n, (rank, kind, name, start, end, group, sequence, size) in enumerate(rows)
        ],
        schema=dict(schema),
    )  # fmt: skip


TWO = facts([("0", "default_pg", (0, 1))], [("0", "default_pg", (0, 1))])


def test_wait_and_transfer_by_hand():
    table = spans(
        (0, "collective", "allreduce", 100, 400, "0", 1, 1000),
        (1, "collective", "allreduce", 300, 400, "0", 1, 1000),
        (0, "collective", "allreduce", 500, 700, "0", 2, 3000),
        (1, "collective", "allreduce", 500, 700, "0", 2, 3000),
    )
    rows = collective_rows(table, TWO)
    matched = arrivals(rows)
    assert matched["wait_ns"].to_list() == [200, 0, 0, 0]
    assert matched["late_ns"].to_list() == [0, 200, 0, 0]
    (one,) = summarise(rows, matched, TWO)
    assert (one.op, one.count, one.bytes, one.members) == ("all_reduce", 2, 4000, 2)
    # Transfer: 400-300 and 700-500; waiting 200 of the members' 300+100+200+200.
    assert one.transfer_ns == 300
    assert one.wait_ratio == pytest.approx(200 / 800)
    assert one.algbw_bytes_per_s == pytest.approx(4000 / 300e-9)
    assert one.busbw_bytes_per_s == pytest.approx(4000 / 300e-9)  # 2(n-1)/n is 1 for two ranks


def test_the_end_of_issuing_is_no_end():
    """On a device the host sees a collective issued: who came when is known, no time it took."""
    table = spans(
        (0, "collective", "allreduce", 100, 110, "0", 1, 1000),
        (1, "collective", "allreduce", 300, 310, "0", 1, 1000),
    ).with_columns(attributes=pl.lit('{"async":true,"no_times":true}'))
    rows = collective_rows(table, TWO)
    matched = arrivals(rows)
    assert matched["late_ns"].to_list() == [0, 200]
    assert matched["end_ns"].to_list() == [None, None]
    assert not estimate_clocks(matched, nodes={0: "a", 1: "b"}).applied
    (one,) = summarise(rows, matched, TWO)
    assert (one.count, one.bytes) == (1, 1000)
    assert (one.transfer_ns, one.busbw_bytes_per_s, one.wait_ratio) == (None, None, None)
    # Nor is it still open.
    assert not blocked_collectives(rows, TWO, last_states(table))


@pytest.mark.parametrize(
    ("op", "members", "factor"),
    [("all_reduce", 8, 1.75), ("all_gather", 8, 0.875), ("reduce_scatter", 4, 0.75),
     ("all_to_all", 4, 0.75), ("broadcast", 8, 1.0), ("send", 2, 1.0)],
)  # fmt: skip
def test_bus_factors_are_those_of_nccl_tests(op, members, factor):
    assert bus_factor(op, members) == factor


def test_subgroups_with_one_name_are_told_apart():
    mesh = facts(
        [("tp", "mesh_tp", (0, 1))], [("tp", "mesh_tp", (0, 1))],
        [("tp", "mesh_tp", (2, 3))], [("tp", "mesh_tp", (2, 3))],
    )  # fmt: skip
    assert group_keys(mesh)[0, "tp"] == "tp[0,1]"
    assert group_keys(mesh)[3, "tp"] == "tp[2,3]"
    table = spans(*((r, "collective", "all_reduce", r, 10, "tp", 5, 4) for r in range(4)))
    matched = arrivals(collective_rows(table, mesh))
    assert matched["seen"].to_list() == [2, 2, 2, 2]
    assert read_layout(mesh, table).to_json() == {"dp": 2, "tp": 2, "pp": 1}


def test_point_to_point_groups_without_a_name_are_a_pipeline():
    pipe = facts(*[[("0", "default_pg", (0, 1, 2, 3)), ("7", None, (0, 1, 2, 3))]] * 4)
    table = spans(
        (0, "collective", "send", 0, 1, "7", 1, 4), (1, "collective", "recv", 0, 1, "7", 1, 4)
    )
    layout = read_layout(pipe, table)
    assert layout.to_json() == {"dp": 1, "tp": 1, "pp": 4}
    assert layout.roles() == {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    assert layout.pipelines == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("description", "sizes"),
    [("mesh_dp", {"dp": 4}), ("mesh_fsdp", {"dp": 4}), ("mesh_pp", {"pp": 4}), ("TENSOR_MODEL_PARALLEL_GROUP", {"tp": 4}),
     ("PIPELINE_MODEL_PARALLEL_GROUP", {"pp": 4}), ("DATA_PARALLEL_GROUP", {"dp": 4}), ("mesh_cp", {"cp": 4}),
     ("default_pg", {"dp": 4})],
)  # fmt: skip
def test_axes_by_the_names_frameworks_give(description, sizes):
    run = facts(*[[("1", description, (0, 1, 2, 3))]] * 4)
    expected = {"dp": 1, "tp": 1, "pp": 1} | sizes
    assert read_layout(run, spans()).to_json() == expected


def test_who_is_waited_for():
    table = spans(
        (0, "step", "step", 0, None, None, None, None),
        (0, "backward", "backward", 5, None, None, None, None),
        (0, "collective", "all_reduce", 10, None, "0", 3, 4),
        (1, "step", "step", 0, None, None, None, None),
        (1, "collective", "all_reduce", 3, 8, "0", 2, 4),
        (1, "data_wait", "loader", 9, None, None, None, None),
    )
    states = {s.rank: s for s in last_states(table)}
    assert (states[0].kind, states[0].sequence, states[0].since_ns) == ("collective", 3, 10)
    assert states[0].path == ("step", "backward", "collective")
    assert (states[1].kind, states[1].since_ns) == ("data_wait", 9)
    (blocked,) = blocked_collectives(collective_rows(table, TWO), TWO, tuple(states.values()))
    assert (blocked.waiting, blocked.missing, blocked.op) == ((0,), (1,), "all_reduce")
    assert blocked.missing_states[1].kind == "data_wait"


def test_all_inside_and_nobody_missing():
    table = spans(
        (0, "collective", "all_reduce", 10, None, "0", 3, 4),
        (1, "collective", "all_reduce", 12, None, "0", 3, 4),
    )
    states = last_states(table)
    (blocked,) = blocked_collectives(collective_rows(table, TWO), TWO, states)
    assert (blocked.waiting, blocked.missing) == ((0, 1), ())


def test_groups_without_known_members_are_matched_with_nobody():
    """Each process named a group of its own "unknown-1": nothing says that it is the same."""
    own = ("unknown-1", None, ())
    table = spans(
        (0, "collective", "allreduce", 100, 400, "unknown-1", 1, 1000),
        (1, "collective", "allreduce", 300, 400, "unknown-1", 1, 1000),
        (1, "collective", "allreduce", 500, None, "unknown-1", 2, 1000),
    )
    two = facts([own], [own])
    rows = collective_rows(table, two)
    matched = arrivals(rows)
    assert matched.is_empty()
    seen = {one.group: one for one in summarise(rows, matched, two)}
    assert {name: (one.count, one.bytes) for name, one in seen.items()} == {
        "unknown-1 of rank 0": (1, 1000), "unknown-1 of rank 1": (2, 2000),
    }  # fmt: skip
    for one in seen.values():
        assert (one.busbw_bytes_per_s, one.wait_ratio) == (None, None)
        assert one.description == "members unknown"
    assert blocked_collectives(rows, two, last_states(table)) == ()
    assert read_layout(two, table).world == 2

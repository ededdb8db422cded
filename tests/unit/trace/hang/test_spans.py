"""States of a run's ranks: what was open, in which group."""

import polars as pl

from kansoku.model import ProcessGroup, RankFacts, RunFacts, table_schema
from kansoku.trace.hang.analyse import analyse_hang
from kansoku.trace.hang.spans import states_of_spans


def _facts(members):
    group = ProcessGroup(name="1", description=None, ranks=members)
    return RunFacts(
        run="r", command=(), start_ns=0, end_ns=None, exit_code=None, slurm_job=None, nodes=("n",),
        ranks=tuple(
            RankFacts(rank=n, local_rank=n, world_size=2, node="n", pid=n, device="cpu",
                      torch_version=None, python_version=None, groups=(group,))
            for n in range(2)
        ),
    )  # fmt: skip


def _spans():
    """Rank 0 is in the fifth reduction of its group "1", rank 1 did three of its own."""
    rows = [(0, n, 10) for n in range(1, 5)] + [(0, 5, None)] + [(1, n, 10) for n in range(1, 4)]
    return pl.DataFrame(
        [
            {"run": "r", "rank": rank, "step": 0, "kind": "collective", "name": "all_reduce",
             "start_ns": 100 * n, "duration_ns": duration, "id": at, "group": "1", "sequence": n,
             "thread": 1}
            for at, (rank, n, duration) in enumerate(rows, start=1)
        ],
        schema=dict(table_schema("spans")),
    )  # fmt: skip


def test_of_groups_without_known_members_nobody_is_waited_for():
    """With members, rank 1 is whom rank 0 waits for; without, the groups may be two."""
    known = analyse_hang(states_of_spans(_spans(), _facts((0, 1))))
    assert known.culprits == (1,)
    states = states_of_spans(_spans(), _facts(()))
    assert [sorted(state.groups) for state in states] == [["1 of rank 0"], ["1 of rank 1"]]
    assert analyse_hang(states).culprits == ()

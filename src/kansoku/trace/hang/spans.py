"""From the spans of our own run to ranks' states: what was open when recording ended."""

from collections import defaultdict

import polars as pl

from kansoku.model import RunFacts
from kansoku.trace.hang.record import Group, Operation, RankState, Status

__all__ = ["states_of_spans"]

_P2P = {"send", "recv", "isend", "irecv"}


def _operation(row: dict[str, object]) -> Operation:
    name = str(row["name"])
    is_p2p = name in _P2P
    sequence = row["sequence"] if isinstance(row["sequence"], int) else None
    return Operation(
        group=str(row["group"]),
        sequence=None if is_p2p else sequence,
        p2p_sequence=sequence if is_p2p else None,
        name=name.removeprefix("i") if is_p2p else name,
        peer=None,
        input_sizes=((int(str(row["bytes"])),),) if row["bytes"] is not None else (),
        output_sizes=(),
        dtypes=(str(row["dtype"]),) if row["dtype"] else (),
        # The host clock cannot tell a device's start: an open operation was issued.
        state="scheduled" if row["duration_ns"] is None else "completed",
        created_ns=int(str(row["start_ns"])),
    )


def states_of_spans(spans: pl.DataFrame, facts: RunFacts) -> list[RankState]:
    """Return one state per rank of the run: its last collectives, group by group."""
    collectives = spans.filter(
        (pl.col("kind") == "collective")
        & pl.col("group").is_not_null()
        & pl.col("sequence").is_not_null()
        & pl.col("rank").is_not_null()
    )
    reached: dict[int, dict[str, Status]] = defaultdict(dict)
    for row in (
        collectives.group_by("rank", "group")
        .agg(
            pl.col("sequence").max().alias("enqueued"),
            pl.col("sequence").filter(pl.col("duration_ns").is_not_null()).max().alias("completed"),
        )
        .iter_rows(named=True)
    ):
        completed = row["completed"] if row["completed"] is not None else row["enqueued"] - 1
        reached[row["rank"]][row["group"]] = Status(enqueued=row["enqueued"], completed=completed)
    open_now = collectives.filter(pl.col("duration_ns").is_null())
    operations: dict[int, list[Operation]] = defaultdict(list)
    for row in open_now.iter_rows(named=True):
        operations[row["rank"]].append(_operation(row))
    states = []
    for rank in facts.ranks:
        if rank.rank is None:
            continue
        states.append(
            RankState(
                rank=rank.rank,
                file=f"{rank.node}/{rank.pid}",
                groups={
                    group.name: Group(
                        name=group.name, description=group.description, ranks=group.ranks
                    )
                    for group in rank.groups
                },
                status=reached[rank.rank],
                operations=tuple(operations[rank.rank]),
            )
        )
    return states

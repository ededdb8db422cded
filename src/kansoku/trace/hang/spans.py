"""From the spans of our own run to ranks' states: what was open when recording ended."""

from collections import defaultdict

import polars as pl

from kansoku.model import RunFacts
from kansoku.trace.hang.record import Group, Operation, RankState, Status

__all__ = ["states_of_spans"]

_P2P = {"send", "recv", "isend", "irecv"}


def _operation(row: dict[str, object], group: str) -> Operation:
    name = str(row["name"])
    is_p2p = name in _P2P
    sequence = row["sequence"] if isinstance(row["sequence"], int) else None
    return Operation(
        group=group,
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
    # Of groups whose members are not known the names are the processes' own.
    own = {
        (r.rank, g.name): f"{g.name} of rank {r.rank}"
        for r in facts.ranks
        for g in r.groups
        if not g.ranks
    }
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
        group = own.get((row["rank"], row["group"]), row["group"])
        reached[row["rank"]][group] = Status(enqueued=row["enqueued"], completed=completed)
    open_now = collectives.filter(pl.col("duration_ns").is_null())
    operations: dict[int, list[Operation]] = defaultdict(list)
    for row in open_now.iter_rows(named=True):
        group = own.get((row["rank"], row["group"]), row["group"])
        operations[row["rank"]].append(_operation(row, group))
    states = []
    for rank in facts.ranks:
        if rank.rank is None:
            continue
        states.append(
            RankState(
                rank=rank.rank,
                file=f"{rank.node}/{rank.pid}",
                groups={
                    name: Group(name=name, description=group.description, ranks=group.ranks)
                    for group in rank.groups
                    for name in (own.get((rank.rank, group.name), group.name),)
                },
                status=reached[rank.rank],
                operations=tuple(operations[rank.rank]),
            )
        )
    return states

"""What every rank was in when the record ended, and which rank a collective waits for."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from kansoku.model.run import RunFacts
from kansoku.trace.clocks import ClockModel
from kansoku.trace.layout import group_keys

__all__ = ["BlockedCollective", "LastState", "blocked_collectives", "last_states"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastState:
    """The innermost thing a rank had begun and not ended."""

    rank: int
    step: int | None
    kind: str | None
    """None: between spans."""
    name: str | None
    group: str | None
    sequence: int | None
    since_ns: int | None
    """On the rank's own clock."""
    last_record_ns: int
    """When the rank last wrote anything."""
    path: tuple[str, ...]
    """Open spans, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedCollective:
    """A collective that some members have entered and others have not."""

    group: str
    sequence: int
    op: str
    waiting: tuple[int, ...]
    """Ranks inside, first come first."""
    missing: tuple[int, ...]
    """Members that never entered it: whom the others wait for."""
    entered_ns: int
    """When the first came, reference clock."""
    missing_states: Mapping[int, LastState | None]


def last_states(spans: pl.DataFrame) -> tuple[LastState, ...]:
    """Return the state of every rank at the end of its record."""
    opened = spans.filter(pl.col("duration_ns").is_null() & pl.col("rank").is_not_null())
    opened = opened.sort("rank", "start_ns", "id")
    by_rank: dict[int, list[dict[str, object]]] = {}
    for row in opened.iter_rows(named=True):
        by_rank.setdefault(row["rank"], []).append(row)
    states = []
    for rank, last_ns, step in _last(spans):
        rows = by_rank.get(rank, [])
        inner = [row for row in rows if row["kind"] != "step"]
        # A blocked collective says more than the phase that surrounds it, whatever its thread.
        top = next((r for r in reversed(inner) if r["kind"] == "collective"), None)
        top = top or (inner[-1] if inner else None)
        states.append(
            LastState(
                rank=rank,
                step=step,
                kind=_text(top, "kind"),
                name=_text(top, "name"),
                group=_text(top, "group"),
                sequence=_number(top, "sequence"),
                since_ns=_number(top, "start_ns"),
                last_record_ns=last_ns,
                path=tuple(str(row["kind"]) for row in rows),
            )
        )
    return tuple(states)


def _last(spans: pl.DataFrame) -> list[tuple[int, int, int | None]]:
    """Return rank, end of its last span and highest step, in the order of ranks.

    By NumPy: of millions of rows, grouping would cost more memory than all else in a report.
    """
    rows = spans.select("rank", "start_ns", "duration_ns", "step")
    if rows["rank"].null_count():
        rows = rows.filter(pl.col("rank").is_not_null())
    ranks, place = np.unique(rows["rank"].to_numpy(), return_inverse=True)
    ends = np.full(len(ranks), np.iinfo(np.int64).min)
    np.maximum.at(ends, place, (rows["start_ns"] + rows["duration_ns"].fill_null(0)).to_numpy())
    steps = np.full(len(ranks), _NO_STEP)
    np.maximum.at(steps, place, rows["step"].cast(pl.Int64).fill_null(_NO_STEP).to_numpy())
    return [
        (rank, end, None if step == _NO_STEP else step)
        for rank, end, step in zip(ranks.tolist(), ends.tolist(), steps.tolist(), strict=True)
    ]


_NO_STEP = np.iinfo(np.int64).min


def _text(row: dict[str, object] | None, key: str) -> str | None:
    value = None if row is None else row[key]
    return None if value is None or value == "" else str(value)


def _number(row: dict[str, object] | None, key: str) -> int | None:
    value = None if row is None else row[key]
    return value if isinstance(value, int) else None


def blocked_collectives(
    rows: pl.DataFrame,
    facts: RunFacts,
    states: tuple[LastState, ...],
    clocks: ClockModel | None = None,
) -> tuple[BlockedCollective, ...]:
    """Return open collectives and the members they wait for, earliest entered first.

    ``rows`` is what :func:`kansoku.trace.collectives.collective_rows` returns. A member is missing
    when it never started that sequence number of the group. Where a group's members are not known,
    nobody can say whom it waits for.
    """
    rows = rows.filter(pl.col("group").is_not_null() & pl.col("sequence").is_not_null())
    start = clocks.corrected("start_ns") if clocks is not None else pl.col("start_ns")
    opened = rows.filter(pl.col("end_ns").is_null()).with_columns(entered=start)
    if opened.is_empty():
        return ()
    keys = group_keys(facts)
    members: dict[str, tuple[int, ...]] = {}
    for rank in facts.ranks:
        for group in rank.groups:
            if rank.rank is not None:
                members[keys.get((rank.rank, group.name), group.name)] = group.ranks
    state_of = {state.rank: state for state in states}
    seen = rows.join(
        opened.select("group", "sequence").unique(), on=["group", "sequence"], how="semi"
    )
    started = {
        (group, sequence): set(ranks)
        for group, sequence, ranks in seen.group_by("group", "sequence")
        .agg(pl.col("rank"))
        .iter_rows()
    }
    found = []
    for (group, sequence), part in opened.sort("entered").group_by(
        "group", "sequence", maintain_order=True
    ):
        name, number = str(group), int(str(sequence))
        known = members.get(name)
        if known is None:
            known = tuple(sorted(rows.filter(pl.col("group") == name)["rank"].unique().to_list()))
        if not known:
            continue
        missing = tuple(rank for rank in known if rank not in started[name, number])
        found.append(
            BlockedCollective(
                group=name,
                sequence=number,
                op=str(part["op"][0]),
                waiting=tuple(part["rank"].to_list()),
                missing=missing,
                entered_ns=int(part["entered"][0]),
                missing_states={rank: state_of.get(rank) for rank in missing},
            )
        )
    return tuple(found)

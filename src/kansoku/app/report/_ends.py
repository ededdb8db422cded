"""Which rank ended first in a job that failed: what the records show, and no more.

Where each process was watched (``kansoku attach``), its exit code and the time of its end are
known. Elsewhere a record that was closed within a step tells when its process ended, an open one
only that it was alive until then: a rank ended first if it closed its record while all others
still wrote. Of one closed between steps only the last word's time is known, and only that is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kansoku.app._few_ranks import few_ranks
from kansoku.app.report._states import BlackBox, RankState

__all__ = ["FirstEnd", "first_end"]

_UNSURE_NS = 100_000_000
"""Ends are noticed within some 50 ms, and clocks of hosts differ: nearer ones have no order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstEnd:
    """The rank that ended first."""

    rank: RankState
    ended_ns: int
    sentence: str
    evidence: str
    after: frozenset[int]
    """Ranks that ended after it for sure."""
    sure: bool


def first_end(box: BlackBox, exit_code: int | None) -> FirstEnd | None:
    """Return who ended first in a job that failed; None where nothing shows it."""
    if not box.stopped or not box.ranks:
        return None
    if any(rank.end is not None for rank in box.ranks):
        return _by_exits(box.ranks)
    return _by_records(box.ranks) if exit_code not in (0, None) else None


def _how(rank: RankState) -> str:
    code = None if rank.end is None else rank.end.exit_code
    return "was ended by a signal" if code is None else f"exited with code {code}"


def _where(rank: RankState) -> str:
    return "" if rank.state.step is None else f" in step {rank.state.step}"


def _seconds(value_ns: int) -> str:
    return f"{value_ns / 1e9:.1f} s" if value_ns >= _UNSURE_NS else f"{value_ns / 1e6:.0f} ms"


def _by_exits(ranks: Sequence[RankState]) -> FirstEnd | None:
    ends = sorted(
        (rank.end.ended_ns, rank.rank, rank)
        for rank in ranks
        if rank.failed and rank.end is not None and rank.end.ended_ns is not None
    )
    if not ends:
        return None
    (at, _, first), later = ends[0], ends[1:]
    sentence = f"Rank {first.rank} (pid {first.pid} on {first.node}) {_how(first)}{_where(first)}"
    near = [number for time, number, _ in later if time - at < _UNSURE_NS]
    if near:
        sentence += f"; {few_ranks(near)} ended within 0.1 s of it, so which was first is not sure."
    elif len(later) == 1:
        sentence += f", {_seconds(later[0][0] - at)} before rank {later[0][1]} {_how(later[0][2])}."
    elif later:
        others = few_ranks(sorted(number for _, number, _ in later))
        sentence += f", {_seconds(later[0][0] - at)} before the first of {others} ended."
    else:
        sentence += "; no other rank failed."
    return FirstEnd(
        rank=first,
        ended_ns=at,
        sentence=sentence,
        evidence=f"rank {first.rank} {_how(first)}",
        after=frozenset(number for time, number, _ in later if time - at >= _UNSURE_NS),
        sure=not near,
    )


def _by_records(ranks: Sequence[RankState]) -> FirstEnd | None:
    closed = [
        (rank.closed_ns or rank.alive_ns or 0, rank.rank, rank)
        for rank in ranks
        if rank.process == "ended"
    ]
    if not closed or len(ranks) < 2:
        return None
    at, _, first = min(closed)
    others = [rank for rank in ranks if rank.rank != first.rank]
    gone = frozenset(rank.rank for rank in others if rank.process == "gone")
    gap = min(rank.alive_ns or 0 for rank in others) - at
    nearest = min(others, key=lambda rank: rank.alive_ns or 0)
    sure = first.closed_ns is not None
    one_clock = len({rank.node for rank in ranks}) == 1
    if gap <= (0 if sure and one_clock else _UNSURE_NS) or not (sure or gone):
        return None
    who = f"rank {first.rank} (pid {first.pid} on {first.node})"
    which = "the last sign of life of" if nearest.process == "gone" else "the end of"
    which += f" rank {nearest.rank}{', the next' if len(others) > 1 else ''}"
    sentence = (
        f"R{who[1:]} was the first to end: it closed its record{_where(first)}, "
        f"{_seconds(gap)} before {which}."
        if sure
        else f"The record of {who} ends first, in order,{_where(first)}: "
        f"{few_ranks([rank.rank for rank in others])} went on for {_seconds(gap)} and more."
    )
    return FirstEnd(
        rank=first,
        ended_ns=at,
        sentence=sentence,
        evidence=f"the record of rank {first.rank} is closed, and the others' go on after it",
        after=gone,
        sure=sure,
    )

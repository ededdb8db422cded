"""What bounds a step of a recorded run: the main thread's innermost span at every moment.

A run records the host's phases, not device rows, so a rank's chain is its main thread: no moment
is in two segments, and they sum to the step. The time in a collective before its last member came
is waiting for that rank; what follows is the transfer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kansoku.trace.kineto.critical_path import CriticalPath, sum_segments

__all__ = ["HostSpan", "LastArrival", "host_path"]

_COMPUTE = frozenset({"forward", "backward", "optimizer"})
_COLLECTIVE = frozenset({"collective", "collective_wait"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """One span of a rank's main thread."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    collective: tuple[str | None, str, int] | None = None
    """Group, operation and sequence number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastArrival:
    """When and through whom a collective was complete, on the clock of the rank asked about."""

    rank: int
    at_ns: int


def host_path(
    step: int | None,
    start_ns: int,
    end_ns: int,
    spans: Iterable[HostSpan],
    last: Mapping[tuple[str | None, str, int], LastArrival],
) -> CriticalPath:
    """Return the path of one rank's step; spans in any order, parts outside the step dropped."""
    segments: list[tuple[str, str, int, int]] = []
    for span, low, high in _innermost(start_ns, end_ns, spans):
        segments += _segments(span, low, high, last)
    return sum_segments(step, start_ns, end_ns, segments)


def _innermost(
    start: int, end: int, spans: Iterable[HostSpan]
) -> list[tuple[HostSpan | None, int, int]]:
    """Cut the window at every boundary; a span that outlives its parent is cut with it."""
    inside = [span for span in spans if span.end_ns > start and span.start_ns < end]
    inside.sort(key=lambda span: (span.start_ns, -span.end_ns, span.kind, span.name))
    out: list[tuple[HostSpan | None, int, int]] = []
    opened: list[tuple[HostSpan, int]] = []
    at = start

    def go(to: int) -> None:
        nonlocal at
        while opened and opened[-1][1] <= to:
            note(opened[-1][1])
            opened.pop()
        note(to)

    def note(to: int) -> None:
        nonlocal at
        if to > at:
            out.append((opened[-1][0] if opened else None, at, to))
            at = to

    for span in inside:
        go(max(span.start_ns, start))
        limit = opened[-1][1] if opened else end
        opened.append((span, min(span.end_ns, limit)))
    go(end)
    return out


def _segments(
    span: HostSpan | None,
    low: int,
    high: int,
    last: Mapping[tuple[str | None, str, int], LastArrival],
) -> Sequence[tuple[str, str, int, int]]:
    if span is None:
        return [("host", "", low, high)]
    if span.kind in _COMPUTE:
        return [("compute", span.kind, low, high)]
    if span.kind not in _COLLECTIVE:
        return [("host", span.kind, low, high)]
    arrival = None if span.collective is None else last.get(span.collective)
    complete = low if arrival is None else min(max(arrival.at_ns, low), high)
    parts = []
    if arrival is not None and complete > low:
        parts.append(("synchronisation", f"wait for rank {arrival.rank}", low, complete))
    if high > complete:
        parts.append(("communication", span.name, complete, high))
    return parts

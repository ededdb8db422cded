"""Begin and end events (``ph`` B and E) joined to slices.

Kineto writes complete slices; other writers of the format, and tools that rewrite traces, write
pairs. An end closes the innermost open beginning of its thread (of its name, where it has one), by
time, not by place in the file.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kansoku.formats.kineto._events import Arguments, Event

__all__ = ["Edge", "pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One beginning or end."""

    at_ns: int
    ends: bool
    category: str | None
    name: Any
    process: Any
    thread: Any
    arguments: Arguments | None


def pair(edges: Iterable[Edge]) -> tuple[list[Event], Counter[str]]:
    """Return the slices, and the reasons why edges belong to none."""
    lanes: defaultdict[tuple[str, str], list[Edge]] = defaultdict(list)
    for edge in edges:
        lanes[str(edge.process), str(edge.thread)].append(edge)
    events: list[Event] = []
    alone: Counter[str] = Counter()
    for lane in lanes.values():
        _pair_lane(lane, events, alone)
    return events, alone


def _pair_lane(lane: list[Edge], events: list[Event], alone: Counter[str]) -> None:
    lane.sort(key=lambda edge: (edge.at_ns, str(edge.name)))
    opened: list[Edge] = []
    for _, together in groupby(lane, key=lambda edge: edge.at_ns):
        now = list(together)
        # At one time: what is open ends, then others begin, and end again if they are empty.
        late = [edge for edge in now if edge.ends and not _close(edge, opened, events)]
        opened += [edge for edge in now if not edge.ends]
        for edge in late:
            if not _close(edge, opened, events):
                alone["an end without a beginning"] += 1
    if opened:
        alone["a beginning without an end"] += len(opened)


def _close(end: Edge, opened: list[Edge], events: list[Event]) -> bool:
    for place in range(len(opened) - 1, -1, -1):
        begin = opened[place]
        if end.name in (None, "", begin.name):
            del opened[place]
            events.append(
                Event(
                    cat=begin.category or end.category,
                    name=begin.name,
                    pid=begin.process,
                    tid=begin.thread,
                    ts=_us(begin.at_ns),
                    dur=_us(end.at_ns - begin.at_ns),
                    args=begin.arguments or end.arguments,
                )
            )
            return True
    return False


def _us(ns: int) -> str:
    """Return microseconds as text: no double comes between the nanosecond and its reader."""
    return f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"

"""What bounds a step: one chain of waiting, walked back from the last thing that ended.

From a device row the walk goes to whatever let it start last: the row before it on its stream, a
row of another stream that ended just before (an event wait), or the call that launched it. From a
call it goes back along the host to the last synchronisation that really waited, and from there to
the device row it waited for. The segments found never overlap and sum to the window.

The chain is inferred from one rank: host threads count as one, and a collective on the path may
itself be waiting for another rank (``trace stragglers`` tells).
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind
from kansoku.formats.kineto import KinetoTrace
from kansoku.trace.kineto.breakdown import find_steps, unions
from kansoku.trace.kineto.rows import DeviceRows, device_rows

__all__ = [
    "CRITICAL_KINDS",
    "CriticalPath",
    "PathRow",
    "RankPaths",
    "RankWalk",
    "critical_path",
    "sum_segments",
]

CRITICAL_KINDS = (
    "compute",
    "communication",
    "memory",
    "stream_gap",
    "launch",
    "synchronisation",
    "host",
)
"""``stream_gap``: between a device row and the one that let it go; ``launch``: the call and the
time until its row starts; ``synchronisation``: from the end of device work to the return of the
call that waited for it."""

_Note = Callable[[str, str, int, int], None]

_EVENT_WAIT_LIMIT_NS = 10_000
"""A row of another stream that ended at most this long before counts as what was waited for."""
_SYNC = re.compile(
    r"(?i)synchronize|^(?:cuda|hip)(?:Memcpy|Free|Malloc)$|MemcpyWithStream|Memcpy(?:DtoH|HtoD)(?:_v2)?$"
)
_DEVICE_WORD = {
    RowKind.COMPUTE: "compute",
    RowKind.COLLECTIVE: "communication",
    RowKind.MEMCPY: "memory",
    RowKind.MEMSET: "memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRow:
    """Everything of one name and kind on the path."""

    kind: str
    name: str
    count: int
    total_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The critical path of one window."""

    step: int | None
    start_ns: int
    end_ns: int
    totals_ns: dict[str, int]
    """Kind to time on the path; sums to the window."""
    rows: tuple[PathRow, ...]
    """Longest first."""
    segments: tuple[tuple[str, str, int, int], ...]
    """(kind, name, start, end) in time order."""

    @property
    def bound_by(self) -> str:
        """The kind with the most time on the path."""
        return max(CRITICAL_KINDS, key=lambda kind: self.totals_ns[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPaths:
    """The critical paths of one file."""

    file: str
    said_rank: int | None
    named_rank: int | None
    world_size: int | None
    base_ns: int
    paths: tuple[CriticalPath, ...]
    incomplete: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWalk:
    """The work of one file, for any process: the choice travels with it."""

    steps: bool

    def __call__(self, trace: KinetoTrace, named_rank: int | None) -> RankPaths:
        """Walk the paths of a trace."""
        return RankPaths(
            file=trace.file,
            said_rank=trace.metadata.rank,
            named_rank=named_rank,
            world_size=trace.metadata.world_size,
            base_ns=trace.base_ns,
            paths=tuple(critical_path(trace, steps=self.steps)),
            incomplete=tuple(trace.problems),
        )


def critical_path(trace: KinetoTrace, *, steps: bool = True) -> list[CriticalPath]:
    """Return the critical path of every step (or of the whole file); empty without device rows."""
    rows = device_rows(trace)
    if len(rows.start) == 0:
        return []
    walker = _Walker(trace, rows)
    if steps:
        windows = [(s.step, s.start_ns, s.end_ns) for s in find_steps(trace, rows, unions(rows))]
    else:
        windows = [(None, *_whole(trace, rows))]
    return [walker.walk(step, start, end) for step, start, end in windows if end > start]


def _whole(trace: KinetoTrace, rows: DeviceRows) -> tuple[int, int]:
    start, end = int(rows.start.min()), int(rows.end.max())
    if trace.host_start_ns is not None and trace.host_end_ns is not None:
        return min(start, trace.host_start_ns), max(end, trace.host_end_ns)
    return start, end


class _Walker:
    def __init__(self, trace: KinetoTrace, rows: DeviceRows) -> None:
        self._trace, self._rows = trace, rows
        self._start, self._end = rows.start.tolist(), rows.end.tolist()
        self._previous = self._previous_on_stream()
        self._by_end = np.argsort(rows.end, kind="stable")
        self._ends = rows.end[self._by_end]
        columns = trace.columns
        self._call_start = columns["start_ns"]
        self._call_end = columns["start_ns"] + columns["duration_ns"]
        self._waits, self._wait_ends = self._find_waits()

    def _previous_on_stream(self) -> list[int]:
        """For each row the one before it on its stream, by start; -1 for the first."""
        lane = self._rows.lane
        order = np.lexsort((np.arange(len(lane)), lane))
        previous = np.full(len(lane), -1, np.int64)
        same = lane[order][1:] == lane[order][:-1]
        previous[order[1:][same]] = order[:-1][same]
        return list(map(int, previous))

    def _find_waits(self) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
        """Return (call, device row) of synchronising calls inside which device work ended."""
        trace, columns = self._trace, self._trace.columns
        codes = [code for code, name in enumerate(trace.names) if _SYNC.search(name)]
        calls = np.flatnonzero(
            (columns["kind"] == RowKind.LAUNCH) & np.isin(columns["name"], codes)
        )
        found = []
        place = np.searchsorted(self._ends, self._call_end[calls], side="right") - 1
        for call, at in zip(calls.tolist(), place.tolist(), strict=True):
            if at >= 0 and self._ends[at] > self._call_start[call]:
                found.append((call, int(self._by_end[at])))
        found.sort(key=lambda pair: (int(self._call_end[pair[0]]), pair))
        return found, np.array([self._call_end[call] for call, _ in found], np.int64)

    def walk(self, step: int | None, start: int, end: int) -> CriticalPath:
        segments: list[tuple[str, str, int, int]] = []

        def note(kind: str, name: str, low: int, high: int) -> None:
            low, high = max(low, start), min(high, end)
            if high > low:
                segments.append((kind, name, low, high))

        at = end
        place = int(np.searchsorted(self._ends, end, side="right")) - 1
        row = self._latest_running(end, place)
        if row < 0:
            note("host", "", start, end)
        else:
            at = min(self._end[row], end)
            note("host", "", at, end)
        while row >= 0 and at > start:
            note(self._word(row), self._name(row), self._start[row], at)
            at = self._start[row]
            row, at = self._before(row, at, note)
            if row < 0:
                note("host", "", start, at)
        return sum_segments(step, start, end, segments)

    def _latest_running(self, end: int, place: int) -> int:
        """Return the row that is last at work before the end of the window; -1 if none."""
        last = int(np.searchsorted(self._rows.start, end, side="left")) - 1
        if last >= 0 and self._end[last] >= end:
            return last
        return int(self._by_end[place]) if place >= 0 else -1

    def _before(self, row: int, at: int, note: _Note) -> tuple[int, int]:
        """Return the device row that the walk goes on with and the time there; -1 to stop."""
        previous = self._previous[row]
        call = int(self._rows.launch[row])
        stream_end = self._end[previous] if previous >= 0 else None
        # A row cannot start before its call has begun; a call may return after its row started.
        launched = min(int(self._call_start[call]), at) if call >= 0 else None
        ready = min(int(self._call_end[call]), at) if call >= 0 else None
        best = max((t for t in (stream_end, ready) if t is not None), default=None)
        other = self._other_stream(row, at, best)
        if other >= 0:
            note("stream_gap", "wait for another stream", self._end[other], at)
            return other, min(self._end[other], at)
        if stream_end is not None and previous >= 0 and (ready is None or stream_end >= ready):
            reached = min(stream_end, at)
            note("stream_gap", "", reached, at)
            return previous, reached
        if launched is None:
            return -1, at
        note("launch", self._trace.names[int(self._trace.columns["name"][call])], launched, at)
        return self._host(row, launched, note)

    def _other_stream(self, row: int, at: int, best: int | None) -> int:
        place = int(np.searchsorted(self._ends, at, side="right")) - 1
        while place >= 0:
            ended = int(self._ends[place])
            if at - ended > _EVENT_WAIT_LIMIT_NS or (best is not None and ended <= best):
                return -1
            candidate = int(self._by_end[place])
            if candidate < row and self._rows.lane[candidate] != self._rows.lane[row]:
                return candidate
            place -= 1
        return -1

    def _host(self, row: int, at: int, note: _Note) -> tuple[int, int]:
        """Go back along the host to the last call that waited for the device before ``at``."""
        place = int(np.searchsorted(self._wait_ends, at, side="right")) - 1
        while place >= 0:
            call, waited = self._waits[place]
            if waited < row:
                returned = int(self._call_end[call])
                note("host", "", returned, at)
                name = self._trace.names[int(self._trace.columns["name"][call])]
                reached = min(self._end[waited], returned)
                note("synchronisation", name, reached, returned)
                return waited, reached
            place -= 1
        return -1, at

    def _word(self, row: int) -> str:
        return _DEVICE_WORD[RowKind(int(self._rows.kind[row]))]

    def _name(self, row: int) -> str:
        return self._trace.names[int(self._rows.name[row])]


def sum_segments(
    step: int | None, start: int, end: int, segments: list[tuple[str, str, int, int]]
) -> CriticalPath:
    """Return the path that segments (kind, name, start, end) make up."""
    totals = dict.fromkeys(CRITICAL_KINDS, 0)
    named: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for kind, name, low, high in segments:
        totals[kind] += high - low
        entry = named[(kind, name)]
        entry[0] += 1
        entry[1] += high - low
    rows = [
        PathRow(kind=kind, name=name, count=count, total_ns=total)
        for (kind, name), (count, total) in named.items()
    ]
    return CriticalPath(
        step=step,
        start_ns=start,
        end_ns=end,
        totals_ns=totals,
        rows=tuple(sorted(rows, key=lambda r: (-r.total_ns, r.kind, r.name))),
        segments=tuple(sorted(segments, key=lambda s: (s[2], s[3]))),
    )

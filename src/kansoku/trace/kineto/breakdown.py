"""Where the time of one rank goes: busy, idle, compute, communication, overlap; whole and by step.

Definitions: span = first start to last end of device work; busy = union of all device work; idle =
span − busy; communication = union of collective kernels; compute = union of the other kernels;
memory = union of copies and sets; overlap = intersection of communication and compute; exposed
communication = communication − overlap.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind
from kansoku.formats.kineto import KinetoTrace
from kansoku.trace.kineto.intervals import IntervalSet, gaps, intersect, union
from kansoku.trace.kineto.rows import DeviceRows, codes_in

__all__ = [
    "NO_FIGURES",
    "Figures",
    "IdleSplit",
    "StepFigures",
    "Unions",
    "figures",
    "find_steps",
    "unions",
]

# Numbers of at most nine digits: what tables hold, in 32 bits.
_PROFILER_STEP = re.compile(r"ProfilerStep[*#]?\s*#?(\d{1,9})(?!\d)")
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")
_ALT_STEP = re.compile(r"(?i)^(?:train(?:ing)?[_ ]?)?(?:step|iteration)[ _#:=]+(\d{1,9})$")

KERNEL_WAIT_LIMIT_NS = 30
"""A gap up to this long between launched rows is the device's own (HTA's 30 ns threshold)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Times of a window, ns; None where there is no device row to measure."""

    span_ns: int | None
    busy_ns: int | None
    idle_ns: int | None
    compute_ns: int | None
    communication_ns: int | None
    memory_ns: int | None
    overlap_ns: int | None
    exposed_communication_ns: int | None


NO_FIGURES = Figures(
    span_ns=None,
    busy_ns=None,
    idle_ns=None,
    compute_ns=None,
    communication_ns=None,
    memory_ns=None,
    overlap_ns=None,
    exposed_communication_ns=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One step of one rank: figures within its window on the host's clock."""

    step: int | None
    source: str
    """``ProfilerStep``, ``optimizer``, ``annotation`` or ``window``."""
    start_ns: int
    end_ns: int
    figures: Figures
    """Here span is the window's length and idle = span − busy within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unions:
    """The interval sets that every figure comes from."""

    busy: IntervalSet
    compute: IntervalSet
    communication: IntervalSet
    memory: IntervalSet
    overlap: IntervalSet


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSplit:
    """Idle time by reason, ns; the three sum to idle."""

    host_bound_ns: int
    """The next row was launched only after the device had run dry."""
    kernel_wait_ns: int
    """Gaps of at most 30 ns between rows already launched."""
    other_ns: int
    """Launched in time, yet not started: a dependency, or no launch is known."""


def unions(rows: DeviceRows) -> Unions:
    """Return the unions of device work by kind."""

    def of(mask: NDArray[np.bool_]) -> IntervalSet:
        return union(rows.start[mask], rows.duration[mask])

    kind = rows.kind
    compute, communication = of(kind == RowKind.COMPUTE), of(kind == RowKind.COLLECTIVE)
    return Unions(
        busy=union(rows.start, rows.duration),
        compute=compute,
        communication=communication,
        memory=of((kind == RowKind.MEMCPY) | (kind == RowKind.MEMSET)),
        overlap=intersect(communication, compute),
    )


def figures(sets: Unions, rows: DeviceRows) -> Figures:
    """Return the figures of the whole file."""
    if len(rows.start) == 0:
        return NO_FIGURES
    start, end = rows.bounds
    return _of_lengths(
        end - start,
        busy=sets.busy.total_ns,
        compute=sets.compute.total_ns,
        communication=sets.communication.total_ns,
        memory=sets.memory.total_ns,
        overlap=sets.overlap.total_ns,
    )


def _of_lengths(
    span: int, *, busy: int, compute: int, communication: int, memory: int, overlap: int
) -> Figures:
    return Figures(
        span_ns=span,
        busy_ns=busy,
        idle_ns=span - busy,
        compute_ns=compute,
        communication_ns=communication,
        memory_ns=memory,
        overlap_ns=overlap,
        exposed_communication_ns=communication - overlap,
    )


def _windows(sets: Unions, starts: list[int], ends: list[int]) -> list[Figures]:
    """Return the figures of each window; all at once, a call of NumPy a window costs more."""
    parts = {
        name: _lengths(getattr(sets, name), starts, ends)
        for name in ("busy", "compute", "communication", "memory", "overlap")
    }
    return [
        _of_lengths(end - start, **{name: lengths[number] for name, lengths in parts.items()})
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def _lengths(intervals: IntervalSet, starts: list[int], ends: list[int]) -> list[int]:
    before = intervals.covered(starts + ends)
    found: list[int] = (before[len(starts) :] - before[: len(starts)]).tolist()
    return found


def idle_split(trace: KinetoTrace, rows: DeviceRows, sets: Unions) -> IdleSplit | None:
    """Split the idle time between busy stretches by what the next row waited for."""
    if len(rows.start) == 0:
        return None
    holes = gaps(sets.busy)
    # Zero-length rows open no stretch; the first row that does is the one that ended the hole.
    works = rows.duration > 0
    next_row = np.searchsorted(rows.start[works], holes.ends, side="left")
    launch = rows.launch[works][next_row] if len(next_row) else np.empty(0, np.int64)
    length = holes.ends - holes.starts
    known = launch >= 0
    launched_at = np.where(known, trace.columns["start_ns"][launch], 0)
    host = known & (launched_at > holes.starts)
    short = ~host & (length <= KERNEL_WAIT_LIMIT_NS)
    return IdleSplit(
        host_bound_ns=int(length[host].sum()),
        kernel_wait_ns=int(length[short].sum()),
        other_ns=_edge_idle(rows, sets) + int(length[~host & ~short].sum()),
    )


def _edge_idle(rows: DeviceRows, sets: Unions) -> int:
    """Idle before the first and after the last working row: only zero-length rows lie there."""
    start, end = rows.bounds
    span = end - start
    if len(sets.busy.starts) == 0:
        return span
    return span - int(sets.busy.ends[-1] - sets.busy.starts[0])


def find_steps(trace: KinetoTrace, rows: DeviceRows, sets: Unions) -> list[StepFigures]:
    """Return the figures of each step: ProfilerStep rows, else optimizer rows, else the window."""
    windows, source = _step_windows(trace)
    if not windows and len(rows.start):
        windows, source = [(None, *rows.bounds)], "window"
    starts, ends = [start for _, start, _ in windows], [end for _, _, end in windows]
    has_device = len(rows.start) > 0
    found = _windows(sets, starts, ends) if has_device else [NO_FIGURES] * len(windows)
    return [
        StepFigures(step=step, source=source, start_ns=start, end_ns=end, figures=of_step)
        for (step, start, end), of_step in zip(windows, found, strict=True)
    ]


def _step_windows(trace: KinetoTrace) -> tuple[list[tuple[int | None, int, int]], str]:
    mask = trace.of(RowKind.ANNOTATION)
    start, duration = trace.columns["start_ns"][mask], trace.columns["duration_ns"][mask]
    names = trace.columns["name"][mask]
    for pattern, source in ((_PROFILER_STEP, "ProfilerStep"), (_ALT_STEP, "annotation")):
        numbers = {
            code: int(match[1])
            for code in codes_in(names)
            if (match := pattern.search(trace.names[code]))
        }
        found: dict[int, tuple[int, int]] = {}
        for code, begin, length in zip(
            names.tolist(), start.tolist(), duration.tolist(), strict=True
        ):
            if code in numbers:
                step = numbers[code]
                low, high = found.get(step, (begin, begin + length))
                found[step] = (min(low, begin), max(high, begin + length))
        if found:
            return [(step, *found[step]) for step in sorted(found)], source
    return _optimizer_windows(trace, names, start, duration), "optimizer"


def _optimizer_windows(
    trace: KinetoTrace,
    names: np.ndarray[tuple[int], np.dtype[np.int32]],
    start: np.ndarray[tuple[int], np.dtype[np.int64]],
    duration: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> list[tuple[int | None, int, int]]:
    """Return steps that end where the optimizer's step ends (the last optimizer of a round)."""
    codes = [c for c in codes_in(names) if _OPTIMIZER_STEP.search(trace.names[c])]
    if not codes or trace.host_start_ns is None:
        return []
    last = {code: int(start[names == code].max()) for code in codes}
    chosen = max(codes, key=lambda code: (last[code], trace.names[code]))
    ends = np.sort((start + duration)[names == chosen]).tolist()
    edges = [trace.host_start_ns, *ends]
    return [
        (number, edges[number], edges[number + 1])
        for number in range(len(ends))
        if edges[number + 1] > edges[number]
    ]

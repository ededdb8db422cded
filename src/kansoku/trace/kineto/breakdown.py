"""Where the time of one rank goes: busy, idle, compute, communication, overlap; whole and by step.

Definitions: span = first start to last end of device work; busy = union of all device work; idle =
span − busy; communication = union of collective kernels; compute = union of the other kernels;
memory = union of copies and sets; overlap = intersection of communication and compute; exposed
communication = communication − overlap.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind
from kansoku.formats.kineto import KinetoTrace
from kansoku.trace.kineto.intervals import IntervalSet, gaps, intersect, union
from kansoku.trace.kineto.joined import Joined, alone, part_edges
from kansoku.trace.kineto.rows import DeviceRows, codes_in

__all__ = [
    "NO_FIGURES",
    "Figures",
    "IdleSplit",
    "StepFigures",
    "Unions",
    "bounds_of_parts",
    "figures",
    "figures_of_parts",
    "find_steps",
    "idle_split",
    "steps_of_parts",
    "unions",
]

# Numbers of at most nine digits: what tables hold, in 32 bits.
_PROFILER_STEP = re.compile(r"ProfilerStep[*#]?\s*#?(\d{1,9})(?!\d)")
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")
_ALT_STEP = re.compile(r"(?i)^(?:train(?:ing)?[_ ]?)?(?:step|iteration)[ _#:=]+(\d{1,9})$")
_STEP_NAMES = ((_PROFILER_STEP, "ProfilerStep"), (_ALT_STEP, "annotation"))

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
    return _windows(sets, [start], [end])[0]


def figures_of_parts(joined: Joined, rows: DeviceRows, sets: Unions) -> list[Figures]:
    """Return the figures of each part."""
    bounds = bounds_of_parts(joined, rows)
    known = [bound for bound in bounds if bound is not None]
    found = iter(_windows(sets, [low for low, _ in known], [high for _, high in known]))
    return [NO_FIGURES if bound is None else next(found) for bound in bounds]


def bounds_of_parts(joined: Joined, rows: DeviceRows) -> list[tuple[int, int] | None]:
    """Return first start and last end of the device work of each part, moved; None without any."""
    edges = part_edges(joined, rows.row)
    some = edges[1:] > edges[:-1]
    firsts = edges[:-1][some]
    found: list[tuple[int, int] | None] = [None] * len(some)
    if len(firsts):
        ends = np.maximum.reduceat(rows.end, firsts).tolist()
        for part, low, high in zip(
            np.flatnonzero(some).tolist(), rows.start[firsts].tolist(), ends, strict=True
        ):
            found[part] = (low, high)
    return found


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


def idle_split(joined: Joined, rows: DeviceRows, sets: Unions) -> list[IdleSplit | None]:
    """Split the idle time of each part, between busy stretches, by what the next row waited for."""
    bounds = bounds_of_parts(joined, rows)
    if len(rows.start) == 0:
        return [None] * len(bounds)
    holes = gaps(sets.busy)
    edges = np.append(np.searchsorted(sets.busy.starts, joined.begins), len(sets.busy.starts))
    # Zero-length rows open no stretch; the first row that does is the one that ended the hole.
    works = rows.duration > 0
    next_row = np.searchsorted(rows.start[works], holes.ends, side="left")
    launch = rows.launch[works][next_row] if len(next_row) else np.empty(0, np.int64)
    length = holes.ends - holes.starts
    known = launch >= 0
    launched_at = np.where(known, joined.columns["start_ns"][launch], 0)
    host = known & (launched_at > holes.starts)
    short = ~host & (length <= KERNEL_WAIT_LIMIT_NS)
    # The holes of a part: between its busy stretches, of which there is one more.
    begins, ends = edges[:-1], np.maximum(edges[1:] - 1, edges[:-1])
    reasons = []
    for mask in (host, short, ~host & ~short):
        before = np.concatenate(([0], np.cumsum(np.where(mask, length, 0))))
        reasons.append(
            before[np.minimum(ends, len(length))] - before[np.minimum(begins, len(length))]
        )
    totals = [reason.tolist() for reason in reasons]
    return [
        None
        if bound is None
        else IdleSplit(
            host_bound_ns=totals[0][part],
            kernel_wait_ns=totals[1][part],
            other_ns=_edge_idle(bound, sets.busy, *edges[part : part + 2].tolist())
            + totals[2][part],
        )
        for part, bound in enumerate(bounds)
    ]


def _edge_idle(bounds: tuple[int, int], busy: IntervalSet, first: int, after: int) -> int:
    """Idle before the first and after the last working row: only zero-length rows lie there."""
    span = bounds[1] - bounds[0]
    if first == after:
        return span
    return span - int(busy.ends[after - 1] - busy.starts[first])


def find_steps(trace: KinetoTrace, rows: DeviceRows, sets: Unions) -> list[StepFigures]:
    """Return the figures of each step: ProfilerStep rows, else optimizer rows, else the window."""
    return steps_of_parts(alone(trace), rows, sets)[0]


_Window = tuple[int | None, int, int]


def steps_of_parts(joined: Joined, rows: DeviceRows, sets: Unions) -> list[list[StepFigures]]:
    """Return the figures of each step of each part, on its own clock."""
    bounds = bounds_of_parts(joined, rows)
    chosen: list[tuple[list[_Window], str]] = [
        ([(None, *bound)], "window") if bound is not None and not windows else (windows, source)
        for (windows, source), bound in zip(_step_windows(joined), bounds, strict=True)
    ]
    measured = [
        window
        for (windows, _), bound in zip(chosen, bounds, strict=True)
        if bound is not None
        for window in windows
    ]
    found = iter(_windows(sets, [start for _, start, _ in measured], [end for *_, end in measured]))
    return [
        [
            StepFigures(
                step=step,
                source=source,
                start_ns=start - shift,
                end_ns=end - shift,
                figures=NO_FIGURES if bound is None else next(found),
            )
            for step, start, end in windows
        ]
        for (windows, source), bound, shift in zip(chosen, bounds, joined.shifts, strict=True)
    ]


def _step_windows(joined: Joined) -> list[tuple[list[_Window], str]]:
    """Return the windows of the steps of each part, moved, and what they were found by."""
    columns = joined.columns
    chosen = np.flatnonzero(columns["kind"] == RowKind.ANNOTATION)
    start, duration = columns["start_ns"][chosen], columns["duration_ns"][chosen]
    names = columns["name"][chosen]
    codes = codes_in(names)
    numbers = [_step_numbers(joined.names, codes, pattern) for pattern, _ in _STEP_NAMES]
    edges = part_edges(joined, chosen).tolist()
    found = []
    for part, (low, high) in enumerate(pairwise(edges)):
        own = slice(low, high)
        of_part = names[own].tolist(), start[own].tolist(), duration[own].tolist()
        for numbered, (_, source) in zip(numbers, _STEP_NAMES, strict=True):
            if windows := _numbered_windows(numbered, *of_part):
                found.append((windows, source))
                break
        else:
            windows = _optimizer_windows(joined, part, names[own], start[own], duration[own])
            found.append((windows, "optimizer"))
    return found


def _step_numbers(names: list[str], codes: list[int], pattern: re.Pattern[str]) -> dict[int, int]:
    return {code: int(match[1]) for code in codes if (match := pattern.search(names[code]))}


def _numbered_windows(
    numbers: dict[int, int], names: list[int], starts: list[int], durations: list[int]
) -> list[_Window]:
    found: dict[int, tuple[int, int]] = {}
    if not numbers:
        return []
    for code, begin, length in zip(names, starts, durations, strict=True):
        if code in numbers:
            step = numbers[code]
            low, high = found.get(step, (begin, begin + length))
            found[step] = (min(low, begin), max(high, begin + length))
    return [(step, *found[step]) for step in sorted(found)]


def _optimizer_windows(
    joined: Joined,
    part: int,
    names: np.ndarray[tuple[int], np.dtype[np.int32]],
    start: np.ndarray[tuple[int], np.dtype[np.int64]],
    duration: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> list[_Window]:
    """Return steps that end where the optimizer's step ends (the last optimizer of a round)."""
    codes = [c for c in codes_in(names) if _OPTIMIZER_STEP.search(joined.names[c])]
    host_start_ns = joined.traces[part].host_start_ns
    if not codes or host_start_ns is None:
        return []
    last = {code: int(start[names == code].max()) for code in codes}
    chosen = max(codes, key=lambda code: (last[code], joined.names[code]))
    ends = np.sort((start + duration)[names == chosen]).tolist()
    edges = [host_start_ns + joined.shifts[part], *ends]
    return [
        (number, edges[number], edges[number + 1])
        for number in range(len(ends))
        if edges[number + 1] > edges[number]
    ]

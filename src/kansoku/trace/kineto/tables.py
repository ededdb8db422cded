"""Tables of one rank's trace: kernels, families, copies, launches, queue, modules, collectives."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind, kernel_rules
from kansoku.formats.kineto import NO_ID, CollectiveArguments, KinetoTrace
from kansoku.trace.kineto.rows import DeviceRows, codes_in, run_starts

__all__ = [
    "CallCost",
    "CollectiveRow",
    "CopyRow",
    "KernelRow",
    "LaunchFigures",
    "QueueRow",
    "call_costs",
    "collectives",
    "copies",
    "kernels",
    "launches",
    "queues",
]

_SHORT_KERNEL_NS = 5_000
_LONG_LAUNCH_DELAY_NS = 100_000


class KernelRow(NamedTuple):
    """Kernels of one name; a tuple, which is made in a fifth of a frozen dataclass's time."""

    name: str
    kind: str
    """``compute``, ``communication`` or ``memory``."""
    family: str
    calls: int
    total_ns: int
    mean_ns: float
    median_ns: float
    min_ns: int
    max_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRow:
    """Memory copies (or sets) of one direction."""

    name: str
    calls: int
    bytes: int | None
    """None where no row says its size."""
    total_ns: int
    bytes_per_s: float | None
    """Over the rows that say their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFigures:
    """Launch calls matched to device rows by correlation id."""

    calls: int
    """Calls that launched at least one device row."""
    rows: int
    """Device rows with a known launch."""
    graph_calls: int
    """Graph launches: one call, many rows."""
    graph_rows: int
    delay_median_ns: float | None
    """From the start of the call to the start of its (first) row."""
    delay_p99_ns: float | None
    delay_max_ns: int | None
    slow_delays: int
    """Rows that started more than 100 µs after their call."""
    short_rows: int
    """Device rows shorter than 5 µs: launch-bound candidates."""
    longer_than_work: int
    """Calls that took longer than the device rows they launched."""
    unmatched_rows: int
    """Device rows with no launch call in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """Rows launched and not yet finished, on one stream."""

    stream: str
    max_length: int
    mean_length: float
    """Time-weighted from the first launch to the last end."""
    busy_ratio: float
    """Part of that time with at least one row queued or running, 0-1."""


class CallCost(NamedTuple):
    """Host time and device time of one annotation or module; a tuple, as kernels are."""

    name: str
    calls: int
    host_ns: int
    """Summed over calls; nested calls of one name count once."""
    device_ns: int
    """Device work launched inside, summed."""
    device_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One collective kernel."""

    operation: str
    group: str | None
    description: str | None
    group_size: int | None
    sequence: int | None
    """``Seq`` of the arguments."""
    stream: str
    start_ns: int
    duration_ns: int
    dtype: str | None
    bytes: int | None
    """Message size as nccl-tests defines it."""
    algorithm_bytes_per_s: float | None
    bus_bytes_per_s: float | None
    ranks: str | None


def kernels(trace: KinetoTrace, rows: DeviceRows) -> list[KernelRow]:
    """Return the device work by name, longest total first."""
    out: list[KernelRow] = []
    if len(rows.name) == 0:
        return out
    key = rows.name.astype(np.int32) * 16 + rows.kind
    order = np.lexsort((rows.duration, key))
    key, duration = key[order], rows.duration[order]
    begins = run_starts(key)
    ends = np.append(begins[1:], len(key))
    # All names at once: a call of NumPy a name costs more than its rows. Sorted within each name.
    totals = np.add.reduceat(duration, begins, dtype=np.int64)
    counts = ends - begins
    middles = duration[(begins + ends - 1) // 2] + duration[(begins + ends) // 2].astype(float)
    for code, calls, total, median, low, high in zip(
        key[begins].tolist(),
        counts.tolist(),
        totals.tolist(),
        (middles / 2).tolist(),
        duration[begins].tolist(),
        duration[ends - 1].tolist(),
        strict=True,
    ):
        name = trace.names[code // 16]
        word, family = _kind_words(code % 16, name)
        out.append(KernelRow(name, word, family, calls, total, total / calls, median, low, high))
    return sorted(out, key=lambda row: (-row.total_ns, row.name))


@lru_cache(maxsize=1 << 14)
def _kind_words(kind: int, name: str) -> tuple[str, str]:
    """Return kind and family of a kernel in words; the ranks of a job run the same kernels."""
    match kind:
        case RowKind.COLLECTIVE:
            return "communication", kernel_rules().operation(name)
        case RowKind.MEMCPY:
            return "memory", "copy"
        case RowKind.MEMSET:
            return "memory", "set"
        case _:
            return "compute", kernel_rules().family(name)


def copies(trace: KinetoTrace, rows: DeviceRows) -> list[CopyRow]:
    """Return memory copies and sets by direction with their bandwidth."""
    chosen = np.flatnonzero((rows.kind == RowKind.MEMCPY) | (rows.kind == RowKind.MEMSET))
    if not len(chosen):
        return []
    mask = chosen[np.argsort(rows.name[chosen], kind="stable")]
    names = rows.name[mask]
    size = trace.details["bytes"].at(rows.row[mask], absent=NO_ID)
    launch = rows.launch[mask]
    # ROCm writes the size on the call, not on the copy.
    from_call = (size == NO_ID) & (launch >= 0)
    size = np.where(from_call, trace.details["bytes"].at(launch, absent=NO_ID), size)
    duration = rows.duration[mask].astype(np.int64)
    known = size != NO_ID
    begins = run_starts(names)
    out = [
        CopyRow(
            name=trace.names[code],
            calls=calls,
            bytes=moved if sized else None,
            total_ns=total,
            bytes_per_s=moved / time_ns * 1e9 if sized and time_ns > 0 else None,
        )
        for code, calls, sized, moved, time_ns, total in zip(
            names[begins].tolist(),
            np.diff(begins, append=len(names)).tolist(),
            *(
                np.add.reduceat(values, begins).tolist()
                for values in (
                    known.astype(np.int64),
                    np.where(known, size, 0),
                    np.where(known, duration, 0),
                    duration,
                )
            ),
            strict=True,
        )
    ]
    return sorted(out, key=lambda row: (-row.total_ns, row.name))


def launches(trace: KinetoTrace, rows: DeviceRows) -> LaunchFigures | None:
    """Return launch statistics; None where the file has no launch call."""
    if not (trace.columns["kind"] == RowKind.LAUNCH).any():
        return None
    matched = np.flatnonzero(rows.launch >= 0)
    matched = matched[np.argsort(rows.launch[matched], kind="stable")]
    launch = rows.launch[matched]
    begins = run_starts(launch)
    calls = launch[begins]
    per_call = np.diff(begins, append=len(launch))
    started = rows.start[matched[begins]]
    call_start = trace.columns["start_ns"][calls]
    call_length = trace.columns["duration_ns"][calls]
    delay = np.maximum(started - call_start, 0)
    any_call = len(calls) > 0
    work = np.add.reduceat(rows.duration[matched], begins, dtype=np.int64) if any_call else 0
    is_graph = np.array(["GraphLaunch" in name for name in trace.names], bool)
    graph = is_graph[trace.columns["name"][calls]]
    median, percentile = _median_and_99th(delay) if any_call else (None, None)
    return LaunchFigures(
        calls=len(calls),
        rows=len(matched),
        graph_calls=int(np.count_nonzero(graph)),
        graph_rows=int(per_call[graph].sum()),
        delay_median_ns=median,
        delay_p99_ns=percentile,
        delay_max_ns=int(delay.max()) if any_call else None,
        slow_delays=int(np.count_nonzero(delay > _LONG_LAUNCH_DELAY_NS)),
        short_rows=int(np.count_nonzero(rows.duration < _SHORT_KERNEL_NS)),
        longer_than_work=int(np.count_nonzero(call_length > work)),
        unmatched_rows=len(rows.launch) - len(matched),
    )


def _median_and_99th(values: NDArray[np.int64]) -> tuple[float, float]:
    """Return the median and the 99th percentile, linear between ranks.

    Not np.median and np.quantile: they load numpy.ma (16 ms), and each would sort for itself.
    """
    size = len(values)
    place = (size - 1) * 0.99
    low = int(place)
    high = min(low + 1, size - 1)
    part = np.partition(values, ((size - 1) // 2, size // 2, low, high))
    median = (float(part[(size - 1) // 2]) + float(part[size // 2])) / 2
    return median, float(part[low] + (part[high] - part[low]) * (place - low))


def _lane_name(trace: KinetoTrace, lane: int) -> str:
    _, thread, device = trace.lanes[lane]
    return thread if device is None else f"device {device} stream {thread}"


def queues(trace: KinetoTrace, rows: DeviceRows) -> list[QueueRow]:
    """Return the queue length of every stream: +1 at the launch call, −1 at the row's end."""
    out = []
    matched = rows.launch >= 0
    for lane in codes_in(rows.lane[matched]):
        same = matched & (rows.lane == lane)
        start = rows.start[same]
        times = np.concatenate(
            (start + rows.duration[same], np.minimum(_launched(trace, rows.launch[same]), start))
        )
        # Ends stand first and the sort is stable: at one time a row ends before another begins.
        order = np.argsort(times, kind="stable")
        length = np.cumsum(np.where(order < len(start), -1, 1), dtype=np.int32)
        times = times[order]
        del order, start
        span = int(times[-1] - times[0])
        held = np.diff(times)
        del times
        out.append(
            QueueRow(
                stream=_lane_name(trace, lane),
                max_length=int(length.max()),
                mean_length=float((held * length[:-1]).sum() / span) if span else 0.0,
                busy_ratio=float(held[length[:-1] > 0].sum() / span) if span else 0.0,
            )
        )
    return sorted(out, key=lambda row: row.stream)


def _launched(trace: KinetoTrace, launch: NDArray[np.int32]) -> NDArray[np.int64]:
    start: NDArray[np.int64] = trace.columns["start_ns"][launch]
    return start


def call_costs(trace: KinetoTrace, rows: DeviceRows, kind: RowKind) -> list[CallCost]:
    """Return host and device time by annotation (or module), longest device time first.

    A device row belongs to every call of this kind that was open on the launching thread when it
    was launched; calls of one name inside each other count once.
    """
    columns = trace.columns
    calls = np.flatnonzero(columns["kind"] == kind)
    if not len(calls):
        return []
    name, lane = columns["name"][calls], columns["lane"][calls]
    start, duration = columns["start_ns"][calls], columns["duration_ns"][calls]
    order = np.lexsort((-duration, start, lane, name))
    name, lane, start = name[order], lane[order], start[order]
    begins, start, stop = _outermost(
        _either(run_starts(name), run_starts(lane)), start, start + duration[order].astype(np.int64)
    )
    device, rows_inside = _work_inside(trace, rows, lane[begins], start, stop)
    firsts = run_starts(name[begins])
    out = [
        CallCost(
            name=trace.names[code], calls=count, host_ns=host, device_ns=work, device_rows=inside
        )
        for code, count, host, work, inside in zip(
            name[begins[firsts]].tolist(),
            np.diff(begins[firsts], append=len(name)).tolist(),
            *(
                np.add.reduceat(values, firsts).tolist()
                for values in (stop - start, device, rows_inside)
            ),
            strict=True,
        )
    ]
    return sorted(out, key=lambda row: (-row.device_ns, -row.host_ns, row.name))


def _either(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places that either of two lists of them holds, ascending."""
    places = np.sort(np.concatenate((one, other)))
    return places[run_starts(places)]


def _outermost(
    begins: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the calls that no other call of their group covers: row, start, end.

    A group begins at each of ``begins``; its calls stand in order of start, longer ones first.
    Calls that overlap without nesting become one.
    """
    size = len(start)
    # The latest end so far in each group. Places among all ends instead of the ends themselves:
    # a group's number can stand before them without leaving 64 bits.
    by_stop = np.argsort(stop, kind="stable")
    place = np.empty(size, np.int64)
    place[by_stop] = np.arange(size)
    group = np.zeros(size, np.int64)
    group[begins] = 1
    offset = np.cumsum(group) * size
    reach = stop[by_stop[np.maximum.accumulate(offset + place) - offset]]
    top = np.empty(size, bool)
    np.greater_equal(start[1:], reach[:-1], out=top[1:])
    top[begins] = True
    tops = np.flatnonzero(top)
    return tops, start[tops], reach[np.append(tops[1:], size) - 1]


def _work_inside(
    trace: KinetoTrace,
    rows: DeviceRows,
    lane: NDArray[Any],
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return device time and rows launched within each stretch of a host thread."""
    columns = trace.columns
    matched = np.flatnonzero(rows.launch >= 0)
    launch = rows.launch[matched]
    # Rows of the trace, launches among them, stand in order of start.
    order = np.lexsort((launch, columns["lane"][launch]))
    thread, at = columns["lane"][launch[order]], columns["start_ns"][launch[order]]
    before = np.zeros(len(order) + 1, np.int64)
    np.cumsum(rows.duration[matched[order]], out=before[1:])
    first, last = np.zeros(len(lane), np.int64), np.zeros(len(lane), np.int64)
    for one in codes_in(lane):
        low, high = np.searchsorted(thread, (one, one + 1))
        same = lane == one
        first[same] = low + np.searchsorted(at[low:high], start[same], side="left")
        last[same] = low + np.searchsorted(at[low:high], stop[same], side="left")
    return before[last] - before[first], last - first


def collectives(trace: KinetoTrace, rows: DeviceRows) -> list[CollectiveRow]:
    """Return every collective kernel with its size and bandwidths, in start order."""
    rules = kernel_rules()
    out = []
    chosen = rows.pick(rows.kind == RowKind.COLLECTIVE)
    code = trace.details["collective"].at(chosen.row, absent=-1).tolist()
    sequence = trace.details["sequence"].at(chosen.row, absent=-1).tolist()
    for index, (start, duration, name, lane) in enumerate(
        zip(
            chosen.start.tolist(),
            chosen.duration.tolist(),
            chosen.name.tolist(),
            chosen.lane.tolist(),
            strict=True,
        )
    ):
        said = trace.collectives[code[index]] if code[index] >= 0 else None
        operation = "unknown"
        if said is not None and said.operation is not None:
            operation = rules.operation(said.operation)
        if operation == "unknown":
            operation = rules.operation(trace.names[name])
        size = _message_bytes(operation, said)
        rate = size / duration * 1e9 if size is not None and duration > 0 else None
        factor = rules.bus_factor(operation, said.group_size if said else None)
        out.append(
            CollectiveRow(
                operation=operation,
                group=said.group if said else None,
                description=said.description if said else None,
                group_size=said.group_size if said else None,
                sequence=sequence[index] if sequence[index] >= 0 else None,
                stream=_lane_name(trace, lane),
                start_ns=start,
                duration_ns=duration,
                dtype=said.dtype if said else None,
                bytes=size,
                algorithm_bytes_per_s=rate,
                bus_bytes_per_s=rate * factor if rate is not None and factor is not None else None,
                ranks=said.ranks if said else None,
            )
        )
    return out


def _message_bytes(operation: str, said: CollectiveArguments | None) -> int | None:
    """Size as nccl-tests counts it: the larger buffer of a rank."""
    if said is None or said.dtype is None:
        return None
    width = kernel_rules().dtype_bytes.get(said.dtype)
    elements = [n for n in (said.in_elements, said.out_elements) if n is not None]
    if width is None or not elements or operation == "barrier":
        return None
    return max(elements) * width

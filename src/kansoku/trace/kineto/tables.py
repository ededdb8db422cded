"""Tables of traces: kernels, families, copies, launches, queue, modules, collectives.

Each function takes a set of traces and returns a table for each part of it.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind, kernel_rules
from kansoku.formats.kineto import NO_ID, CollectiveArguments, KinetoTrace
from kansoku.trace.kineto.joined import Joined, alone, part_edges, sums_between
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
    "collectives_of_parts",
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


def kernels(joined: Joined, rows: DeviceRows) -> list[list[KernelRow]]:
    """Return the device work by name, longest total first."""
    out: list[list[KernelRow]] = [[] for _ in joined.traces]
    if len(rows.name) == 0:
        return out
    key = joined.keys(rows.name, rows.lane) * 16 + rows.kind
    order = np.lexsort((rows.duration, key))
    key, duration = key[order], rows.duration[order]
    begins = run_starts(key)
    ends = np.append(begins[1:], len(key))
    # All names at once: a call of NumPy a name costs more than its rows. Sorted within each name.
    totals = np.add.reduceat(duration, begins, dtype=np.int64)
    counts = ends - begins
    middles = duration[(begins + ends - 1) // 2] + duration[(begins + ends) // 2].astype(float)
    keys, kinds = np.divmod(key[begins], 16)
    for part, name, kind, calls, total, median, low, high in zip(
        *joined.split_keys(keys),
        kinds.tolist(),
        counts.tolist(),
        totals.tolist(),
        (middles / 2).tolist(),
        duration[begins].tolist(),
        duration[ends - 1].tolist(),
        strict=True,
    ):
        word, family = _kind_words(kind, name)
        out[part].append(
            KernelRow(name, word, family, calls, total, total / calls, median, low, high)
        )
    return [sorted(part, key=lambda row: (-row.total_ns, row.name)) for part in out]


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


def copies(joined: Joined, rows: DeviceRows) -> list[list[CopyRow]]:
    """Return memory copies and sets by direction with their bandwidth."""
    out: list[list[CopyRow]] = [[] for _ in joined.traces]
    chosen = np.flatnonzero((rows.kind == RowKind.MEMCPY) | (rows.kind == RowKind.MEMSET))
    if not len(chosen):
        return out
    keys = joined.keys(rows.name[chosen], rows.lane[chosen])
    order = np.argsort(keys, kind="stable")
    keys, mask = keys[order], chosen[order]
    size = joined.details["bytes"].at(rows.row[mask], absent=NO_ID)
    launch = rows.launch[mask]
    # ROCm writes the size on the call, not on the copy.
    from_call = (size == NO_ID) & (launch >= 0)
    size = np.where(from_call, joined.details["bytes"].at(launch, absent=NO_ID), size)
    duration = rows.duration[mask].astype(np.int64)
    known = size != NO_ID
    begins = run_starts(keys)
    for part, name, calls, sized, moved, time_ns, total in zip(
        *joined.split_keys(keys[begins]),
        np.diff(begins, append=len(keys)).tolist(),
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
    ):
        out[part].append(
            CopyRow(
                name=name,
                calls=calls,
                bytes=moved if sized else None,
                total_ns=total,
                bytes_per_s=moved / time_ns * 1e9 if sized and time_ns > 0 else None,
            )
        )
    return [sorted(part, key=lambda row: (-row.total_ns, row.name)) for part in out]


def launches(joined: Joined, rows: DeviceRows) -> list[LaunchFigures | None]:
    """Return launch statistics; None where the file has no launch call."""
    columns = joined.columns
    has_calls = sums_between(columns["kind"] == RowKind.LAUNCH, joined.bounds) > 0
    matched = np.flatnonzero(rows.launch >= 0)
    matched = matched[np.argsort(rows.launch[matched], kind="stable")]
    launch = rows.launch[matched]
    begins = run_starts(launch)
    calls = launch[begins]
    per_call = np.diff(begins, append=len(launch))
    started = rows.start[matched[begins]]
    call_start = columns["start_ns"][calls]
    call_length = columns["duration_ns"][calls]
    delay = np.maximum(started - call_start, 0)
    any_call = len(calls) > 0
    work = np.add.reduceat(rows.duration[matched], begins, dtype=np.int64) if any_call else 0
    is_graph = np.array(["GraphLaunch" in name for name in joined.names], bool)
    graph = is_graph[columns["name"][calls]]
    edges, row_edges = part_edges(joined, calls), part_edges(joined, rows.row)
    matched_of = sums_between(per_call, edges).tolist()
    counts = zip(
        np.diff(edges).tolist(),
        matched_of,
        sums_between(graph, edges).tolist(),
        sums_between(np.where(graph, per_call, 0), edges).tolist(),
        sums_between(delay > _LONG_LAUNCH_DELAY_NS, edges).tolist(),
        sums_between(rows.duration < _SHORT_KERNEL_NS, row_edges).tolist(),
        sums_between(call_length > work, edges).tolist(),
        (np.diff(row_edges) - matched_of).tolist(),
        strict=True,
    )
    found: list[LaunchFigures | None] = []
    for has, low, figures in zip(has_calls.tolist(), edges.tolist(), counts, strict=False):
        if not has:
            found.append(None)
            continue
        called, with_call, graph_calls, graph_rows, slow, short, longer, unmatched = figures
        of_part = delay[low : low + called]
        median, percentile = _median_and_99th(of_part) if called else (None, None)
        found.append(
            LaunchFigures(
                calls=called,
                rows=with_call,
                graph_calls=graph_calls,
                graph_rows=graph_rows,
                delay_median_ns=median,
                delay_p99_ns=percentile,
                delay_max_ns=int(of_part.max()) if called else None,
                slow_delays=slow,
                short_rows=short,
                longer_than_work=longer,
                unmatched_rows=unmatched,
            )
        )
    return found


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


def _lane_name(joined: Joined, lane: int) -> str:
    _, thread, device = joined.lanes[lane]
    return thread if device is None else f"device {device} stream {thread}"


def queues(joined: Joined, rows: DeviceRows) -> list[list[QueueRow]]:
    """Return the queue length of every stream: +1 at the launch call, −1 at the row's end."""
    out: list[list[QueueRow]] = [[] for _ in joined.traces]
    matched = np.flatnonzero(rows.launch >= 0)
    if not len(matched):
        return out
    size, start = len(matched), rows.start[matched]
    launched = np.minimum(joined.columns["start_ns"][rows.launch[matched]], start)
    times = np.concatenate((start + rows.duration[matched], launched))
    del start, launched
    lane = np.tile(rows.lane[matched], 2)
    # Ends stand first and the sort is stable: at one time a row ends before another begins.
    order = np.lexsort((times, lane))
    lane, times = lane[order], times[order]
    # Over all streams in a row: each ends with nothing in its queue.
    length = np.cumsum(np.where(order < size, -1, 1), dtype=np.int32)
    del order
    begins = run_starts(lane)
    last = np.append(begins[1:], len(lane)) - 1
    span = times[last] - times[begins]
    held = np.diff(times, append=0)
    held[last] = 0
    del times
    for code, some, longest, weighted, busy in zip(
        lane[begins].tolist(),
        span.tolist(),
        np.maximum.reduceat(length, begins).tolist(),
        (np.add.reduceat(held * length, begins) / np.maximum(span, 1)).tolist(),
        (np.add.reduceat(np.where(length > 0, held, 0), begins) / np.maximum(span, 1)).tolist(),
        strict=True,
    ):
        out[joined.lane_part[code]].append(
            QueueRow(
                stream=_lane_name(joined, code),
                max_length=longest,
                mean_length=weighted if some else 0.0,
                busy_ratio=busy if some else 0.0,
            )
        )
    return [sorted(part, key=lambda row: row.stream) for part in out]


def call_costs(joined: Joined, rows: DeviceRows, kind: RowKind) -> list[list[CallCost]]:
    """Return host and device time by annotation (or module), longest device time first.

    A device row belongs to every call of this kind that was open on the launching thread when it
    was launched; calls of one name inside each other count once.
    """
    out: list[list[CallCost]] = [[] for _ in joined.traces]
    columns = joined.columns
    calls = np.flatnonzero(columns["kind"] == kind)
    if not len(calls):
        return out
    name, lane = columns["name"][calls], columns["lane"][calls]
    start, duration = columns["start_ns"][calls], columns["duration_ns"][calls]
    order = np.lexsort((-duration, start, lane, name))
    name, lane, start = name[order], lane[order], start[order]
    begins, start, stop = _outermost(
        _either(run_starts(name), run_starts(lane)), start, start + duration[order].astype(np.int64)
    )
    device, rows_inside = _work_inside(joined, rows, lane[begins], start, stop)
    keys = joined.keys(name, lane)
    firsts = run_starts(keys[begins])
    for part, text, count, host, work, inside in zip(
        *joined.split_keys(keys[begins[firsts]]),
        np.diff(begins[firsts], append=len(name)).tolist(),
        *(
            np.add.reduceat(values, firsts).tolist()
            for values in (stop - start, device, rows_inside)
        ),
        strict=True,
    ):
        out[part].append(
            CallCost(name=text, calls=count, host_ns=host, device_ns=work, device_rows=inside)
        )
    return [sorted(part, key=lambda row: (-row.device_ns, -row.host_ns, row.name)) for part in out]


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
    joined: Joined,
    rows: DeviceRows,
    lane: NDArray[Any],
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return device time and rows launched within each stretch of a host thread."""
    columns = joined.columns
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
    return collectives_of_parts(alone(trace), rows)[0]


def collectives_of_parts(joined: Joined, rows: DeviceRows) -> list[list[CollectiveRow]]:
    """Return every collective kernel of each part, in start order, on the part's own clock."""
    rules = kernel_rules()
    out: list[list[CollectiveRow]] = [[] for _ in joined.traces]
    chosen = rows.pick(rows.kind == RowKind.COLLECTIVE)
    code = joined.details["collective"].at(chosen.row, absent=-1).tolist()
    sequence = joined.details["sequence"].at(chosen.row, absent=-1).tolist()
    parts = joined.lane_part.tolist()
    for index, (start, duration, name, lane) in enumerate(
        zip(
            chosen.start.tolist(),
            chosen.duration.tolist(),
            chosen.name.tolist(),
            chosen.lane.tolist(),
            strict=True,
        )
    ):
        part = parts[lane]
        said = None
        if code[index] >= 0:
            said = joined.traces[part].collectives[code[index] - joined.collective_starts[part]]
        operation = "unknown"
        if said is not None and said.operation is not None:
            operation = rules.operation(said.operation)
        if operation == "unknown":
            operation = rules.operation(joined.names[name])
        size = _message_bytes(operation, said)
        rate = size / duration * 1e9 if size is not None and duration > 0 else None
        factor = rules.bus_factor(operation, said.group_size if said else None)
        out[part].append(
            CollectiveRow(
                operation=operation,
                group=said.group if said else None,
                description=said.description if said else None,
                group_size=said.group_size if said else None,
                sequence=sequence[index] if sequence[index] >= 0 else None,
                stream=_lane_name(joined, lane),
                start_ns=start - joined.shifts[part],
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

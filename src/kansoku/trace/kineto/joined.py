"""Several traces as one set of columns, so that one call of NumPy serves all of them.

Small traces cost calls, not rows. The times of each part (trace) are moved into a stretch of their
own: rows stand in the order of part and start, and intervals of two parts never touch. One trace
alone is a set of one, whose columns are its own, unmoved and not copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kansoku.formats.kineto import Detail, KinetoTrace

__all__ = ["Joined", "alone", "join", "part_edges", "sums_between"]

_LIMIT = 1 << 62
"""Moved times and ids stay below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Columns, details and names as a trace has them, over all parts."""

    traces: Sequence[KinetoTrace]
    columns: dict[str, NDArray[Any]]
    details: dict[str, Detail]
    names: list[str]
    lanes: list[tuple[str, str, int | None]]
    lane_part: NDArray[np.int64]
    """Part of each lane: no two parts share one."""
    collective_starts: list[int]
    """Of each part, what its codes of collectives were moved by."""
    bounds: NDArray[np.int64]
    """First row of each part, and the number of rows."""
    shifts: list[int]
    """What was added to the times of each part, ns."""

    @property
    def begins(self) -> NDArray[np.int64]:
        """First start of each part that has rows, moved; the next part's where it has none, ns."""
        start = self.columns["start_ns"]
        after = np.iinfo(np.int64).max
        return np.array(
            [int(start[at]) if at < len(start) else after for at in self.bounds[:-1].tolist()],
            np.int64,
        )

    def keys(self, names: NDArray[Any], lanes: NDArray[Any]) -> NDArray[Any]:
        """Return a number for each pair of part and name, in that order: name + part * names."""
        if len(self.traces) == 1:
            return names
        found: NDArray[np.int64] = self.lane_part[lanes] * len(self.names) + names
        return found

    def split_keys(self, keys: NDArray[Any]) -> tuple[list[int], list[str]]:
        """Return parts and names of such numbers."""
        parts, codes = np.divmod(keys, max(len(self.names), 1))
        return parts.tolist(), [self.names[code] for code in codes.tolist()]


def join(traces: Sequence[KinetoTrace]) -> list[Joined]:
    """Return the traces as one set; each as a set of its own where times or ids do not fit."""
    if len(traces) > 1:
        times = _moves([_time_range(trace) for trace in traces])
        ids = _moves([_id_range(trace) for trace in traces])
        if times is not None and ids is not None:
            return [_joined(traces, times, ids)]
    return [alone(trace) for trace in traces]


def alone(trace: KinetoTrace) -> Joined:
    """Return a trace as a set of one."""
    return Joined(
        traces=(trace,),
        columns=trace.columns,
        details=trace.details,
        names=trace.names,
        lanes=trace.lanes,
        lane_part=np.zeros(len(trace.lanes), np.int64),
        collective_starts=[0],
        bounds=np.array((0, len(trace.columns["kind"])), np.int64),
        shifts=[0],
    )


def _time_range(trace: KinetoTrace) -> tuple[int, int]:
    """Return the first and last time that an analysis of a trace may name, ns."""
    start = trace.columns["start_ns"]
    times = [time for time in (trace.host_start_ns, trace.host_end_ns) if time is not None]
    if len(start):
        end = np.add(start, trace.columns["duration_ns"], dtype=np.int64)
        times += [int(start[0]), int(end.max())]
    return min(times, default=0), max(times, default=0)


def _id_range(trace: KinetoTrace) -> tuple[int, int]:
    ids = trace.columns["correlation"]
    return (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)


def _moves(ranges: list[tuple[int, int]]) -> list[int] | None:
    """Return what moves each range to right after the one before, from 1 on; None if none does."""
    found, begin = [], 1
    for low, high in ranges:
        found.append(begin - low)
        begin += high - low + 1
    fits = begin < _LIMIT and all(abs(move) < _LIMIT for move in found)
    return found if fits else None


def _joined(traces: Sequence[KinetoTrace], shifts: list[int], id_shifts: list[int]) -> Joined:
    index: dict[str, int] = {}
    lanes: list[tuple[str, str, int | None]] = []
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in traces[0].columns}
    lane_part: list[int] = []
    for number, trace in enumerate(traces):
        columns = trace.columns
        codes = np.fromiter((index.setdefault(n, len(index)) for n in trace.names), np.int32)
        ids = columns["correlation"].astype(np.int64)
        known = (ids != 0) & (ids != -1)
        parts["kind"].append(columns["kind"])
        parts["name"].append(codes[columns["name"]] if len(codes) else columns["name"])
        parts["lane"].append(columns["lane"].astype(np.int32) + len(lanes))
        parts["start_ns"].append(columns["start_ns"].astype(np.int64) + shifts[number])
        parts["duration_ns"].append(columns["duration_ns"])
        parts["correlation"].append(np.where(known, ids + id_shifts[number], 0))
        lanes += trace.lanes
        lane_part += [number] * len(trace.lanes)
    bounds = np.cumsum([0, *(len(part) for part in parts["kind"])])
    starts = np.cumsum([0, *(len(trace.collectives) for trace in traces)]).tolist()
    return Joined(
        traces=traces,
        columns={name: np.concatenate(arrays) for name, arrays in parts.items()},
        details={
            name: Detail(
                np.concatenate(
                    [
                        t.details[name].rows + at
                        for t, at in zip(traces, bounds.tolist(), strict=False)
                    ]
                ),
                np.concatenate(
                    [
                        t.details[name].values + (at if name == "collective" else 0)
                        for t, at in zip(traces, starts, strict=False)
                    ]
                ),
            )
            for name in traces[0].details
        },
        names=list(index),
        lanes=lanes,
        lane_part=np.array(lane_part, np.int64),
        collective_starts=starts[:-1],
        bounds=bounds,
        shifts=shifts,
    )


def part_edges(joined: Joined, rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return where each part begins among ascending rows, and how many rows there are."""
    return np.searchsorted(rows, joined.bounds)


def sums_between(values: NDArray[Any], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the values from each edge to the next; the last edge is their number."""
    found = np.zeros(len(edges) - 1, np.int64)
    some = edges[1:] > edges[:-1]
    if some.any():
        found[some] = np.add.reduceat(values, edges[:-1][some], dtype=np.int64)
    return found

"""The columns of one trace, as the analyses take them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind
from kansoku.formats.kineto import KinetoTrace
from kansoku.trace.kineto.joined import Joined

__all__ = ["DeviceRows", "codes_in", "device_rows", "launch_of", "run_starts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Work of the devices, sorted by start; arrays of one length."""

    kind: NDArray[np.uint8]
    name: NDArray[np.int32]
    lane: NDArray[np.int32]
    start: NDArray[np.int64]
    duration: NDArray[np.int64]
    launch: NDArray[np.int32]
    """Row index of the launch call in the trace's columns, -1 where unknown."""
    row: NDArray[np.int32]
    """Row index in the trace's columns."""

    @property
    def end(self) -> NDArray[np.int64]:
        """Ends, ns."""
        return np.add(self.start, self.duration, dtype=np.int64)

    @property
    def bounds(self) -> tuple[int, int]:
        """First start and last end of the rows, of which there is at least one, ns."""
        return int(self.start[0]), int(self.end.max())

    def pick(self, mask: NDArray[np.bool_]) -> "DeviceRows":
        """Return the rows of a mask."""
        return DeviceRows(
            kind=self.kind[mask],
            name=self.name[mask],
            lane=self.lane[mask],
            start=self.start[mask],
            duration=self.duration[mask],
            launch=self.launch[mask],
            row=self.row[mask],
        )


def codes_in(values: NDArray[Any]) -> list[int]:
    """Return the distinct codes (0 and up) of a column, ascending."""
    # Counting beats np.unique, which also loads numpy.ma at its first call (25 ms).
    found: list[int] = np.flatnonzero(np.bincount(values)).tolist()
    return found


def run_starts(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return where each run of equal values begins."""
    if len(values) == 0:
        return np.empty(0, np.int64)
    new = np.empty(len(values), bool)
    new[0] = True
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return np.flatnonzero(new)


def launch_of(columns: dict[str, NDArray[Any]], rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return for each device row the row of its launch call, by correlation id; -1 if none.

    Of several calls with one id (a driver call inside a runtime call) the earliest counts; many
    device rows may share one call, as in a CUDA graph launch.
    """
    ids = columns["correlation"]
    calls = np.flatnonzero((columns["kind"] == RowKind.LAUNCH) & (ids != 0) & (ids != -1)).astype(
        np.int32
    )
    found = np.full(len(rows), -1, np.int32)
    if len(calls) == 0:
        return found
    calls = calls[np.argsort(ids[calls], kind="stable")]  # rows are in start order
    calls = calls[run_starts(ids[calls])]
    keys = ids[calls]
    wanted = ids[rows]
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1).astype(np.int32)
    match = keys[place] == wanted
    found[match] = calls[place[match]]
    return found


def device_rows(trace: KinetoTrace | Joined) -> DeviceRows:
    """Return the device work of a trace, or of a set of them, with its launches."""
    columns = trace.columns
    kind = columns["kind"]
    chosen = np.flatnonzero((kind >= RowKind.COMPUTE) & (kind <= RowKind.MEMSET))
    rows = chosen.astype(np.int32)
    return DeviceRows(
        kind=kind[rows],
        name=columns["name"][rows],
        lane=columns["lane"][rows],
        start=columns["start_ns"][rows],
        duration=columns["duration_ns"][rows],
        launch=launch_of(columns, rows),
        row=rows,
    )

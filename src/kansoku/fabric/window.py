"""One window of the whole fabric as columns, put together from the agents' reports."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kansoku.errors import InputError
from kansoku.fabric.ecmp import FIRST_PORT, PORTS
from kansoku.fabric.pinglist import SERVICE, TOR_MESH
from kansoku.fabric.summary import Histogram, Report, RowColumns, TraceRow

__all__ = ["Rows", "Window", "check_rows", "merge", "merge_reports", "rows_of"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Tuples of one window, one row each; NaN is unknown."""

    source: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]
    port: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    probes: npt.NDArray[np.int64]
    lost: npt.NDArray[np.int64]
    late: npt.NDArray[np.int64]
    qpn: npt.NDArray[np.int64]
    rtt_p50_ns: Floats
    rtt_p99_ns: Floats
    responder_p50_ns: Floats
    responder_p99_ns: Floats
    prober_p99_ns: Floats
    stamps: npt.NDArray[np.int8]
    slow: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source)

    def where(self, keep: npt.NDArray[np.bool_]) -> "Rows":
        """Return the rows of a mask."""
        return Rows(**{name: getattr(self, name)[keep] for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Window:
    """Everything the analyser needs to know of one window."""

    start_ns: int
    end_ns: int
    rows: Rows
    traces: list[tuple[int, TraceRow]] = field(default_factory=list)
    """RNIC index and what it traced."""
    silent_hosts: Mapping[str, float | None] = field(default_factory=dict)
    """Host to seconds since its last report (None: registered and never reported)."""
    clocks_off: Mapping[str, float] = field(default_factory=dict)
    """Host whose reports are of another time to the seconds its clock is ahead."""
    gone: frozenset[int] = frozenset()
    """RNICs whose agent said goodbye: planned, no fault."""
    qpns: Mapping[int, int] = field(default_factory=dict)
    """Newest QPN of each registered RNIC."""
    changed: frozenset[int] = frozenset()
    """RNICs that registered inside the window: probes to their old QPN say nothing."""
    reporting: int = 0
    """RNICs that reported."""
    rtt: Mapping[str, Histogram] = field(default_factory=dict)
    responder: Mapping[str, Histogram] = field(default_factory=dict)
    prober: Mapping[str, Histogram] = field(default_factory=dict)
    degraded_jobs: frozenset[str] = frozenset()
    """Jobs known from elsewhere to run slowly or to stand."""


_TYPES = {
    "target": "<i4", "port": "<i2", "kind": "i1", "probes": "<i8", "lost": "<i8", "late": "<i8",
    "qpn": "<u4", "rtt_p50_ns": "<f8", "rtt_p99_ns": "<f8", "responder_p50_ns": "<f8",
    "responder_p99_ns": "<f8", "prober_p99_ns": "<f8", "stamps": "i1", "slow": "<i8",
}  # fmt: skip
_FINAL = {"port": np.int32, "qpn": np.int64}


def rows_of(reports: Iterable[tuple[int, RowColumns]]) -> Rows:
    """Return the columns of (source RNIC, its rows); raise InputError for torn ones."""
    parts = [(source, part.columns) for source, part in reports]
    counts = []
    for _, columns in parts:
        lengths = {
            len(column) / np.dtype(kind).itemsize
            for column, kind in zip(columns, _TYPES.values(), strict=False)
        }
        if len(columns) != len(_TYPES) or len(lengths) != 1 or not min(lengths).is_integer():
            raise InputError("a fabric report has columns of different lengths")
        counts.append(int(min(lengths)))
    made: dict[str, npt.NDArray[Any]] = {}
    for place, (name, kind) in enumerate(_TYPES.items()):
        column = np.frombuffer(b"".join(columns[place] for _, columns in parts), dtype=kind)
        made[name] = column.astype(_FINAL.get(name, column.dtype.newbyteorder("=")))
    made["port"] += FIRST_PORT
    sources = np.array([source for source, _ in parts], dtype=np.int32)
    return Rows(source=np.repeat(sources, counts), **made)


def check_rows(rows: Rows, rnics: int) -> None:
    """Raise InputError for rows of a report that cannot be true: one would spoil the window."""
    kinds, most = (TOR_MESH, SERVICE), 1 << 40
    ranges: tuple[tuple[str, float, float], ...] = (
        ("target", 0, rnics - 1), ("port", FIRST_PORT, FIRST_PORT + PORTS - 1),
        ("kind", *kinds), ("probes", 1, most), ("lost", 0, most), ("late", 0, most),
        ("slow", 0, most), ("stamps", -1, 2),
    )  # fmt: skip
    for name, low, high in ranges:
        values = getattr(rows, name)
        bad = values[(values < low) | (values > high)]
        if len(bad):
            raise InputError(f"{name} {bad[0]} is not within {low} and {high}")
    if np.any((rows.lost + rows.slow > rows.probes) | (rows.late > rows.lost)):
        raise InputError("more probes lost, late or slow than sent")
    for name in ("rtt_p50_ns", "rtt_p99_ns", "responder_p50_ns", "responder_p99_ns",
                 "prober_p99_ns"):  # fmt: skip
        if np.any(np.abs(getattr(rows, name)) > 1 << 60):  # NaN, which is unknown, is not above
            raise InputError(f"{name} is beyond any time")


def merge(histograms: Iterable[Mapping[str, Histogram]]) -> dict[str, Histogram]:
    """Return the sum of histograms by scope."""
    total: dict[str, Histogram] = {}
    for part in histograms:
        for scope, histogram in part.items():
            into = total.setdefault(scope, {})
            for bucket, count in histogram.items():
                into[bucket] = into.get(bucket, 0) + count
    return total


def merge_reports(
    reports: Iterable[Report], index: Mapping[str, int]
) -> tuple[Rows, list[tuple[int, TraceRow]]]:
    """Return rows and traces of reports; an RNIC that the cluster file lacks is left out."""
    known = [(index[r.rnic], r) for r in reports if r.rnic in index]
    known.sort(key=lambda pair: pair[0])
    rows = rows_of((number, r.rows) for number, r in known)
    return rows, [(number, trace) for number, r in known for trace in r.traces]

"""An agent's window: results in, one row per tuple and histograms per scope out.

Plain Python and no NumPy: it runs on every host.
"""

import math
import sys
from array import array
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from kansoku.fabric.ecmp import FIRST_PORT
from kansoku.fabric.probe import Late, Result, StampSource

__all__ = [
    "MOST_BUCKETS",
    "MOST_TRACES",
    "Histogram",
    "Report",
    "Row",
    "RowColumns",
    "Text",
    "TraceRow",
    "WindowSummary",
    "percentile_of",
]

MOST_TRACES = 5000
"""Traced paths in one report."""
Text = Annotated[str, msgspec.Meta(max_length=256)]
"""A name or an address; what comes over the network must not be endless."""
_SUB = 16  # buckets per octave: 4.4 % resolution
_KEEP = 4096  # samples kept of a tuple and window: a service tuple has 2,000 in 20 s


def _bucket(value_ns: int) -> int:
    """Return the bucket of a value: 16 per octave, linear inside."""
    if value_ns < _SUB:
        return max(value_ns, 0)
    octave = value_ns.bit_length() - 5
    return (octave << 4) + (value_ns >> octave)


def bucket_middle_ns(bucket: int) -> float:
    """Return the middle of a bucket, nanoseconds."""
    if bucket < 2 * _SUB:
        return float(bucket)
    octave = (bucket >> 4) - 1
    low = (bucket - (octave << 4)) << octave
    return low + ((1 << octave) - 1) / 2


MOST_BUCKETS = 1024
"""16 buckets for each of 64 octaves."""
Histogram = Annotated[dict[int, int], msgspec.Meta(max_length=MOST_BUCKETS)]
"""Bucket to count."""
_Scopes = Annotated[dict[Text, Histogram], msgspec.Meta(max_length=8)]


def percentile_of(histogram: Histogram, quantile: float) -> float | None:
    """Return a quantile (0-1) of a histogram in nanoseconds; None when it is empty."""
    total = sum(histogram.values())
    if not total:
        return None
    wanted = quantile * (total - 1)
    seen = 0
    for bucket in sorted(histogram):
        seen += histogram[bucket]
        if seen > wanted:
            return bucket_middle_ns(bucket)
    return None


class Row(msgspec.Struct, array_like=True, frozen=True):
    """One tuple's window."""

    target: int
    """RNIC index in the plan."""
    port: int
    kind: int
    probes: int
    lost: int
    late: int
    """Lost ones that a slow host answered after the timeout."""
    qpn: int
    """Target QPN the probes were sent to."""
    rtt_p50_ns: int | None
    rtt_p99_ns: int | None
    responder_p50_ns: int | None
    responder_p99_ns: int | None
    prober_p99_ns: int | None
    stamps: int
    """0 hardware, 1 kernel, 2 application: the weakest of the window; -1 where none came back."""
    slow: int = 0
    """Answered ones whose network RTT was above the policy's ``slow_rtt_ns``."""


_COLUMNS = "ihbqqqIdddddbq"  # target … slow in the order of Row; d: NaN is unknown


class RowColumns(msgspec.Struct, array_like=True, frozen=True):
    """Rows as little-endian columns in the order of :class:`Row`.

    A window of 10,000 RNICs has millions of rows: the controller joins buffers, not objects.
    Ports travel less 49152, to fit 16 bits.
    """

    columns: Annotated[list[bytes], msgspec.Meta(max_length=len(_COLUMNS))]

    @classmethod
    def pack(cls, rows: list[Row]) -> "RowColumns":
        """Return the columns of rows."""
        packed = []
        for code, name in zip(_COLUMNS, Row.__struct_fields__, strict=True):
            values = [getattr(row, name) for row in rows]
            if code == "d":
                values = [math.nan if value is None else value for value in values]
            elif name == "port":
                values = [value - FIRST_PORT for value in values]
            column = array(code, values)
            if sys.byteorder != "little":
                column.byteswap()
            packed.append(column.tobytes())
        return cls(packed)


class TraceRow(msgspec.Struct, array_like=True, frozen=True):
    """One traced path, probe or ACK direction, from the reporting RNIC."""

    target: int
    port: int
    hops: Annotated[list[Text | None], msgspec.Meta(max_length=64)]
    """Addresses that answered, in order; None where none did."""
    reached: bool
    slow: Annotated[list[bool], msgspec.Meta(max_length=64)] = []
    """Per hop: it answered later than the policy's ``slow_rtt_ns``."""


class Report(msgspec.Struct, frozen=True):
    """What one RNIC of an agent saw in one window."""

    rnic: Text
    incarnation: int
    """The agent's own start; a restart shows."""
    window_start_ns: int
    window_ns: int
    rows: RowColumns
    traces: Annotated[list[TraceRow], msgspec.Meta(max_length=MOST_TRACES)] = []
    rtt: _Scopes = {}
    """``cluster`` and ``service`` to histogram."""
    responder: _Scopes = {}
    prober: _Scopes = {}
    agent: Annotated[dict[Text, float], msgspec.Meta(max_length=64)] = {}
    """The agent's own CPU ratio, memory, drops, throttle."""


_STAMPS = {"hardware": 0, "kernel": 1, "application": 2}


@dataclass(slots=True)
class _Cell:
    probes: int = 0
    lost: int = 0
    late: int = 0
    qpn: int = 0
    stamps: int = -1
    slow: int = 0
    scope: str = "cluster"
    source: StampSource | None = None
    rtt: list[int] = field(default_factory=list)
    responder: list[int] = field(default_factory=list)
    prober: list[int] = field(default_factory=list)


def _quantile(values: list[int], quantile: float) -> int | None:
    if not values:
        return None
    values.sort()
    return values[min(int(quantile * len(values)), len(values) - 1)]


class WindowSummary:
    """Collects the results of one RNIC and window."""

    def __init__(self, *, slow_rtt_ns: int, slow_host_ns: int) -> None:
        """Count RTTs above ``slow_rtt_ns``, and late answers held for ``slow_host_ns``."""
        self._slow_host_ns = slow_host_ns
        self._slow_rtt_ns = slow_rtt_ns
        self._cells: dict[int, _Cell] = {}

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, result: Result, scope: str) -> None:
        """Count one probe. This runs for every probe: sums are made when the window is over."""
        cell = self._cells.get(result.tuple_id)
        if cell is None:
            cell = self._cells[result.tuple_id] = _Cell()
            cell.scope = scope
        cell.probes += 1
        cell.qpn = result.target_qpn
        if result.lost:
            cell.lost += 1
            return
        source = result.stamp_source
        if source is not cell.source:
            cell.source = source
            cell.stamps = max(cell.stamps, _STAMPS[source])
        rtt = result.rtt_ns
        if rtt is None or len(cell.rtt) >= _KEEP:
            return
        if rtt > self._slow_rtt_ns:
            cell.slow += 1
        cell.rtt.append(rtt)
        if result.responder_delay_ns is not None:
            cell.responder.append(result.responder_delay_ns)
        if result.prober_delay_ns is not None:
            cell.prober.append(result.prober_delay_ns)

    def histograms(self, name: str) -> dict[str, Histogram]:
        """Return ``rtt``, ``responder`` or ``prober`` samples of the window by scope."""
        total: dict[str, Histogram] = {}
        for cell in self._cells.values():
            histogram = total.setdefault(cell.scope, {})
            for value in getattr(cell, name):
                bucket = _bucket(value)
                histogram[bucket] = histogram.get(bucket, 0) + 1
        return total

    def add_late(self, late: Late) -> None:
        """Note that a lost probe was answered after all; it is the host if the host took long."""
        cell = self._cells.get(late.tuple_id)
        delay = late.responder_delay_ns
        if cell is None or cell.late >= cell.lost or delay is None:
            return
        if len(cell.responder) < _KEEP:
            cell.responder.append(delay)
        if delay >= self._slow_host_ns:
            cell.late += 1

    def rows(self, tuples: dict[int, tuple[int, int, int]]) -> list[Row]:
        """Return a row per tuple; ``tuples`` maps its id to (target, port, kind)."""
        found = []
        for number, cell in self._cells.items():
            if number not in tuples:
                continue
            target, port, kind = tuples[number]
            found.append(
                Row(
                    target, port, kind, cell.probes, cell.lost, cell.late, cell.qpn,
                    _quantile(cell.rtt, 0.5), _quantile(cell.rtt, 0.99),
                    _quantile(cell.responder, 0.5), _quantile(cell.responder, 0.99),
                    _quantile(cell.prober, 0.99), cell.stamps, cell.slow,
                )
            )  # fmt: skip
        found.sort(key=lambda row: (row.target, row.port))
        return found

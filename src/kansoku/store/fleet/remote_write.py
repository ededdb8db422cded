"""Prometheus remote write: samples as a snappy-compressed WriteRequest."""

import struct
from collections.abc import Iterator

import orjson
import polars as pl
import pyarrow as pa

from kansoku.errors import InputError
from kansoku.store.fleet._web import BackEnd
from kansoku.store.fleet.names import Naming

__all__ = ["RemoteWriter", "write_request"]

_HEADERS = {
    "content-type": "application/x-protobuf",
    "content-encoding": "snappy",
    "x-prometheus-remote-write-version": "0.1.0",
}
_BATCH_ROWS = 50_000


class RemoteWriter:
    """Writes metrics to VictoriaMetrics or Prometheus, at least once."""

    def __init__(self, back_end: BackEnd, *, naming: Naming, path: str = "/api/v1/write") -> None:
        self._web = back_end
        self._naming = naming
        self._path = path

    def write(self, rows: pl.DataFrame) -> int:
        """Send rows of the metrics table; return how many were sent."""
        sent = 0
        # Receivers want each series' samples in time order.
        ordered = rows.drop_nulls(["metric", "time_ns", "value"]).sort("time_ns")
        for part in ordered.iter_slices(_BATCH_ROWS):
            body = pa.compress(write_request(part, self._naming), codec="snappy", asbytes=True)
            self._web.request("POST", self._path, content=body, headers=_HEADERS)
            sent += len(part)
        return sent

    def close(self) -> None:
        """Let go of connections."""
        self._web.close()


def write_request(rows: pl.DataFrame, naming: Naming) -> bytes:
    """Return a WriteRequest: one TimeSeries a series, its labels sorted by name."""
    parts = []
    for (metric, labels), group in rows.group_by("metric", "labels", maintain_order=True):
        pairs = b"".join(_label(k, v) for k, v in _labels(str(metric), str(labels or "{}"), naming))
        samples = b"".join(_samples(group))
        parts.append(_field(1, pairs + samples))
    return b"".join(parts)


def _labels(metric: str, text: str, naming: Naming) -> Iterator[tuple[str, str]]:
    try:
        own = {naming.label(key): str(value) for key, value in orjson.loads(text).items() if value}
    except (orjson.JSONDecodeError, AttributeError):
        raise InputError(f"metric {metric}: labels {text[:80]!r} are no JSON object") from None
    own["__name__"] = naming.metric(metric)
    yield from sorted(own.items())


def _samples(group: pl.DataFrame) -> Iterator[bytes]:
    times, values = group["time_ns"].to_list(), group["value"].to_list()
    for time_ns, value in zip(times, values, strict=True):
        stamp = _varint(time_ns // 10**6 & (2**64 - 1))
        yield _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + stamp)


def _label(name: str, value: str) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, value.encode()))


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

"""Write spans as OTLP trace files: protobuf, or one JSON object a line (the file exporter's form).

One ResourceSpans a chunk and rank; concatenated protobuf messages are one valid TracesData,
because repeated fields merge. Ids come from run, rank and span id, so a second conversion gives
the same ones.
"""

import hashlib
from collections.abc import Iterable
from typing import IO, Any

import orjson
import polars as pl
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

__all__ = ["write_otlp_json", "write_otlp_protobuf"]

_COLUMNS = (
    "id", "parent", "name", "start_ns", "duration_ns", "kind", "step", "group", "sequence",
    "bytes", "dtype", "device", "thread", "cpu_ns", "attributes",
)  # fmt: skip
_ATTRIBUTES = (
    "kind", "step", "group", "sequence", "bytes", "dtype", "device", "thread", "cpu_ns",
    "attributes",
)  # fmt: skip


def _trace_id(run: str) -> bytes:
    return hashlib.blake2b(run.encode(), digest_size=16).digest()


def _span_id(run: str, rank: int | None, number: int) -> bytes:
    return hashlib.blake2b(f"{run}/{rank}/{number}".encode(), digest_size=8).digest()


def _parts(frame: pl.DataFrame) -> Iterable[tuple[str, int | None, pl.DataFrame]]:
    closed = frame.filter(pl.col("duration_ns").is_not_null() & pl.col("start_ns").is_not_null())
    for (run, rank), part in closed.group_by("run", "rank", maintain_order=True):
        yield str(run or ""), None if rank is None else int(str(rank)), part


def write_otlp_protobuf(file: IO[bytes], frames: Iterable[pl.DataFrame]) -> int:
    """Write ``spans`` rows as TracesData; return the number of spans."""
    count = 0
    for frame in frames:
        for run, rank, part in _parts(frame):
            data = TracesData()
            resource = data.resource_spans.add()
            _set(resource.resource.attributes.add(), "service.name", "kansoku")
            _set(resource.resource.attributes.add(), "kansoku.run", run)
            if rank is not None:
                _set(resource.resource.attributes.add(), "kansoku.rank", rank)
            scope = resource.scope_spans.add()
            scope.scope.name = "kansoku.trace"
            trace = _trace_id(run)
            for row in part.select(_COLUMNS).iter_rows(named=True):
                count += 1
                span = scope.spans.add()
                span.trace_id = trace
                span.span_id = _span_id(run, rank, _number(row["id"], count))
                if row["parent"] is not None:
                    span.parent_span_id = _span_id(run, rank, row["parent"])
                span.name = row["name"] or ""
                span.kind = 1  # internal
                span.start_time_unix_nano = row["start_ns"]
                span.end_time_unix_nano = row["start_ns"] + row["duration_ns"]
                for key in _ATTRIBUTES:
                    if row[key] is not None:
                        _set(span.attributes.add(), f"kansoku.{key}", row[key])
            file.write(data.SerializeToString())
    return count


def _set(attribute: Any, key: str, value: str | int) -> None:
    attribute.key = key
    if isinstance(value, int):
        attribute.value.int_value = value
    else:
        attribute.value.string_value = value


def write_otlp_json(file: IO[bytes], frames: Iterable[pl.DataFrame]) -> int:
    """Write ``spans`` rows as JSON lines, each one TracesData; return the number of spans."""
    count = 0
    for frame in frames:
        for run, rank, part in _parts(frame):
            trace = _trace_id(run).hex()
            spans = []
            for row in part.select(_COLUMNS).iter_rows(named=True):
                count += 1
                span: dict[str, Any] = {
                    "traceId": trace,
                    "spanId": _span_id(run, rank, _number(row["id"], count)).hex(),
                    "name": row["name"] or "",
                    "kind": 1,
                    "startTimeUnixNano": str(row["start_ns"]),
                    "endTimeUnixNano": str(row["start_ns"] + row["duration_ns"]),
                    "attributes": [
                        _json(f"kansoku.{key}", row[key])
                        for key in _ATTRIBUTES
                        if row[key] is not None
                    ],
                }
                if row["parent"] is not None:
                    span["parentSpanId"] = _span_id(run, rank, row["parent"]).hex()
                spans.append(span)
            facts = [_json("service.name", "kansoku"), _json("kansoku.run", run)]
            if rank is not None:
                facts.append(_json("kansoku.rank", rank))
            line = {
                "resourceSpans": [
                    {
                        "resource": {"attributes": facts},
                        "scopeSpans": [{"scope": {"name": "kansoku.trace"}, "spans": spans}],
                    }
                ]
            }
            file.write(orjson.dumps(line) + b"\n")
    return count


def _number(value: int | None, count: int) -> int:
    return count if value is None else value


def _json(key: str, value: str | int) -> dict[str, Any]:
    # OTLP/JSON writes 64-bit integers as text.
    kind = {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}
    return {"key": key, "value": kind}

"""Rows of the bulk tables to OTLP requests."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import polars as pl
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from kansoku.model import TABLES
from kansoku.telemetry._attributes import add_attribute
from kansoku.telemetry._names import (
    COLUMN_PREFIX,
    EVENT_COLUMNS,
    EVENT_NAME,
    SPAN_COLUMNS,
    severity_number,
)

__all__ = ["Describe", "MetricInfo", "encode", "signal_of", "span_ids"]

SCOPE = "kansoku"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """What a metric is, as its catalogue declares it."""

    unit: str = ""
    """UCUM, such as ``W`` or ``By``."""
    kind: str = "gauge"
    """``gauge``, ``counter`` (cumulative, only grows, restarts at zero) or ``updown`` (a sum that
    may fall: OTLP's non-monotonic sum, whose Prometheus name gets no ``_ratio``)."""
    description: str = ""


Describe = Callable[[str], MetricInfo | None]
"""Metric name to what it is; None for an unknown one, which travels as a gauge."""


def signal_of(table: str) -> str:
    """Return the OTLP signal that carries a table: ``traces``, ``metrics`` or ``logs``."""
    return {"spans": "traces", "metrics": "metrics"}.get(table, "logs")


def span_ids(run: str | None, rank: int | None, number: int) -> tuple[bytes, bytes]:
    """Return trace and span id of a span: the same wherever the run is encoded."""
    trace = hashlib.blake2b((run or "").encode(), digest_size=16).digest()
    span = hashlib.blake2b(f"{run}\0{rank}\0{number}".encode(), digest_size=8).digest()
    return trace, span


def encode(
    tables: Mapping[str, pl.DataFrame],
    *,
    resource: Mapping[str, str],
    describe: Describe = lambda _: None,
) -> dict[str, Any]:
    """Return signal to request message for the rows of several tables."""
    requests: dict[str, Any] = {}
    for table, rows in tables.items():
        signal = signal_of(table)
        if signal == "traces":
            _spans(requests.setdefault(signal, ExportTraceServiceRequest()), rows, resource)
        elif signal == "metrics":
            target = requests.setdefault(signal, ExportMetricsServiceRequest())
            _metrics(target, rows, resource, describe)
        else:
            _logs(requests.setdefault(signal, ExportLogsServiceRequest()), table, rows, resource)
    return requests


def _resource(target: Any, resource: Mapping[str, str]) -> None:
    for key, value in resource.items():
        add_attribute(target.resource.attributes, key, value)


def _extra(target: Any, text: str | None) -> None:
    """Add the keys of an ``attributes`` column."""
    if text:
        values = orjson.loads(text)
        for key, value in values.items():
            add_attribute(target, key, value)


def _spans(
    request: ExportTraceServiceRequest, rows: pl.DataFrame, resource: Mapping[str, str]
) -> None:
    group = request.resource_spans.add()
    _resource(group, resource)
    scope = group.scope_spans.add()
    scope.scope.name = SCOPE
    for number, row in enumerate(rows.iter_rows(named=True)):
        span = scope.spans.add()
        run, rank = row.get("run"), row.get("rank")
        own = row.get("id")
        identity = own if own is not None else -1 - number
        span.trace_id, span.span_id = span_ids(run, rank, identity)
        if row.get("parent") is not None:
            span.parent_span_id = span_ids(run, rank, row["parent"])[1]
        span.name = row.get("name") or ""
        span.kind = span.SPAN_KIND_INTERNAL
        span.start_time_unix_nano = max(row["start_ns"] or 0, 0)
        if row.get("duration_ns") is not None:
            span.end_time_unix_nano = span.start_time_unix_nano + max(row["duration_ns"], 0)
        for column in SPAN_COLUMNS:
            add_attribute(span.attributes, COLUMN_PREFIX + column, row.get(column))
        _extra(span.attributes, row.get("attributes"))


def _metrics(
    request: ExportMetricsServiceRequest,
    rows: pl.DataFrame,
    resource: Mapping[str, str],
    describe: Describe,
) -> None:
    group = request.resource_metrics.add()
    _resource(group, resource)
    scope = group.scope_metrics.add()
    scope.scope.name = SCOPE
    points: dict[str, Any] = {}
    parsed: dict[str, list[tuple[str, Any]]] = {}
    columns = ("metric", "labels", "time_ns", "value")
    for name, labels, time_ns, value in rows.select(columns).iter_rows():
        target = points.get(name)
        if target is None:
            metric = scope.metrics.add(name=name)
            info = describe(name) or MetricInfo()
            metric.unit, metric.description = info.unit, info.description
            if info.kind in {"counter", "updown"}:
                metric.sum.is_monotonic = info.kind == "counter"
                metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
                target = metric.sum.data_points
            else:
                target = metric.gauge.data_points
            points[name] = target
        if value is None or time_ns is None:
            continue
        point = target.add(time_unix_nano=max(time_ns, 0), as_double=value)
        text = labels or "{}"
        if text not in parsed:
            parsed[text] = list(orjson.loads(text).items())
        for key, label in parsed[text]:
            if resource.get(key) != label:
                add_attribute(point.attributes, key, label)


def _logs(
    request: ExportLogsServiceRequest,
    table: str,
    rows: pl.DataFrame,
    resource: Mapping[str, str],
) -> None:
    group = request.resource_logs.add()
    _resource(group, resource)
    scope = group.scope_logs.add()
    scope.scope.name = SCOPE
    time_column = TABLES[table].time_column
    for row in rows.iter_rows(named=True):
        record = scope.log_records.add()
        record.time_unix_nano = max(row.get(time_column) or 0, 0)
        record.observed_time_unix_nano = record.time_unix_nano
        if table == "events":
            _event(record, row)
            continue
        name = COLUMN_PREFIX + table
        record.event_name = name
        add_attribute(record.attributes, EVENT_NAME, name)
        for column, value in row.items():
            if column not in {time_column, "attributes"}:
                add_attribute(record.attributes, COLUMN_PREFIX + column, value)
        if table == "findings" and row.get("sentence"):
            record.body.string_value = row["sentence"]
        _extra(record.attributes, row.get("attributes"))


def _event(record: Any, row: Mapping[str, Any]) -> None:
    record.severity_number = severity_number(row.get("severity"))
    record.severity_text = row.get("severity") or ""
    if row.get("body") is not None:
        record.body.string_value = row["body"]
    if row.get("kind"):
        record.event_name = row["kind"]
    for column in EVENT_COLUMNS:
        add_attribute(record.attributes, COLUMN_PREFIX + column, row.get(column))
    _extra(record.attributes, row.get("attributes"))

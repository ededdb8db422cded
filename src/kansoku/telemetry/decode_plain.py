"""OTLP messages to rows, one item at a time: the plain walk, which the bulk decoder must equal.

It also serves what the bulk decoder leaves to it: histograms, summaries, JSON bodies.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from kansoku.model import TABLES
from kansoku.telemetry._attributes import (
    any_value,
    attribute_dict,
    json_text,
    label_text,
    labels_json,
)
from kansoku.telemetry._names import (
    COLUMN_PREFIX,
    EVENT_COLUMNS,
    EVENT_NAME,
    LOG_TABLES,
    SPAN_COLUMNS,
    column_kinds,
    severity_text,
)

__all__ = ["DROPPED_RESOURCE_KEYS", "Decoded", "arrow_types", "decode_plain", "fits", "owner_of"]

_MAX = 2**63 - 1
_SPAN_KINDS = (None, "internal", "server", "client", "producer", "consumer")
_RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), _MAX)}
_CUMULATIVE, _DELTA = 2, 1
_NO_VALUE = 1  # DataPointFlags.NO_RECORDED_VALUE

DROPPED_RESOURCE_KEYS = frozenset(
    {"telemetry.sdk.language", "telemetry.sdk.name", "telemetry.sdk.version", "process.pid",
     "process.command_args", "process.command_line", "process.runtime.description"}
)  # fmt: skip
"""Resource attributes that would only multiply series: they never become labels."""


@dataclass(slots=True)
class Decoded:
    """Rows of one request."""

    tables: dict[str, pa.Table] = field(default_factory=dict)
    owners: set[tuple[str, str | None, str | None, str | None, bool | None]] = field(
        default_factory=set
    )
    """(run, job, user, account, consent) that resources named."""
    info: dict[str, tuple[str, str | None, str | None, str | None]] = field(default_factory=dict)
    """Metric to (metric, unit, kind, description)."""
    items: int = 0
    """Spans, data points or log records in the request."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason to items that give no row."""

    def skip(self, reason: str, count: int = 1) -> None:
        """Count items that give no row."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count


_ARROW = {
    "text": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
}


def arrow_types(table: str) -> dict[str, pa.DataType]:
    """Return the Arrow type of every column."""
    return {name: _ARROW[kind] for name, kind in column_kinds(table).items()}


class _Rows:
    """Columns of one table, filled row by row."""

    def __init__(self, table: str) -> None:
        self._table = table
        self.columns: dict[str, list[Any]] = {name: [] for name in column_kinds(table)}

    def add(self, **values: Any) -> None:
        for name, column in self.columns.items():
            column.append(values.get(name))

    def arrow(self) -> pa.Table:
        types = arrow_types(self._table)
        return pa.table(
            [pa.array(values, types[name]) for name, values in self.columns.items()],
            names=list(self.columns),
        )


def fits(kind: str, value: Any) -> Any:
    """Return the value as a column of that kind holds it, or None where it does not fit."""
    if kind == "text":
        return value if isinstance(value, str) else None
    if kind == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind == "float":
        return float(value)
    low, high = _RANGES[kind]
    return value if isinstance(value, int) and low <= value <= high else None


def _take(attributes: dict[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Move the attributes that are columns out; what does not fit its column stays."""
    row = {}
    for name, kind in kinds.items():
        key = COLUMN_PREFIX + name
        if key in attributes:
            value = fits(kind, attributes[key])
            if value is not None:
                row[name] = value
                del attributes[key]
    return row


def owner_of(
    resource: Mapping[str, Any],
) -> tuple[str, str | None, str | None, str | None, bool | None] | None:
    """Return whose run a resource speaks of, when it names one."""
    run = resource.get("kansoku.run")
    if not isinstance(run, str) or not run:
        return None
    job, user, account = (
        label_text(resource[key]) if resource.get(key) is not None else None
        for key in ("slurm.job.id", "slurm.job.user", "slurm.job.account")
    )
    consent = resource.get("kansoku.consent")
    if isinstance(consent, str):
        consent = {"true": True, "false": False}.get(consent)
    return run, job, user, account, consent if isinstance(consent, bool) else None


def decode_plain(signal: str, request: Any, *, received_ns: int) -> Decoded:
    """Return the rows of a parsed request of ``traces``, ``metrics`` or ``logs``."""
    decoded = Decoded()
    if signal == "traces":
        _traces(request, decoded)
    elif signal == "metrics":
        _metrics(request, decoded)
    else:
        _logs(request, decoded, received_ns)
    return decoded


def _note_owner(decoded: Decoded, resource: Mapping[str, Any]) -> None:
    if (owner := owner_of(resource)) is not None:
        decoded.owners.add(owner)


def _id(raw: bytes) -> int | None:
    return int.from_bytes(raw, "big", signed=True) if len(raw) == 8 else None


def _time(value: int) -> int | None:
    return value if 0 < value <= _MAX else None


def _traces(request: Any, decoded: Decoded) -> None:
    rows = _Rows("spans")
    kinds = {name: kind for name, kind in column_kinds("spans").items() if name in SPAN_COLUMNS}
    for group in request.resource_spans:
        resource = attribute_dict(group.resource.attributes)
        _note_owner(decoded, resource)
        for scope in group.scope_spans:
            for span in scope.spans:
                decoded.items += 1
                attributes = attribute_dict(span.attributes)
                row = _take(attributes, kinds)
                if "run" not in row:
                    row = {**row, **_foreign(span, row)}
                    attributes = _kept(resource) | attributes
                    if span.status.code == 2:
                        attributes["otel.status_code"] = "ERROR"
                start = _time(span.start_time_unix_nano)
                end = _time(span.end_time_unix_nano)
                rows.add(
                    **row,
                    name=span.name,
                    start_ns=start,
                    duration_ns=end - start if start and end and end >= start else None,
                    attributes=json_text(attributes),
                )
    if decoded.items:
        decoded.tables["spans"] = rows.arrow()


def _kept(resource: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in resource.items() if key not in DROPPED_RESOURCE_KEYS}


def _foreign(span: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a span of another program gives for our columns."""
    kind = _SPAN_KINDS[span.kind] if 0 <= span.kind < len(_SPAN_KINDS) else None
    return {
        "run": span.trace_id.hex() or None,
        "kind": row.get("kind", kind),
        "id": row.get("id", _id(span.span_id)),
        "parent": row.get("parent", _id(span.parent_span_id)),
    }


def _metrics(request: Any, decoded: Decoded) -> None:
    rows = _Rows("metrics")
    add = rows.add
    for group in request.resource_metrics:
        resource = attribute_dict(group.resource.attributes)
        _note_owner(decoded, resource)
        resource = _kept(resource)
        for scope in group.scope_metrics:
            for metric in scope.metrics:
                for name, kind, labels, time_ns, value in _points(metric, decoded):
                    if name not in decoded.info:
                        unit = metric.unit or None
                        decoded.info[name] = (name, unit, kind, metric.description or None)
                    add(
                        metric=name,
                        labels=labels_json(resource, labels),
                        time_ns=_time(time_ns),
                        value=value,
                    )
    if rows.columns["metric"]:
        decoded.tables["metrics"] = rows.arrow()


_Point = tuple[str, str, dict[str, Any], int, float]


def _points(metric: Any, decoded: Decoded) -> Iterator[_Point]:
    which = metric.WhichOneof("data")
    if which is None:
        return
    for point in getattr(metric, which).data_points:
        decoded.items += 1
        if point.flags & _NO_VALUE:
            decoded.skip("no_recorded_value")
            continue
        labels = attribute_dict(point.attributes)
        if which in {"gauge", "sum"}:
            yield from _number(metric, which, point, labels, decoded)
        elif which == "summary":
            yield from _summary(metric.name, point, labels)
        else:
            temporality = getattr(metric, which).aggregation_temporality
            kind = "delta" if temporality == _DELTA else "histogram"
            buckets = _bounds(point) if which == "histogram" else _exponential(point)
            yield from _histogram(metric.name, kind, point, labels, buckets)


def _number(
    metric: Any, which: str, point: Any, labels: dict[str, Any], decoded: Decoded
) -> Iterator[_Point]:
    value = point.WhichOneof("value")
    if value is None:
        decoded.skip("no_value")
        return
    kind = "gauge"
    if which == "sum" and metric.sum.aggregation_temporality == _DELTA:
        kind = "delta"
    elif which == "sum" and metric.sum.is_monotonic:
        kind = "counter"
    yield metric.name, kind, labels, point.time_unix_nano, float(getattr(point, value))


def _summary(name: str, point: Any, labels: dict[str, Any]) -> Iterator[_Point]:
    for one in point.quantile_values:
        at = labels | {"quantile": repr(one.quantile)}
        yield name, "gauge", at, point.time_unix_nano, one.value
    yield f"{name}_sum", "counter", labels, point.time_unix_nano, point.sum
    yield f"{name}_count", "counter", labels, point.time_unix_nano, float(point.count)


def _bounds(point: Any) -> list[tuple[str, float]]:
    total, buckets = 0, []
    bounds = [*point.explicit_bounds, math.inf]
    for bound, count in zip(bounds, point.bucket_counts, strict=False):
        total += count
        buckets.append(("+Inf" if math.isinf(bound) else repr(bound), float(total)))
    return buckets


def _exponential(point: Any) -> list[tuple[str, float]]:
    """Return cumulative counts at the upper bounds of an exponential histogram's buckets."""
    if abs(point.scale) > 20:
        return [("+Inf", float(point.count))]
    base = 2.0 ** (2.0**-point.scale)
    total, buckets = 0, []

    def power(index: int) -> float:
        try:
            return float(base**index)
        except OverflowError:
            return math.inf

    negative = list(enumerate(point.negative.bucket_counts, point.negative.offset))
    for index, count in reversed(negative):
        total += count
        buckets.append((repr(-power(index)), float(total)))
    total += point.zero_count
    buckets.append((repr(point.zero_threshold), float(total)))
    for index, count in enumerate(point.positive.bucket_counts, point.positive.offset):
        total += count
        bound = power(index + 1)
        buckets.append(("+Inf" if math.isinf(bound) else repr(bound), float(total)))
    return [one for one in buckets if one[0] != "+Inf"] + [("+Inf", float(point.count))]


def _histogram(
    name: str, kind: str, point: Any, labels: dict[str, Any], buckets: list[tuple[str, float]]
) -> Iterator[_Point]:
    time_ns = point.time_unix_nano
    for bound, count in buckets:
        yield f"{name}_bucket", kind, labels | {"le": bound}, time_ns, count
    yield f"{name}_count", kind, labels, time_ns, float(point.count)
    if point.HasField("sum"):
        yield f"{name}_sum", kind, labels, time_ns, point.sum
    for end in ("min", "max"):
        if point.HasField(end):
            yield f"{name}_{end}", "gauge", labels, time_ns, getattr(point, end)


def _logs(request: Any, decoded: Decoded, received_ns: int) -> None:
    tables: dict[str, _Rows] = {}
    kinds = {table: column_kinds(table) for table in LOG_TABLES}
    event_kinds = dict.fromkeys(EVENT_COLUMNS, "text")
    for group in request.resource_logs:
        resource = attribute_dict(group.resource.attributes)
        _note_owner(decoded, resource)
        for scope in group.scope_logs:
            for record in scope.log_records:
                decoded.items += 1
                attributes = attribute_dict(record.attributes)
                named = attributes.get(EVENT_NAME)
                name = named if isinstance(named, str) and named else record.event_name
                time_ns = _time(record.time_unix_nano) or _time(record.observed_time_unix_nano)
                table = name.removeprefix(COLUMN_PREFIX)
                if table in kinds and name != table:
                    attributes.pop(EVENT_NAME, None)
                    row = _take(attributes, kinds[table])
                    row[TABLES[table].time_column] = time_ns
                    if "attributes" in kinds[table]:
                        row["attributes"] = json_text(attributes)
                    tables.setdefault(table, _Rows(table)).add(**row)
                    continue
                row = _take(attributes, event_kinds)
                if "kind" not in row:
                    row["kind"] = name or None
                    attributes.pop(EVENT_NAME, None)
                tables.setdefault("events", _Rows("events")).add(
                    **_event(record, row, resource, scope.scope.name),
                    time_ns=time_ns or received_ns,
                    attributes=json_text(attributes),
                )
    decoded.tables.update({name: rows.arrow() for name, rows in tables.items()})


def _event(
    record: Any, row: dict[str, Any], resource: Mapping[str, Any], scope: str
) -> dict[str, Any]:
    body = any_value(record.body)
    host = resource.get("host.name")
    service = resource.get("service.name")
    return {
        "source": row.get("source") or (label_text(service) if service else scope) or None,
        "subject": row.get("subject") or (f"node:{host}" if host else None),
        "severity": severity_text(record.severity_number, record.severity_text),
        "kind": row.get("kind"),
        "body": body if isinstance(body, str) or body is None else label_text(body),
    }

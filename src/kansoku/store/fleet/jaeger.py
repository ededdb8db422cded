"""Spans over the Jaeger query API: VictoriaTraces, Jaeger, Tempo's bridge.

Times are microseconds there: a span's nanoseconds are lost, so LogsQL is the better way where
there is a choice.
"""

from collections.abc import Mapping
from typing import Any

import orjson
import polars as pl

from kansoku.errors import InputError, StoreError
from kansoku.model import table_schema
from kansoku.store._interface import Filters
from kansoku.store.fleet._web import BackEnd

__all__ = ["JaegerSpans"]

_PREFIX = "kansoku."
_MOST_TRACES = 1000
_DAY_NS = 86_400 * 10**9


class JaegerSpans:
    """Spans of every service the back end knows."""

    def __init__(self, back_end: BackEnd, *, prefix: str = "/select/jaeger") -> None:
        self._web = back_end
        self._prefix = prefix.rstrip("/")

    def table(
        self,
        since_ns: int | None,
        until_ns: int | None,
        filters: Filters | None,
        *,
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return spans in time order; with a limit, the newest. A time range is needed."""
        if since_ns is None or until_ns is None:
            raise InputError("spans over the Jaeger API need since and until")
        schema = table_schema("spans")
        if unknown := set(filters or {}) - set(schema):
            raise InputError(f"table spans has no column {', '.join(sorted(unknown))} to filter by")
        tags = {
            _PREFIX + column: str(value)
            for column, value in (filters or {}).items()
            if isinstance(value, str | int) and column not in {"name", "start_ns", "duration_ns"}
        }
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for service in self._services():
            params = {
                "service": service,
                "start": str((since_ns - _DAY_NS) // 1000),
                "end": str(until_ns // 1000),
                "limit": str(_MOST_TRACES),
            }
            if tags:
                params["tags"] = orjson.dumps(tags).decode()
            answer = self._web.json("GET", f"{self._prefix}/api/traces", params=params)
            for trace in answer.get("data") or ():
                for span in trace.get("spans", ()):
                    rows[trace["traceID"], span["spanID"]] = _row(span)
        frame = pl.DataFrame(list(rows.values()), schema=schema, orient="row")
        wanted = [pl.col("start_ns") >= since_ns, pl.col("start_ns") < until_ns]
        for column, value in (filters or {}).items():
            several = value if isinstance(value, list | tuple) else [value]
            wanted.append(pl.col(column).is_in(several, nulls_equal=True))
        frame = frame.filter(*wanted).sort("start_ns", maintain_order=True)
        return frame if limit is None else frame.tail(limit)

    def _services(self) -> list[str]:
        answer = self._web.json("GET", f"{self._prefix}/api/services")
        if not isinstance(answer, Mapping):
            raise StoreError("the answer is not a Jaeger API's", where=self._web.url)
        return [str(one) for one in answer.get("data") or ()]

    def close(self) -> None:
        """Let go of connections."""
        self._web.close()


def _row(span: Mapping[str, Any]) -> dict[str, Any]:
    tags = {tag["key"]: _value(tag) for tag in span.get("tags", ())}
    row: dict[str, Any] = {}
    for name, kind in table_schema("spans").items():
        value = tags.pop(_PREFIX + name, None)
        if value is not None and not isinstance(kind, pl.String):
            value = int(value)
        row[name] = value
    if row["run"] is None:
        row["run"] = span["traceID"]
    row["name"] = span["operationName"]
    row["start_ns"] = int(span["startTime"]) * 1000
    row["duration_ns"] = int(span["duration"]) * 1000
    row["attributes"] = orjson.dumps(tags, option=orjson.OPT_SORT_KEYS).decode() if tags else None
    return row


def _value(tag: Mapping[str, Any]) -> Any:
    if tag.get("type") in {"int64", "float64", "bool", "string", None}:
        return tag.get("value")
    return str(tag.get("value"))

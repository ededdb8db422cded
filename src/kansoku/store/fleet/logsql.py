"""Rows from LogsQL back ends: VictoriaLogs for log records, VictoriaTraces for spans.

Field names are those that OTLP's attributes get there: as they are in VictoriaLogs, behind
``span_attr:`` and ``resource_attr:`` in VictoriaTraces. All values are text; columns know their
types.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import orjson
import polars as pl

from kansoku.errors import InputError, StoreError
from kansoku.model import TABLES, table_schema
from kansoku.store._interface import Filters
from kansoku.store.fleet._web import BackEnd

__all__ = ["LogsqlEvents", "LogsqlSpans", "time_ns_of"]

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_EVENTS_OWN = {"time_ns", "body", "severity", "attributes"}
_MOST_ROWS = 1_000_000
_OWN_TABLES = ("steps", "profiles", "jobs", "probes", "bursts", "findings", "incidents")
_SPAN_FIELDS = {"name": "name", "start_ns": "start_time_unix_nano"}
_LATEST_END_NS = 3600 * 10**9
_KINDS = {"1": "internal", "2": "server", "3": "client", "4": "producer", "5": "consumer"}


def time_ns_of(text: str) -> int:
    """Return Unix nanoseconds of RFC 3339; raise StoreError for anything else."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise StoreError(f"{text!r} is not a time")
    seconds = int(datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00")).timestamp())
    return seconds * 10**9 + int((match[2] or "").ljust(9, "0"))


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()


def _exact(field: str, value: Any) -> str:
    """Return a condition: the field is one of these values, or absent."""
    name = _quoted(field)
    if value is None:
        return f'{name}:=""'
    if isinstance(value, bool):
        return f"{name}:={_quoted(str(value).lower())}"
    if isinstance(value, str | int | float):
        return f"{name}:={_quoted(str(value))}"
    several = [_quoted(str(one)) for one in value]
    return f"{name}:in({','.join(several)})"


class _Logsql:
    """Runs queries; answers are JSON lines."""

    def __init__(self, back_end: BackEnd) -> None:
        self._web = back_end

    def close(self) -> None:
        """Let go of connections."""
        self._web.close()

    def lines(
        self, query: str, since_ns: int | None, until_ns: int | None, limit: int
    ) -> Iterator[dict[str, str]]:
        """Yield found entries, newest first."""
        params = {"query": f"{query} | sort by (_time desc) limit {limit}"}
        if since_ns is not None:
            params["start"] = str(since_ns)
        if until_ns is not None:
            params["end"] = str(until_ns - 1)
        response = self._web.request("POST", "/select/logsql/query", data=params)
        for line in response.content.splitlines():
            if line:
                try:
                    yield orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise StoreError(f"garbled line: {error}", where=self._web.url) from None


def _typed(table: str, rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return rows of texts as the table's types; what does not fit is null."""
    schema = table_schema(table)
    texts = pl.DataFrame(
        list(rows), schema=dict.fromkeys(schema, pl.String), orient="row", strict=False
    )
    columns = []
    for name, kind in schema.items():
        column = pl.col(name)
        if isinstance(kind, pl.Boolean):
            columns.append(pl.when(column.is_not_null()).then(column == "true").alias(name))
        elif isinstance(kind, pl.String):
            columns.append(column)
        else:
            columns.append(column.cast(kind, strict=False))
    time = TABLES[table].time_column
    return texts.select(columns).sort(time, maintain_order=True)


class LogsqlEvents:
    """Log records: events, and the tables that travel as named records."""

    def __init__(self, back_end: BackEnd) -> None:
        self._logs = _Logsql(back_end)

    def close(self) -> None:
        """Let go of connections."""
        self._logs.close()

    def table(
        self,
        name: str,
        since_ns: int | None,
        until_ns: int | None,
        filters: Filters | None,
        *,
        limit: int | None = None,
        contains: str | None = None,
    ) -> pl.DataFrame:
        """Return rows of a table in time order; with a limit, the newest."""
        if name == "events":
            names = ",".join(_quoted(f"kansoku.{one}") for one in _OWN_TABLES)
            conditions = [f'NOT "event.name":in({names})']
        else:
            conditions = [_exact("event.name", f"kansoku.{name}")]
        for column, value in (filters or {}).items():
            if column not in table_schema(name) or column == TABLES[name].time_column:
                raise InputError(f"table {name}: cannot filter by {column!r} in VictoriaLogs")
            conditions.append(_exact(self._field(name, column), value))
        if contains is not None:
            conditions.append(f"_msg:~{_quoted(re.escape(contains))}")
        found = self._logs.lines(
            " ".join(conditions), since_ns, until_ns, limit if limit is not None else _MOST_ROWS
        )
        rows = (self._row(name, entry) for entry in found)
        return _typed(name, rows)

    @staticmethod
    def _field(table: str, column: str) -> str:
        if table == "events" and column in _EVENTS_OWN:
            return {"body": "_msg", "severity": "severity"}.get(column, column)
        return f"kansoku.{column}"

    def _row(self, table: str, entry: Mapping[str, str]) -> dict[str, Any]:
        row: dict[str, Any] = {
            name: entry.get(f"kansoku.{name}") or None for name in table_schema(table)
        }
        row[TABLES[table].time_column] = str(time_ns_of(entry["_time"]))
        if table == "events":
            row["body"] = entry.get("_msg") or None
            row["severity"] = (entry.get("severity") or "").lower() or None
            row["source"] = row["source"] or entry.get("service.name") or None
            if row["subject"] is None and entry.get("host.name"):
                row["subject"] = f"node:{entry['host.name']}"
            row["kind"] = row["kind"] or entry.get("event.name") or None
        if "attributes" in row:
            known = {"_time", "_msg", "_stream", "_stream_id", "severity", "event.name"}
            own = {k: v for k, v in entry.items() if k not in known and k[:8] != "kansoku."}
            row["attributes"] = (
                orjson.dumps(own, option=orjson.OPT_SORT_KEYS).decode() if own else None
            )
        return row


class LogsqlSpans:
    """Spans of VictoriaTraces, to the nanosecond."""

    def __init__(self, back_end: BackEnd) -> None:
        self._logs = _Logsql(back_end)

    def close(self) -> None:
        """Let go of connections."""
        self._logs.close()

    def table(
        self,
        since_ns: int | None,
        until_ns: int | None,
        filters: Filters | None,
        *,
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return spans in time order; with a limit, the newest."""
        conditions = ['"start_time_unix_nano":*']
        if since_ns is not None:
            conditions.append(f'"start_time_unix_nano":>={since_ns}')
        if until_ns is not None:
            conditions.append(f'"start_time_unix_nano":<{until_ns}')
        for column, value in (filters or {}).items():
            if column not in table_schema("spans"):
                raise InputError(f"table spans has no column {column!r} to filter by")
            conditions.append(
                _exact(_SPAN_FIELDS.get(column, f"span_attr:kansoku.{column}"), value)
            )
        # Entries are filed under the span's end: leave room for long ones.
        latest = None if until_ns is None else until_ns + _LATEST_END_NS
        found = self._logs.lines(
            " ".join(conditions), since_ns, latest, limit if limit is not None else _MOST_ROWS
        )
        return _typed("spans", (self._row(entry) for entry in found))

    @staticmethod
    def _row(entry: Mapping[str, str]) -> dict[str, Any]:
        schema = table_schema("spans")
        row: dict[str, Any] = {n: entry.get(f"span_attr:kansoku.{n}") or None for n in schema}
        start, end = entry.get("start_time_unix_nano"), entry.get("end_time_unix_nano")
        row |= {"name": entry.get("name"), "start_ns": start, "duration_ns": None}
        if start and end and int(end) >= int(start):
            row["duration_ns"] = str(int(end) - int(start))
        own = {
            key.removeprefix("span_attr:"): value
            for key, value in entry.items()
            if key.startswith("span_attr:") and not key.startswith("span_attr:kansoku.")
        }
        if row["run"] is None:
            row["run"] = entry.get("trace_id")
            row["kind"] = row["kind"] or _KINDS.get(entry.get("kind", ""))
            for column, key in (("id", "span_id"), ("parent", "parent_span_id")):
                if row[column] is None and re.fullmatch(r"[0-9a-f]{16}", entry.get(key) or ""):
                    number = int(entry[key], 16)
                    row[column] = str(number - 2**64 if number >= 2**63 else number)
            own |= {
                key.removeprefix("resource_attr:"): value
                for key, value in entry.items()
                if key.startswith("resource_attr:")
            }
        row["attributes"] = orjson.dumps(own, option=orjson.OPT_SORT_KEYS).decode() if own else None
        return row

"""The description of the API, OpenAPI 3.1."""

from typing import Any

import polars as pl

from kansoku import __version__
from kansoku.model import TABLES, table_schema
from kansoku.store import QUERIES, Aggregate

__all__ = ["openapi"]

_ARROW = "application/vnd.apache.arrow.stream"
_INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_TEXT = {"type": "string", "pattern": "^[^\\x00]*$"}


def _parameter(
    name: str, schema: dict[str, Any], text: str, *, needed: bool = False
) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": needed, "schema": schema, "description": text}


_SINCE = _parameter("since_ns", _INT64, "From, Unix nanoseconds, included.")
_UNTIL = _parameter("until_ns", _INT64, "Until, Unix nanoseconds, excluded.")
_LIMIT = _parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": 1_000_000, "default": 10_000},
    "Most rows of the answer: the newest.",
)
_MATCH = {
    "name": "match",
    "in": "query",
    "required": False,
    "schema": {"type": "array", "items": _TEXT},
    "style": "form",
    "explode": True,
    "description": "Condition on a label: LABEL=VALUE, !=, =~EXPRESSION, !~; may be repeated.",
}
_JOB = _parameter(
    "job", _TEXT, "Only the nodes and time of this Slurm job; a tenant must name one of its own."
)
_METRIC = _parameter("metric", {**_TEXT, "minLength": 1}, "Name of the metric.", needed=True)

_PROBLEM = {
    "description": "What is wrong, and the remedy.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
_ERRORS = {"400": _PROBLEM, "401": _PROBLEM, "403": _PROBLEM, "503": _PROBLEM}


def _rows() -> dict[str, Any]:
    return {
        "description": "Rows, as JSON or as an Arrow IPC stream by the Accept header.",
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/Rows"}},
            _ARROW: {"schema": {"type": "string", "format": "binary"}},
        },
    }


def _get(
    summary: str, parameters: list[dict[str, Any]], ok: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "get": {
            "summary": summary,
            "parameters": parameters,
            "responses": {"200": ok or _rows(), **_ERRORS, **more},
        }
    }


def _document(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }


def _column_parameters(table: str) -> list[dict[str, Any]]:
    kinds: dict[type[pl.DataType], dict[str, Any]] = {
        pl.String: _TEXT,
        pl.Int32: _INT64,
        pl.Int64: _INT64,
        pl.Float64: {"type": "number"},
        pl.Boolean: {"type": "boolean"},
    }
    return [
        _parameter(name, kinds[type(kind)], f"Only rows whose {name} equals this.")
        for name, kind in table_schema(table).items()
    ]


def _append(table: str) -> dict[str, Any]:
    return {
        "summary": f"Keep rows of {table}; answered when they are durable.",
        "parameters": [
            _parameter("agent", {**_TEXT, "minLength": 1}, "Sender of a numbered batch."),
            _parameter("sequence", _INT64, "Number of the batch: kept once."),
        ],
        "requestBody": {
            "required": True,
            "content": {_ARROW: {"schema": {"type": "string", "format": "binary"}}},
        },
        "responses": {"200": _document("Rows kept and rejected."), **_ERRORS, "413": _PROBLEM},
    }


def _query_parameters(name: str) -> list[dict[str, Any]]:
    return [
        _parameter(one.name, _INT64 if one.kind is int else _TEXT, one.meaning)
        for one in QUERIES[name].parameters
    ]


_COMPONENTS: dict[str, Any] = {
    "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
    "schemas": {
        "Problem": {
            "type": "object",
            "required": ["version", "error"],
            "properties": {"version": {"type": "integer"}, "error": {"type": "string"}},
        },
        "Rows": {
            "type": "object",
            "required": ["version", "columns", "rows", "truncated"],
            "properties": {
                "version": {"type": "integer"},
                "columns": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "type"],
                        "properties": {
                            "name": {"type": "string"},
                            "type": {"type": "string"},
                        },
                    },
                },
                "rows": {"type": "array", "items": {"type": "array"}},
                "truncated": {"type": "boolean"},
            },
        },
    },
}


def _metric_paths() -> dict[str, Any]:
    aggregate = {"type": "string", "enum": [str(one) for one in Aggregate], "default": "avg"}
    across = {"type": "string", "enum": ["avg", "min", "max", "sum", "count"], "default": "avg"}
    return {
        "/api/v1/metrics": _get("Every metric with unit, kind and number of series.", []),
        "/api/v1/metrics/series": _get(
            "Series of a metric.",
            [_parameter("metric", _TEXT, "Name of the metric; all without it."), _MATCH, _JOB,
             _LIMIT],
        ),
        "/api/v1/metrics/range": _get(
            "One value per series and step; steps lie on multiples of step_ns.",
            [
                _METRIC, _MATCH, _JOB,
                _parameter("start_ns", _INT64, "From, Unix ns.", needed=True),
                _parameter("end_ns", _INT64, "Until, Unix ns.", needed=True),
                _parameter("step_ns", {**_INT64, "minimum": 1}, "Length of a step, ns.",
                           needed=True),
                _parameter("aggregate", aggregate, "How samples of a step become one value."),
                _parameter("by", _TEXT, "Labels, joined by commas: merge series that agree."),
                _parameter("across", across, "How series are merged."),
            ],
        ),
        "/api/v1/metrics/latest": _get(
            "Each series' last sample, none older than five minutes.",
            [_METRIC, _MATCH, _JOB, _parameter("at_ns", _INT64, "As of this time, Unix ns.")],
        ),
    }  # fmt: skip


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document."""
    event_filters = [
        _parameter(name, _TEXT, text)
        for name, text in {
            "subject": "Such as node:c001.",
            "source": "Who logged it.",
            "kind": "Kind of event.",
            "severity": "info, warning, error, critical.",
            "contains": "Text within the body.",
        }.items()
    ]
    paths: dict[str, Any] = {
        "/api/health": {
            "get": {
                "summary": "Whether the server answers.",
                "security": [],
                "responses": {"200": _document("It does.")},
            }
        },
        "/api/v1/tables": _get("The tables and their columns.", [], _document("Tables.")),
        "/api/v1/queries": _get("The named queries.", [], _document("Queries.")),
        **_metric_paths(),
        "/api/v1/events": _get("Events, in time order.", [_SINCE, _UNTIL, _LIMIT, *event_filters]),
        "/api/v1/statistics": _get("Counts of every stage, for operators.", [],
                                   _document("Counts.")),
        "/api/v1/stream": _get(
            "Fresh rows as server-sent events.",
            [_parameter("tables", {**_TEXT, "minLength": 1}, "Tables, joined by commas.",
                        needed=True)],
            {"description": "Events `rows`.", "content": {"text/event-stream": {"schema": _TEXT}}},
        ),
    }  # fmt: skip
    for name, table in TABLES.items():
        path = _get(
            f"Rows of {name}: {table.row}.", [_SINCE, _UNTIL, _LIMIT, *_column_parameters(name)]
        )
        paths[f"/api/v1/tables/{name}"] = path | {"post": _append(name)}
    for name, query in QUERIES.items():
        paths[f"/api/v1/queries/{name}"] = _get(
            f"One row is {query.answers}.", _query_parameters(name)
        )
    from kansoku.app.web_pages import page_paths

    paths |= page_paths(_ERRORS)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kansoku",
            "version": __version__,
            "description": "Query API of `kansoku serve`.",
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {}],
        "paths": paths,
        "components": _COMPONENTS,
    }

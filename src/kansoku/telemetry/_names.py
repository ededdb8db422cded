"""Names on the wire: how rows of the bulk tables travel as OTLP.

- spans are OTLP spans, samples OTLP data points, events log records;
- rows of every other table are log records with ``event.name`` = ``kansoku.TABLE``;
- a column travels as the attribute ``kansoku.COLUMN``; the keys of the ``attributes`` column as
  attributes of their own.
"""

import polars as pl

from kansoku.model import table_schema

__all__ = [
    "AGENT_HEADER",
    "COLUMN_PREFIX",
    "EVENT_COLUMNS",
    "EVENT_NAME",
    "LOG_TABLES",
    "SEQUENCE_HEADER",
    "SPAN_COLUMNS",
    "column_kinds",
    "severity_number",
    "severity_text",
]

COLUMN_PREFIX = "kansoku."
EVENT_NAME = "event.name"
AGENT_HEADER = "kansoku-agent"
SEQUENCE_HEADER = "kansoku-sequence"

LOG_TABLES = ("steps", "profiles", "jobs", "probes", "bursts", "findings", "incidents")
"""Tables whose rows travel as log records named ``kansoku.TABLE``."""

_SPAN_OWN = {"name", "start_ns", "duration_ns", "attributes"}
SPAN_COLUMNS = tuple(name for name in table_schema("spans") if name not in _SPAN_OWN)
"""Columns of a span that travel as attributes; the rest are fields of an OTLP span."""

EVENT_COLUMNS = ("source", "subject", "kind")

_SEVERITIES = {"trace": 1, "debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}


def column_kinds(table: str) -> dict[str, str]:
    """Return ``text``, ``int32``, ``int64``, ``float`` or ``bool`` of every column."""
    names = {
        pl.String: "text",
        pl.Int32: "int32",
        pl.Int64: "int64",
        pl.Float64: "float",
        pl.Boolean: "bool",
    }
    return {name: names[type(kind)] for name, kind in table_schema(table).items()}


def severity_number(text: str | None) -> int:
    """Return OTLP's number of a severity; 0 where there is none."""
    return _SEVERITIES.get(text or "", 0)


def severity_text(number: int, text: str) -> str | None:
    """Return a severity in our words, from OTLP's number (1-24), else from its text."""
    if 1 <= number <= 24:
        return tuple(_SEVERITIES)[(number - 1) // 4]
    lowered = text.strip().lower()
    return {"warn": "warning", "fatal": "critical", "err": "error"}.get(lowered, lowered) or None

"""DuckDB tables of the bulk tables, and conforming of rows to them."""

from collections.abc import Iterable

import polars as pl
import pyarrow as pa

from kansoku.errors import InputError
from kansoku.model import TABLES, table_schema

__all__ = ["BULK", "DDL", "ROLLUPS", "conform", "missing_columns", "quoted"]

_TYPES = {
    pl.String: "VARCHAR",
    pl.Int32: "INTEGER",
    pl.Int64: "BIGINT",
    pl.Float64: "DOUBLE",
    pl.Boolean: "BOOLEAN",
}
_ARROW = {
    pl.String: pa.string(),
    pl.Int32: pa.int32(),
    pl.Int64: pa.int64(),
    pl.Float64: pa.float64(),
    pl.Boolean: pa.bool_(),
}

BULK = tuple(name for name in TABLES if name != "metrics")
"""Tables kept as they are; metrics go through the series dictionary."""


def quoted(name: str) -> str:
    """Return an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _columns(table: str) -> str:
    return ", ".join(
        f"{quoted(name)} {_TYPES[type(kind)]}" for name, kind in table_schema(table).items()
    )


ROLLUPS = {"5m": 300 * 10**9, "1h": 3600 * 10**9}
"""Name to width of the kept roll-ups, ns."""

_PARTIALS = (
    "series INTEGER, bucket BIGINT, n INTEGER, total DOUBLE, low DOUBLE, high DOUBLE, "
    "first_value DOUBLE, last_value DOUBLE, growth DOUBLE"
)
# What is kept beside the bulk tables.
_OWN = {
    "series": "id INTEGER, metric VARCHAR, labels VARCHAR",
    "samples": "series INTEGER, time_ns BIGINT, value DOUBLE",
    # What each metric is: unit and kind (gauge, counter, delta, histogram) as senders declare it.
    "metric_info": "metric VARCHAR, unit VARCHAR, kind VARCHAR, description VARCHAR",
    # Ranges of sequences kept of each agent: committed with their rows.
    "deliveries": "agent VARCHAR, low BIGINT, high BIGINT",
    # Digest of bodies from senders that number nothing: a retry is the same bytes.
    "bodies": "digest VARCHAR, time_ns BIGINT",
    # Whose a run is, as its sender said, and whether its user shows its inside to the provider.
    "owners": 'run VARCHAR, job VARCHAR, "user" VARCHAR, account VARCHAR, consent BOOLEAN',
    "sealed": (
        "table_name VARCHAR, file VARCHAR, hour BIGINT, from_ns BIGINT, until_ns BIGINT, "
        "row_count BIGINT, bytes BIGINT"
    ),
    # Partial aggregates of one series and bucket. Gauges have no first and growth, counters no
    # total, low and high: those queries read the samples.
    **{f"rollup_{name}": _PARTIALS for name in ROLLUPS},
}

DDL = tuple(
    f"CREATE TABLE IF NOT EXISTS {quoted(name)} ({columns})"
    for name, columns in ({name: _columns(name) for name in BULK} | _OWN).items()
)


def missing_columns(present: Iterable[tuple[str, str]]) -> list[str]:
    """Return statements that add the columns an older version did not have.

    ``present`` is (table, column) of what the database holds. Columns are written and sealed by
    name, so it does not matter that a new one stands last; old rows have null there.
    """
    known = set(present)
    return [
        f"ALTER TABLE {quoted(table)} ADD COLUMN {quoted(name)} {_TYPES[type(kind)]}"
        for table in BULK
        for name, kind in table_schema(table).items()
        if (table, name) not in known
    ]


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def conform(table: str, rows: pl.DataFrame | pa.Table) -> pa.Table:
    """Return the rows with exactly the table's columns and types.

    Missing columns become null; raises InputError for unknown columns and values that do not fit.
    """
    arrow = rows.to_arrow() if isinstance(rows, pl.DataFrame) else rows
    schema = table_schema(table)
    if unknown := [name for name in arrow.column_names if name not in schema]:
        raise InputError(
            f"table {table}: unknown column {', '.join(unknown)}",
            remedy=f"its columns are {', '.join(schema)}",
        )
    columns = []
    for name, kind in schema.items():
        wanted = _ARROW[type(kind)]
        if name not in arrow.column_names:
            columns.append(pa.nulls(len(arrow), wanted))
            continue
        column = arrow.column(name)
        if wanted == pa.string() and _is_text(column.type):
            columns.append(column)  # DuckDB reads every form of text; casting costs memory
            continue
        if column.type != wanted:
            try:
                column = column.cast(wanted)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise InputError(f"table {table}, column {name}: {error}") from None
        columns.append(column)
    return pa.table(columns, names=list(schema))

"""SQL over hot rows and sealed files as one relation, and conditions on columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kansoku.errors import InputError
from kansoku.model import TABLES, table_schema
from kansoku.store._interface import Filters
from kansoku.store._schema import quoted

__all__ = ["Sealed", "condition", "file_list", "relation", "sealed_rows", "time_condition"]

Sealed = Mapping[str, Sequence[tuple[str, int, int]]]
"""Table to its sealed files: file name, first and last time."""


def time_condition(column: str, since_ns: int | None, until_ns: int | None) -> str:
    """Return an SQL condition for a half-open time range; numbers only, so safe as text."""
    parts = []
    if since_ns is not None:
        parts.append(f"{column} >= {int(since_ns)}")
    if until_ns is not None:
        parts.append(f"{column} < {int(until_ns)}")
    return " AND ".join(parts) or "true"


def _files(
    sealed: Sequence[tuple[str, int, int]], folder: Path, since_ns: int | None, until_ns: int | None
) -> list[str]:
    return [
        str(folder / name)
        for name, first, last in sealed
        if (until_ns is None or first < until_ns) and (since_ns is None or last >= since_ns)
    ]


def file_list(files: Sequence[str]) -> str:
    """Return files as an SQL list."""
    return "[" + ", ".join("'" + file.replace("'", "''") + "'" for file in files) + "]"


def relation(
    table: str,
    sealed: Sequence[tuple[str, int, int]],
    folder: Path,
    since_ns: int | None = None,
    until_ns: int | None = None,
) -> str:
    """Return a parenthesised SELECT of a table's rows within a time range."""
    time = TABLES[table].time_column
    columns = ", ".join(quoted(name) for name in table_schema(table))
    where = time_condition(time, since_ns, until_ns)
    if table == "metrics":
        hot = (
            "SELECT s.metric, s.labels, x.time_ns, x.value FROM samples x "
            f"JOIN series s ON s.id = x.series WHERE {where}"
        )
    else:
        hot = f"SELECT {columns} FROM {quoted(table)} WHERE {where}"
    if not (files := _files(sealed, folder, since_ns, until_ns)):
        return f"({hot})"
    if table == "metrics":
        cold = f"SELECT {columns} FROM read_parquet({file_list(files)}) WHERE {where}"
        return f"({hot} UNION ALL {cold})"
    return f"({hot} UNION ALL BY NAME {sealed_rows(files)} WHERE {where})"


def sealed_rows(files: Sequence[str]) -> str:
    """Return SQL of the rows of sealed files, to be united by name with hot ones.

    Files that an older version wrote may lack columns; in the union these are null.
    """
    return f"SELECT * FROM read_parquet({file_list(files)}, union_by_name = true)"


def condition(table: str, filters: Filters | None) -> tuple[str, list[Any]]:
    """Return an SQL condition with placeholders, and its values."""
    schema = table_schema(table)
    parts: list[str] = []
    values: list[Any] = []
    for column, wanted in (filters or {}).items():
        if column not in schema:
            raise InputError(
                f"table {table} has no column {column!r} to filter by",
                remedy=f"its columns are {', '.join(schema)}",
            )
        if wanted is None:
            parts.append(f"{quoted(column)} IS NULL")
        elif isinstance(wanted, str | int | float | bool):
            parts.append(f"{quoted(column)} = ?")
            values.append(wanted)
        else:
            several = list(wanted)
            marks = ", ".join("?" * len(several))
            parts.append(f"{quoted(column)} IN ({marks})" if several else "false")
            values += several
    return " AND ".join(parts) or "true", values

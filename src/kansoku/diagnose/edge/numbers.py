"""Open tables of numbers: CSV, Parquet, JSON lines, Prometheus text; large ones are reduced."""

import re
from pathlib import Path

import polars as pl

from kansoku.catalog.quantities import quantity_of
from kansoku.diagnose.tables import measures_of_prometheus, measures_of_table

__all__ = ["is_prometheus", "is_table_of_numbers", "read_numbers"]

_MOST_ROWS = 20_000_000
_TEXT_LIMIT = 256 << 20
# Larger tables are averaged while they are read; the comparison has half as many bins.
_LARGE_BYTES = 8 << 20
_BINS = 240


_SAMPLE = re.compile(r"[A-Za-z_:][\w:]*\{[^{}]*\}\s+[-+\w.]+(?:\s+\d{10,13})?\s*")
_START_BYTES = 16 * 1024


def is_prometheus(path: Path) -> bool:
    """Say whether a text is Prometheus samples with labels, whatever its name."""
    if path.suffix in {".prom", ".gz"}:
        return path.suffix == ".prom"
    with path.open("rb") as file:
        start = file.read(_START_BYTES)
    lines = start.decode("utf-8", "replace").splitlines()
    if len(start) == _START_BYTES:
        lines.pop()  # cut off
    samples = [line for line in lines if line.strip() and not line.startswith("#")]
    return bool(samples) and all(_SAMPLE.fullmatch(line) for line in samples)


def _scan(path: Path) -> pl.LazyFrame:
    name = path.name.removesuffix(".gz")
    if name.endswith((".parquet", ".pq")):
        return pl.scan_parquet(path)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return pl.scan_ndjson(path, infer_schema_length=2000, ignore_errors=True)
    with path.open("rb") as file:
        first = file.readline(65536)
    separator = max(",;\t|", key=lambda c: first.count(c.encode()))
    return pl.scan_csv(
        path,
        separator=separator,
        infer_schema_length=2000,
        ignore_errors=True,
        truncate_ragged_lines=True,
        comment_prefix="#",
        with_column_names=_cleaned,
        null_values=["", "N/A", "[N/A]", "NA", "null", "[Not Supported]", "-"],
    )


def _cleaned(names: list[str]) -> list[str]:
    """Strip blanks after separators; repeated names get a number."""
    seen: dict[str, int] = {}
    clean = []
    for name in names:
        text = name.strip()
        seen[text] = seen.get(text, 0) + 1
        clean.append(text if seen[text] == 1 else f"{text}_{seen[text]}")
    return clean


def read_numbers(path: Path, *, node: str | None = None, rank: int | None = None) -> pl.DataFrame:
    """Return a file's known numbers as measures; raise polars' errors for files that are no table.

    Empty where no column is known.
    """
    if is_prometheus(path):
        with path.open(encoding="utf-8", errors="replace") as file:
            return measures_of_prometheus(file.read(_TEXT_LIMIT), node=node)
    bins = _BINS if path.stat().st_size > _LARGE_BYTES else None
    return measures_of_table(_scan(path).head(_MOST_ROWS), node=node, rank=rank, bins=bins)


def is_table_of_numbers(path: Path) -> bool:
    """Say whether a JSON-lines file has columns that are numbers with a known meaning."""
    try:
        kinds = pl.scan_ndjson(path, infer_schema_length=20).collect_schema()
    except (pl.exceptions.PolarsError, OSError):
        return False
    return any(k.is_numeric() and quantity_of(n) is not None for n, k in kinds.items())

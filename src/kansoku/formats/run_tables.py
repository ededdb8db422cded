"""Step rows and sampled spans that a node agent keeps in a run directory, beside or without rings.

At scale full spans of every step are too much: the agent keeps a step row for each rank and step,
and full spans of sampled steps. They lie in the run directory as

- ``steps/*.parquet``: rows of the ``steps`` table (further columns are ignored),
- ``spans/*.parquet``: rows of the ``spans`` table,
- ``ranks.json``: ``{"schema": "kansoku.ranks/1", "ranks": [RankFacts, …]}``.

Each is optional. A file that cannot be read becomes a sentence in ``missing``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import polars as pl

from kansoku.model.run import RankFacts
from kansoku.model.tables import table_schema

__all__ = ["RunTables", "read_tables", "write_tables"]

_SCHEMA = "kansoku.ranks/1"


class _RanksFile(msgspec.Struct, frozen=True):
    schema: str
    ranks: list[RankFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTables:
    """What was kept as tables; None where the directory has none."""

    steps: pl.DataFrame | None
    spans: pl.DataFrame | None
    ranks: tuple[RankFacts, ...]
    missing: tuple[str, ...] = ()


def read_tables(path: Path | str) -> RunTables:
    """Read the tables of a run directory; an empty answer where there are none."""
    folder = Path(path)
    missing: list[str] = []
    return RunTables(
        steps=_table(folder, "steps", missing),
        spans=_table(folder, "spans", missing),
        ranks=_ranks(folder / "ranks.json", missing),
        missing=tuple(missing),
    )


def _table(folder: Path, name: str, missing: list[str]) -> pl.DataFrame | None:
    schema = table_schema(name)
    frames = []
    for file in sorted((folder / name).glob("*.parquet")):
        try:
            if not file.is_file():  # a named pipe would be waited for
                raise OSError("not a regular file")
            frame = pl.scan_parquet(file)
            known = frame.collect_schema()
            absent = [column for column in schema if column not in known]
            columns = [*schema, *(c for c in ("run_delay_ns",) if c in known and name == "steps")]
            frames.append(
                frame.with_columns(
                    pl.lit(None, dtype=schema[column]).alias(column) for column in absent
                )
                .select(pl.col(c).cast(schema.get(c, pl.Int64)) for c in columns)
                .collect()
            )
        except (pl.exceptions.PolarsError, OSError) as error:
            missing.append(f"{name}/{file.name} cannot be read: {error}")
    return pl.concat(frames, how="diagonal") if frames else None


def _ranks(file: Path, missing: list[str]) -> tuple[RankFacts, ...]:
    if not file.is_file():
        return ()
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_RanksFile)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        missing.append(f"ranks.json cannot be read: {error}")
        return ()
    if found.schema != _SCHEMA:
        missing.append(f"ranks.json has schema {found.schema!r}, expected {_SCHEMA!r}")
    return tuple(found.ranks)


def write_tables(
    path: Path | str,
    *,
    steps: pl.DataFrame | None = None,
    spans: pl.DataFrame | None = None,
    ranks: Sequence[RankFacts] = (),
    part: str = "part-0",
) -> None:
    """Write tables of a run directory; ``part`` names the files of one writer."""
    folder = Path(path)
    for name, frame in (("steps", steps), ("spans", spans)):
        if frame is not None:
            (folder / name).mkdir(parents=True, exist_ok=True)
            frame.write_parquet(folder / name / f"{part}.parquet", compression="zstd")
    if ranks:
        folder.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.encode(_RanksFile(schema=_SCHEMA, ranks=list(ranks)))
        (folder / "ranks.json").write_bytes(text)

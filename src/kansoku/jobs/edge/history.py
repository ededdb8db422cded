"""The job history on disk: sealed Parquet segments, idempotent and incremental.

A folder per table holds segments of rows with distinct keys and one manifest, replaced as a
whole. A row that changes goes to a new segment and its old place is listed as dead, so that an
import writes what is new and nothing else. Times in the manifest let an import of new jobs skip
old segments unread. One writer at a time (a lock file); readers need no lock.
"""

import fcntl
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import polars as pl

from kansoku.errors import InputError
from kansoku.formats.slurm import FINAL_STATES, JOB_SCHEMA, NODE_EVENT_SCHEMA, STEP_SCHEMA

__all__ = ["History", "Merged", "ParquetHistory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What a merge did with the rows it was given."""

    new: int = 0
    updated: int = 0
    unchanged: int = 0

    def __add__(self, other: "Merged") -> "Merged":
        return Merged(
            new=self.new + other.new,
            updated=self.updated + other.updated,
            unchanged=self.unchanged + other.unchanged,
        )


class History(Protocol):
    """Where job history is kept."""

    def scan(self, table: str) -> pl.LazyFrame:
        """Return every row of ``jobs``, ``steps`` or ``node_events``."""

    def merge(self, table: str, frame: pl.DataFrame) -> Merged:
        """Add rows; a row whose key is known changes it, or nothing if it says nothing new."""

    def note(self, name: str) -> str | None:
        """Return a remembered value, such as the collector's position."""

    def remember(self, name: str, value: str) -> None:
        """Keep a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    schema: dict[str, pl.DataType]
    key: tuple[str, ...]
    time: str


_TABLES = {
    "jobs": _Table(
        schema=JOB_SCHEMA, key=("cluster", "raw_id", "submit_ns", "job_id"), time="submit_ns"
    ),
    "steps": _Table(
        schema=STEP_SCHEMA, key=("cluster", "raw_id", "step", "start_ns"), time="start_ns"
    ),
    "node_events": _Table(
        schema=NODE_EVENT_SCHEMA, key=("cluster", "node", "start_ns"), time="start_ns"
    ),
}
# Compaction joins small segments once there are this many of them.
_SMALL_ROWS = 100_000
_MOST_SMALL = 24
_UNNAMED = "?"
_ROW = "\u0085row"


class ParquetHistory:
    """History in a folder."""

    def __init__(self, folder: Path) -> None:
        """Use (and on the first write create) the folder."""
        self.folder = folder

    # -- reading ------------------------------------------------------------------------------

    def scan(self, table: str) -> pl.LazyFrame:
        """Return every living row of a table."""
        kind = self._kind(table)
        parts = []
        plain: list[Path] = []
        for segment in self._manifest(table):
            path = self.folder / table / segment["file"]
            if segment["dead"]:
                parts.append(self._living(path, segment["dead"]))
            else:
                plain.append(path)
        if plain:
            parts.insert(0, pl.scan_parquet(plain))
        if not parts:
            return pl.LazyFrame(schema=kind.schema)
        return pl.concat(parts, how="vertical").select(list(kind.schema))

    def _living(self, path: Path, dead: Sequence[int]) -> pl.LazyFrame:
        frame = pl.scan_parquet(path, row_index_name=_ROW)
        return frame.filter(~pl.col(_ROW).is_in(list(dead))).drop(_ROW)

    def note(self, name: str) -> str | None:
        """Return a remembered value."""
        path = self.folder / "notes.json"
        if not path.exists():
            return None
        value = json.loads(path.read_text(encoding="utf-8")).get(name)
        return None if value is None else str(value)

    def remember(self, name: str, value: str) -> None:
        """Keep a value."""
        with self._lock():
            path = self.folder / "notes.json"
            notes = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            notes[name] = value
            self._replace(path, json.dumps(notes).encode())

    # -- writing ------------------------------------------------------------------------------

    def merge(self, table: str, frame: pl.DataFrame) -> Merged:
        """Add rows to a table by its key; final states never go back to earlier ones."""
        kind = self._kind(table)
        frame = frame.select(list(kind.schema))
        given = frame.height
        if frame.is_empty():
            return Merged()
        with self._lock():
            frame = self._named(table, kind, frame)
            return self._merge(table, kind, _once(table, kind, frame), given)

    def _named(self, table: str, kind: _Table, frame: pl.DataFrame) -> pl.DataFrame:
        """Name the cluster of rows from files that do not say it, where there is only one.

        Otherwise the same job would be kept twice, once without its cluster.
        """
        segments = self._manifest(table)
        kept = {c for s in segments for c in s["clusters"]} - {_UNNAMED}
        given = set(frame["cluster"].drop_nulls().unique().to_list())
        names = kept | given
        name = next(iter(names)) if len(names) == 1 else _UNNAMED
        stale = [s for s in segments if _UNNAMED in s["clusters"]]
        if name != _UNNAMED and stale:
            for segment in stale:
                path = self.folder / table / segment["file"]
                rows = self._living(path, segment["dead"]).collect()
                rows = rows.with_columns(pl.col("cluster").replace(_UNNAMED, name))
                segments[segments.index(segment)] = self._write_segment(table, kind, rows)
            self._write_manifest(table, segments)
        return frame.with_columns(pl.col("cluster").fill_null(name))

    def _merge(self, table: str, kind: _Table, frame: pl.DataFrame, given: int) -> Merged:
        segments = self._manifest(table)
        low, high = _range(frame, kind)
        updated = unchanged = 0
        changes: list[pl.DataFrame] = []
        rest = frame
        for segment in segments:
            if segment["low"] > high or segment["high"] < low or rest.is_empty():
                continue
            path = self.folder / table / segment["file"]
            keys = pl.read_parquet(path, columns=list(kind.key), row_index_name=_ROW)
            if segment["dead"]:
                keys = keys.filter(~pl.col(_ROW).is_in(segment["dead"]))
            known = keys.join(rest.select(kind.key), on=list(kind.key), nulls_equal=True)
            if known.is_empty():
                continue
            old = pl.read_parquet(path)[known[_ROW].to_numpy()]
            both = old.select(kind.key).join(
                rest, on=list(kind.key), how="left", nulls_equal=True, maintain_order="left"
            )
            better = _settled(old, both, kind)
            differs = pl.DataFrame(
                [old[c].ne_missing(better[c]).alias(c) for c in kind.schema if c not in kind.key]
            ).select(pl.any_horizontal(pl.all()).alias("differs"))["differs"]
            changes.append(better.filter(differs))
            updated += int(differs.sum())
            unchanged += int((~differs).sum())
            segment["dead"] = sorted({*segment["dead"], *known[_ROW].filter(differs).to_list()})
            rest = rest.join(known.select(kind.key), on=list(kind.key), how="anti",
                             nulls_equal=True)  # fmt: skip
        fresh = pl.concat([rest, *changes]) if changes else rest
        if not fresh.is_empty():
            segments.append(self._write_segment(table, kind, fresh))
            segments = self._compacted(table, kind, segments)
            self._write_manifest(table, segments)
        unchanged += given - frame.height
        return Merged(new=rest.height, updated=updated, unchanged=unchanged)

    def _compacted(self, table: str, kind: _Table, segments: list[dict]) -> list[dict]:  # type: ignore[type-arg]
        small = [s for s in segments if s["rows"] - len(s["dead"]) < _SMALL_ROWS]
        if len(small) <= _MOST_SMALL:
            return segments
        frames = [self._living(self.folder / table / s["file"], s["dead"]).collect() for s in small]
        joined = self._write_segment(table, kind, pl.concat(frames))
        # Old files stay until the next compaction, for readers that hold the old manifest.
        self._remove_strangers(table, {str(s["file"]) for s in [*segments, joined]})
        return [*(s for s in segments if s not in small), joined]

    def _remove_strangers(self, table: str, named: set[str]) -> None:
        for path in (self.folder / table).glob("*.parquet"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _write_segment(self, table: str, kind: _Table, frame: pl.DataFrame) -> dict[str, object]:
        name = f"{uuid.uuid4().hex}.parquet"
        path = self.folder / table / name
        partial = path.with_suffix(".partial")
        frame.write_parquet(partial, compression="lz4" if frame.height > _SMALL_ROWS else "zstd")
        partial.replace(path)
        low, high = _range(frame, kind)
        return {
            "file": name,
            "rows": frame.height,
            "low": low,
            "high": high,
            "clusters": sorted(frame["cluster"].unique().to_list()),
            "dead": [],
        }

    def _manifest(self, table: str) -> list[dict]:  # type: ignore[type-arg]
        path = self.folder / table / "manifest.json"
        if not path.exists():
            return []
        content: list[dict] = json.loads(path.read_text(encoding="utf-8"))["segments"]  # type: ignore[type-arg]
        return content

    def _write_manifest(self, table: str, segments: Sequence[dict]) -> None:  # type: ignore[type-arg]
        text = json.dumps({"format": 1, "segments": list(segments)})
        self._replace(self.folder / table / "manifest.json", text.encode())

    def _replace(self, path: Path, content: bytes) -> None:
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        for table in _TABLES:
            (self.folder / table).mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _kind(self, table: str) -> _Table:
        try:
            return _TABLES[table]
        except KeyError:
            raise InputError(
                f"no history table {table!r}; there are {', '.join(_TABLES)}"
            ) from None


def _once(table: str, kind: _Table, frame: pl.DataFrame) -> pl.DataFrame:
    """Keep one row per key: the last, but a finished reading of a job before an unfinished one."""
    if table != "jobs":
        return frame.unique(kind.key, keep="last", maintain_order=True)
    order = frame.with_columns(_final().alias("\u0085final"))
    order = order.sort("\u0085final", maintain_order=True)
    return order.unique(kind.key, keep="last", maintain_order=True).drop("\u0085final")


def _final() -> pl.Expr:
    return pl.col("state").is_in(list(FINAL_STATES))


def _range(frame: pl.DataFrame, kind: _Table) -> tuple[int, int]:
    times = frame[kind.time].drop_nulls().to_numpy()
    if len(times) < frame.height:
        return 0, int(np.iinfo(np.int64).max)
    return int(times.min()), int(times.max())


def _settled(old: pl.DataFrame, new: pl.DataFrame, kind: _Table) -> pl.DataFrame:
    """Return the better of two readings of the same rows: new texts win, nulls never do.

    A reading taken while the job ran says nothing against one taken after its end.
    """
    stale = pl.lit(value=False)
    if "state" in kind.schema and "submit_ns" in kind.schema:
        finals = list(FINAL_STATES)
        stale = pl.Series(old["state"].is_in(finals) & ~new["state"].is_in(finals))  # type: ignore[assignment]
    return pl.DataFrame(
        [
            pl.select(
                pl.when(stale)
                .then(pl.coalesce(old[c], new[c]))
                .otherwise(pl.coalesce(new[c], old[c]))
                .alias(c)
            ).to_series()
            for c in kind.schema
        ],
        schema=kind.schema,
    )

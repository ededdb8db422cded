"""Sealing of hours into Parquet, roll-ups, and retention by age and size.

A sealed hour is one zstd Parquet file per table, which any engine reads: samples sorted by
metric, series and time with metric and labels beside the series number. The file of the current
hour grows in steps of ten minutes, so that few rows are hot; late rows wait among the hot ones
for the next step. Either way a new file takes the place of the old one. It is written first; one
transaction then swaps it in, removes the hot rows and replaces the hour's roll-ups, so a crash at
any point leaves every row exactly once. Files nobody names are removed at start.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from kansoku.model import TABLES, table_schema
from kansoku.store._relation import file_list, sealed_rows
from kansoku.store._schema import ROLLUPS, quoted
from kansoku.store._writer import Writer

__all__ = ["Keeper", "Retention"]

_log = logging.getLogger(__name__)
HOUR_NS = 3600 * 10**9
STEP_NS = 600 * 10**9
DAY_S = 86_400
# Few rows that are read whole for years: they stay in the database.
_UNSEALED = {"jobs", "findings", "incidents"}
_ORDER = {
    "metrics": "metric, series, time_ns",
    "spans": "run, rank, start_ns",
    "steps": "run, rank, step",
    "profiles": "run, rank, start_ns",
    "probes": "source, target, time_ns",
    "bursts": "node, port, start_ns",
}
_FORMAT = "(FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2, ROW_GROUP_SIZE 122880)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long rows stay."""

    seal_after_s: int = 600
    """Age after which rows are sealed, in steps of ten minutes."""
    default_age_s: int | None = None
    """Age of rows removed, for tables not named in ``ages_s``; None keeps them."""
    ages_s: Mapping[str, int | None] = field(default_factory=lambda: dict.fromkeys(_UNSEALED))
    rollup_age_s: int | None = None
    """Age of the hourly roll-ups, which outlive their samples; None keeps them."""
    max_bytes: int | None = None
    """Size of the folder beyond which the oldest sealed files go."""

    def age_ns(self, table: str) -> int | None:
        """Return the age beyond which rows of a table are removed."""
        age = self.ages_s.get(table, self.default_age_s)
        return None if age is None else age * 10**9


class Keeper:
    """Seals and removes; called now and then by the owner, from one thread."""

    def __init__(
        self,
        folder: Path,
        *,
        cursor: Callable[[], duckdb.DuckDBPyConnection],
        writer: Writer,
        clock_ns: Callable[[], int],
        retention: Retention,
    ) -> None:
        self._folder = folder
        self._cursor = cursor
        self._writer = writer
        self._clock_ns = clock_ns
        self._retention = retention
        self._lock = threading.Lock()
        self._reader_lock = threading.Lock()
        self._readers: dict[object, int] = {}
        self._generation = 0
        self._retired: list[tuple[int, Path]] = []
        self.sealed_hours = 0
        self.failures = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep sealed files that leave the catalogue on disk until this reader is done."""
        token = object()
        with self._reader_lock:
            self._readers[token] = self._generation
        try:
            yield
        finally:
            with self._reader_lock:
                del self._readers[token]

    def maintain(self) -> None:
        """Seal what is due, remove what is too old or too much, forget old digests."""
        with self._lock:
            self._unlink_retired()
            now = self._clock_ns()
            cutoff = (now - self._retention.seal_after_s * 10**9) // STEP_NS * STEP_NS
            for table in TABLES:
                if table not in _UNSEALED:
                    self._seal_table(table, cutoff)
            self._expire(now)
            self._shrink()
            self._forget(now)
            self._unlink_retired()

    def seal_all(self) -> None:
        """Seal everything up to now, whatever its age."""
        with self._lock:
            for table in TABLES:
                if table not in _UNSEALED:
                    self._seal_table(table, self._clock_ns() + 1)
            self._unlink_retired()

    def _seal_table(self, table: str, before_ns: int) -> None:
        hot = "samples" if table == "metrics" else quoted(table)
        time = TABLES[table].time_column
        cursor = self._cursor()
        try:
            hours = cursor.execute(
                f"SELECT DISTINCT {time} // {HOUR_NS} AS h FROM {hot} "
                f"WHERE {time} < {before_ns} ORDER BY h"
            ).fetchall()
            for (hour,) in hours:
                self._seal_hour(cursor, table, hour, before_ns)
            if hours:
                cursor.execute("CHECKPOINT")
        except (duckdb.Error, OSError) as error:
            # Hot rows stay where they are; the next call tries again.
            self.failures += 1
            _log.warning("sealing %s: %s", table, error)
        finally:
            cursor.close()

    def _seal_hour(
        self, cursor: duckdb.DuckDBPyConnection, table: str, hour: int, before_ns: int
    ) -> None:
        metrics = table == "metrics"
        hot, time = ("samples" if metrics else quoted(table)), TABLES[table].time_column
        span = f"{time} >= {hour * HOUR_NS} AND {time} < {min((hour + 1) * HOUR_NS, before_ns)}"
        old = cursor.execute(
            "SELECT file FROM sealed WHERE table_name = ? AND hour = ?", [table, hour]
        ).fetchall()
        (count,) = _one(cursor, f"SELECT count(*) FROM {hot} WHERE {span}")
        target = self._target(table, hour, len(old) + 1)
        temporary = target.with_suffix(".part")
        rows = _hour_rows(table, span, [str(self._folder / file) for (file,) in old])
        name = str(temporary).replace("'", "''")
        cursor.execute(f"COPY ({rows}) TO '{name}' {_FORMAT}")
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.rename(target)
        _sync_folder(target.parent)
        file = "'" + str(target).replace("'", "''") + "'"
        first, last, kept = _one(
            cursor,
            f"SELECT min({time}), max({time}), count(*) FROM read_parquet({file})",
        )
        if metrics:
            for rollup, width in ROLLUPS.items():
                cursor.execute(_fresh_rollup(rollup, width, file))
        with self._writer.exclusive:
            cursor.execute("BEGIN")
            try:
                (now,) = _one(cursor, f"SELECT count(*) FROM {hot} WHERE {span}")
                if now != count:
                    cursor.execute("ROLLBACK")
                    target.unlink()
                    return  # late rows came meanwhile: seal this hour the next time
                cursor.execute(f"DELETE FROM {hot} WHERE {span}")
                cursor.execute(
                    "DELETE FROM sealed WHERE table_name = ? AND hour = ?", [table, hour]
                )
                cursor.execute(
                    "INSERT INTO sealed VALUES (?, ?, ?, ?, ?, ?, ?)",
                    [table, str(target.relative_to(self._folder)), hour, first, last, kept,
                     target.stat().st_size],
                )  # fmt: skip
                for rollup in ROLLUPS if metrics else ():
                    cursor.execute(
                        f"DELETE FROM rollup_{rollup} WHERE bucket >= {hour * HOUR_NS} "
                        f"AND bucket < {(hour + 1) * HOUR_NS}"
                    )
                    cursor.execute(f"INSERT INTO rollup_{rollup} SELECT * FROM fresh_{rollup}")
                cursor.execute("COMMIT")
            except duckdb.Error:
                cursor.execute("ROLLBACK")
                raise
        self.sealed_hours += 1
        for (file_name,) in old:
            self._retire(self._folder / file_name)

    def _target(self, table: str, hour: int, part: int) -> Path:
        folder = self._folder / "sealed" / table
        folder.mkdir(parents=True, exist_ok=True)
        while (path := folder / f"{hour}-{part}.parquet").exists():
            part += 1
        return path

    def _retire(self, path: Path) -> None:
        with self._reader_lock:
            self._generation += 1
            self._retired.append((self._generation, path))

    def _unlink_retired(self) -> None:
        with self._reader_lock:
            oldest = min(self._readers.values(), default=self._generation)
            gone = [path for generation, path in self._retired if generation <= oldest]
            self._retired = [item for item in self._retired if item[0] > oldest]
        for path in gone:
            path.unlink(missing_ok=True)

    def _expire(self, now: int) -> None:
        cursor = self._cursor()
        try:
            for table in TABLES:
                age = self._retention.age_ns(table)
                if age is not None:
                    self._remove_before(cursor, table, now - age)
            if self._retention.rollup_age_s is not None:
                oldest = now - self._retention.rollup_age_s * 10**9
                with self._writer.exclusive:
                    cursor.execute("DELETE FROM rollup_1h WHERE bucket < ?", [oldest])
        except duckdb.Error as error:
            self.failures += 1
            _log.warning("retention: %s", error)
        finally:
            cursor.close()

    def _remove_before(self, cursor: duckdb.DuckDBPyConnection, table: str, oldest: int) -> None:
        files = cursor.execute(
            "SELECT file FROM sealed WHERE table_name = ? AND until_ns < ?", [table, oldest]
        ).fetchall()
        hot = "samples" if table == "metrics" else quoted(table)
        with self._writer.exclusive:
            cursor.execute("BEGIN")
            cursor.execute(
                "DELETE FROM sealed WHERE table_name = ? AND until_ns < ?", [table, oldest]
            )
            cursor.execute(f"DELETE FROM {hot} WHERE {TABLES[table].time_column} < ?", [oldest])
            if table == "metrics":
                cursor.execute("DELETE FROM rollup_5m WHERE bucket < ?", [oldest])
            cursor.execute("COMMIT")
        for (file,) in files:
            self._retire(self._folder / file)

    def _shrink(self) -> None:
        limit = self._retention.max_bytes
        if limit is None:
            return
        cursor = self._cursor()
        excess = self.disk_bytes() - limit
        try:
            rows = cursor.execute(
                "SELECT table_name, file, hour, bytes FROM sealed ORDER BY until_ns"
            ).fetchall()
            for table, file, hour, size in rows:
                if excess <= 0:
                    break
                with self._writer.exclusive:
                    cursor.execute("BEGIN")
                    cursor.execute("DELETE FROM sealed WHERE file = ?", [file])
                    if table == "metrics":
                        end = (hour + 1) * HOUR_NS
                        cursor.execute("DELETE FROM rollup_5m WHERE bucket < ?", [end])
                    cursor.execute("COMMIT")
                self._retire(self._folder / file)
                excess -= size
        except duckdb.Error as error:
            self.failures += 1
            _log.warning("retention by size: %s", error)
        finally:
            cursor.close()

    def _forget(self, now: int) -> None:
        """Drop digests older than an hour and merge the ranges of kept sequences."""
        oldest = now - HOUR_NS
        cursor = self._cursor()
        with self._writer.exclusive:
            self._writer.digests.forget_before(oldest)
            ranges = list(self._writer.deliveries.rows())
            try:
                cursor.execute("BEGIN")
                cursor.execute("DELETE FROM bodies WHERE time_ns < ?", [oldest])
                (rows,) = _one(cursor, "SELECT count(*) FROM deliveries")
                if rows > 2 * len(ranges) + 1000:
                    cursor.execute("DELETE FROM deliveries")
                    cursor.executemany("INSERT INTO deliveries VALUES (?, ?, ?)", ranges)
                cursor.execute("COMMIT")
            except duckdb.Error as error:
                self.failures += 1
                _log.warning("compaction: %s", error)
            finally:
                cursor.close()

    def remove_strays(self) -> None:
        """Remove files of an interrupted sealing."""
        cursor = self._cursor()
        known = {file for (file,) in cursor.execute("SELECT file FROM sealed").fetchall()}
        cursor.close()
        for path in (self._folder / "sealed").glob("*/*"):
            if str(path.relative_to(self._folder)) not in known:
                path.unlink()

    def disk_bytes(self) -> int:
        """Return the size of the database and the sealed files still in use, bytes."""
        retired = {path for _, path in self._retired}
        paths = [self._folder / "hot.duckdb", self._folder / "hot.duckdb.wal"]
        paths += [path for path in (self._folder / "sealed").glob("*/*") if path not in retired]
        return sum(path.stat().st_size for path in paths if path.exists())

    def close(self) -> None:
        """Remove files that left the catalogue."""
        self._unlink_retired()


def _hour_rows(table: str, span: str, old: list[str]) -> str:
    """Return SQL of an hour's rows: hot and, where there is one, the hour's sealed file."""
    if table == "metrics":
        files = file_list(old)
        hot = f"SELECT series, time_ns, value FROM samples WHERE {span}"
        cold = f" UNION ALL SELECT series, time_ns, value FROM read_parquet({files})" if old else ""
        # A sample of one series and time is one sample, however often a sender repeated it.
        return (
            "SELECT d.metric, x.series, x.time_ns, x.value, d.labels FROM "
            f"(SELECT series, time_ns, max(value) AS value FROM ({hot}{cold}) GROUP BY 1, 2) x "
            f"JOIN series d ON d.id = x.series ORDER BY {_ORDER[table]}"
        )
    columns = ", ".join(quoted(name) for name in table_schema(table))
    hot = f"SELECT {columns} FROM {quoted(table)} WHERE {span}"
    cold = f" UNION ALL BY NAME {sealed_rows(old)}" if old else ""
    order = _ORDER.get(table, TABLES[table].time_column)
    return f"SELECT * FROM ({hot}{cold}) ORDER BY {order}"


def _fresh_rollup(name: str, width: int, file: str) -> str:
    """Return SQL that computes an hour's partial aggregates into a temporary table."""
    return (
        f"CREATE OR REPLACE TEMP TABLE fresh_{name} AS "
        "SELECT series, bucket, count(*)::INTEGER AS n, "
        "CASE WHEN any_value(cumulative) THEN NULL ELSE sum(value) END AS total, "
        "CASE WHEN any_value(cumulative) THEN NULL ELSE min(value) END AS low, "
        "CASE WHEN any_value(cumulative) THEN NULL ELSE max(value) END AS high, "
        "CASE WHEN any_value(gauge) THEN NULL ELSE arg_min(value, time_ns) END AS first_value, "
        "arg_max(value, time_ns) AS last_value, "
        "CASE WHEN any_value(gauge) THEN NULL ELSE coalesce(sum(CASE WHEN p IS NULL THEN 0 "
        "WHEN value >= p THEN value - p ELSE value END), 0) END AS growth FROM ("
        f"SELECT x.series, x.time_ns // {width} * {width} AS bucket, x.time_ns, x.value, "
        f"lag(x.value) OVER (PARTITION BY x.series, x.time_ns // {width} ORDER BY x.time_ns) AS p, "
        "coalesce(i.kind IN ('counter', 'histogram'), false) AS cumulative, "
        "coalesce(i.kind IN ('gauge', 'delta'), false) AS gauge "
        f"FROM read_parquet({file}) x LEFT JOIN metric_info i ON i.metric = x.metric) "
        "GROUP BY series, bucket ORDER BY series, bucket"
    )


def _one(cursor: duckdb.DuckDBPyConnection, sql: str) -> tuple[int, ...]:
    row = cursor.execute(sql).fetchone()
    assert row is not None
    return tuple(row)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

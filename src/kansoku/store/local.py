"""The embedded store: DuckDB for fresh rows, sealed Parquet for old ones, one owner process."""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa

from kansoku.errors import InputError, StoreError
from kansoku.model import TABLES, Origin, Receipt
from kansoku.store._deliveries import BodyDigests, Deliveries
from kansoku.store._interface import Aggregate, Filters, Matchers, Rows, matcher_list
from kansoku.store._range import Grid, merge_across, range_sql, rollup_for
from kansoku.store._relation import Sealed, condition, file_list, relation, time_condition
from kansoku.store._schema import DDL, ROLLUPS, conform, missing_columns, quoted
from kansoku.store._seal import Keeper, Retention
from kansoku.store._series import SeriesDictionary, TextLimits
from kansoku.store._wal import commits_out_of_reach, keep_damaged
from kansoku.store._writer import Batch, InfoRow, OwnerRow, Writer
from kansoku.store.broadcast import Broadcast, Listener
from kansoku.store.queries import named_query

__all__ = ["LocalStore", "StoreLimits"]

_log = logging.getLogger(__name__)
STALE_NS = 300 * 10**9
_EMPTY = {"metric": pl.String, "labels": pl.String, "time_ns": pl.Int64, "value": pl.Float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What bounds the store."""

    max_series: int = 2_000_000
    """Series beyond it are refused and counted."""
    max_series_per_metric: int = 200_000
    texts: TextLimits = field(default_factory=TextLimits)
    """Samples of metrics or labels with longer texts are refused and counted."""
    max_pending_rows: int = 4_000_000
    """Rows that may wait for a commit; more is answered with BusyError."""
    max_future_ns: int = 3600 * 10**9
    """Rows stamped later than this after now are refused: a broken clock must not hold back
    retention or hide what follows."""
    memory_bytes: int = 4 << 30
    """Memory DuckDB may take."""
    retention: Retention = field(default_factory=Retention)


class LocalStore:
    """The store in a folder; this process owns it until :meth:`close`."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: StoreLimits | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open or create; raise StoreError where another process owns the folder."""
        self.folder = folder
        self.limits = limits or StoreLimits()
        self._clock_ns = clock_ns
        self._closed = False
        self._commits_lost = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _own(folder)
            self._database = self._open()
        except OSError as error:
            raise StoreError(str(error), where=str(folder)) from None
        self._broadcast = Broadcast()
        self._writer = self._load()
        self.keeper = Keeper(
            folder,
            cursor=self._database.cursor,
            writer=self._writer,
            clock_ns=clock_ns,
            retention=self.limits.retention,
        )
        self.keeper.remove_strays()

    def _open(self) -> duckdb.DuckDBPyConnection:
        self._look_at_log()
        try:
            database = duckdb.connect(
                str(self.folder / "hot.duckdb"),
                config={
                    "memory_limit": f"{self.limits.memory_bytes >> 20}MiB",
                    "checkpoint_threshold": "64MiB",
                    "temp_directory": str(self.folder / "spill"),
                },
            )
            for statement in ("LOAD parquet", "SET parquet_metadata_cache = true", *DDL):
                database.execute(statement)
            present = database.execute(
                "SELECT table_name, column_name FROM information_schema.columns"
            ).fetchall()
            for statement in missing_columns(present):
                database.execute(statement)
        except duckdb.Error as error:
            self._lock.close()
            remedy = None
            if "WAL" in str(error):
                remedy = "move hot.duckdb.wal away: the store opens without its last writes"
            raise StoreError(
                str(error), where=str(self.folder / "hot.duckdb"), remedy=remedy
            ) from None
        return database

    def _look_at_log(self) -> None:
        """Say which commits the engine will leave out in silence, and keep a copy of them."""
        path = self.folder / "hot.duckdb.wal"
        lost = commits_out_of_reach(path)
        if lost:
            self._commits_lost += lost
            _log.error(
                "%s is damaged: %d commits in it cannot be read and are lost; a copy is kept in %s",
                path, lost, keep_damaged(path).name,
            )  # fmt: skip

    def _connect(self) -> duckdb.DuckDBPyConnection:
        """Return a connection; open the database anew where the engine declared it invalid."""
        try:
            cursor = self._database.cursor()
            cursor.execute("SELECT 1 FROM sealed LIMIT 1")
        except duckdb.Error:
            self._database.close()
            self._database = self._open()
            cursor = self._database.cursor()
        return cursor

    def _load(self) -> Writer:
        cursor = self._database.cursor()
        limits = self.limits
        series = SeriesDictionary(
            limit=limits.max_series,
            limit_per_metric=limits.max_series_per_metric,
            texts=limits.texts,
        )
        series.load(cursor.execute("SELECT id, metric, labels FROM series ORDER BY id").fetchall())
        self._load_last(cursor, series)
        deliveries = Deliveries()
        deliveries.load(cursor.execute("SELECT agent, low, high FROM deliveries").fetchall())
        digests = BodyDigests()
        for digest, when in cursor.execute("SELECT * FROM bodies ORDER BY time_ns").fetchall():
            digests.add(digest, when)
        info = cursor.execute("SELECT * FROM metric_info").fetchall()
        writer = Writer(
            self._connect,
            series=series,
            deliveries=deliveries,
            digests=digests,
            broadcast=self._broadcast,
            clock_ns=self._clock_ns,
            known_owners=set(cursor.execute("SELECT * FROM owners").fetchall()),
            known_info={row[0]: row for row in info},
            max_pending_rows=limits.max_pending_rows,
            max_future_ns=limits.max_future_ns,
            oldest_ns=self._oldest_ns,
        )
        cursor.close()
        return writer

    def _load_last(self, cursor: duckdb.DuckDBPyConnection, series: SeriesDictionary) -> None:
        """Find each series' newest sample among the hot rows and the newest sealed hour."""
        files = cursor.execute(
            "SELECT file FROM sealed WHERE table_name = 'metrics' ORDER BY until_ns DESC LIMIT 1"
        ).fetchall()
        sources = ["samples"]
        sources += [f"read_parquet({file_list([str(self.folder / file)])})" for (file,) in files]
        for source in sources:
            last = cursor.execute(
                f"SELECT series, max(time_ns), arg_max(value, time_ns) FROM {source} GROUP BY 1"
            ).fetchnumpy()
            ids, times, values = (np.asarray(column) for column in last.values())
            if len(ids):
                series.note_last(ids, times, values)

    def _oldest_ns(self, table: str) -> int | None:
        age = limits.age_ns(table) if (limits := self.limits.retention) else None
        return None if age is None else self._clock_ns() - age

    # Writing

    def append(self, table: str, rows: Rows) -> Receipt:
        """Keep rows; return when they are durable."""
        return self.commit({table: rows})

    def commit(self, batches: Mapping[str, Rows], *, origin: Origin | None = None) -> Receipt:
        """Keep rows of several tables together, once per origin."""
        return self.submit(batches, origin=origin).result()

    def submit(
        self,
        batches: Mapping[str, Rows],
        *,
        origin: Origin | None = None,
        digest: str | None = None,
        owners: Sequence[OwnerRow] = (),
        info: Sequence[InfoRow] = (),
    ) -> "Future[Receipt]":
        """Queue rows; the future is answered when they are durable, or says why they are not."""
        tables = {name: conform(name, rows) for name, rows in batches.items() if len(rows)}
        batch = Batch(
            tables=tables, origin=origin, digest=digest, owners=tuple(owners), info=tuple(info)
        )
        return self._writer.submit(batch)

    # Reading

    @contextmanager
    def _snapshot(self) -> Iterator[tuple[duckdb.DuckDBPyConnection, Sealed]]:
        """Give a cursor in a transaction and the sealed files of that moment."""
        if self._closed:
            raise StoreError("the store is closed", where=str(self.folder))
        cursor = self._database.cursor()
        with self.keeper.reading():
            try:
                cursor.execute("BEGIN")
                sealed: dict[str, list[tuple[str, int, int]]] = {}
                for name, file, first, last in cursor.execute(
                    "SELECT table_name, file, from_ns, until_ns FROM sealed"
                ).fetchall():
                    sealed.setdefault(name, []).append((file, first, last))
                yield cursor, sealed
            except duckdb.Error as error:
                raise StoreError(f"query failed: {error}", where=str(self.folder)) from None
            finally:
                cursor.close()

    def table(
        self,
        name: str,
        since_ns: int | None = None,
        until_ns: int | None = None,
        filters: Filters | None = None,
        *,
        limit: int | None = None,
        where: str = "true",
    ) -> pl.DataFrame:
        """Return rows of a table in time order; with a limit, the newest.

        ``where`` is a further SQL condition, for the server's own use.
        """
        if name not in TABLES:
            raise InputError(f"no table {name!r}; the tables are {', '.join(TABLES)}")
        wanted, values = condition(name, filters)
        time_column = quoted(TABLES[name].time_column)
        with self._snapshot() as (cursor, sealed):
            rows = relation(name, sealed.get(name, ()), self.folder, since_ns, until_ns)
            sql = f"SELECT * FROM {rows} WHERE {wanted} AND ({where})"
            if limit is not None:
                sql = f"SELECT * FROM ({sql} ORDER BY {time_column} DESC LIMIT {int(limit)})"
            return _frame(cursor.sql(f"{sql} ORDER BY {time_column}", params=values))

    def events(  # noqa: PLR0913 - one flag per column
        self,
        since_ns: int | None = None,
        until_ns: int | None = None,
        *,
        subject: str | None = None,
        source: str | None = None,
        kind: str | None = None,
        severity: str | None = None,
        contains: str | None = None,
        limit: int | None = None,
        where: str = "true",
    ) -> pl.DataFrame:
        """Return events in time order; with a limit, the newest."""
        wanted = {"subject": subject, "source": source, "kind": kind, "severity": severity}
        filters = {name: value for name, value in wanted.items() if value is not None}
        if contains is not None:
            text = contains.replace("'", "''").replace("\0", "")
            where = f"({where}) AND contains(body, '{text}')"
        return self.table("events", since_ns, until_ns, filters, limit=limit, where=where)

    def query(
        self, name: str, *, allowed: Mapping[str, str] | None = None, **params: Any
    ) -> pl.DataFrame:
        """Return the answer of a named query; ``allowed`` narrows tables, for the server's use."""
        query = named_query(name)
        values = query.values(params)
        since_ns, until_ns = values.get("since_ns"), values.get("until_ns")
        with self._snapshot() as (cursor, sealed):
            relations = {}
            for table in query.tables:
                rows = relation(table, sealed.get(table, ()), self.folder, since_ns, until_ns)
                if allowed and table in allowed:
                    rows = f"(SELECT * FROM {rows} WHERE {allowed[table]})"
                relations[table] = rows
            return _frame(cursor.sql(query.sql.format(**relations), params=query.bound(values)))

    def series(self, metric: str | None = None, matchers: Matchers = None) -> pl.DataFrame:
        """Return ``metric, labels`` of known series."""
        dictionary = self._writer.series
        ids = dictionary.find(metric, matcher_list(matchers)).tolist()
        return pl.DataFrame(
            {
                "metric": [dictionary.metrics[number] for number in ids],
                "labels": [dictionary.labels[number] for number in ids],
            },
            schema={"metric": pl.String, "labels": pl.String},
        )

    def metrics(self) -> pl.DataFrame:
        """Return ``metric, unit, kind, description, series`` of every metric."""
        dictionary, info = self._writer.series, self._writer.info
        empty: InfoRow = ("", None, None, None)
        rows = [
            (name, *info.get(name, empty)[1:], len(dictionary.find(name, ())))
            for name in dictionary.names()
        ]
        columns = ["metric", "unit", "kind", "description"]
        schema = dict.fromkeys(columns, pl.String) | {"series": pl.Int64}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def metric_range(
        self,
        metric: str,
        matchers: Matchers = None,
        *,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        aggregate: str = "avg",
        by: Sequence[str] | None = None,
        across: str = "avg",
    ) -> pl.DataFrame:
        """Return ``labels, time_ns, value``, one value per series and step."""
        try:
            how = Aggregate(aggregate)
        except ValueError:
            raise InputError(
                f"aggregate {aggregate!r} is not one of {', '.join(Aggregate)}"
            ) from None
        grid = Grid.of(start_ns, end_ns, step_ns)
        dictionary = self._writer.series
        ids = dictionary.find(metric, matcher_list(matchers))
        kind = self._writer.info.get(metric, (metric, None, None, None))[2]
        if how in {Aggregate.INCREASE, Aggregate.RATE}:
            if kind == "delta":
                return self._delta(metric, matchers, grid, how, by, across)
            since = grid.lookback_ns
        else:
            since = grid.start_ns
        if not len(ids):
            return pl.DataFrame(schema={k: v for k, v in _EMPTY.items() if k != "metric"})
        with self._snapshot() as (cursor, sealed):
            name = rollup_for(step_ns, how, kind)
            samples = self._samples(metric, ids, sealed, since, grid.end_ns, cold=name is None)
            rollups = None
            if name is not None:
                width = ROLLUPS[name]
                rollups = (
                    f"(SELECT * FROM rollup_{name} WHERE {_among(ids)} "
                    f"AND {time_condition('bucket', since // width * width, grid.end_ns)})"
                )
            cursor.register("wanted", pa.table({"id": pa.array(ids)}))
            sql = range_sql(grid, how, samples=samples, rollups=rollups)
            frame = _frame(cursor.sql(f"SELECT * FROM ({sql}) ORDER BY series, time_ns"))
        texts = {number: dictionary.labels[number] for number in ids.tolist()}
        if by is not None:
            return merge_across(frame, texts, by, across)
        labels = pl.DataFrame({"series": ids, "labels": list(texts.values())})
        return frame.join(labels, on="series", how="left", maintain_order="left").select(
            "labels", "time_ns", "value"
        )

    def _delta(
        self,
        metric: str,
        matchers: Matchers,
        grid: Grid,
        how: Aggregate,
        by: Sequence[str] | None,
        across: str,
    ) -> pl.DataFrame:
        """Growth of a metric whose samples are increments already."""
        # avg, min, max and sum across series commute with the scale; a count has none.
        sums = self.metric_range(
            metric,
            matchers,
            start_ns=grid.start_ns,
            end_ns=grid.end_ns,
            step_ns=grid.step_ns,
            aggregate="sum",
            by=by,
            across=across,
        )
        if across == "count" and by is not None:
            return sums
        scale = 1e9 / grid.step_ns if how is Aggregate.RATE else 1.0
        return sums.with_columns(pl.col("value") * scale)

    def _samples(
        self,
        metric: str,
        ids: np.ndarray[Any, np.dtype[np.int32]],
        sealed: Sealed,
        since_ns: int,
        until_ns: int,
        *,
        cold: bool,
    ) -> str:
        """Return a relation (series, time_ns, value) of the wanted series and range."""
        where = f"{time_condition('time_ns', since_ns, until_ns)} AND {_among(ids)}"
        hot = f"SELECT series, time_ns, value FROM samples WHERE {where}"
        files = [
            str(self.folder / file)
            for file, first, last in sealed.get("metrics", ())
            if first < until_ns and last >= since_ns
        ]
        if not cold or not files:
            return f"({hot})"
        text = metric.replace("'", "''")
        return (
            f"({hot} UNION ALL SELECT series, time_ns, value FROM read_parquet({file_list(files)}) "
            f"WHERE metric = '{text}' AND {where})"
        )

    def latest(
        self, metric: str, matchers: Matchers = None, *, at_ns: int | None = None
    ) -> pl.DataFrame:
        """Return ``metric, labels, time_ns, value``: each series' last sample before ``at_ns``."""
        dictionary = self._writer.series
        ids = dictionary.find(metric, matcher_list(matchers))
        if not len(ids):
            return pl.DataFrame(schema=_EMPTY)
        if at_ns is None:
            times, values = dictionary.last_time[ids], dictionary.last_value[ids]
            keep = times >= max(int(times.max()) - STALE_NS, 0)
            ids, times, values = ids[keep], times[keep], values[keep]
        else:
            with self._snapshot() as (cursor, sealed):
                cursor.register("wanted", pa.table({"id": pa.array(ids)}))
                rows = self._samples(metric, ids, sealed, at_ns - STALE_NS, at_ns + 1, cold=True)
                found = cursor.sql(
                    "SELECT series, max(time_ns) AS time_ns, arg_max(value, time_ns) AS value "
                    f"FROM {rows} GROUP BY 1 ORDER BY 1"
                ).pl()
            ids, times, values = (found[name].to_numpy() for name in found.columns)
        return pl.DataFrame(
            {
                "metric": [metric] * len(ids),
                "labels": [dictionary.labels[number] for number in ids.tolist()],
                "time_ns": times,
                "value": values,
            },
            schema=_EMPTY,
        )

    def subscribe(self, tables: Sequence[str], *, capacity: int = 256) -> Listener:
        """Return freshly kept rows of those tables from now on."""
        return self._broadcast.subscribe(tables, capacity=capacity)

    def end_subscriptions(self) -> None:
        """End every subscription, before a server stops."""
        self._broadcast.close()

    def owners(self) -> list[OwnerRow]:
        """Return (run, job, user, account, consent) of every run whose sender said so."""
        with self._snapshot() as (cursor, _):
            return cursor.execute("SELECT * FROM owners").fetchall()

    def statistics(self) -> dict[str, Any]:
        """Return counts of the writer and sizes on disk."""
        counts = self._writer.counts
        return {
            "batches_in": counts.batches_in,
            "rows_in": counts.rows_in,
            "rows_kept": counts.rows_kept,
            "rows_duplicate": counts.rows_duplicate,
            "rows_failed": counts.rows_failed,
            "rows_rejected": dict(counts.rows_rejected),
            "rows_pending": self._writer.pending_rows,
            "commits": counts.commits,
            "failures": counts.failures,
            "commits_lost": self._commits_lost,
            "series": len(self._writer.series),
            "disk_bytes": self.keeper.disk_bytes(),
            "sealed_hours": self.keeper.sealed_hours,
            "seal_failures": self.keeper.failures,
        }

    def close(self) -> None:
        """Commit what is queued, let listeners go, give the folder back."""
        if self._closed:
            return
        self._writer.close()
        self._closed = True
        self._broadcast.close()
        self.keeper.close()
        try:
            self._database.close()
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _frame(answer: duckdb.DuckDBPyRelation) -> pl.DataFrame:
    frame: pl.DataFrame = answer.pl()
    return frame


def _among(ids: np.ndarray[Any, np.dtype[np.int32]]) -> str:
    """Return a condition on ``series``: bounds prune row groups, the join table decides."""
    low, high = int(ids[0]), int(ids[-1])
    if len(ids) == high - low + 1:
        return f"series BETWEEN {low} AND {high}"
    if len(ids) <= 16:
        return f"series IN ({', '.join(str(number) for number in ids.tolist())})"
    return f"series BETWEEN {low} AND {high} AND series IN (SELECT id FROM wanted)"


def _own(folder: Path) -> Any:
    """Lock the folder for this process; raise StoreError naming the owner."""
    handle = (folder / "owner").open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.seek(0)
        owner = handle.read().strip() or "another process"
        handle.close()
        raise StoreError(
            f"{owner} owns this store", where=str(folder), remedy="ask it over HTTP: --store URL"
        ) from None
    handle.truncate(0)
    handle.write(f"process {os.getpid()}")
    handle.flush()
    return handle

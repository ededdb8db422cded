"""A fleet's back ends behind the store's interface: every analysis runs on either."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import duckdb
import polars as pl
import pyarrow as pa

from kansoku.errors import ConfigurationError, InputError, StoreError
from kansoku.model import TABLES, Origin, Receipt, table_schema
from kansoku.store._interface import (
    Aggregate,
    Filters,
    Matcher,
    Matchers,
    Rows,
    Store,
    matcher_list,
)
from kansoku.store._range import Grid
from kansoku.store._schema import conform
from kansoku.store.broadcast import Waiting
from kansoku.store.fleet.logsql import LogsqlEvents
from kansoku.store.fleet.promql import PromMetrics
from kansoku.store.fleet.remote_write import RemoteWriter
from kansoku.store.queries import named_query

__all__ = ["FleetStore", "PollListener", "SpanReader"]

_DAY_NS = 86_400 * 10**9


class SpanReader(Protocol):
    """Reads spans: :class:`LogsqlSpans` or :class:`JaegerSpans`."""

    def table(
        self,
        since_ns: int | None,
        until_ns: int | None,
        filters: Filters | None,
        *,
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return spans in time order; with a limit, the newest."""

    def close(self) -> None:
        """Let go of connections."""


class FleetStore:
    """Metrics by PromQL, log records by LogsQL, spans by LogsQL or Jaeger, jobs by kansoku.

    Writing is at least once: metrics by remote write, the rest by the ``write`` function (OTLP).
    Named queries fetch the tables they name and run here.
    """

    def __init__(
        self,
        *,
        metrics: PromMetrics | None = None,
        logs: LogsqlEvents | None = None,
        spans: SpanReader | None = None,
        own: Store | None = None,
        remote_write: RemoteWriter | None = None,
        write: Callable[[Mapping[str, pa.Table]], None] | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Take the readers there are; asking for what is missing raises ConfigurationError."""
        self._metrics = metrics
        self._logs = logs
        self._spans = spans
        self._own = own
        self._remote_write = remote_write
        self._write = write
        self._clock_ns = clock_ns

    @staticmethod
    def _need(reader: Any, what: str) -> Any:
        if reader is None:
            raise ConfigurationError(
                f"no back end for {what}", remedy=f"name stores.{what} in the cluster file"
            )
        return reader

    def append(self, table: str, rows: Rows) -> Receipt:
        """Send rows; they may arrive twice where a connection breaks."""
        return self.commit({table: rows})

    def commit(self, batches: Mapping[str, Rows], *, origin: Origin | None = None) -> Receipt:
        """Send rows of several tables; ``origin`` cannot be kept by these back ends."""
        _ = origin
        rest: dict[str, pa.Table] = {}
        for name, rows in batches.items():
            arrow = conform(name, rows)
            if name == "metrics" and self._remote_write is not None:
                frame = pl.from_arrow(arrow)
                assert isinstance(frame, pl.DataFrame)
                self._remote_write.write(frame)
            elif name == "jobs" and self._own is not None:
                self._own.append(name, arrow)
            else:
                rest[name] = arrow
        if rest:
            self._need(self._write, "otlp")(rest)
        return Receipt(rows={name: len(rows) for name, rows in batches.items()})

    def table(
        self,
        name: str,
        since_ns: int | None = None,
        until_ns: int | None = None,
        filters: Filters | None = None,
        *,
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return rows of a table in time order; with a limit, the newest.

        Metrics and spans without ``since_ns`` reach back a day.
        """
        if name not in TABLES:
            raise InputError(f"no table {name!r}; the tables are {', '.join(TABLES)}")
        until = self._clock_ns() + 1 if until_ns is None else until_ns
        since = until - _DAY_NS if since_ns is None else since_ns
        if name == "metrics":
            return self._samples(since, until, filters, limit)
        if name == "spans":
            reader: SpanReader = self._need(self._spans, "traces")
            return reader.table(since, until, filters, limit=limit)
        if name == "jobs":
            own: Store = self._need(self._own, "kansoku")
            return own.table(name, since_ns, until_ns, filters, limit=limit)
        logs: LogsqlEvents = self._need(self._logs, "logs")
        return logs.table(name, since_ns, until_ns, filters, limit=limit)

    def _samples(
        self, since: int, until: int, filters: Filters | None, limit: int | None
    ) -> pl.DataFrame:
        wanted = dict(filters or {})
        metric = wanted.pop("metric", None)
        labels = wanted.pop("labels", None)
        if wanted or not isinstance(metric, str | None):
            raise InputError("samples of a fleet are filtered by one metric, or by labels")
        reader: PromMetrics = self._need(self._metrics, "metrics")
        frame = reader.samples(metric, (), since, until)
        if labels is not None:
            several = [labels] if isinstance(labels, str) else list(labels)  # type: ignore[arg-type]
            frame = frame.filter(pl.col("labels").is_in(several))
        return frame if limit is None else frame.tail(limit)

    def query(self, name: str, **params: Any) -> pl.DataFrame:
        """Return the answer of a named query, computed here from the tables it names."""
        query = named_query(name)
        values = query.values(params)
        with duckdb.connect(":memory:") as database:
            for table in query.tables:
                # Only runs narrow the fetch: by state, old versions of a row would come back.
                run = values.get("run")
                filters: Filters | None = None
                if isinstance(run, str) and "run" in table_schema(table):
                    filters = {"run": run}
                rows = self.table(table, values.get("since_ns"), values.get("until_ns"), filters)
                database.register(table, rows.to_arrow())
            relations = {table: table for table in query.tables}
            try:
                answer = database.sql(query.sql.format(**relations), params=query.bound(values))
                frame: pl.DataFrame = answer.pl()
            except duckdb.Error as error:
                raise StoreError(f"query {name}: {error}") from None
        return frame

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
        reader: PromMetrics = self._need(self._metrics, "metrics")
        grid = Grid.of(start_ns, end_ns, step_ns)
        return reader.metric_range(metric, matchers, grid=grid, aggregate=how, by=by, across=across)

    def latest(
        self, metric: str, matchers: Matchers = None, *, at_ns: int | None = None
    ) -> pl.DataFrame:
        """Return ``metric, labels, time_ns, value``: each series' last sample."""
        reader: PromMetrics = self._need(self._metrics, "metrics")
        return reader.latest(metric, matchers, self._clock_ns() if at_ns is None else at_ns)

    def series(self, metric: str | None = None, matchers: Matchers = None) -> pl.DataFrame:
        """Return ``metric, labels`` of known series."""
        reader: PromMetrics = self._need(self._metrics, "metrics")
        every: tuple[Matcher, ...] = matcher_list(matchers)
        return reader.series(metric, every)

    def events(
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
    ) -> pl.DataFrame:
        """Return events in time order; with a limit, the newest."""
        wanted = {"subject": subject, "source": source, "kind": kind, "severity": severity}
        filters = {name: value for name, value in wanted.items() if value is not None}
        logs: LogsqlEvents = self._need(self._logs, "logs")
        return logs.table("events", since_ns, until_ns, filters, limit=limit, contains=contains)

    def subscribe(
        self, tables: Sequence[str], *, capacity: int = 256, every_s: float = 2.0
    ) -> "PollListener":
        """Return fresh rows by asking every so often."""
        return PollListener(self, tables, capacity, every_s, self._clock_ns)

    def close(self) -> None:
        """Let go of every back end."""
        for one in (self._metrics, self._logs, self._spans, self._own, self._remote_write):
            if one is not None:
                one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PollListener(Waiting):
    """A subscription by polling: rows stamped since the last look."""

    def __init__(
        self,
        store: FleetStore,
        tables: Sequence[str],
        capacity: int,
        every_s: float,
        clock_ns: Callable[[], int],
    ) -> None:
        if unknown := set(tables) - set(TABLES):
            raise InputError(f"no table {', '.join(sorted(unknown))} to subscribe to")
        super().__init__(capacity)
        self._store = store
        self._since = dict.fromkeys(tables, clock_ns())
        self._every_s = every_s
        self._clock_ns = clock_ns
        threading.Thread(target=self._run, name="fleet-poll", daemon=True).start()

    def _run(self) -> None:
        while not self._closed:
            for table, since in list(self._since.items()):
                until = self._clock_ns()
                try:
                    rows = self._store.table(table, since, until)
                except (StoreError, InputError):
                    continue  # the back end is away: the same range is asked again
                self._since[table] = until
                if not rows.is_empty():
                    self.put(table, rows)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._every_s)

"""The one thread that writes: batches that wait together are committed together.

A batch is acknowledged when its transaction is on disk, never before. A failed commit is rolled
back whole, in memory too, and every batch of it is answered with the error.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from kansoku.errors import BusyError, InputError, StoreError
from kansoku.model import TABLES, Origin, Receipt
from kansoku.store._deliveries import BodyDigests, Deliveries
from kansoku.store._schema import quoted
from kansoku.store._series import NO_ROOM, TOO_LONG, SeriesDictionary
from kansoku.store.broadcast import Broadcast

__all__ = ["Batch", "Writer", "WriterCounts"]

_log = logging.getLogger(__name__)

OwnerRow = tuple[str, str | None, str | None, str | None, bool | None]
InfoRow = tuple[str, str | None, str | None, str | None]
_MOST_DESCRIBED = 1024
"""Characters of a metric's unit and description."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """What one sender wants kept, and the promise to answer it."""

    tables: Mapping[str, pa.Table]
    origin: Origin | None = None
    digest: str | None = None
    owners: tuple[OwnerRow, ...] = ()
    info: tuple[InfoRow, ...] = ()
    answer: "Future[Receipt]" = field(default_factory=Future)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(len(table) for table in self.tables.values())


@dataclass(slots=True, kw_only=True)
class WriterCounts:
    """What became of everything that was submitted; the parts add up to ``rows_in``."""

    batches_in: int = 0
    rows_in: int = 0
    rows_kept: int = 0
    rows_duplicate: int = 0
    rows_failed: int = 0
    rows_rejected: dict[str, int] = field(default_factory=dict)
    commits: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Plan:
    """What one transaction will write, and how to undo it in memory."""

    tables: dict[str, list[pa.Table]] = field(default_factory=dict)
    samples: list[pa.Table] = field(default_factory=list)
    answers: list[tuple[Batch, Receipt]] = field(default_factory=list)
    origins: dict[tuple[str, int], None] = field(default_factory=dict)
    digests: dict[str, None] = field(default_factory=dict)
    owners: list[OwnerRow] = field(default_factory=list)
    info: list[InfoRow] = field(default_factory=list)


class Writer:
    """Queue, group commit, and the state that goes with the rows."""

    def __init__(  # noqa: PLR0913 - made in one place, all of it state of the store
        self,
        connect: Callable[[], duckdb.DuckDBPyConnection],
        *,
        series: SeriesDictionary,
        deliveries: Deliveries,
        digests: BodyDigests,
        broadcast: Broadcast,
        clock_ns: Callable[[], int],
        known_owners: set[OwnerRow],
        known_info: dict[str, InfoRow],
        max_pending_rows: int,
        max_future_ns: int,
        oldest_ns: Callable[[str], int | None],
    ) -> None:
        self._connect = connect
        self._connection = connect()
        self.series = series
        self.deliveries = deliveries
        self.digests = digests
        self._broadcast = broadcast
        self._clock_ns = clock_ns
        self._owners = known_owners
        self.info = known_info
        self._max_pending_rows = max_pending_rows
        self._max_future_ns = max_future_ns
        self._oldest_ns = oldest_ns
        self.counts = WriterCounts()
        self._queue: list[Batch] = []
        self._pending_rows = 0
        self._changed = threading.Condition()
        self._closing = False
        self.exclusive = threading.Lock()
        """Held during a transaction; maintenance takes it to write on its own."""
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    @property
    def pending_rows(self) -> int:
        """Rows queued or being committed."""
        return self._pending_rows

    def submit(self, batch: Batch) -> "Future[Receipt]":
        """Queue a batch; raise BusyError when too many rows wait already."""
        with self._changed:
            if self._closing:
                raise StoreError("the store is closed")
            if self._pending_rows and self._pending_rows + batch.rows > self._max_pending_rows:
                raise BusyError(
                    f"{self._pending_rows} rows wait to be committed",
                    remedy="send the same batch again in a second",
                )
            self._queue.append(batch)
            self._pending_rows += batch.rows
            self.counts.batches_in += 1
            self.counts.rows_in += batch.rows
            self._changed.notify()
        return batch.answer

    def close(self) -> None:
        """Commit what is queued, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                group, self._queue = self._queue, []
            try:
                self._commit(group)
            finally:
                with self._changed:
                    self._pending_rows -= sum(batch.rows for batch in group)

    def _commit(self, group: list[Batch]) -> None:
        size = len(self.series)
        plan = _Plan()
        try:
            with self.exclusive:
                for batch in group:
                    self._plan(batch, plan)
                self._write(plan, size)
        except Exception as error:  # noqa: BLE001 - the writer outlives any batch; all are answered
            self.series.forget_from(size)
            self._failed(group, error)
            return
        self._remember(plan)
        for batch, receipt in plan.answers:
            batch.answer.set_result(receipt)
        self._publish(plan)

    def _failed(self, group: list[Batch], error: Exception) -> None:
        self.counts.failures += 1
        self.counts.rows_failed += sum(batch.rows for batch in group)
        _log.warning("commit of %d batches failed: %s", len(group), error)
        if isinstance(error, duckdb.FatalException):
            self._reopen()
        answer = error if isinstance(error, InputError) else StoreError(f"commit failed: {error}")
        for batch in group:
            batch.answer.set_exception(answer)

    def _reopen(self) -> None:
        """Open the database again after the engine declared it invalid (a full disk does)."""
        try:
            self._connection.close()
            self._connection = self._connect()
        except duckdb.Error as error:
            _log.warning("the database cannot be opened again yet: %s", error)

    def _plan(self, batch: Batch, plan: _Plan) -> None:
        origin, digest = batch.origin, batch.digest
        key = (origin.agent, origin.sequence) if origin else None
        if (key and (key in self.deliveries or key in plan.origins)) or (
            digest and (digest in self.digests or digest in plan.digests)
        ):
            plan.answers.append((batch, Receipt(duplicate=True)))
            return
        kept: dict[str, int] = {}
        rejected: dict[str, int] = {}
        for name, rows in batch.tables.items():
            good = self._in_time(name, rows, rejected)
            if name == "metrics":
                good = self._samples(good, plan, rejected)
            if len(good):
                plan.tables.setdefault(name, []).append(good)
                kept[name] = len(good)
        if key:
            plan.origins[key] = None
        if digest:
            plan.digests[digest] = None
        plan.owners += [row for row in batch.owners if row not in self._owners]
        described = (_short(row) for row in batch.info if self.series.may_describe(row[0]))
        plan.info += [row for row in described if self.info.get(row[0]) != row]
        plan.answers.append((batch, Receipt(rows=kept, rejected=rejected)))

    def _in_time(self, name: str, rows: pa.Table, rejected: dict[str, int]) -> pa.Table:
        """Leave out rows without a time, from the future, or older than what is kept."""
        times = rows.column(TABLES[name].time_column)
        if not len(rows):
            return rows
        if times.null_count:
            keep = pc.is_valid(times)
            rejected["no_time"] = rejected.get("no_time", 0) + times.null_count
            rows = rows.filter(keep)
            times = rows.column(TABLES[name].time_column)
            if not len(rows):
                return rows
        ends = pc.min_max(times).as_py()
        newest = self._clock_ns() + self._max_future_ns
        oldest = self._oldest_ns(name)
        if ends["max"] > newest:
            keep = pc.less_equal(times, newest)
            refused = len(rows) - pc.sum(keep).as_py()
            rejected["future"] = rejected.get("future", 0) + refused
            rows = rows.filter(keep)
            times = rows.column(TABLES[name].time_column)
        if oldest is not None and ends["min"] < oldest:
            keep = pc.greater_equal(times, oldest)
            refused = len(rows) - (pc.sum(keep).as_py() or 0)
            rejected["too_old"] = rejected.get("too_old", 0) + refused
            rows = rows.filter(keep)
        return rows

    def _samples(self, rows: pa.Table, plan: _Plan, rejected: dict[str, int]) -> pa.Table:
        if not len(rows):
            return rows
        if rows.column("value").null_count:
            rejected["no_value"] = rejected.get("no_value", 0) + rows.column("value").null_count
            rows = rows.filter(pc.is_valid(rows.column("value")))
            if not len(rows):
                return rows
        ids = self.series.encode(rows.column("metric"), rows.column("labels"))
        if len(ids) and int(ids.min()) < 0:
            keep = ids >= 0
            for code, reason in ((NO_ROOM, "series_limit"), (TOO_LONG, "label_too_long")):
                if refused := int((ids == code).sum()):
                    rejected[reason] = rejected.get(reason, 0) + refused
            rows, ids = rows.filter(pa.array(keep)), ids[keep]
        if len(rows):
            plan.samples.append(
                pa.table(
                    [pa.array(ids), rows.column("time_ns"), rows.column("value")],
                    names=["series", "time_ns", "value"],
                )
            )
        return rows

    def _write(self, plan: _Plan, known_series: int) -> None:
        connection = self._connection
        connection.execute("BEGIN")
        try:
            for name, parts in plan.tables.items():
                if name != "metrics":
                    self._insert(quoted(name), parts)
            if plan.samples:
                self._insert("samples", plan.samples)
            if len(self.series) > known_series:
                self._insert("series", [self._new_series(known_series)])
            if plan.origins:
                agents, sequences = zip(*plan.origins, strict=True)
                rows = pa.table([pa.array(agents), pa.array(sequences), pa.array(sequences)],
                                names=["agent", "low", "high"])  # fmt: skip
                self._insert("deliveries", [rows])
            if plan.digests:
                now = [self._clock_ns()] * len(plan.digests)
                rows = pa.table(
                    [pa.array(list(plan.digests)), pa.array(now)], names=["digest", "time_ns"]
                )
                self._insert("bodies", [rows])
            if plan.owners:
                connection.executemany("INSERT INTO owners VALUES (?, ?, ?, ?, ?)", plan.owners)
            for row in {row[0]: row for row in plan.info}.values():
                connection.execute("DELETE FROM metric_info WHERE metric = ?", [row[0]])
                connection.execute("INSERT INTO metric_info VALUES (?, ?, ?, ?)", list(row))
            connection.execute("COMMIT")
        except Exception:
            # The rollback of a broken database fails too; the first error is the one to tell.
            try:
                connection.execute("ROLLBACK")
            except duckdb.Error as error:
                _log.info("rollback: %s", error)
            raise

    def _insert(self, target: str, parts: list[pa.Table]) -> None:
        rows = parts[0] if len(parts) == 1 else _joined(parts)
        self._connection.register("incoming", rows)
        try:
            self._connection.execute(f"INSERT INTO {target} BY NAME SELECT * FROM incoming")
        finally:
            self._connection.unregister("incoming")

    def _new_series(self, start: int) -> pa.Table:
        return pa.table(
            {
                "id": pa.array(range(start, len(self.series)), pa.int32()),
                "metric": self.series.metrics[start:],
                "labels": self.series.labels[start:],
            }
        )

    def _remember(self, plan: _Plan) -> None:
        counts = self.counts
        counts.commits += 1
        now = self._clock_ns()
        for agent, sequence in plan.origins:
            self.deliveries.add(agent, sequence)
        for digest in plan.digests:
            self.digests.add(digest, now)
        self._owners.update(plan.owners)
        self.info.update({row[0]: row for row in plan.info})
        for rows in plan.samples:
            self.series.note_last(
                rows.column(0).to_numpy(), rows.column(1).to_numpy(), rows.column(2).to_numpy()
            )
        for batch, receipt in plan.answers:
            if receipt.duplicate:
                counts.rows_duplicate += batch.rows
            counts.rows_kept += sum(receipt.rows.values())
            for reason, number in receipt.rejected.items():
                counts.rows_rejected[reason] = counts.rows_rejected.get(reason, 0) + number

    def _publish(self, plan: _Plan) -> None:
        for name, parts in plan.tables.items():
            for rows in parts:
                self._broadcast.publish({name: rows})


def _short(row: InfoRow) -> InfoRow:
    """Return a metric's unit, kind and description without what no page would show."""
    metric, *rest = row
    unit, kind, description = (text and text[:_MOST_DESCRIBED] for text in rest)
    return (metric, unit, kind, description)


def _joined(parts: list[pa.Table]) -> pa.Table:
    """Concatenate tables whose text columns may differ in form (plain, large, dictionary)."""
    if all(part.schema.equals(parts[0].schema) for part in parts):
        return pa.concat_tables(parts)
    plain = [
        pa.table(
            [
                column.cast(pa.string()) if not _fixed(column.type) else column
                for column in part.columns
            ],
            names=part.column_names,
        )
        for part in parts
    ]
    return pa.concat_tables(plain)


def _fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(kind) or pa.types.is_null(kind))

"""Send rows to a receiver: batch, keep on disk, retry until they arrive, count everything."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from kansoku.errors import ConfigurationError, InputError
from kansoku.model import table_schema
from kansoku.telemetry.batch import pack_batch
from kansoku.telemetry.encode import Describe, MetricInfo
from kansoku.telemetry.spool import Record, Spool
from kansoku.telemetry.transport import (
    ArrowTransport,
    GrpcTransport,
    HttpTransport,
    Tls,
    Transport,
)

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Exporter", "ExporterCounts", "make_transport"]

_log = logging.getLogger(__name__)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterCounts:
    """Rows at every stage; ``rows_in`` is the sum of all that follow it up to ``rows_pending``."""

    rows_in: int
    rows_delivered: int
    """The receiver has them, durably where it is ours."""
    rows_rejected: int
    """The receiver took the batch but not these rows (no time, too many series …)."""
    rows_refused: int
    """The receiver refused the whole batch for good."""
    rows_dropped: int
    """The spool was full, or the disk and the memory beside it were."""
    rows_pending: int
    batches_pending: int
    spool_bytes: int
    spool_failures: int
    """Batches that the disk refused."""
    segments_dropped: int
    """Segments of the spool that went because it was full; their rows are ``rows_dropped``."""
    segments_damaged: int
    """Segments that an earlier process left and of which something could not be read."""
    retries: int
    last_success_ns: int | None
    last_error: str | None


def make_transport(
    endpoint: str,
    *,
    protocol: str = "arrow",
    headers: Mapping[str, str] | None = None,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
) -> Transport:
    """Return a transport: ``arrow`` (our server), ``http`` or ``grpc`` (OTLP, any receiver)."""
    kinds: dict[str, Callable[..., Transport]] = {
        "arrow": ArrowTransport,
        "http": HttpTransport,
        "grpc": GrpcTransport,
    }
    if protocol not in kinds:
        raise ConfigurationError(
            f"protocol {protocol!r} is not one of {', '.join(kinds)}", where=endpoint
        )
    every = dict(headers or {})
    if token is not None:
        every["authorization"] = f"Bearer {token}"
    return kinds[protocol](endpoint, headers=every, tls=tls, timeout_s=timeout_s)


class Exporter:
    """One destination, with a spool of its own; every method may be called from any thread."""

    def __init__(  # noqa: PLR0913 - settings, all with defaults
        self,
        transport: Transport | str,
        *,
        spool: Path,
        resource: Mapping[str, str] | None = None,
        describe: Describe = lambda _: None,
        protocol: str = "arrow",
        token: str | None = None,
        max_spool_bytes: int = 2 << 30,
        max_memory_bytes: int = 64 << 20,
        batch_rows: int = 50_000,
        batch_s: float = 1.0,
        sync: bool = True,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Start sending what the spool already holds.

        ``transport`` is a Transport, or an endpoint URL sent to by ``protocol`` with ``token``.
        ``resource`` are the attributes of the sender (``host.name``, ``service.name`` …), added
        to every row's labels; ``describe`` gives a metric's unit and kind.
        """
        if isinstance(transport, str):
            transport = make_transport(transport, protocol=protocol, token=token)
        self._transport = transport
        self._spool = Spool(spool, max_bytes=max_spool_bytes, sync=sync)
        if self._spool.damaged_segments:
            _log.warning(
                "%d segments in %s are damaged: what could not be read of them is lost",
                self._spool.damaged_segments, spool,
            )  # fmt: skip
        self._resource = dict(resource or {})
        self._describe = describe
        self._max_memory_bytes = max_memory_bytes
        self._batch_rows = batch_rows
        self._batch_s = batch_s
        self._clock_ns = clock_ns
        self._changed = threading.Condition()
        self._memory: deque[Record] = deque()
        self._gathering: dict[str, list[pl.DataFrame | pa.Table]] = {}
        self._gathering_rows = 0
        self._gathering_since: float | None = None
        self._closing = False
        # What an earlier process left in the spool came in as well.
        self._in = self._spool.pending_rows
        self._delivered = self._rejected = self._refused = self._memory_dropped = 0
        self._retries = self._spool_failures = 0
        self._last_success_ns: int | None = None
        self._last_error: str | None = None
        self._thread = threading.Thread(target=self._run, name="exporter", daemon=True)
        self._thread.start()

    @property
    def identity(self) -> str:
        """The sender's name at the receiver, kept with the spool."""
        return self._spool.identity

    def put(self, table: str, rows: "pl.DataFrame | pa.Table", *, durable: bool = True) -> None:
        """Take rows of a table for sending.

        A durable put returns when the rows are on disk. Otherwise they gather in memory with
        others, up to ``batch_rows`` or ``batch_s``, and a killed process loses those.
        """
        self.put_tables({table: rows}, durable=durable)

    def put_tables(
        self, tables: "Mapping[str, pl.DataFrame | pa.Table]", *, durable: bool = True
    ) -> None:
        """Take rows of several tables; a durable put keeps and sends them as one batch."""
        good = {name: _checked(name, rows) for name, rows in tables.items() if len(rows)}
        count = sum(len(rows) for rows in good.values())
        if not count:
            return
        with self._changed:
            self._in += count
            if durable:
                self._keep(good)
            else:
                for name, rows in good.items():
                    self._gathering.setdefault(name, []).append(rows)
                self._gathering_rows += count
                self._gathering_since = self._gathering_since or time.monotonic()
                if self._gathering_rows >= self._batch_rows:
                    self._close_batch()
            self._changed.notify_all()

    def _close_batch(self) -> None:
        gathered, self._gathering = self._gathering, {}
        self._gathering_rows, self._gathering_since = 0, None
        self._keep({name: _joined(parts) for name, parts in gathered.items()})

    def _keep(self, tables: "dict[str, pl.DataFrame | pa.Table]") -> None:
        rows = sum(len(table) for table in tables.values())
        info: dict[str, Mapping[str, str]] = {}
        if "metrics" in tables:
            for name in _metric_names(tables["metrics"]):
                if (found := self._describe(name)) is not None:
                    info[name] = _info(found)
        payload = pack_batch(tables, resource=self._resource, metrics=info)
        try:
            self._spool.put(payload, rows=rows)
        except OSError as error:
            self._spool_failures += 1
            self._last_error = f"spool: {error}"
            held = sum(len(record.payload) for record in self._memory)
            if held + len(payload) > self._max_memory_bytes:
                self._memory_dropped += rows
                return
            self._memory.append(
                Record(sequence=self._spool.next_sequence(), rows=rows, payload=payload)
            )

    def _next(self) -> Record | None:
        return self._spool.first() or (self._memory[0] if self._memory else None)

    def _run(self) -> None:
        wait_s, away = _FIRST_WAIT_S, False
        while True:
            with self._changed:
                while (record := self._next()) is None:
                    if self._gathering_since is not None:
                        due = self._gathering_since + self._batch_s - time.monotonic()
                        if due <= 0 or self._closing:
                            self._close_batch()
                            continue
                        self._changed.wait(due)
                    elif self._closing:
                        return
                    else:
                        self._changed.wait()
                if self._closing:
                    return
            outcome = self._transport.send(record, self._spool.identity)
            with self._changed:
                if outcome.state == "retry":
                    self._retries += 1
                    self._last_error = outcome.reason
                    if not away:  # said once an outage, not at every attempt
                        _log.warning("rows wait in the spool: %s", outcome.reason)
                    away = True
                    pause = max(wait_s, outcome.after_s or 0.0)
                    wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
                    self._changed.wait_for(lambda: self._closing, pause)
                    continue
                if away:
                    _log.warning("the receiver answers again")
                    away = False
                wait_s = _FIRST_WAIT_S
                self._finish(record, outcome.state == "delivered", outcome.rejected_rows)
                if outcome.state == "refused":
                    self._last_error = outcome.reason
                    _log.warning("batch %d refused: %s", record.sequence, outcome.reason)
                self._changed.notify_all()

    def _finish(self, record: Record, delivered: bool, rejected: int) -> None:  # noqa: FBT001
        if self._memory and self._memory[0].sequence == record.sequence:
            self._memory.popleft()
        elif not self._spool.delivered(record.sequence):
            return  # dropped while it travelled, and counted so
        if delivered:
            rejected = min(rejected, record.rows)
            self._delivered += record.rows - rejected
            self._rejected += rejected
            self._last_success_ns = self._clock_ns()
        else:
            self._refused += record.rows

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything taken so far was answered; False after the timeout."""
        with self._changed:
            if self._gathering_since is not None:
                self._close_batch()
                self._changed.notify_all()
            return self._changed.wait_for(lambda: self._next() is None, timeout_s)

    @property
    def counts(self) -> ExporterCounts:
        """Rows at every stage until now."""
        with self._changed:
            memory = sum(record.rows for record in self._memory)
            return ExporterCounts(
                rows_in=self._in,
                rows_delivered=self._delivered,
                rows_rejected=self._rejected,
                rows_refused=self._refused,
                rows_dropped=self._spool.dropped_rows + self._memory_dropped,
                rows_pending=self._spool.pending_rows + memory + self._gathering_rows,
                batches_pending=self._spool.pending_batches + len(self._memory),
                spool_bytes=self._spool.size_bytes,
                spool_failures=self._spool_failures,
                segments_dropped=self._spool.dropped_segments,
                segments_damaged=self._spool.damaged_segments,
                retries=self._retries,
                last_success_ns=self._last_success_ns,
                last_error=self._last_error,
            )

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Try to send what is left, then stop; the rest waits in the spool."""
        self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._transport.close()
        self._spool.close()


def _info(info: MetricInfo) -> Mapping[str, str]:
    return {"unit": info.unit, "kind": info.kind, "description": info.description}


def _checked(table: str, rows: "pl.DataFrame | pa.Table") -> "pl.DataFrame | pa.Table":
    """Return the rows; raise InputError for a table or column nobody knows."""
    schema = table_schema(table)
    names = rows.columns if isinstance(rows, pl.DataFrame) else rows.column_names
    if unknown := [name for name in names if name not in schema]:
        raise InputError(f"table {table}: unknown column {', '.join(unknown)}")
    return rows


def _joined(parts: "list[pl.DataFrame | pa.Table]") -> "pl.DataFrame | pa.Table":
    """Return the rows of all parts; columns that a part lacks are null there."""
    frames = [part for part in parts if isinstance(part, pl.DataFrame)]
    if len(frames) == len(parts):
        return pl.concat(frames, how="diagonal_relaxed")
    import pyarrow as pa

    oldest = pl.CompatLevel.oldest()
    tables = [
        part.to_arrow(compat_level=oldest) if isinstance(part, pl.DataFrame) else part
        for part in parts
    ]
    return pa.concat_tables(tables, promote_options="default")


def _metric_names(rows: "pl.DataFrame | pa.Table") -> list[str]:
    if isinstance(rows, pl.DataFrame):
        return rows["metric"].unique().to_list()
    names: list[str] = rows.column("metric").unique().to_pylist()
    return names

"""Freshly kept rows to whoever listens: bounded, in process."""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import polars as pl
import pyarrow as pa

from kansoku.errors import InputError
from kansoku.model import TABLES

__all__ = ["Broadcast", "Listener", "Waiting"]


class Waiting:
    """Batches that wait for one reader: the oldest give way when it is slow.

    Every subscription is one; they differ in how batches come in.
    """

    def __init__(self, capacity: int) -> None:
        self._waiting: deque[tuple[str, pl.DataFrame | pa.Table]] = deque(maxlen=capacity)
        self._changed = threading.Condition()
        self._closed = False
        self._dropped = 0

    @property
    def dropped_batches(self) -> int:
        """Batches lost because the reader was too slow."""
        return self._dropped

    @property
    def closed(self) -> bool:
        """Whether nothing more will come."""
        return self._closed

    def put(self, table: str, rows: pl.DataFrame | pa.Table) -> None:
        """Take a batch, never waiting."""
        with self._changed:
            if len(self._waiting) == self._waiting.maxlen:
                self._dropped += 1
            self._waiting.append((table, rows))
            self._changed.notify_all()

    def get(self, timeout_s: float | None = None) -> tuple[str, pl.DataFrame] | None:
        """Return the next (table, rows), or None after the timeout or when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout_s)
            if not self._waiting:
                return None
            table, rows = self._waiting.popleft()
        return table, rows if isinstance(rows, pl.DataFrame) else _frame(rows)

    def close(self) -> None:
        """Stop receiving."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[str, pl.DataFrame]]:
        """Yield batches until closed."""
        while (item := self.get()) is not None:
            yield item


def _frame(rows: pa.Table) -> pl.DataFrame:
    """Convert in the reader's thread, not in the writer's."""
    frame = pl.from_arrow(rows)
    assert isinstance(frame, pl.DataFrame)
    text = [name for name, kind in frame.schema.items() if kind == pl.Categorical]
    return frame.with_columns(pl.col(text).cast(pl.String)) if text else frame


class Listener(Waiting):
    """A subscription in the process of the store."""

    def __init__(self, owner: "Broadcast", tables: frozenset[str], capacity: int) -> None:
        super().__init__(capacity)
        self.tables = tables
        self._owner = owner

    def close(self) -> None:
        """Stop receiving."""
        self._owner.remove(self)
        super().close()


class Broadcast:
    """All subscriptions of one store."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.Lock()

    def subscribe(self, tables: Sequence[str], *, capacity: int = 256) -> Listener:
        """Return a listener for those tables."""
        if unknown := set(tables) - set(TABLES):
            raise InputError(f"no table {', '.join(sorted(unknown))} to subscribe to")
        listener = Listener(self, frozenset(tables), capacity)
        with self._lock:
            self._listeners = (*self._listeners, listener)
        return listener

    def remove(self, listener: Listener) -> None:
        """Forget a listener."""
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

    def publish(self, batches: Mapping[str, pa.Table]) -> None:
        """Hand batches to every listener that wants them."""
        for listener in self._listeners:
            for table, rows in batches.items():
                if table in listener.tables and len(rows):
                    listener.put(table, rows)

    def close(self) -> None:
        """Wake and end every listener."""
        for listener in self._listeners:
            listener.close()

"""Freshly kept rows to whoever listens: bounded, in process."""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import polars as pl
import pyarrow as pa

from kansoku.errors import InputError
from kansoku.model import TABLES

__all__ = ["Broadcast", "Listener"]


class Listener:
    """One subscription: the oldest batches give way when the reader is slow."""

    def __init__(self, owner: "Broadcast", tables: frozenset[str], capacity: int) -> None:
        self.tables = tables
        self._owner = owner
        self._waiting: deque[tuple[str, pa.Table]] = deque(maxlen=capacity)
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

    def put(self, table: str, rows: pa.Table) -> None:
        """Take a batch, never waiting."""
        with self._changed:
            if len(self._waiting) == self._waiting.maxlen:
                self._dropped += 1
            self._waiting.append((table, rows))
            self._changed.notify()

    def get(self, timeout_s: float | None = None) -> tuple[str, pl.DataFrame] | None:
        """Return the next (table, rows), or None after the timeout or when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout_s)
            if not self._waiting:
                return None
            table, rows = self._waiting.popleft()
        frame = pl.from_arrow(rows)
        assert isinstance(frame, pl.DataFrame)
        text = [name for name, kind in frame.schema.items() if kind == pl.Categorical]
        return table, frame.with_columns(pl.col(text).cast(pl.String)) if text else frame

    def close(self) -> None:
        """Stop receiving."""
        self._owner.remove(self)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[str, pl.DataFrame]]:
        """Yield batches until closed."""
        while (item := self.get()) is not None:
            yield item


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

"""What pages computed a moment ago, bounded in bytes: a page and its columns ask for the same."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["Memory"]

T = TypeVar("T")


@dataclass(slots=True)
class _Entry:
    value: Any
    size: int
    made_s: float


class Memory:
    """Keeps values for a while; two who ask for one value at once wait for a single computation."""

    def __init__(
        self, *, most_bytes: int = 24 << 20, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep at most ``most_bytes``, the least recently used going first."""
        self._most = most_bytes
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(
        self,
        key: Hashable,
        age_s: float,
        make: Callable[[T | None], tuple[T, int]],
    ) -> T:
        """Return a value younger than ``age_s``, or make one: ``make(old) -> value, bytes``.

        ``make`` is given the last value under the key, however old, to build upon.
        """
        with self._lock:
            entry = self._fresh(key, age_s)
            if entry is not None:
                return entry.value  # type: ignore[no-any-return]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                entry = self._fresh(key, age_s)
                if entry is not None:
                    return entry.value  # type: ignore[no-any-return]
                old = self._entries.get(key)
            value, size = make(None if old is None else old.value)
            with self._lock:
                self._keep(key, _Entry(value, size, self._clock_s()))
                self._making.pop(key, None)
            return value

    @property
    def size_bytes(self) -> int:
        """Bytes kept now."""
        with self._lock:
            return sum(entry.size for entry in self._entries.values())

    def _fresh(self, key: Hashable, age_s: float) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None or self._clock_s() - entry.made_s > age_s:
            return None
        self._entries.move_to_end(key)
        return entry

    def _keep(self, key: Hashable, entry: _Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        total = sum(one.size for one in self._entries.values())
        while total > self._most and len(self._entries) > 1:
            _, gone = self._entries.popitem(last=False)
            total -= gone.size
        if total > self._most:
            self._entries.clear()

"""Memory that is lent for as long as one file is read, and used again for the next.

The files of a set are many and small: fresh pages would take as long as what is put into them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

__all__ = ["Spare"]

T = TypeVar("T")


class Spare(Generic[T]):
    """Things between two uses; nobody else has one while it is lent."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._idle: list[T] = []

    @contextmanager
    def lent(self) -> Iterator[T]:
        """Yield a thing; after an error it is not used again: who knows where that stopped."""
        try:
            thing = self._idle.pop()
        except IndexError:
            thing = self._make()
        yield thing
        self._idle.append(thing)

"""Wrappers in the places of torch's attributes: put in, exchanged for the same in C, taken out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["QUICKENING", "UNDO", "Wrapper", "replace"]

Make = Callable[[Any], Any]
Quick = Callable[[Any, Any], Any]
UNDO: list[Callable[[], None]] = []
"""What takes everything out again, newest last."""
QUICKENING: list[Callable[[], None]] = []
"""What puts the wrappers in C in the places of those in Python."""


class Wrapper:
    """A wrapper in the place of an attribute of torch's."""

    def __init__(self, owner: Any, name: str, make: Make, quick: Quick | None):
        self._owner, self._name, self._quick = owner, name, quick
        self._original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
        self._slow = self._current = make(self._original)
        setattr(owner, name, self._current)

    def _now(self) -> Any:
        owner, name = self._owner, self._name
        return owner.__dict__.get(name) if isinstance(owner, type) else getattr(owner, name)

    def _exchange(self, new: Any) -> None:
        now = self._now()
        # Somebody else may have wrapped us since: leave theirs.
        if now is self._current or now is self._slow:
            setattr(self._owner, self._name, new)
            self._current = new

    def quicken(self) -> None:
        """Put the same in C in its place, where there is one."""
        if self._quick is not None:
            self._exchange(self._quick(self._original, self._slow))

    def again(self) -> None:
        """Put the one in C in its place again after somebody restored what can be read there."""
        if self._current is not self._slow and self._now() is self._slow:
            setattr(self._owner, self._name, self._current)

    def slow_down(self) -> None:
        """Put the one in Python in its place again."""
        self._exchange(self._slow)

    def undo(self) -> None:
        """Put the original in its place."""
        self._exchange(self._original)


def replace(owner: Any, name: str, make: Make, quick: Quick | None = None) -> Wrapper:
    """Put ``make(original)`` in place of an attribute; the same in C is ``quick(original, it)``."""
    wrapper = Wrapper(owner, name, make, quick)
    UNDO.append(wrapper.undo)
    if quick is not None:
        QUICKENING.append(wrapper.quicken)
    return wrapper

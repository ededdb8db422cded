"""Where ranks that already run begin to count steps: at the same update of all.

Probes reach the ranks one after the other, so each has seen a different update first. A group's
collectives carry the same number on every rank; so counting begins on each at the first update
after the collective that no rank had come to when the last one was first heard.
"""

from __future__ import annotations

__all__ = ["Alignment"]

_PATIENCE_NS = 5_000_000_000


class Alignment:
    """The collective after which every rank counts steps from its next update."""

    def __init__(self) -> None:
        self._group: str | None = None
        self._newest: dict[int, int] = {}
        self._first_ns = 0
        self.expected: set[int] = set()
        """Processes known to be ranks that were at work before us."""
        self.size: int | None = None
        """Ranks of the group, where known and all here."""
        self.point: int | None = None

    def passes(self, process: int, group: str, sequence: int, time_ns: int) -> bool:
        """Take a collective of a rank that does not count yet; say whether it may begin now."""
        if self._group is None:
            self._group, self._first_ns = group, time_ns
        if group != self._group or sequence < 0:
            return False
        if self.point is not None:
            return sequence >= self.point
        self._newest[process] = max(sequence, self._newest.get(process, -1))
        heard = set(self._newest)
        complete = (
            self.expected <= heard
            if len(self.expected) > 1
            else self.size is not None and len(heard) >= self.size
        )
        if complete or time_ns - self._first_ns > _PATIENCE_NS:
            self.point = max(self._newest.values()) + 1
        return False

"""Unions, intersections and coverage of time intervals, in integer nanoseconds.

An interval set is a pair of equally long int64 arrays ``(starts, ends)``, disjoint and ascending.
Nothing here depends on the order of its input rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["IntervalSet", "gaps", "intersect", "union"]

Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IntervalSet:
    """Disjoint intervals, ascending; touching ones are joined, empty ones dropped."""

    starts: Array
    ends: Array

    @property
    def total_ns(self) -> int:
        """Length of all intervals together."""
        return int((self.ends - self.starts).sum())

    def covered(self, times: Array | Sequence[int]) -> Array:
        """Return how many nanoseconds before each time the set covers."""
        at = np.asarray(times, dtype=np.int64)
        if len(self.starts) == 0:
            return np.zeros(len(at), np.int64)
        before = np.concatenate(([0], np.cumsum(self.ends - self.starts)))
        index = np.searchsorted(self.starts, at, side="right")
        last = np.maximum(index - 1, 0)
        inside = np.clip(at - self.starts[last], 0, self.ends[last] - self.starts[last])
        return np.where(index > 0, before[last] + inside, 0)

    def within(self, start: int, end: int) -> int:
        """Return how many nanoseconds of ``[start, end)`` the set covers."""
        low, high = self.covered([start, max(start, end)])
        return int(high - low)


def union(starts: NDArray[Any], durations: NDArray[Any]) -> IntervalSet:
    """Return the union of rows given by start and duration, in any order."""
    keep = durations > 0
    first = starts[keep].astype(np.int64)
    if len(first) == 0:
        empty = np.empty(0, np.int64)
        return IntervalSet(empty, empty)
    reach = first + durations[keep]
    if (first[1:] < first[:-1]).any():
        order = np.argsort(first, kind="stable")
        first, reach = first[order], reach[order]
    np.maximum.accumulate(reach, out=reach)
    begins = np.flatnonzero(np.concatenate(([True], first[1:] > reach[:-1])))
    ends = reach[np.concatenate((begins[1:] - 1, [len(reach) - 1]))]
    return IntervalSet(first[begins], ends)


def intersect(one: IntervalSet, other: IntervalSet) -> IntervalSet:
    """Return what both sets cover."""
    # Each interval of one set meets a run of the other's, from `first` on.
    first = np.searchsorted(other.ends, one.starts, side="right")
    met = np.searchsorted(other.starts, one.ends, side="left") - first
    mine = np.repeat(np.arange(len(met)), met)
    theirs = np.arange(len(mine)) + np.repeat(first - np.cumsum(met) + met, met)
    # No two of these touch: in one of the sets two intervals would have to.
    return IntervalSet(
        np.maximum(one.starts[mine], other.starts[theirs]),
        np.minimum(one.ends[mine], other.ends[theirs]),
    )


def gaps(busy: IntervalSet) -> IntervalSet:
    """Return the holes between the intervals of a set."""
    return IntervalSet(busy.ends[:-1], busy.starts[1:])

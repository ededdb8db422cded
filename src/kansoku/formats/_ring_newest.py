"""The newest records of a ring's lanes: what is read again every second need not be read whole."""

import numpy as np
import numpy.typing as npt

from kansoku.model import ring

__all__ = ["newest_stretches", "since_all_lanes"]

_AHEAD = 256
"""Records looked at at once."""
_COUNT_MASK = np.uint64((1 << ring.LANE_SHIFT) - 1)


def newest_stretches(
    ids: npt.NDArray[np.uint64], newest: int, head: int = 0
) -> list[tuple[int, int]]:
    """Return ``(first, count)`` of a lane's newest records: one stretch, two where it wraps.

    ``ids`` are those of all its places: record n lies at (n - 1) modulo their number. ``head`` is
    the newest that the writer has noted; the records may be ahead of it.
    """
    last = _last(ids, head)
    size = min(newest, last, len(ids))
    first = (last - size) % max(len(ids), 1)
    before = min(size, len(ids) - first)
    return [stretch for stretch in ((first, before), (0, size - before)) if stretch[1]]


def _last(ids: npt.NDArray[np.uint64], head: int) -> int:
    """Return the newest record's number, without touching each page of the file if it can."""
    while len(ids) > _AHEAD:
        numbers = np.arange(head + 1, head + 1 + _AHEAD)
        found = (ids[(numbers - 1) % len(ids)] & _COUNT_MASK).astype(np.int64)
        follow = int(np.argmin(np.append(found == numbers, False)))
        if follow < _AHEAD and head + follow:
            return head + follow
        if follow < _AHEAD:
            break
        head += follow
    return int((ids & _COUNT_MASK).max()) if len(ids) else 0


def since_all_lanes(
    ids: npt.NDArray[np.uint64], start_ns: npt.NDArray[np.int64], newest: int
) -> npt.NDArray[np.bool_]:
    """Mark records no older than the oldest of any lane of which ``newest`` were taken.

    A step whose native collectives were cut off would seem to have waited less than it did.
    """
    lanes = ids >> np.uint64(ring.LANE_SHIFT)
    oldest = [
        int(start_ns[lanes == lane].min())
        for lane in np.unique(lanes[ids != 0])
        if int(np.count_nonzero(lanes == lane)) >= newest
    ]
    return start_ns >= max(oldest, default=np.iinfo(np.int64).min)

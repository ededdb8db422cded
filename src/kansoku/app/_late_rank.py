"""The rank that the others wait for, while the job still runs."""

import statistics
from collections.abc import Mapping

__all__ = ["late_rank"]

_STANDS_OUT_RATIO = 0.5
"""A rank that waits for less than this part of what its peers wait is named."""
_LEAST_WAIT_RATIO = 0.05
"""…where the peers wait for at least this part of the time."""


def late_rank(wait_ratios: Mapping[int, float]) -> int | None:
    """Return the rank that waits much less than the median of the others; None without one.

    ``wait_ratios`` is, by rank, the part of the time (0-1) in which it waited for collectives.

    >>> late_rank({0: 0.30, 1: 0.02, 2: 0.34, 3: 0.28})
    1
    >>> late_rank({0: 0.30, 1: 0.25})
    """
    if len(wait_ratios) < 2:
        return None
    first = min(wait_ratios, key=lambda rank: wait_ratios[rank])
    others = statistics.median(ratio for rank, ratio in wait_ratios.items() if rank != first)
    stands_out = wait_ratios[first] < _STANDS_OUT_RATIO * others
    return first if others >= _LEAST_WAIT_RATIO and stands_out else None

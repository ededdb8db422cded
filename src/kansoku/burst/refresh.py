"""Recognise counters that are renewed more slowly than they are read."""

import numpy as np
import numpy.typing as npt

__all__ = ["changed_samples", "refresh_samples"]

Ints = npt.NDArray[np.int64]
_CHANGES = 8  # fewer changes say nothing about a rhythm
_REGULAR = 0.9  # share of gaps that must fit


def refresh_samples(counter: Ints) -> int | None:
    """Return how many samples pass between renewals; None where every sample may be fresh.

    A counter of which two neighbouring samples never both change, and whose changes lie at
    multiples of one gap (within a sample), is renewed every so many samples. Traffic of exactly
    that rhythm looks the same; then too no finer statement is possible from the counter.
    """
    changes = np.flatnonzero(np.diff(counter) != 0)
    if len(changes) < _CHANGES:
        return None
    gaps = np.diff(changes)
    base = float(np.quantile(gaps, 0.25))
    if base < 2 or float(np.mean(gaps == 1)) > 1 - _REGULAR:
        return None
    multiple = np.maximum(np.round(gaps / base), 1)
    fits = np.abs(gaps - multiple * base) <= 1.0
    # An idle stretch is a large multiple, which fits by chance: most gaps must be the base itself.
    regular = float(np.mean(fits)) >= _REGULAR and float(np.mean(multiple == 1)) >= 0.5
    return round(base) if regular else None


def changed_samples(counter: Ints, refresh: int) -> npt.NDArray[np.intp]:
    """Return the samples at which the counter was fresh.

    Those where it changed, and, before a change after an idle stretch, the sample one renewal
    earlier: the idle time must not thin out the rate that follows.
    """
    changed = np.flatnonzero(np.diff(counter) != 0) + 1
    before = changed - refresh
    previous = np.concatenate([np.zeros(1, dtype=np.intp), changed[:-1]])
    idle = before[changed - previous > 2 * refresh]
    ends = np.asarray([0], dtype=np.intp)
    return np.unique(np.concatenate([ends, changed, idle[idle > 0]]))

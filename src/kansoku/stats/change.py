"""Change points and trends that a few wild values cannot move."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kansoku.stats.robust import median_absolute_deviation

__all__ = ["ChangePoint", "Trend", "change_point", "theil_sen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """One lasting change of level."""

    index: int
    """First value of the new level."""
    before: float
    """Median before."""
    after: float
    """Median after."""
    score: float
    """Size of the change in standard errors of the medians; above 5 it is no accident."""


def change_point(values: npt.ArrayLike, *, margin: int = 5) -> ChangePoint | None:
    """Return the split that explains the values best, or None when there are too few.

    Among all splits with ``margin`` values on each side it takes the one that lowers the sum of
    squared ranks' deviations most (a rank CUSUM: wild values count as one rank, no more), then
    scores the two medians against the spread inside the two sides.
    """
    array = np.asarray(values, dtype=np.float64)
    count = len(array)
    if count < 2 * margin:
        return None
    ranks = np.argsort(np.argsort(array, kind="stable"), kind="stable").astype(np.float64)
    ranks -= ranks.mean()
    left = np.cumsum(ranks)[:-1]
    sizes = np.arange(1, count)
    gain = left**2 * (1 / sizes + 1 / (count - sizes))
    gain[: margin - 1] = -1
    gain[count - margin :] = -1
    index = int(np.argmax(gain)) + 1
    index = _polished(array, index, margin)
    first, second = array[:index], array[index:]
    before, after = float(np.median(first)), float(np.median(second))
    spread = max(
        median_absolute_deviation(np.concatenate([first - before, second - after])),
        1e-9 * max(abs(before), abs(after), 1e-300),
    )
    # Standard error of a median of normal data is 1.2533 sigma / sqrt(n).
    error = 1.2533 * spread * float(np.sqrt(1 / len(first) + 1 / len(second)))
    return ChangePoint(index=index, before=before, after=after, score=abs(after - before) / error)


def _polished(array: npt.NDArray[np.float64], index: int, margin: int) -> int:
    """Move the split to where fewest values lie on the wrong side of the middle of the levels."""
    before, after = float(np.median(array[:index])), float(np.median(array[index:]))
    above = np.where(array > (before + after) / 2, 1, -1) * (1 if after > before else -1)
    balance = np.cumsum(above)[margin - 1 : len(array) - margin]
    return margin + int(np.argmin(balance)) if len(balance) else index


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A line's slope, in units of y per unit of x; both NaN where nothing tells."""

    slope: float
    error: float
    """Standard error, from how far the slopes of single pairs lie apart."""


def theil_sen(x: npt.ArrayLike, y: npt.ArrayLike) -> Trend:
    """Return the median slope over pairs half the window apart; x ascends.

    Nothing tells below four points, or where x does not change.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    half = len(xs) // 2
    run = xs[len(xs) - half :] - xs[:half]
    far = run > 0
    if half < 2 or not far.any():
        return Trend(slope=float("nan"), error=float("nan"))
    slopes = (ys[len(ys) - half :] - ys[:half])[far] / run[far]
    slope = float(np.median(slopes))
    spread = median_absolute_deviation(slopes - slope)
    return Trend(slope=slope, error=1.2533 * spread / float(np.sqrt(len(slopes))))

"""Statistics that a few wild values cannot move."""

import numpy as np
import numpy.typing as npt

__all__ = ["median_absolute_deviation", "robust_z"]

# Makes the MAD an estimate of the standard deviation for normal data: 1 / Φ⁻¹(3/4).
_NORMAL_CONSISTENCY = 1.4826022185056018


def median_absolute_deviation(values: npt.ArrayLike) -> float:
    """Return the MAD scaled to the standard deviation of normal data; NaN when empty."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return float("nan")
    return float(_NORMAL_CONSISTENCY * np.median(np.abs(array - np.median(array))))


def robust_z(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return each value's distance from the median in scaled MADs, shape as given.

    Zero spread gives 0 for values at the median and infinity elsewhere.
    """
    array = np.asarray(values, dtype=np.float64)
    distance = array - np.median(array)
    spread = median_absolute_deviation(array)
    if spread == 0:
        return np.where(distance == 0, 0.0, np.copysign(np.inf, distance))
    return distance / spread

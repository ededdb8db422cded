"""Split a sequence of vectors into stretches of one level: change points by optimal partition."""

import numpy as np
import numpy.typing as npt

__all__ = ["change_points"]


def change_points(
    values: npt.ArrayLike, *, penalty: float | None = None, minimum: int = 2
) -> list[int]:
    """Return the indices where a new level starts, in order.

    ``values`` has shape ``(points,)`` or ``(points, dimensions)``. The partition minimises the
    sum of squared distances from each stretch's mean plus ``penalty`` per change (Jackson et al.
    2005, exact). The default penalty is 3 σ² (d + 1) ln n with σ² from successive differences,
    which a few changes do not inflate. ``minimum`` is the shortest stretch.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim == 1:
        data = data[:, None]
    points, dimensions = data.shape
    if points < 2 * minimum:
        return []
    if penalty is None:
        steps = np.diff(data, axis=0)
        # Half the mean squared difference is the noise; the median keeps jumps out of it.
        noise = float(np.median((steps**2).sum(axis=1)) / 2 / max(dimensions, 1))
        noise = max(noise, float(data.var(axis=0).mean()) * 1e-3)
        penalty = 3 * noise * (dimensions + 1) * np.log(points)
    sums = np.vstack([np.zeros(dimensions), np.cumsum(data, axis=0)])
    squares = np.concatenate([[0.0], np.cumsum((data**2).sum(axis=1))])
    best = np.full(points + 1, np.inf)
    best[0] = -penalty
    previous = np.zeros(points + 1, dtype=np.int64)
    for end in range(minimum, points + 1):
        starts = np.arange(0, end - minimum + 1)
        lengths = end - starts
        spread = squares[end] - squares[starts]
        spread = spread - ((sums[end] - sums[starts]) ** 2).sum(axis=1) / lengths
        total = best[starts] + spread + penalty
        choice = int(np.argmin(total))
        best[end], previous[end] = total[choice], starts[choice]
    found = []
    at = points
    while at > 0:
        at = int(previous[at])
        if at > 0:
            found.append(at)
    return found[::-1]

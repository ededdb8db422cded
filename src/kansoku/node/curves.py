"""A counter over time, made of readings that are some milliseconds apart."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    from kansoku.node import later_numpy as np

__all__ = ["CUMULATIVE", "GAUGES", "Curve", "Floats", "Ints", "curve_of"]

if TYPE_CHECKING:
    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
else:
    Floats = Ints = Any

CUMULATIVE = (
    "energy_j",
    "receive_bytes",
    "transmit_bytes",
    "nvlink_receive_bytes",
    "nvlink_transmit_bytes",
    "cpu_s",
)
GAUGES = ("power_w", "sm_activity", "memory_activity")
_NS = 1e9


@dataclass(frozen=True, slots=True)
class Curve:
    """A counter over time that never falls."""

    times: Ints
    values: Floats
    gaps: tuple[Ints, Ints] | None = None
    """Starts and ends of times that it says nothing about, in order and disjoint."""

    def covers(self, start: Ints, end: Ints) -> "npt.NDArray[np.bool_]":
        """Say which spans lie wholly between the first and the last reading, outside gaps."""
        if len(self.times) < 2:
            return np.zeros(len(start), dtype=bool)
        inside: npt.NDArray[np.bool_] = (start >= self.times[0]) & (end <= self.times[-1])
        if self.gaps is not None:
            starts, ends = self.gaps
            over = np.searchsorted(ends, start, side="right")
            begun = np.searchsorted(starts, end, side="left")
            inside &= begun <= over
        return inside

    def at(self, moments: Ints) -> Floats:
        """Return the counter at moments, growing evenly between readings."""
        base = self.times[0]  # differences keep nanoseconds exact in a double
        grown: Floats = np.interp(moments - base, self.times - base, self.values)
        return grown

    def edge_error(self, moments: Ints) -> Floats:
        """Return by how much ``at`` can be wrong: the readings around bound the truth."""
        after = np.clip(np.searchsorted(self.times, moments, side="left"), 0, len(self.times) - 1)
        before = np.clip(
            np.searchsorted(self.times, moments, side="right") - 1, 0, len(self.times) - 1
        )
        here = self.at(moments)
        return np.maximum(here - self.values[before], self.values[after] - here)


def curve_of(quantity: str, times: Ints, values: Floats) -> Curve:
    """Make a counter that never falls of raw readings of one series, in any order.

    A value below the one before is a reset: the counter began at zero. An energy counter that the
    driver renews less often than it is read keeps only the readings where it moved, or all the
    energy of a renewal would fall into its last few milliseconds.
    """
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    good = np.isfinite(values)
    times, values = times[good], values[good]
    first = np.concatenate([[True], np.diff(times) > 0]) if len(times) else np.empty(0, dtype=bool)
    times, values = times[first], values[first]
    if quantity in GAUGES:
        steps = np.diff(times) / _NS * (values[1:] + values[:-1]) / 2
        return Curve(times, np.concatenate([[0.0], np.cumsum(steps)])[: len(times)])
    growth = np.diff(values)
    growth = np.where(growth < 0, values[1:], growth)
    total = np.concatenate([[0.0], np.cumsum(growth)])[: len(values)]
    if quantity == "energy_j" and len(total) > 2:
        moved = np.concatenate([[True], np.diff(total) > 0])
        moved[-1] = True
        times, total = times[moved], total[moved]
    return Curve(times, total)

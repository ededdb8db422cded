"""Where a fit of clocks begins: places where most pairs lie together inside the bounds."""

from collections import deque

import numpy as np

from kansoku.stats.change import theil_sen
from kansoku.trace.clock_mixture import USUAL_DRIFT, Frame, State
from kansoku.trace.clock_pairs import Floats, Ints, Pairs

__all__ = [
    "MAX_DRIFT_PPM",
    "MIN_MATCHES",
    "MOST_POINTS",
    "beside",
    "impossible",
    "partners",
    "placed",
]

MAX_DRIFT_PPM = 200.0
"""Crystals of computers stay within 100 ppm of true time, so two within 200 of each other."""
MIN_MATCHES = 8
"""Collectives that two hosts must share: one barrier says how late somebody left it."""
MOST_POINTS = 1000
_NEIGHBOURS = 4
_MOST_SLOPES = 61


def _slopes(slope: float, error: float, step: float) -> Floats:
    """Return the slopes worth trying: around the medians', none that no clock has."""
    most = MAX_DRIFT_PPM * 1e-6
    around = 0.0 if abs(slope) > most else slope
    reach = min(max(4 * error, step), 2 * most)
    count = min(2 * int(np.ceil(reach / step)) + 1, _MOST_SLOPES)
    found: Floats = np.concatenate([[0.0], around + np.linspace(-reach, reach, count)])
    return np.asarray(found[np.abs(found) <= most], dtype=np.float64)


def _part(values: Floats, share: float) -> float:
    """Return the value that ``share`` of all lie below: no mean of two, for speed."""
    at = int(share * (len(values) - 1))
    return float(np.partition(values, at)[at])


def _peak(
    time: Floats, apart: Floats, upper: Floats, lower: Floats, scale: float
) -> tuple[float, float]:
    """Return offset at 0 and slope where most pairs lie within ``scale``, inside the bounds."""
    order = np.argsort(time, kind="stable")  # neighbours come one after another
    trend = theil_sen(time[order], apart[order])
    slope, error = np.nan_to_num((trend.slope, trend.error)).tolist()
    length = max(float(time.max() - time.min()), 1.0)
    cell = scale / 4
    kernel = np.exp(-0.5 * (np.arange(-12, 13) / 4) ** 2)
    best, answer = -np.inf, (float(np.median(apart)), 0.0)
    for tried in _slopes(slope, error, 2 * scale / length).tolist():
        rest = apart - tried * time
        high, low = float((upper - tried * time).min()), float((lower - tried * time).max())
        if high < low:  # a wrong record: the bounds say nothing
            high, low = np.inf, -np.inf
        # Nobody's peak is outside of what most pairs span; a bounded grid, whatever the outliers.
        centre = _part(rest, 0.5)
        reach = min(4 * _part(np.abs(rest - centre), 0.75) + 8 * cell, 20_000 * cell)
        grid = np.floor((rest - centre + reach) / cell)
        inside = (grid >= 0) & (grid < 2 * reach / cell)
        counts = np.bincount(grid[inside].astype(np.int64), minlength=32)
        heap = np.convolve(counts, kernel, "same")
        at = centre - reach + (np.arange(len(heap)) + 0.5) * cell
        heap = np.where((at >= low - cell) & (at <= high + cell), heap, -np.inf)
        top = int(heap.argmax())
        score = 1.5 * float(heap[top]) - 0.5 * (tried / USUAL_DRIFT) ** 2
        if score > best:
            best, answer = score, (float(np.clip(at[top], low, high)), tried)
    return answer


def partners(pairs: Pairs, hosts: int) -> dict[int, dict[int, Ints]]:
    """Return for each host its partners and the rows they share, where these are enough."""
    code = pairs.first * hosts + pairs.second
    order = np.argsort(code, kind="stable")
    cuts = np.flatnonzero(np.diff(code[order])) + 1
    found: dict[int, dict[int, Ints]] = {}
    for rows in np.split(order, cuts):
        if len(rows) >= MIN_MATCHES:
            a, b = int(pairs.first[rows[0]]), int(pairs.second[rows[0]])
            found.setdefault(a, {})[b] = rows
            found.setdefault(b, {})[a] = rows
    return found


def beside(
    frame: Frame, edges: dict[int, dict[int, Ints]], state: State, host: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return times, the reference's, and what ends and bounds beside neighbours say of a clock."""
    pairs = frame.pairs
    near = [n for n in edges[host] if n != host and not np.isnan(state.middle[n])][:_NEIGHBOURS]
    parts = []
    for other in near:
        rows = edges[host][other]
        rows = rows[:: max(1, len(rows) * len(near) // MOST_POINTS)]
        apart, high, low = pairs.apart[rows], pairs.upper[rows], pairs.lower[rows]
        # The neighbour's end in the reference's time: by its own clock, days bend the lines.
        shown = frame.time[rows] - (apart if host < other else 0.0)
        time = (shown - state.middle[other]) / (1 + state.slope[other])
        base = state.middle[other] + state.slope[other] * time
        if host > other:
            apart, high, low = -apart, -low, -high
        parts.append((time, apart + base, high + base, low + base))
    time, apart, high, low = (np.concatenate(column) for column in zip(*parts, strict=True))
    return time, apart, high, low


def placed(frame: Frame, edges: dict[int, dict[int, Ints]], scale: float) -> State:
    """Walk from the reference; place each host against those neighbours that have a place."""
    state = State(
        middle=np.full(frame.hosts, np.nan),
        slope=np.zeros(frame.hosts),
        width=np.full(frame.kinds, scale),
        core=np.full(frame.kinds, 0.5),
    )
    state.middle[frame.reference] = 0.0
    queue = deque([frame.reference])
    while queue:
        for host in edges.get(queue.popleft(), {}):
            if np.isnan(state.middle[host]):
                around = beside(frame, edges, state, host)
                state.middle[host], state.slope[host] = _peak(*around, scale)
                queue.append(host)
    return state


def impossible(
    frame: Frame, edges: dict[int, dict[int, Ints]], state: State, host: int
) -> tuple[float, float] | None:
    """Return offset and slope of a host whose ends plainly drift as no clock does."""
    time, apart, _, _ = beside(frame, edges, state, host)
    order = np.argsort(time, kind="stable")
    trend = theil_sen(time[order], apart[order])
    slope = trend.slope
    if not (abs(slope) * 1e6 > MAX_DRIFT_PPM and abs(slope) > 4 * trend.error):  # or NaN
        return None
    offset = np.median(apart - slope * time)
    # Noise has steep slopes too; it follows none.
    line = state.middle[host] + state.slope[host] * time
    if np.median(np.abs(apart - offset - slope * time)) > 0.5 * np.median(np.abs(apart - line)):
        return None
    return float(np.median(apart)), slope

"""How well the lines of the clocks are known, and which other places are about as likely."""

import numpy as np

from kansoku.trace.clock_mixture import (
    USUAL_DRIFT,
    Bools,
    Frame,
    State,
    apart_of,
    belonging,
    information,
)
from kansoku.trace.clock_pairs import Floats, Ints
from kansoku.trace.clock_start import MOST_POINTS

__all__ = ["rival", "uncertain"]

_INTERVAL = 2.2
"""Half a 95 % interval in standard errors, at the worse end of a line."""
_FEW = 15.0
"""So few pairs of a core make the interval twice as wide: they may lie together by chance, closer
than the core is. Found from 4,400 generated runs of two hosts with 10 to 200 collectives."""
_MOST_WIDER = 3.0
_ORDER = 0.4
_ORDER_NS = 10e3
"""How late against others a host may always leave: in widths of the core, and more."""
_BLOCK = 8
"""Collectives on end that may err together: those of a step or two."""
_NO_PAIRS = 1e-6
"""Keeps the equations solvable, as the next does."""
_FARTHEST_NS = 1e9
"""What nothing says is known to so much: keeps the equations solvable."""


def _normal(frame: Frame, weight: Floats, others: Ints) -> Floats:
    """Return the normal equations of all lines but the reference's: middles, then slopes."""
    one, cross, square = information(frame, weight)
    first, second = frame.first, frame.second
    place = np.full(frame.hosts, -1)
    place[others] = np.arange(len(others))
    n = len(others)
    matrix = np.zeros((2 * n, 2 * n))
    blocks = ((0, 0, one), (0, n, cross), (n, 0, cross), (n, n, square))
    ends = ((first, first, 1), (second, second, 1), (first, second, -1), (second, first, -1))
    for row, column, part in blocks:
        for a, b, sign in ends:
            here = (place[a] >= 0) & (place[b] >= 0)
            np.add.at(matrix, (row + place[a[here]], column + place[b[here]]), sign * part[here])
    return matrix


def _ordered(frame: Frame, state: State, weight: Floats, others: Ints, inverse: Floats) -> Floats:
    """Return by how much lines move where each host always leaves by something late, ns.

    Ends that always come in one order are a bias that no number of them takes away. It goes from
    host to host along the operations that join them, the further the wider their cores.
    """
    late = _ORDER * state.width[frame.pairs.kind] + _ORDER_NS
    one, cross, _ = information(frame, weight * late)
    n = len(others)
    place = np.full(frame.hosts, -1)
    place[others] = np.arange(n)
    pull = np.zeros((2 * n, frame.hosts))
    for a, b in ((frame.first, frame.second), (frame.second, frame.first)):
        here = place[a] >= 0
        for row, part in ((0, one), (n, cross)):
            np.add.at(pull, (row + place[a[here]], a[here]), part[here])
            np.add.at(pull, (row + place[a[here]], b[here]), -part[here])
    moved = inverse @ pull
    ends = [np.square(moved[:n] + sign * moved[n:]).sum(axis=1) for sign in (-1, 1)]
    return np.asarray(np.sqrt(np.maximum(*ends)), dtype=np.float64)


def _wider(frame: Frame, belongs: Floats, others: Ints) -> Floats:
    """Return how much wider each interval is, for how few pairs of the core join the host.

    Pairs count as conductors do: side by side they add up, one after another the fewest decide.
    """
    n = len(others)
    joined = _normal(frame, belongs, others)[:n, :n]
    joined[np.arange(n), np.arange(n)] += _NO_PAIRS
    pairs = 1 / np.linalg.inv(joined).diagonal()
    wider = np.minimum(1 + (_FEW / pairs) ** 3, _MOST_WIDER)
    return np.asarray(wider, dtype=np.float64)


def _scattered(frame: Frame, share: Floats, score: Floats) -> float:
    """Return the sum of squared scores, of blocks where neighbours in time err together.

    Who leaves first often does so for some collectives on end: these say less than as many apart.
    """
    alone = float((share * score**2).sum())
    order = np.lexsort((frame.time, frame.edge))
    count = np.diff(np.append(frame.begin, len(order)))
    place = np.arange(len(order)) - np.repeat(frame.begin, count)
    code = frame.edge[order] * (int(count.max()) // _BLOCK + 1) + place // _BLOCK
    _, block = np.unique(code, return_inverse=True)
    together = np.bincount(block, (np.sqrt(share) * score)[order]) ** 2
    return max(alone, float(together.sum()))


def uncertain(frame: Frame, state: State, used: Ints) -> tuple[Floats, Floats]:
    """Return half the 95 % interval of each line at its worse end; its slope's standard error."""
    pairs = frame.pairs
    apart = apart_of(frame, state)
    belongs, _ = belonging(frame, state, apart)
    each = belongs / state.width[pairs.kind] ** 2
    whole = pairs.share * each
    # Minus the second derivative of the log likelihood is what is left of ``whole``.
    lost = whole * (1 - belongs) * (apart / state.width[pairs.kind]) ** 2
    kept = max(1 - float(lost.sum()) / float(whole.sum()), 0.2)
    score = _scattered(frame, pairs.share, each * apart) / float(whole.sum())
    inflation = max(score / kept**2, 1.0)
    others = used[used != frame.reference]
    matrix = _normal(frame, whole, others)
    n = len(others)
    known = matrix[n:, n:].diagonal().copy()
    matrix[np.arange(n), np.arange(n)] += _FARTHEST_NS**-2
    matrix[np.arange(n, 2 * n), np.arange(n, 2 * n)] += (USUAL_DRIFT * frame.half) ** -2
    inverse: Floats = np.linalg.inv(matrix).astype(np.float64, copy=False)
    at, slope = inverse[:n, :n].diagonal(), inverse[n:, n:].diagonal()
    cross = inverse[:n, n:].diagonal()
    error, alone = np.zeros(frame.hosts), np.full(frame.hosts, np.inf)
    spread = np.sqrt(inflation * np.maximum(at + slope + 2 * np.abs(cross), 0))
    spread *= _wider(frame, belongs, others)
    error[others] = np.hypot(_INTERVAL * spread, _ordered(frame, state, whole, others, inverse))
    with np.errstate(divide="ignore"):
        alone[others] = np.sqrt(inflation / np.maximum(known, 0)) / frame.half
    return error, alone


def rival(frame: Frame, state: State, moving: Bools) -> tuple[float, float]:
    """Return how far off the next best place of some hosts is, and the log likelihood it gains.

    They move together: what joins them among themselves says nothing.
    """
    pairs = frame.pairs
    rows = np.flatnonzero(moving[pairs.first] != moving[pairs.second])
    rows = rows[:: max(1, len(rows) // (4 * MOST_POINTS))]
    if not len(rows):
        return 0.0, -np.inf
    ahead = np.where(moving[pairs.first[rows]], 1.0, -1.0)
    raw = apart_of(frame, state)[rows]
    apart, line = ahead * raw, pairs.apart[rows] - raw
    high = np.where(ahead > 0, pairs.upper[rows] - line, line - pairs.lower[rows])
    low = np.where(ahead > 0, pairs.lower[rows] - line, line - pairs.upper[rows])
    cell = float(state.width[np.unique(pairs.kind[rows])].min()) / 4
    count = int(min(20 * float(np.quantile(np.abs(apart), 0.75)) / cell + 64, 8000))
    places = np.floor(apart / cell + count / 2).astype(np.int64)
    inside = (places >= 0) & (places < count)
    gain = np.zeros(count)
    for kind in np.unique(pairs.kind[rows]).tolist():
        own = inside & (pairs.kind[rows] == kind)
        width, core = state.width[kind] / cell, state.core[kind]
        peak = core / (width * cell * 2.5066) / ((1 - core) * frame.floor[kind])
        reach = min(int(5 * width), count // 2 - 1)
        near = np.arange(-reach, reach + 1)
        kernel = np.log1p(peak * np.exp(-0.5 * (near / width) ** 2))
        heap = np.bincount(places[own], pairs.share[rows][own], minlength=count)
        gain += np.convolve(heap, kernel, "same")
    at = (np.arange(count) - count / 2 + 0.5) * cell
    here = float(gain[np.abs(at) <= 4 * cell].max())
    far = np.abs(at) > 12 * cell
    if low.max() <= high.min():
        far &= (at <= high.min()) & (at >= low.max())
    if not far.any():
        return 0.0, -np.inf
    best = int(np.where(far, gain, -np.inf).argmax())
    return float(at[best]), float(gain[best]) - here

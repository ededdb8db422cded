"""Offsets and drifts of all hosts together, from their pairs: see ``docs/clock-alignment.md``.

The ends of two hosts in one collective are read apart by the difference of their clocks and by how
late each noticed the end. On a busy machine most are late by milliseconds, a time slice of the
scheduler, while some pairs leave together. So what is apart is a narrow core around the clocks'
difference over a wide floor, and the narrower the core the more it says: a mixture for each kind of
operation, fitted by expectation and maximisation together with one line a host. Where it starts is
searched within the bounds of causality, for a core may also stand a time slice off.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kansoku.trace.clock_pairs import Floats, Ints, Pairs

__all__ = ["MAX_DRIFT_PPM", "MIN_MATCHES", "Lines", "fit"]

Bools = npt.NDArray[np.bool_]

MAX_DRIFT_PPM = 200.0
"""Crystals of computers stay within 100 ppm of true time, so two within 200 of each other."""
MIN_MATCHES = 8
"""Collectives that two hosts must share: one barrier says how late somebody left it."""
# Two crystals of one make differ by some 20 ppm: what a short run cannot tell leans on that.
_USUAL_DRIFT = 20e-6
_NARROWEST_NS = 20e3
_SCALES_NS = (100e3, 500e3)
_NEIGHBOURS = 4
_MOST_POINTS = 1000
_MOST_SLOPES = 61
_ROUNDS = 40
_STILL = 0.01
"""Gain in log likelihood of a round that is no gain."""
_BROKEN = 10.0
"""What a pair whose bounds the lines break costs, in log likelihood."""
_CLOSE = 7.0
"""A place less likely by less than this (in log likelihood) cannot be told from the best."""
_FEW_HOSTS = 64
"""Beyond, each host has so many partners that no peak but the right one fits all."""
_UNTOLD = 3.0
"""A drift is left out where its error is so many times what drifts usually are."""
_PASSES = 3
_RARE_PAIRS = 5.0
_INTERVAL = 2.5
_ORDER = 0.2
"""Half a 95 % interval in standard errors, and in widths of the core: as real runs came out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """One line a host: its clock is ahead of the reference's by ``offset + slope × own time``."""

    offset: Floats
    slope: Floats
    known: Bools
    uncertainty: Floats
    """Half of the 95 % interval over the whole run, ns."""
    residual: Floats
    """Median distance of the host's ends from its partners', corrected, ns."""
    refused: dict[int, float]
    """Slopes of hosts that no clock has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Lines through the middle of the run, and the mixture of each kind."""

    middle: Floats
    slope: Floats
    width: Floats
    core: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Pairs with time centred, and what does not change between rounds."""

    pairs: Pairs
    time: Floats
    half: float
    kinds: int
    floor: Floats
    """Density of what is not in the core, per kind, 1/ns."""
    rare: Bools
    """Kinds seen too rarely to say how narrow their core is."""
    hosts: int
    reference: int
    edge: Ints
    """Of each row, its pair of hosts: rows of one pair stand together."""
    begin: Ints
    """Where each pair of hosts begins."""
    first: Ints
    second: Ints


def _begins(pairs: Pairs) -> Ints:
    """Return where each pair of hosts begins in pairs sorted by hosts."""
    changed = (np.diff(pairs.first) != 0) | (np.diff(pairs.second) != 0)
    return np.flatnonzero(np.concatenate([[True], changed])).astype(np.int64)


def _framed(
    pairs: Pairs, time: Floats, floor: Floats, rare: Bools, hosts: int, reference: int
) -> _Frame:
    begin = _begins(pairs)
    return _Frame(
        pairs=pairs,
        time=time,
        half=max(float(time.max() - time.min()) / 2, 1.0),
        kinds=len(floor),
        floor=floor,
        rare=rare,
        hosts=hosts,
        reference=reference,
        edge=np.repeat(np.arange(len(begin)), np.diff(np.append(begin, len(pairs)))),
        begin=begin,
        first=pairs.first[begin],
        second=pairs.second[begin],
    )


def _theil_sen(time: Floats, apart: Floats) -> tuple[float, float, float]:
    """Return offset at 0, slope and the slope's standard error, of a line by medians."""
    half = len(time) // 2
    run, rise = time[half : 2 * half] - time[:half], apart[half : 2 * half] - apart[:half]
    far = run > 0
    if not far.any():
        return float(np.median(apart)), 0.0, 0.0
    slopes = rise[far] / run[far]
    slope = float(np.median(slopes))
    spread = 1.4826 * float(np.median(np.abs(slopes - slope)))
    return (
        float(np.median(apart - slope * time)),
        slope,
        1.2533 * spread / float(np.sqrt(len(slopes))),
    )


def _slopes(slope: float, error: float, step: float) -> Floats:
    """Return the slopes worth trying: around the medians', none that no clock has."""
    most = MAX_DRIFT_PPM * 1e-6
    around = 0.0 if abs(slope) > most else slope
    reach = min(max(4 * error, step), 2 * most)
    count = min(2 * int(np.ceil(reach / step)) + 1, _MOST_SLOPES)
    found: Floats = np.concatenate([[0.0], around + np.linspace(-reach, reach, count)])
    return np.asarray(found[np.abs(found) <= most], dtype=np.float64)


def _peak(
    time: Floats, apart: Floats, upper: Floats, lower: Floats, scale: float
) -> tuple[float, float]:
    """Return offset at 0 and slope where most pairs lie within ``scale``, inside the bounds."""
    _, slope, error = _theil_sen(time, apart)
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
        centre = float(np.median(rest))
        reach = min(4 * float(np.quantile(np.abs(rest - centre), 0.75)) + 8 * cell, 20_000 * cell)
        grid = np.floor((rest - centre + reach) / cell)
        inside = (grid >= 0) & (grid < 2 * reach / cell)
        counts = np.bincount(grid[inside].astype(np.int64), minlength=32)
        heap = np.convolve(counts, kernel, "same")
        at = centre - reach + (np.arange(len(heap)) + 0.5) * cell
        heap = np.where((at >= low - cell) & (at <= high + cell), heap, -np.inf)
        top = int(heap.argmax())
        score = 1.5 * float(heap[top]) - 0.5 * (tried / _USUAL_DRIFT) ** 2
        if score > best:
            best, answer = score, (float(np.clip(at[top], low, high)), tried)
    return answer


def _edges(pairs: Pairs, hosts: int) -> dict[int, dict[int, Ints]]:
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


def _beside(
    frame: _Frame, edges: dict[int, dict[int, Ints]], state: _State, host: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return times, and of a host's clock what ends and bounds say beside placed neighbours."""
    pairs = frame.pairs
    near = [n for n in edges[host] if n != host and not np.isnan(state.middle[n])][:_NEIGHBOURS]
    parts = []
    for other in near:
        rows = edges[host][other]
        rows = rows[:: max(1, len(rows) * len(near) // _MOST_POINTS)]
        time = frame.time[rows]
        base = state.middle[other] + state.slope[other] * time
        apart, high, low = pairs.apart[rows], pairs.upper[rows], pairs.lower[rows]
        if host > other:
            apart, high, low = -apart, -low, -high
        parts.append((time, apart + base, high + base, low + base))
    time, apart, high, low = (np.concatenate(column) for column in zip(*parts, strict=True))
    return time, apart, high, low


def _placed(frame: _Frame, edges: dict[int, dict[int, Ints]], scale: float) -> _State:
    """Walk from the reference; place each host against those neighbours that have a place."""
    state = _State(
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
                beside = _beside(frame, edges, state, host)
                state.middle[host], state.slope[host] = _peak(*beside, scale)
                queue.append(host)
    return state


def _apart(frame: _Frame, state: _State) -> Floats:
    pairs = frame.pairs
    middle = state.middle[frame.first] - state.middle[frame.second]
    slope = state.slope[frame.first] - state.slope[frame.second]
    return pairs.apart - middle[frame.edge] - slope[frame.edge] * frame.time


def _belongs(frame: _Frame, state: _State, apart: Floats) -> tuple[Floats, Floats]:
    """Return each pair's probability to be of its kind's core, and its log likelihood."""
    kind = frame.pairs.kind
    width = state.width[kind]
    inside = state.core[kind] * np.exp(-0.5 * (apart / width) ** 2) / (width * 2.5066)
    whole = inside + (1 - state.core[kind]) * frame.floor[kind]
    return inside / whole, np.log(whole)


_Weights = tuple[Floats, Floats, Floats]


def _information(frame: _Frame, weight: Floats) -> _Weights:
    """Return weights of pairs of hosts: middle, across, slope; time counts in half lengths."""
    time = frame.time / frame.half
    leaning = weight * time
    one, cross, square = (
        np.add.reduceat(part, frame.begin) for part in (weight, leaning, leaning * time)
    )
    return one, cross, square


def _spread(frame: _Frame, edges: Floats) -> Floats:
    """Add what each pair of hosts says to its first host, take it from its second."""
    hosts = frame.hosts
    found = np.bincount(frame.first, edges, hosts) - np.bincount(frame.second, edges, hosts)
    return found.astype(np.float64)


def _product(frame: _Frame, parts: _Weights, prior: float, v: Floats) -> Floats:
    """Multiply the normal equations of all lines with ``v`` (2 × hosts)."""
    one, cross, square = parts
    gap = v[:, frame.first] - v[:, frame.second]
    out = np.stack(
        [
            _spread(frame, one * gap[0] + cross * gap[1]),
            _spread(frame, cross * gap[0] + square * gap[1]),
        ]
    )
    out[1] += prior * v[1]
    out[:, frame.reference] = 0.0
    return out


def _solved(frame: _Frame, weight: Floats, apart: Floats, slope: Floats) -> tuple[Floats, Floats]:
    """Return what to add to middles and slopes: least squares by conjugate gradients."""
    parts = _information(frame, weight)
    prior = (_USUAL_DRIFT * frame.half) ** -2
    pulling = weight * apart
    pull = np.stack(
        [
            _spread(frame, np.add.reduceat(row, frame.begin))
            for row in (pulling, pulling * (frame.time / frame.half))
        ]
    )
    # The prior pulls on the whole slope, not on what is added to it.
    pull[1] -= prior * frame.half * slope
    diagonal = np.stack(
        [
            np.bincount(frame.first, part, frame.hosts)
            + np.bincount(frame.second, part, frame.hosts)
            for part in (parts[0], parts[2])
        ]
    )
    diagonal[1] += prior
    scale = np.divide(1.0, diagonal, out=np.zeros_like(diagonal), where=diagonal > 0)
    scale[:, frame.reference] = 0.0
    found, rest = np.zeros_like(pull), pull.copy()
    rest[:, frame.reference] = 0.0
    ahead = scale * rest
    way, size = ahead.copy(), float((rest * ahead).sum())
    stop = size * 1e-18
    for _ in range(200):
        if size <= stop:
            break
        image = _product(frame, parts, prior, way)
        length = size / float((way * image).sum())
        found += length * way
        rest -= length * image
        ahead = scale * rest
        size, before = float((rest * ahead).sum()), size
        way = ahead + size / before * way
    return found[0], found[1] / frame.half


def _improved(frame: _Frame, state: _State, rounds: int = _ROUNDS) -> tuple[_State, float]:
    """Alternate between who is of the core and where the lines are; also the likelihood."""
    pairs, kinds = frame.pairs, frame.kinds
    # As if a few more pairs had been seen, an eighth of the whole scatter off.
    more = np.where(frame.rare, _RARE_PAIRS, 1e-9)
    off = more * (0.5 / frame.floor / 8) ** 2
    total = np.maximum(np.bincount(pairs.kind, minlength=kinds), 1)
    likelihood = -np.inf
    for _ in range(rounds):
        apart = _apart(frame, state)
        belongs, each = _belongs(frame, state, apart)
        now = float((each * pairs.share).sum())
        weight = belongs * pairs.share / state.width[pairs.kind] ** 2
        middle, slope = _solved(frame, weight, apart, state.slope)
        state = replace(state, middle=state.middle + middle, slope=state.slope + slope)
        apart = _apart(frame, state)
        sums = np.bincount(pairs.kind, belongs, kinds)
        squares = np.bincount(pairs.kind, belongs * apart**2, kinds) + off
        state = replace(
            state,
            width=np.maximum(np.sqrt(squares / (sums + more)), _NARROWEST_NS),
            core=np.clip(sums / total, 0.01, 0.99),
        )
        if abs(now - likelihood) < _STILL:
            break
        likelihood = now
    return state, likelihood


def _scatter(pairs: Pairs, hosts: int, kinds: int) -> Floats:
    """Return per kind how wide the ends of two hosts scatter around their middle, ns."""
    code = pairs.first * hosts + pairs.second
    order = np.lexsort((pairs.apart, code))
    _, index, count = np.unique(code, return_inverse=True, return_counts=True)
    begin = np.cumsum(count) - count
    off = np.abs(pairs.apart - pairs.apart[order][begin + count // 2][index])
    # Never as narrow as a core, or ends without any noise would be of no core.
    least = 20 * _NARROWEST_NS
    found = np.full(kinds, least)
    for kind in range(kinds):
        own = off[pairs.kind == kind]
        if len(own):
            found[kind] = max(float(np.quantile(own, 0.9)), least)
    return found


def _outside(frame: _Frame, state: _State) -> float:
    """Return how many pairs have their bounds broken by the lines: they cannot be right."""
    pairs = frame.pairs
    line = pairs.apart - _apart(frame, state)
    broken = (line > pairs.upper) | (line < pairs.lower)
    return float(pairs.share[broken].sum())


def _normal(frame: _Frame, weight: Floats, others: Ints) -> Floats:
    """Return the normal equations of all lines but the reference's: middles, then slopes."""
    one, cross, square = _information(frame, weight)
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


def _uncertain(frame: _Frame, state: _State, used: Ints) -> tuple[Floats, Floats]:
    """Return half the 95 % interval of each line at its worse end; its slope's standard error."""
    pairs = frame.pairs
    apart = _apart(frame, state)
    belongs, _ = _belongs(frame, state, apart)
    each = belongs / state.width[pairs.kind] ** 2
    whole = pairs.share * each
    score = pairs.share * (each * apart) ** 2
    # Minus the second derivative of the log likelihood is what is left of ``whole``.
    lost = whole * (1 - belongs) * (apart / state.width[pairs.kind]) ** 2
    kept = max(1 - float(lost.sum()) / float(whole.sum()), 0.2)
    inflation = max(float(score.sum()) / float(whole.sum()) / kept**2, 1.0)
    others = used[used != frame.reference]
    matrix = _normal(frame, whole, others)
    n = len(others)
    known = matrix[n:, n:].diagonal().copy()
    matrix[np.arange(n, 2 * n), np.arange(n, 2 * n)] += (_USUAL_DRIFT * frame.half) ** -2
    inverse = np.linalg.pinv(matrix, hermitian=True) * inflation
    at, slope = inverse[:n, :n].diagonal(), inverse[n:, n:].diagonal()
    cross = inverse[:n, n:].diagonal()
    error, alone = np.zeros(frame.hosts), np.full(frame.hosts, np.inf)
    # Ends that always come in one order are a bias that no number of them takes away.
    order = _ORDER * float(np.sqrt(belongs.sum() / each.sum()))
    spread = np.sqrt(np.maximum(at + slope + 2 * np.abs(cross), 0))
    error[others] = np.hypot(_INTERVAL * spread, order)
    with np.errstate(divide="ignore"):
        alone[others] = np.sqrt(inflation / np.maximum(known, 0)) / frame.half
    return error, alone


def _rival(frame: _Frame, state: _State, host: int) -> tuple[float, float]:
    """Return how far off the next best place of a host is, and the log likelihood it gains."""
    pairs = frame.pairs
    rows = np.flatnonzero((pairs.first == host) | (pairs.second == host))
    rows = rows[:: max(1, len(rows) // (4 * _MOST_POINTS))]
    ahead = np.where(pairs.first[rows] == host, 1.0, -1.0)
    raw = _apart(frame, state)[rows]
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


def _searched(part: _Frame, known: Bools, starts: list[_State]) -> _State:
    """Return the most likely lines of several starts, counting those against that break bounds."""
    few = int(known.sum()) <= _FEW_HOSTS

    def tried(start: _State, rounds: int = _ROUNDS) -> tuple[float, _State]:
        start = replace(start, middle=np.nan_to_num(start.middle))
        state, likelihood = _improved(part, start, rounds)
        return likelihood - _BROKEN * _outside(part, state), state

    first = _ROUNDS if few else _ROUNDS // 5
    best = max((tried(start, first) for start in starts), key=lambda found: found[0])
    if not few:
        return tried(best[1])[1]
    others = [host for host in np.flatnonzero(known).tolist() if host != part.reference]
    for _ in range(_PASSES):
        before = best[0]
        for host in others:
            move, gain = _rival(part, best[1], host)
            if gain > -_CLOSE:
                moved = best[1].middle.copy()
                moved[host] += move
                best = max(best, tried(replace(best[1], middle=moved)), key=lambda found: found[0])
        if best[0] <= before:
            break
    return best[1]


def _impossible(
    frame: _Frame, edges: dict[int, dict[int, Ints]], state: _State, host: int
) -> tuple[float, float] | None:
    """Return offset and slope of a host whose ends plainly drift as no clock does."""
    time, apart, _, _ = _beside(frame, edges, state, host)
    order = np.argsort(time, kind="stable")
    offset, slope, error = _theil_sen(time[order], apart[order])
    if abs(slope) * 1e6 <= MAX_DRIFT_PPM or abs(slope) <= 4 * error:
        return None
    # Noise has steep slopes too; it follows none.
    line = state.middle[host] + state.slope[host] * time
    if np.median(np.abs(apart - offset - slope * time)) > 0.5 * np.median(np.abs(apart - line)):
        return None
    return float(np.median(apart)), slope


def _residuals(frame: _Frame, state: _State) -> Floats:
    """Return per host the median distance of its ends from its partners'."""
    pairs = frame.pairs
    apart = np.tile(np.abs(_apart(frame, state)), 2)
    host = np.concatenate([pairs.first, pairs.second])
    ranked = apart[np.lexsort((apart, host))]
    count = np.bincount(host, minlength=frame.hosts)
    begin = np.cumsum(count) - count
    found, some = np.zeros(frame.hosts), count > 0
    found[some] = ranked[begin[some] + count[some] // 2]
    return found


def _lines(
    whole: _Frame,
    frame: _Frame,
    edges: dict[int, dict[int, Ints]],
    state: _State,
    known: Bools,
    centre: float,
) -> Lines:
    """Return lines from the origin on, without what the pairs cannot tell from nothing."""
    used = np.flatnonzero(known)
    others = [host for host in used.tolist() if host != frame.reference]
    error, alone = _uncertain(frame, state, used)
    middle, slope, uncertain = state.middle.copy(), state.slope.copy(), error
    placed = replace(state, middle=np.where(known, state.middle, np.nan))
    refused = {}
    for host in others:
        wrong = _impossible(whole, edges, placed, host)
        if wrong is not None:
            middle[host], refused[host] = wrong
            slope[host] = 0.0
            continue
        if alone[host] > _UNTOLD * _USUAL_DRIFT:  # the run is too short to say
            slope[host] = 0.0
        slope[host] = np.clip(slope[host], -MAX_DRIFT_PPM * 1e-6, MAX_DRIFT_PPM * 1e-6)
        if len(used) <= _FEW_HOSTS:
            move, gain = _rival(frame, state, host)
            if gain > -_CLOSE:
                uncertain[host] = max(uncertain[host], abs(move))
        if slope[host] == 0 and abs(middle[host]) < uncertain[host]:
            middle[host] = 0.0  # no more than chance
    offset = middle - slope * centre
    return Lines(
        offset=offset * (1 - slope),  # by its own clock again
        slope=slope,
        known=known,
        uncertainty=uncertain,
        residual=_residuals(frame, replace(state, middle=middle, slope=slope)),
        refused=refused,
    )


def fit(pairs: Pairs, *, rare: Bools, hosts: int, reference: int) -> Lines:
    """Fit a line to every host that shares enough collectives with the others.

    ``rare`` says of each kind whether it was seen too rarely to say how its ends scatter.
    """
    pairs = pairs.where(np.argsort(pairs.first * hosts + pairs.second, kind="stable"))
    edges = _edges(pairs, hosts)
    low, high = float(pairs.time.min(initial=0.0)), float(pairs.time.max(initial=0.0))
    centre = (low + high) / 2
    scatter = _scatter(pairs, hosts, len(rare))
    floor = 0.5 / scatter
    frame = _framed(pairs, pairs.time - centre, floor, rare, hosts, reference)
    wide = max(float(np.median(scatter)), 1.0)
    scales = (*_SCALES_NS, wide) if hosts <= _FEW_HOSTS else (_SCALES_NS[0], wide)
    starts = [_placed(frame, edges, scale) for scale in scales]
    known = ~np.isnan(starts[0].middle)
    rows = known[pairs.first] & known[pairs.second]
    if not rows.any():
        zero = np.zeros(hosts)
        return Lines(
            offset=zero, slope=zero, known=known, uncertainty=zero, residual=zero, refused={}
        )
    # From here on time is the reference's: a host may be hours off.
    time = (frame.time - np.nan_to_num(starts[0].middle)[pairs.first])[rows]
    part = _framed(pairs.where(rows), time, floor, rare, hosts, reference)
    state = _searched(part, known, starts)
    return _lines(frame, part, edges, state, known, centre)

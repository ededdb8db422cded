"""Lines of all hosts and the mixture that their pairs are taken for, improved together.

What is apart is a narrow core around the clocks' difference over a wide floor, for each kind of
operation; who is of the core and where the lines are is found in turns (expectation and
maximisation).
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kansoku.trace.clock_pairs import Floats, Ints, Pairs

__all__ = [
    "NARROWEST_NS",
    "USUAL_DRIFT",
    "Bools",
    "Frame",
    "State",
    "apart_of",
    "belonging",
    "framed",
    "improved",
    "information",
]

Bools = npt.NDArray[np.bool_]

USUAL_DRIFT = 20e-6
"""Two crystals of one make differ by so much: what a short run cannot tell leans on that."""
NARROWEST_NS = 20e3
_ROUNDS = 40
_STILL, _STILL_PART = 0.01, 1e-6
"""Gain in log likelihood of a round that is no gain: at least, and of the whole."""
_RARE_PAIRS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Lines through the middle of the run, and the mixture of each kind."""

    middle: Floats
    slope: Floats
    width: Floats
    core: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
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


def framed(
    pairs: Pairs, time: Floats, floor: Floats, rare: Bools, hosts: int, reference: int
) -> Frame:
    """Return the frame of pairs that are sorted by hosts."""
    begin = _begins(pairs)
    return Frame(
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


def apart_of(frame: Frame, state: State) -> Floats:
    """Return how far apart the ends of each pair are when corrected, ns."""
    pairs = frame.pairs
    middle = state.middle[frame.first] - state.middle[frame.second]
    slope = state.slope[frame.first] - state.slope[frame.second]
    return pairs.apart - middle[frame.edge] - slope[frame.edge] * frame.time


def belonging(frame: Frame, state: State, apart: Floats) -> tuple[Floats, Floats]:
    """Return each pair's probability to be of its kind's core, and its log likelihood."""
    kind = frame.pairs.kind
    width = state.width[kind]
    inside = state.core[kind] * np.exp(-0.5 * (apart / width) ** 2) / (width * 2.5066)
    whole = inside + (1 - state.core[kind]) * frame.floor[kind]
    return inside / whole, np.log(whole)


_Weights = tuple[Floats, Floats, Floats]


def information(frame: Frame, weight: Floats) -> _Weights:
    """Return weights of pairs of hosts: middle, across, slope; time counts in half lengths."""
    time = frame.time / frame.half
    leaning = weight * time
    one, cross, square = (
        np.add.reduceat(part, frame.begin) for part in (weight, leaning, leaning * time)
    )
    return one, cross, square


def _spread(frame: Frame, edges: Floats) -> Floats:
    """Add what each pair of hosts says to its first host, take it from its second."""
    hosts = frame.hosts
    found = np.bincount(frame.first, edges, hosts) - np.bincount(frame.second, edges, hosts)
    return found.astype(np.float64)


def _product(frame: Frame, parts: _Weights, prior: float, v: Floats) -> Floats:
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


def _solved(frame: Frame, weight: Floats, apart: Floats, slope: Floats) -> tuple[Floats, Floats]:
    """Return what to add to middles and slopes: least squares by conjugate gradients."""
    parts = information(frame, weight)
    prior = (USUAL_DRIFT * frame.half) ** -2
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


def improved(frame: Frame, state: State) -> tuple[State, float]:
    """Alternate between who is of the core and where the lines are; also the likelihood."""
    pairs, kinds = frame.pairs, frame.kinds
    # As if a few more pairs had been seen, an eighth of the whole scatter off.
    more = np.where(frame.rare, _RARE_PAIRS, 1e-9)
    off = more * (0.5 / frame.floor / 8) ** 2
    total = np.maximum(np.bincount(pairs.kind, minlength=kinds), 1)
    likelihood = -np.inf
    for _ in range(_ROUNDS):
        apart = apart_of(frame, state)
        belongs, each = belonging(frame, state, apart)
        now = float((each * pairs.share).sum())
        weight = belongs * pairs.share / state.width[pairs.kind] ** 2
        middle, slope = _solved(frame, weight, apart, state.slope)
        state = replace(state, middle=state.middle + middle, slope=state.slope + slope)
        apart = apart_of(frame, state)
        sums = np.bincount(pairs.kind, belongs, kinds)
        squares = np.bincount(pairs.kind, belongs * apart**2, kinds) + off
        state = replace(
            state,
            width=np.maximum(np.sqrt(squares / (sums + more)), NARROWEST_NS),
            core=np.clip(sums / total, 0.01, 0.99),
        )
        if abs(now - likelihood) < max(_STILL, _STILL_PART * abs(now)):
            break
        likelihood = now
    return state, likelihood

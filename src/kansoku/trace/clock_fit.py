"""Offsets and drifts of all hosts together, from their pairs: see ``docs/clock-alignment.md``.

The ends of two hosts in one collective are read apart by the difference of their clocks and by how
late each noticed the end. On a busy machine most are late by milliseconds, a time slice of the
scheduler, while some pairs leave together. So what is apart is a narrow core around the clocks'
difference over a wide floor, and the narrower the core the more it says: a mixture for each kind of
operation, fitted by expectation and maximisation together with one line a host. Where it starts is
searched within the bounds of causality, for a core may also stand a time slice off.
"""

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from kansoku.trace.clock_error import rival, uncertain
from kansoku.trace.clock_mixture import (
    NARROWEST_NS,
    USUAL_DRIFT,
    Bools,
    Frame,
    State,
    apart_of,
    framed,
    improved,
)
from kansoku.trace.clock_pairs import Floats, Ints, Pairs
from kansoku.trace.clock_start import MAX_DRIFT_PPM, MIN_MATCHES, impossible, partners, placed

__all__ = ["MAX_DRIFT_PPM", "MIN_MATCHES", "Lines", "fit"]

_SCALES_NS = (100e3, 500e3)
_BROKEN = 10.0
"""What a pair whose bounds the lines break costs, in log likelihood."""
_CLOSE = 10.0
"""A place less likely by less than this (in log likelihood) cannot be told from the best."""
_FEW_HOSTS = 64
"""Beyond, each host has so many partners that no peak but the right one fits all."""
_VERY_FEW_HOSTS = 8
_UNTOLD = 3.0
"""A drift is left out where its error is so many times what drifts usually are."""
_PASSES = 3


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


def _scatter(pairs: Pairs, hosts: int, kinds: int) -> Floats:
    """Return per kind how wide the ends of two hosts scatter around their middle, ns."""
    code = pairs.first * hosts + pairs.second
    order = np.lexsort((pairs.apart, code))
    _, index, count = np.unique(code, return_inverse=True, return_counts=True)
    begin = np.cumsum(count) - count
    off = np.abs(pairs.apart - pairs.apart[order][begin + count // 2][index])
    # Never as narrow as a core, or ends without any noise would be of no core.
    least = 20 * NARROWEST_NS
    found = np.full(kinds, least)
    for kind in range(kinds):
        own = off[pairs.kind == kind]
        if len(own):
            found[kind] = max(float(np.quantile(own, 0.9)), least)
    return found


def _outside(frame: Frame, state: State) -> float:
    """Return how many pairs have their bounds broken by the lines: they cannot be right."""
    pairs = frame.pairs
    line = pairs.apart - apart_of(frame, state)
    broken = (line > pairs.upper) | (line < pairs.lower)
    return float(pairs.share[broken].sum())


def _movable(known: Bools, reference: int) -> list[Bools]:
    """Return which hosts may stand a time slice off together: one, two of a few, all but one.

    The reference never moves; where it would, all others do.
    """
    hosts = np.flatnonzero(known).tolist()
    if len(hosts) > _FEW_HOSTS:
        return []
    found: list[tuple[int, ...]] = [(host,) for host in hosts]
    if len(hosts) <= _VERY_FEW_HOSTS:
        found += list(combinations(hosts, 2))
    masks = []
    for group in found:
        mask = np.isin(np.arange(len(known)), group) & known
        masks.append(known & ~mask if mask[reference] else mask)
    distinct = dict.fromkeys(tuple(mask.tolist()) for mask in masks)
    return [np.array(mask) for mask in distinct if any(mask)]


def _in_doubt(frame: Frame, state: State, known: Bools) -> Floats:
    """Return per host how far off a place is that is about as likely; 0 where there is none."""
    doubt = np.zeros(frame.hosts)
    for moving in _movable(known, frame.reference):
        move, gain = rival(frame, state, moving)
        if gain > -_CLOSE:
            doubt[moving] = np.maximum(doubt[moving], abs(move))
    return doubt


def _searched(part: Frame, known: Bools, starts: list[State]) -> State:
    """Return the most likely lines of several starts, counting those against that break bounds."""

    def tried(start: State) -> tuple[float, State]:
        start = replace(start, middle=np.nan_to_num(start.middle))
        state, likelihood = improved(part, start)
        return likelihood - _BROKEN * _outside(part, state), state

    best = max((tried(start) for start in starts), key=lambda found: found[0])
    for _ in range(_PASSES):
        before = best[0]
        for moving in _movable(known, part.reference):
            move, gain = rival(part, best[1], moving)
            # The other place keeps the bounds.
            if gain > -_CLOSE - _BROKEN * _outside(part, best[1]):
                moved = best[1].middle + move * moving
                best = max(best, tried(replace(best[1], middle=moved)), key=lambda found: found[0])
        if best[0] <= before:
            break
    return best[1]


def _residuals(frame: Frame, state: State) -> Floats:
    """Return per host the median distance of its ends from its partners'."""
    pairs = frame.pairs
    apart = np.tile(np.abs(apart_of(frame, state)), 2)
    host = np.concatenate([pairs.first, pairs.second])
    ranked = apart[np.lexsort((apart, host))]
    count = np.bincount(host, minlength=frame.hosts)
    begin = np.cumsum(count) - count
    found, some = np.zeros(frame.hosts), count > 0
    found[some] = ranked[begin[some] + count[some] // 2]
    return found


def _lines(
    whole: Frame,
    frame: Frame,
    edges: dict[int, dict[int, Ints]],
    state: State,
    known: Bools,
    centre: float,
) -> Lines:
    """Return lines from the origin on, without what the pairs cannot tell from nothing."""
    used = np.flatnonzero(known)
    others = [host for host in used.tolist() if host != frame.reference]
    error, alone = uncertain(frame, state, used)
    middle, slope = state.middle.copy(), state.slope.copy()
    there = replace(state, middle=np.where(known, state.middle, np.nan))
    refused = {}
    doubt = _in_doubt(frame, state, known)
    for host in others:
        wrong = impossible(whole, edges, there, host)
        if wrong is not None:
            middle[host], refused[host] = wrong
            slope[host] = 0.0
            continue
        if alone[host] > _UNTOLD * USUAL_DRIFT:  # the run is too short to say
            slope[host] = 0.0
        slope[host] = np.clip(slope[host], -MAX_DRIFT_PPM * 1e-6, MAX_DRIFT_PPM * 1e-6)
        error[host] += doubt[host]
        if slope[host] == 0 and abs(middle[host]) < error[host]:
            middle[host] = 0.0  # no more than chance
    # By its own clock again: of a time ``x`` read there, ``x = t + offset + slope × t``.
    own = 1 + slope
    return Lines(
        offset=(middle - slope * centre) / own,
        slope=slope / own,
        known=known,
        uncertainty=error,
        residual=_residuals(frame, replace(state, middle=middle, slope=slope)),
        refused=refused,
    )


def fit(pairs: Pairs, *, rare: Bools, hosts: int, reference: int) -> Lines:
    """Fit a line to every host that shares enough collectives with the others.

    ``rare`` says of each kind whether it was seen too rarely to say how its ends scatter.
    """
    pairs = pairs.where(np.argsort(pairs.first * hosts + pairs.second, kind="stable"))
    edges = partners(pairs, hosts)
    low, high = float(pairs.time.min(initial=0.0)), float(pairs.time.max(initial=0.0))
    centre = (low + high) / 2
    scatter = _scatter(pairs, hosts, len(rare))
    floor = 0.5 / scatter
    frame = framed(pairs, pairs.time - centre, floor, rare, hosts, reference)
    wide = max(float(np.median(scatter)), 1.0)
    scales = (*_SCALES_NS, wide) if hosts <= _FEW_HOSTS else (max(_SCALES_NS[-1], wide),)
    starts = [placed(frame, edges, scale) for scale in scales]
    known = ~np.isnan(starts[0].middle)
    rows = known[pairs.first] & known[pairs.second]
    if not rows.any():
        zero = np.zeros(hosts)
        return Lines(
            offset=zero, slope=zero, known=known, uncertainty=zero, residual=zero, refused={}
        )
    # From here on time is the reference's: a host may be hours off, and drifts for days.
    start = starts[0]
    time = (frame.time - np.nan_to_num(start.middle)[pairs.first]) / (1 + start.slope[pairs.first])
    time = time[rows]
    part = framed(pairs.where(rows), time, floor, rare, hosts, reference)
    state = _searched(part, known, starts)
    return _lines(frame, part, edges, state, known, centre)

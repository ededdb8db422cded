"""From lost probes to the RNIC, link or switch at fault: peel, vote, compare.

Every tuple is a row; its components are both RNICs, the switches and the directed links of the
probe's and of the ACK's path. A lost probe votes for all of them. The component whose guilt
explains the votes best is blamed, **its rows are set aside**, and the vote is counted again: else
the peers of a dead RNIC under a small ToR, or the links beside a dead one, would be condemned
with it.

"Best" is the gain in log-likelihood over background loss, for a component with e of n probes lost

    G = e ln(r/r0) + (n - e) ln((1 - r)/(1 - r0)),   r = e/n > r0

(the G statistic of a binomial). Plain vote counts prefer what carries most traffic (a ToR over
its link), plain ratios prefer what carries least (one link of a dead spine over the spine).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kansoku.fabric.settings import Settings

__all__ = ["LINK", "RNIC", "SWITCH", "Blame", "component_totals", "localise"]

RNIC, SWITCH, LINK = 0, 1, 2

Ints32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
# A part must lose this much more than its whole, and show it this much more clearly than an
# anomaly must: among thousands of links of one lossy spine some stand out by chance.
_STANDS_OUT, _CLEARLY = 1.3, 2.0
_REST = 0.2  # without such parts, a whole that is innocent keeps less than this of its loss
_PARTS = 32  # more parts than that at once are a fault of the whole
_ROUNDS = 400  # more simultaneous faults than that is one fault that nobody modelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """One component at fault; several share a ``group`` when nothing tells them apart."""

    component: int
    group: int
    votes: int
    """Lost probes over it that nothing else had explained."""
    probes: int
    loss_ratio: float
    gain: float
    """G, natural logarithm."""


def _gain(lost: Floats, probes: Floats, background: float) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = lost / probes
        good = probes - lost
        gain = lost * np.log(ratio / background)
        gain += np.where(good > 0, good * np.log((1 - ratio) / (1 - background)), 0.0)
    return np.where((lost > 0) & (ratio > background), gain, 0.0)


def component_totals(components: Ints32, weights: Floats, count: int) -> Floats:
    """Return the sum of ``weights`` (one per row) over the rows of each component."""
    total = np.zeros(count + 1)
    for column in components:
        # -1 (no component in this column) is counted in the spare first place.
        total += np.bincount(column + np.int32(1), weights=weights, minlength=count + 1)
    return total[1:]


class _Votes:
    """Lost and sent probes per component over the rows that are still unexplained."""

    def __init__(
        self, components: Ints32, probes: Floats, lost: Floats, count: int, totals: Floats | None
    ) -> None:
        self.components = components
        self.row_probes = probes
        self.row_lost = lost
        self.active = np.ones(components.shape[1], dtype=bool)
        self.count = count
        self.probes = (
            component_totals(components, probes, count) if totals is None else totals.copy()
        )
        hit = np.flatnonzero(lost > 0)
        self.lost = component_totals(components[:, hit], lost[hit], count)
        # RNICs, switches and links stand in columns of their own: most need not be searched.
        self._ranges = [
            (int(column.min(initial=0)), int(column.max(initial=-1))) for column in components
        ]

    def rows_of(self, component: int) -> npt.NDArray[np.bool_]:
        found = np.zeros(self.components.shape[1], dtype=bool)
        for column, (low, high) in zip(self.components, self._ranges, strict=True):
            if low <= component <= high:
                found |= column == component
        return found & self.active

    def set_aside(self, rows: npt.NDArray[np.bool_]) -> None:
        chosen = np.flatnonzero(rows)
        self.active[chosen] = False
        part = self.components[:, chosen]
        self.probes -= component_totals(part, self.row_probes[chosen], self.count)
        self.lost -= component_totals(part, self.row_lost[chosen], self.count)
        np.clip(self.lost, 0, None, out=self.lost)


def localise(
    components: Ints32,
    probes: npt.ArrayLike,
    lost: npt.ArrayLike,
    kinds: npt.NDArray[np.int8],
    settings: Settings,
    *,
    slow: bool = False,
    totals: Floats | None = None,
) -> list[Blame]:
    """Return who is to blame, strongest first.

    ``components`` is ``(columns, rows)``: per row the distinct component numbers, -1 for none.
    ``kinds`` is ``(components,)``. An RNIC that explains most but loses less than the policy's
    ratio is peeled without blame. With ``slow`` the votes are of slow probes, not of lost ones.
    ``totals`` are the probes per component, where the caller has them already.
    """
    if np.sum(lost) < settings.minimum_lost:
        return []
    votes = _Votes(
        np.ascontiguousarray(components, dtype=np.int32),
        np.asarray(probes, dtype=np.float64),
        np.asarray(lost, dtype=np.float64),
        len(kinds),
        totals,
    )
    floor = np.where(kinds == RNIC, settings.rnic_loss, settings.link_loss)
    background = settings.background_loss
    if slow:
        floor = np.full(len(kinds), settings.slow_ratio)
        background = settings.slow_ratio / 5
    blamed: list[Blame] = []
    for group in range(_ROUNDS):
        gain = _gain(votes.lost, votes.probes, background)
        gain[votes.lost < settings.minimum_lost - 1e-9] = 0.0
        best = float(gain.max(initial=0.0))
        if best < settings.evidence:
            break
        best = float(gain[_finest(votes, gain, settings.evidence)])
        leaders = _same_rows(votes, np.flatnonzero(np.abs(gain - best) <= best * 1e-9))
        aside = votes.rows_of(leaders[0])
        for leader in leaders:
            ratio = float(votes.lost[leader] / votes.probes[leader])
            if ratio > floor[leader]:
                blamed.append(
                    Blame(
                        component=leader,
                        group=group,
                        votes=round(float(votes.lost[leader])),
                        probes=round(float(votes.probes[leader])),
                        loss_ratio=ratio,
                        gain=best,
                    )
                )
        votes.set_aside(aside)
    return blamed


def _finest(votes: _Votes, gain: Floats, evidence: float) -> int:
    """Return the component to take first: the best one, unless a part of it is far worse.

    Two dead RNICs of eight explain less each than their ToR explains; but within the ToR's rows
    they stand out from its mean, and without them it loses nothing: a ToR at fault would. What
    the part leaves unexplained is voted on again.
    """
    chosen = int(gain.argmax())
    for _ in range(8):
        ratio = votes.lost[chosen] / votes.probes[chosen]
        if ratio >= 1 / _STANDS_OUT:
            break
        with np.errstate(divide="ignore", invalid="ignore"):
            worse = votes.lost / votes.probes >= _STANDS_OUT * ratio
        worse &= _gain(votes.lost, votes.probes, float(ratio)) >= _CLEARLY * evidence
        parts = np.flatnonzero(worse & (gain >= evidence))
        if not 0 < len(parts) <= _PARTS:
            break
        rest = votes.rows_of(chosen)
        for part in parts:
            rest &= ~votes.rows_of(int(part))
        sent, lost = float(votes.row_probes[rest].sum()), float(votes.row_lost[rest].sum())
        if sent and lost / sent > _REST * ratio:
            break  # it loses without them as well: it is the whole
        chosen = int(parts[gain[parts].argmax()])
    return chosen


def _same_rows(votes: _Votes, leaders: npt.NDArray[np.intp]) -> Sequence[int]:
    """Keep the leaders that stand on the first one's lost rows: only those are a tie."""
    if len(leaders) == 1:
        return [int(leaders[0])]
    first = votes.rows_of(int(leaders[0])) & (votes.row_lost > 0)
    kept = [int(leaders[0])]
    kept += [
        int(leader)
        for leader in leaders[1:]
        if np.array_equal(votes.rows_of(int(leader)) & (votes.row_lost > 0), first)
    ]
    return kept

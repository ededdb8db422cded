"""Which rank comes last to the collectives: arrivals matched across ranks, clocks aligned by ends.

Every member of a collective leaves it at nearly the same moment, whoever came late; so ends tell
how the clocks of the ranks differ, and starts, so corrected, tell who kept the others waiting.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Arrival",
    "ArrivalPolicy",
    "ArrivalReport",
    "MatchedCollective",
    "Straggler",
    "find_stragglers",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalPolicy:
    """Thresholds, kept with the result."""

    min_collectives: int = 4
    """Fewer matched collectives say nothing: the verdict is unknown."""
    min_share: float = 0.25
    """Part of the imposed wait that one rank must cause to be named."""
    min_excess: float = 2.0
    """Times its fair share (1 / ranks) of being last."""
    max_chance: float = 0.01
    """Probability that an innocent rank is last so often."""
    min_lateness_ns: int = 10_000
    """A mean lateness that no reader would care about is not named."""
    noise_factor: float = 3.0
    """Lateness must exceed this many times the disagreement of ends."""
    end_tolerance_ns: int = 200_000
    """Ends of one collective may differ by this much after alignment …"""
    end_tolerance_ratio: float = 0.1
    """… or by this part of its length, else it is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One rank in one collective; stamps on the rank's own Unix clock."""

    operation: str
    group: str | None
    """Name and members of the process group; None where the trace does not say."""
    sequence: int | None
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedCollective:
    """One collective as several ranks saw it, arrivals on the common clock."""

    group: str | None
    sequence: int
    operation: str
    arrivals: tuple[tuple[int, int], ...]
    """(rank, arrival ns after the first), in order of arrival."""
    end_spread_ns: int
    """Disagreement of the aligned ends."""
    duration_ns: int
    """From the last arrival to the median end: the transfer itself."""

    @property
    def first_rank(self) -> int:
        """The rank that arrived first."""
        return self.arrivals[0][0]

    @property
    def last_rank(self) -> int:
        """The rank that arrived last."""
        return self.arrivals[-1][0]

    @property
    def spread_ns(self) -> int:
        """From first to last arrival."""
        return self.arrivals[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that others wait for."""

    rank: int
    lateness_ns: float
    """Mean over the matched collectives where it came last: own arrival − median of the others."""
    share: float
    """Its part of the wait imposed on others by all ranks, 0-1."""
    last_count: int
    collectives: int
    confidence: float
    """0-1: 1 − probability of coming last so often by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalReport:
    """The answer, with what it rests on."""

    verdict: str
    """``found``, ``none`` or ``unknown``."""
    reason: str
    stragglers: tuple[Straggler, ...]
    collectives: tuple[MatchedCollective, ...]
    offsets_ns: Mapping[int, int]
    """Added to each rank's stamps to reach the common clock."""
    imposed_wait_ns: Mapping[int, int]
    """Wait that each rank, coming last, imposed on all others, summed."""
    policy: ArrivalPolicy


def find_stragglers(
    ranks: Mapping[int, Sequence[Arrival]],
    policy: ArrivalPolicy | None = None,
    *,
    added_ns: Mapping[int, int] | None = None,
) -> ArrivalReport:
    """Match, align, order and judge; the order of the rows given does not matter.

    With ``added_ns`` the stamps are on one clock already, and that was added to each rank's.
    """
    policy = policy or ArrivalPolicy()
    matched = _match({rank: _sorted(rows) for rank, rows in ranks.items()})
    if not matched:
        return _unknown("no collective was seen by two ranks or more", policy, added_ns or {})
    offsets = _align(matched) if added_ns is None else dict.fromkeys(ranks, 0)
    matched.sort(key=lambda item: (_when(item[1], offsets), item[0][0] or "", item[0][1:]))
    ordered = [_ordered(key, rows, offsets) for key, rows in matched]
    collectives = [c for c in ordered if _ends_agree(c, policy)]
    added = offsets if added_ns is None else added_ns
    return _judge(collectives, len(ordered) - len(collectives), added, policy)


_Key = tuple[str | None, str, int]
_Matched = list[tuple[_Key, dict[int, Arrival]]]


def _when(rows: Mapping[int, Arrival], offsets: Mapping[int, int]) -> int:
    """Return the first aligned end: collectives are listed as they happened."""
    return min(row.end_ns + offsets[rank] for rank, row in rows.items())


def _ends_agree(collective: MatchedCollective, policy: ArrivalPolicy) -> bool:
    """Say whether ends lie close; a wrong match, or members let go early, has them far apart."""
    longest = collective.spread_ns + collective.duration_ns
    limit = max(policy.end_tolerance_ns, policy.end_tolerance_ratio * longest)
    return collective.end_spread_ns <= limit


def _sorted(rows: Sequence[Arrival]) -> list[Arrival]:
    return sorted(rows, key=lambda row: (row.start_ns, row.end_ns, row.operation))


def _unknown(reason: str, policy: ArrivalPolicy, offsets: Mapping[int, int]) -> ArrivalReport:
    return ArrivalReport(
        verdict="unknown",
        reason=reason,
        stragglers=(),
        collectives=(),
        offsets_ns=dict(offsets),
        imposed_wait_ns={},
        policy=policy,
    )


def _match(ranks: Mapping[int, list[Arrival]]) -> _Matched:
    """Match by group and ``Seq`` where both are there, else by position in the group."""
    out: _Matched = []
    by_group: dict[str | None, dict[int, list[Arrival]]] = defaultdict(dict)
    for rank, rows in ranks.items():
        for row in rows:
            by_group[row.group].setdefault(rank, []).append(row)
    for group in sorted(by_group, key=lambda g: g or ""):
        members = by_group[group]
        if len(members) < 2:
            continue
        if all(row.sequence is not None for rows in members.values() for row in rows):
            out += _by_sequence(group, members)
        else:
            out += _by_position(group, members)
    return out


def _by_sequence(group: str | None, members: Mapping[int, list[Arrival]]) -> _Matched:
    found: dict[tuple[str, int], dict[int, Arrival]] = defaultdict(dict)
    for rank, rows in members.items():
        for row in rows:
            # Several kernels of one sequence number: the first to start is the arrival.
            found[(row.operation, row.sequence or 0)].setdefault(rank, row)
    return [
        ((group, operation, sequence), rows)
        for (operation, sequence), rows in sorted(found.items())
        if len(rows) > 1
    ]


def _by_position(group: str | None, members: Mapping[int, list[Arrival]]) -> _Matched:
    orders = {tuple(row.operation for row in rows) for rows in members.values()}
    if len(orders) == 1:
        count = len(next(iter(members.values())))
        return [
            (
                (group, next(iter(members.values()))[place].operation, place),
                {rank: rows[place] for rank, rows in members.items()},
            )
            for place in range(count)
        ]
    out: _Matched = []
    for operation in sorted({row.operation for rows in members.values() for row in rows}):
        lists = {
            rank: [row for row in rows if row.operation == operation]
            for rank, rows in members.items()
        }
        lists = {rank: rows for rank, rows in lists.items() if rows}
        if len(lists) > 1:
            out += _shifted(group, operation, lists)
    return out


def _shifted(group: str | None, operation: str, lists: Mapping[int, list[Arrival]]) -> _Matched:
    """Align lists of unequal length: each begins at the place whose ends agree best."""
    longest = max(lists, key=lambda rank: (len(lists[rank]), -rank))
    reference = np.array([row.end_ns for row in lists[longest]], np.int64)
    found: dict[int, dict[int, Arrival]] = defaultdict(dict)
    for rank, rows in lists.items():
        ends = np.array([row.end_ns for row in rows], np.int64)
        shift = _best_shift(reference, ends)
        for place, row in enumerate(rows):
            found[place + shift][rank] = row
    return [
        ((group, operation, place), rows) for place, rows in sorted(found.items()) if len(rows) > 1
    ]


def _best_shift(reference: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    room = len(reference) - len(ends)
    best, best_cost = 0, None
    for shift in range(min(room, 4096) + 1):
        difference = ends - reference[shift : shift + len(ends)]
        # A constant clock difference costs nothing; only disagreement does, then distance.
        middle = np.median(difference)
        cost = (float(np.median(np.abs(difference - middle))), abs(float(middle)))
        if best_cost is None or cost < best_cost:
            best, best_cost = shift, cost
    return best


def _align(matched: _Matched) -> dict[int, int]:
    """Return offsets that make ends agree, spreading out from the rank seen most often."""
    counts: Counter[int] = Counter(rank for _, rows in matched for rank in rows)
    reference = min(counts, key=lambda rank: (-counts[rank], rank))
    offsets = {reference: 0}
    pending = True
    while pending:
        pending = False
        differences: dict[int, list[float]] = defaultdict(list)
        for _, rows in matched:
            known = [rows[rank].end_ns + offsets[rank] for rank in rows if rank in offsets]
            if not known:
                continue
            middle = sorted(known)[len(known) // 2]
            for rank, row in rows.items():
                if rank not in offsets:
                    differences[rank].append(middle - row.end_ns)
        for rank, values in differences.items():
            offsets[rank] = round(_median_int(values))
            pending = True
    settled = _refine(matched, offsets)
    # Ranks that share no collective with the reference, even through others, keep their clocks.
    zero = settled[reference]
    found = {rank: offset - zero for rank, offset in settled.items()}
    return {rank: found.get(rank, 0) for rank in counts}


def _refine(matched: _Matched, offsets: dict[int, int]) -> dict[int, int]:
    """Re-centre each rank on the median end of its collectives, twice: enough to settle."""
    for _ in range(2):
        errors: dict[int, list[float]] = defaultdict(list)
        for _, rows in matched:
            present = [rank for rank in rows if rank in offsets]
            ends = sorted(rows[rank].end_ns + offsets[rank] for rank in present)
            middle = ends[len(ends) // 2]
            for rank in present:
                errors[rank].append(middle - rows[rank].end_ns - offsets[rank])
        offsets = {
            rank: offset + round(_median_int(errors[rank])) if rank in errors else offset
            for rank, offset in offsets.items()
        }
    return offsets


def _median_int(values: Sequence[float]) -> float:
    # Stamps near 2**61 lose nanoseconds in floats; differences do not.
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _ordered(
    key: _Key, rows: Mapping[int, Arrival], offsets: Mapping[int, int]
) -> MatchedCollective:
    group, operation, sequence = key
    starts = {rank: row.start_ns + offsets[rank] for rank, row in rows.items()}
    ends = sorted(row.end_ns + offsets[rank] for rank, row in rows.items())
    first = min(starts.values())
    order = sorted(starts, key=lambda rank: (starts[rank], rank))
    return MatchedCollective(
        group=group,
        sequence=sequence,
        operation=operation,
        arrivals=tuple((rank, starts[rank] - first) for rank in order),
        end_spread_ns=ends[-1] - ends[0],
        duration_ns=max(ends[len(ends) // 2] - starts[order[-1]], 0),
    )


def _judge(
    collectives: list[MatchedCollective],
    unusable: int,
    offsets: Mapping[int, int],
    policy: ArrivalPolicy,
) -> ArrivalReport:
    imposed: dict[int, int] = defaultdict(int)
    last: Counter[int] = Counter()
    lateness: dict[int, list[float]] = defaultdict(list)
    seen: Counter[int] = Counter()
    for collective in collectives:
        times = [at for _, at in collective.arrivals]
        rank = collective.last_rank
        imposed[rank] += sum(times[-1] - at for at in times[:-1])
        last[rank] += 1
        lateness[rank].append(times[-1] - float(np.median(times[:-1])))
        seen.update(r for r, _ in collective.arrivals)
    total = sum(imposed.values())
    noise = float(np.median([c.end_spread_ns for c in collectives])) if collectives else 0.0
    enough = len(collectives) >= policy.min_collectives
    found = []
    for rank, count in last.items():
        share = imposed[rank] / total if total else 0.0
        mean_late = float(np.mean(lateness[rank]))
        fair = float(
            np.mean([1 / len(c.arrivals) for c in collectives if rank in dict(c.arrivals)])
        )
        chance = _at_least(count, seen[rank], fair)
        floor = max(policy.min_lateness_ns, policy.noise_factor * noise)
        if (
            enough
            and share >= max(policy.min_share, policy.min_excess * fair)
            and chance <= policy.max_chance
            and mean_late >= floor
        ):
            found.append(
                Straggler(
                    rank=rank,
                    lateness_ns=mean_late,
                    share=share,
                    last_count=count,
                    collectives=seen[rank],
                    confidence=1 - chance,
                )
            )
    found.sort(key=lambda straggler: (-straggler.share, straggler.rank))
    verdict, reason = "none", "no rank comes last more often, or later, than chance explains"
    if not enough:
        verdict = "unknown"
        reason = (
            f"{len(collectives)} matched collectives whose ends agree, {unusable} whose ends do "
            f"not; {policy.min_collectives} are needed"
        )
    elif found:
        top = found[0]
        verdict = "found"
        reason = (
            f"rank {top.rank} came last in {top.last_count} of {top.collectives} collectives and "
            f"caused {top.share:.0%} of the wait"
        )
    return ArrivalReport(
        verdict=verdict,
        reason=reason,
        stragglers=tuple(found),
        collectives=tuple(collectives),
        offsets_ns=dict(offsets),
        imposed_wait_ns=dict(imposed),
        policy=policy,
    )


def _at_least(count: int, trials: int, chance: float) -> float:
    """Return the binomial probability of ``count`` or more in ``trials``."""
    if trials > 500:  # the normal tail serves, and the sum would overflow floats
        deviation = (trials * chance * (1 - chance)) ** 0.5
        z = (count - 0.5 - trials * chance) / deviation if deviation else 0.0
        return float(0.5 * (1 - np.tanh(z * 0.7978845608 * (1 + 0.044715 * z * z))))
    return float(
        sum(
            comb(trials, k) * chance**k * (1 - chance) ** (trials - k)
            for k in range(count, trials + 1)
        )
    )

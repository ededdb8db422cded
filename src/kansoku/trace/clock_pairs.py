"""Pairs of hosts in one collective: what their ends and starts say about their clocks.

Every pair gives three numbers: how far apart the two ends were read (the clocks' difference and
how late each noticed the end), and two bounds that hold whatever was late. Where everybody waits
for everybody no host ends before the other has started, so host i minus host j is at most the end
of i minus the start of j, and at least the start of i minus the end of j.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["FEW", "Floats", "Ints", "Pairs", "contradicted", "pair_up", "tightened"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# More than these add nothing but time.
_MAX_COLLECTIVES = 2000
_MAX_PAIRS = 400_000
_ALL_PAIRS = 8
"""In larger groups a host is paired with those 1, 2, 4 … places on, not with everyone."""
_DRIFT = 200e-6
_WINDOW_NS = 10e9
FEW = 20
"""Collectives of one operation and size that say how its ends scatter."""
_SAFE_PART = 0.25
_ONE_IN = 20
"""So few records of a kind may be wrong by themselves: matched wrongly, closed late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """One row a collective and pair of hosts ``first < second``, in nanoseconds as read."""

    first: Ints
    second: Ints
    time: Floats
    """Of the end, since the origin."""
    apart: Floats
    """End of the first minus end of the second."""
    upper: Floats
    """No difference of the clocks is above; infinite where no start is known."""
    lower: Floats
    kind: Ints
    """Operations of one name and size: their ends scatter alike."""
    share: Floats
    """Weight that keeps one collective from counting once a partner."""

    def __len__(self) -> int:
        return len(self.apart)

    def where(self, kept: npt.NDArray[np.bool_] | Ints) -> "Pairs":
        """Return the rows that ``kept`` picks."""
        return Pairs(
            first=self.first[kept], second=self.second[kept], time=self.time[kept],
            apart=self.apart[kept], upper=self.upper[kept], lower=self.lower[kept],
            kind=self.kind[kept], share=self.share[kept],
        )  # fmt: skip


def _offsets(members: int) -> list[int]:
    if members <= _ALL_PAIRS:
        return list(range(1, members))
    return [1 << n for n in range((members // 2).bit_length()) if 1 << n <= members // 2]


def _one_in(members: int) -> int:
    """Return one in how many collectives pairs a host with one of its partners, where sparse."""
    return 1 if members <= _ALL_PAIRS else max(1, len(_offsets(members)) // 2)


def _columns(part: pl.DataFrame) -> tuple[Ints, Floats, Floats, Ints]:
    """Return hosts, and per collective and host the ends, the starts, and the kinds."""
    hosts, column = np.unique(part["host"].to_numpy(), return_inverse=True)
    numbers, row = np.unique(part["sequence"].to_numpy(), return_inverse=True)
    ends = np.full((len(numbers), len(hosts)), np.nan)
    starts = np.full_like(ends, np.nan)
    kinds = np.zeros(len(numbers), dtype=np.int64)
    ends[row, column] = part["end"].to_numpy()
    starts[row, column] = part["start"].to_numpy()
    kinds[row] = part["kind"].to_numpy()
    return hosts.astype(np.int64), ends, starts, kinds


def pair_up(shared: pl.DataFrame) -> Pairs:
    """Return the pairs of ``shared``: one row a group, sequence and host.

    Columns: ``group``, ``sequence``, ``host``, ``kind``, and ``end`` and ``start`` in nanoseconds
    since the origin (the earliest end and the latest start of the host's ranks).
    """
    groups = [_columns(part) for part in shared.partition_by("group", maintain_order=True)]
    counts = [
        min(len(kinds), _MAX_COLLECTIVES) * len(hosts) * len(_offsets(len(hosts)))
        for hosts, _, _, kinds in groups
    ]
    # Of too many, each collective pairs some partners and the next ones others: what it says of a
    # host is nearly said by two, and more collectives count.
    sparse = sum(counts) > _MAX_PAIRS
    if sparse:
        counts = [
            count // _one_in(len(group[0])) for count, group in zip(counts, groups, strict=True)
        ]
    wanted = sum(counts)
    most = max(16, int(_MAX_COLLECTIVES * min(1.0, _MAX_PAIRS / max(wanted, 1))))
    found = []
    for hosts, ends, starts, kinds in groups:
        kept = np.arange(len(kinds))
        if len(kept) > most:
            kept = np.linspace(0, len(kept) - 1, most).astype(np.int64)
        one_in = _one_in(len(hosts)) if sparse else 1
        for turn, step in enumerate(_offsets(len(hosts))):
            rows = kept[turn % one_in :: one_in]
            seen = np.maximum((~np.isnan(ends[rows])).sum(axis=1), 2)
            every = step * 2 != len(hosts) and len(hosts) > _ALL_PAIRS
            last = len(hosts) if every else len(hosts) - step
            a = np.arange(last)
            b = (a + step) % len(hosts)
            one, other = np.minimum(a, b), np.maximum(a, b)
            end_a, end_b = ends[np.ix_(rows, one)], ends[np.ix_(rows, other)]
            here = ~(np.isnan(end_a) | np.isnan(end_b))
            at, pair = np.nonzero(here)
            partners = np.minimum(seen[at], 2 * len(_offsets(len(hosts))) / one_in + 1)
            found.append(
                (
                    hosts[one[pair]], hosts[other[pair]], end_a[here], (end_a - end_b)[here],
                    (end_a - starts[np.ix_(rows, other)])[here],
                    (starts[np.ix_(rows, one)] - end_b)[here],
                    kinds[rows][at], 2.0 / partners,
                )
            )  # fmt: skip
    first, second, time, apart, upper, lower, kind, share = (
        np.concatenate(part) for part in zip(*found, strict=True)
    )
    return Pairs(
        first=first, second=second, time=time, apart=apart,
        upper=np.where(np.isnan(upper), np.inf, upper),
        lower=np.where(np.isnan(lower), -np.inf, lower),
        kind=kind, share=share,
    )  # fmt: skip


def contradicted(pairs: Pairs) -> set[int]:
    """Return the kinds whose bounds exclude each other for some pair of hosts.

    No clock, whatever its drift, makes an operation end before all have started; so somebody did
    not wait, or what was recorded is not the end (a reduce-scatter that hands its work on).
    """
    edge = pairs.first * (int(pairs.second.max()) + 1) + pairs.second
    window = (pairs.time // _WINDOW_NS).astype(np.int64)
    window -= window.min()
    code = (pairs.kind * (int(edge.max()) + 1) + edge) * (int(window.max()) + 1) + window
    _, part = np.unique(code, return_inverse=True)
    by_lower, by_upper = np.lexsort((pairs.lower, part)), np.lexsort((pairs.upper, part))
    count = np.bincount(part)
    first = np.concatenate([[0], np.cumsum(count)[:-1]])
    spared = count // _ONE_IN
    highest = pairs.lower[by_lower][first + count - 1 - spared]
    lowest = pairs.upper[by_upper][first + spared]
    kind = pairs.kind[by_lower][first]
    # A drift that no clock exceeds loosens the bounds by what it can do within the window.
    return set(np.unique(kind[highest - lowest > _DRIFT * _WINDOW_NS]).tolist())


def tightened(pairs: Pairs, shared: pl.DataFrame) -> Pairs:
    """Return the pairs with bounds that count in what a transfer takes at least.

    Who comes last sees the bare transfer, on one clock. But it may see more of it than others do
    (in a ring of two a hop more), and no host need ever have left in time: so a part of the
    shortest that any host saw, and of kinds that were seen often.
    """
    own = pl.col("end") - pl.col("start")
    seen = pl.struct("group", "sequence").n_unique()
    shortest = shared.group_by("kind").agg(
        least=pl.when(seen >= FEW).then(_SAFE_PART * own.min()).clip(lower_bound=0.0)
    )
    least = np.zeros(int(pairs.kind.max(initial=0)) + 1)
    for kind, shift in shortest.drop_nulls().iter_rows():
        if kind < len(least):
            least[kind] = shift
    shift = least[pairs.kind]
    return replace(pairs, upper=pairs.upper - shift, lower=pairs.lower + shift)

"""Clock offsets between ranks, from the ends of collectives that all of them took part in.

Nobody leaves an all-reduce before everybody has come, so its ends lie together on the true time
axis, while arrivals do not. For two members of a group the difference of their ends, over all
collectives of that group, is therefore their clock difference plus a jitter of the finish. A robust
line through it gives offset and drift. Ranks without a common group are joined through others; one
refinement then fits every rank against the median end of each collective.

The line is a Theil-Sen fit (median of slopes, then median of residuals): half of the ends may be
late by any amount without moving it.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["ClockModel", "ClockOffset", "estimate_clocks"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Slopes are taken over pairs far apart; more points than this add nothing but time.
_MAX_POINTS = 2000
# Below this the finish jitter of one machine, not its clock, explains a spread inside one node.
_SAME_CLOCK_NS = 150_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far one rank's clock is ahead of the reference rank's."""

    rank: int
    offset_ns: float
    """At ``ClockModel.origin_ns``; positive: this clock shows a later time."""
    drift_ppm: float
    """Nanoseconds gained per millisecond."""
    residual_ns: float | None
    """Median absolute residual of the fit: how closely the ends lie together."""
    matches: int
    """Collectives used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockModel:
    """Offsets of all ranks, ready to correct columns of times."""

    reference: int | None
    origin_ns: int
    offsets: tuple[ClockOffset, ...]
    applied: bool
    """False where all differences are within what one shared clock shows."""
    reason: str
    unmatched: tuple[int, ...] = ()
    """Ranks that share no collective with the others; their times are left as they are."""

    def corrected(self, column: str) -> pl.Expr:
        """Return an expression for a time column on the reference clock; needs ``rank``."""
        time = pl.col(column)
        if not self.applied:
            return time
        ranks = [o.rank for o in self.offsets]
        offset = pl.col("rank").replace_strict(
            ranks, [o.offset_ns for o in self.offsets], default=0.0, return_dtype=pl.Float64
        )
        drift = pl.col("rank").replace_strict(
            ranks, [o.drift_ppm for o in self.offsets], default=0.0, return_dtype=pl.Float64
        )
        since = (time - self.origin_ns).cast(pl.Float64)
        return time - (offset + drift * 1e-6 * since).round().cast(pl.Int64)

    def at(self, rank: int, time_ns: int) -> float:
        """Return how far the rank's clock is ahead of the reference at its own ``time_ns``."""
        for offset in self.offsets:
            if offset.rank == rank:
                return offset.offset_ns + offset.drift_ppm * 1e-6 * (time_ns - self.origin_ns)
        return 0.0


def _line(x: Floats, y: Floats) -> tuple[float, float, float]:
    """Return offset at x = 0, slope, and median absolute residual of a Theil-Sen fit."""
    if len(x) > _MAX_POINTS:
        keep = np.linspace(0, len(x) - 1, _MAX_POINTS).astype(np.int64)
        x, y = x[keep], y[keep]
    slope = 0.0
    if len(x) >= 8:
        half = len(x) // 2
        # Pairs half the window apart (Siegel's economical form): long baselines only.
        run = x[half : 2 * half] - x[:half]
        rise = y[half : 2 * half] - y[:half]
        far = run > 0
        if far.any():
            slopes = rise[far] / run[far]
            slope = float(np.median(slopes))
            # A slope smaller than its own uncertainty is left out: it would only add noise.
            spread = 1.4826 * float(np.median(np.abs(slopes - slope)))
            if abs(slope) < 3 * 1.2533 * spread / np.sqrt(len(slopes)):
                slope = 0.0
    rest = y - slope * x
    offset = float(np.median(rest))
    return offset, slope, float(np.median(np.abs(rest - offset)))


def _dense(matched: pl.DataFrame) -> list[tuple[Ints, Floats]]:
    """Return, per process group, its ranks and ends ``(collectives, ranks)`` since the origin."""
    found = []
    for part in matched.partition_by("group", maintain_order=True):
        table = part.pivot(on="rank", index="sequence", values="since", aggregate_function="first")
        columns = [name for name in table.columns if name != "sequence"]
        ends = table.sort("sequence").select(columns).to_numpy().astype(np.float64)
        found.append((np.array([int(name) for name in columns]), ends))
    return sorted(found, key=lambda pair: (-pair[1].shape[1], -pair[1].shape[0]))


def _spanning(
    groups: list[tuple[Ints, Floats]], reference: int
) -> tuple[dict[int, tuple[float, float]], dict[int, tuple[float, int]]]:
    """Walk from the reference through common groups, adding up pairwise fits."""
    fits = {reference: (0.0, 0.0)}
    quality: dict[int, tuple[float, int]] = {reference: (0.0, 0)}
    queue = deque([reference])
    member: dict[int, list[int]] = {}
    for number, (ranks, _) in enumerate(groups):
        for rank in ranks.tolist():
            member.setdefault(rank, []).append(number)
    done: set[int] = set()
    while queue:
        known = queue.popleft()
        for number in member.get(known, ()):
            if number in done:
                continue
            done.add(number)
            ranks, ends = groups[number]
            base = ends[:, int(np.flatnonzero(ranks == known)[0])]
            offset, drift = fits[known]
            true = base - (offset + drift * base)
            for column, rank in enumerate(ranks.tolist()):
                if rank in fits:
                    continue
                both = ~np.isnan(true) & ~np.isnan(ends[:, column])
                if not both.any():
                    continue
                own = ends[both, column]
                o, d, residual = _line(own, own - true[both])
                fits[rank] = (o, d)
                quality[rank] = (residual, int(both.sum()))
                queue.append(rank)
    return fits, quality


def estimate_clocks(matched: pl.DataFrame, *, nodes: dict[int, str] | None = None) -> ClockModel:
    """Estimate every rank's offset and drift against the lowest rank.

    ``matched`` is what :func:`kansoku.trace.collectives.arrivals` returns without a model;
    ``nodes`` maps ranks to hosts. Ranks of one host share one clock: where their estimates agree
    the host's median is used for all of them, and a run on one host is left uncorrected.
    """
    columns = matched.select("rank", "group", "sequence", "end_ns", "seen")
    closed = columns.filter(pl.col("end_ns").is_not_null() & (pl.col("seen") > 1))
    if closed.is_empty():
        reason = "no collective was seen on two ranks"
        return ClockModel(reference=None, origin_ns=0, offsets=(), applied=False, reason=reason)
    origin = int(closed["end_ns"].min())  # type: ignore[arg-type]
    closed = _thinned(closed).with_columns(since=(pl.col("end_ns") - origin).cast(pl.Float64))
    groups = _dense(closed)
    ranks = sorted(matched["rank"].unique().to_list())
    reference = ranks[0]
    fits, quality = _spanning(groups, reference)
    unmatched = tuple(rank for rank in ranks if rank not in fits)
    fits = _refined(groups, fits, quality, reference)
    offsets = [
        ClockOffset(
            rank=rank,
            offset_ns=fits[rank][0],
            drift_ppm=fits[rank][1] * 1e6,
            residual_ns=quality[rank][0] if quality[rank][1] else None,
            matches=quality[rank][1],
        )
        for rank in sorted(fits)
    ]
    return _pooled(offsets, nodes or {}, reference, origin, unmatched, float(closed["since"].max()))  # type: ignore[arg-type]


def _thinned(closed: pl.DataFrame) -> pl.DataFrame:
    """Keep at most ``_MAX_POINTS`` collectives of each group, evenly over its life."""
    extent = pl.col("sequence").max().over("group") - pl.col("sequence").min().over("group") + 1
    stride = (extent // _MAX_POINTS).clip(lower_bound=1)
    from_first = pl.col("sequence") - pl.col("sequence").min().over("group")
    return closed.filter(from_first % stride == 0)


def _refined(
    groups: list[tuple[Ints, Floats]],
    fits: dict[int, tuple[float, float]],
    quality: dict[int, tuple[float, int]],
    reference: int,
) -> dict[int, tuple[float, float]]:
    """Fit each rank once more against the median corrected end of its collectives.

    With three or more members the median end is steadier than any single member's.
    """
    points: dict[int, list[tuple[Floats, Floats]]] = {}
    for ranks, ends in groups:
        if ends.shape[1] < 3:
            continue
        known = np.array([rank in fits for rank in ranks.tolist()])
        if known.sum() < 3:
            continue
        line = np.array([fits.get(rank, (0.0, 0.0)) for rank in ranks.tolist()])
        true = ends - (line[:, 0] + line[:, 1] * ends)
        true[:, ~known] = np.nan
        whole = ~np.isnan(true[:, known]).any(axis=1)
        if not whole.any():
            continue
        middle = np.median(true[whole][:, known], axis=1)
        for column, rank in enumerate(ranks.tolist()):
            if rank in fits:
                own = ends[whole, column]
                points.setdefault(rank, []).append((own, own - middle))
    refined = dict(fits)
    for rank, parts in points.items():
        x = np.concatenate([part[0] for part in parts])
        y = np.concatenate([part[1] for part in parts])
        order = np.argsort(x, kind="stable")
        offset, slope, residual = _line(x[order], y[order])
        refined[rank] = (offset, slope)
        quality[rank] = (residual, len(x))
    zero = refined[reference]
    return {rank: (fit[0] - zero[0], fit[1] - zero[1]) for rank, fit in refined.items()}


def _pooled(
    offsets: list[ClockOffset],
    nodes: dict[int, str],
    reference: int,
    origin: int,
    unmatched: tuple[int, ...],
    window: float,
) -> ClockModel:
    by_node: dict[str, list[ClockOffset]] = {}
    for offset in offsets:
        by_node.setdefault(nodes.get(offset.rank, f"rank {offset.rank}"), []).append(offset)

    def middle(o: ClockOffset) -> float:
        return o.offset_ns + o.drift_ppm * 1e-6 * window / 2

    def agree(members: list[ClockOffset]) -> bool:
        times = (0.0, window)
        values = [[o.offset_ns + o.drift_ppm * 1e-6 * t for o in members] for t in times]
        jitter = float(np.median([o.residual_ns or 0.0 for o in members]))
        return all(max(v) - min(v) < max(_SAME_CLOCK_NS, 4 * jitter) for v in values)

    def model(found: list[ClockOffset], reason: str, *, applied: bool) -> ClockModel:
        return ClockModel(
            reference=reference,
            origin_ns=origin,
            offsets=tuple(found),
            applied=applied,
            reason=reason,
            unmatched=unmatched,
        )

    shared = nodes and all(agree(members) for members in by_node.values())
    if shared and len(by_node) == 1:
        return model(offsets, "one host, one clock: nothing to correct", applied=False)
    if not shared:
        return model(offsets, "each rank corrected by its own estimate", applied=True)
    pooled = []
    for members in by_node.values():
        drift = float(np.median([o.drift_ppm for o in members]))
        centre = float(np.median([middle(o) for o in members]))
        pooled += [
            ClockOffset(
                rank=o.rank,
                offset_ns=centre - drift * 1e-6 * window / 2,
                drift_ppm=drift,
                residual_ns=o.residual_ns,
                matches=o.matches,
            )
            for o in members
        ]
    zero = next(o for o in pooled if o.rank == reference)
    pooled = [
        ClockOffset(
            rank=o.rank,
            offset_ns=o.offset_ns - zero.offset_ns,
            drift_ppm=o.drift_ppm - zero.drift_ppm,
            residual_ns=o.residual_ns,
            matches=o.matches,
        )
        for o in sorted(pooled, key=lambda o: o.rank)
    ]
    return model(pooled, "one estimate a host, from all its ranks", applied=True)

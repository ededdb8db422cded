"""Clock offsets between hosts, from the ends of collectives that both took part in.

Nobody leaves an all-reduce before everybody has come, so its ends lie together on the true time
axis, while arrivals do not. For two hosts the difference of their ends, over all collectives they
share, is therefore their clock difference plus a jitter of the finish. A robust line through it
gives offset and drift. Hosts without a common collective are joined through others; one refinement
then fits every host against the median end of each collective.

Ranks of one host read one clock. They are never corrected against each other: what their ends lie
apart is how late each noticed the end, and taking that for a clock would move true times. The end
of a host is the median of its ranks' ends.

The line is a Theil-Sen fit (median of slopes, then median of residuals): half of the ends may be
late by any amount without moving it. What no clock does is no clock: a drift beyond
``MAX_DRIFT_PPM`` is noise, few collectives give no estimate, and where no two clocks differ by more
than chance nothing is corrected.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["MAX_DRIFT_PPM", "MIN_MATCHES", "ClockModel", "ClockOffset", "estimate_clocks"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Slopes are taken over pairs far apart; more points than this add nothing but time.
_MAX_POINTS = 2000
MAX_DRIFT_PPM = 200.0
"""Crystals of computers stay within 100 ppm of true time, so two within 200 of each other."""
MIN_MATCHES = 8
"""Collectives that two hosts must share: one barrier says how late somebody left it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far the clock of a rank's host is ahead of that of the reference rank's."""

    rank: int
    offset_ns: float
    """At ``ClockModel.origin_ns``; positive: this clock shows a later time."""
    drift_ppm: float
    """Nanoseconds gained per millisecond."""
    residual_ns: float | None
    """Median absolute residual of the fit: how closely the ends lie together."""
    matches: int
    """Collectives used; 0 on the reference rank's own host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockModel:
    """Offsets of all ranks, ready to correct columns of times."""

    reference: int | None
    origin_ns: int
    offsets: tuple[ClockOffset, ...]
    applied: bool
    """False where there is one clock, or none of the differences is more than noise."""
    reason: str
    unmatched: tuple[int, ...] = ()
    """Ranks whose host shares too few collectives with the others; their times are left."""
    spread_ns: float | None = None
    """Median distance of the ends of one collective within a host: noise, not clocks."""
    notes: tuple[str, ...] = ()
    """Estimates that were refused, in sentences."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A line through the differences of two clocks."""

    offset: float = 0.0
    slope: float = 0.0
    residual: float = 0.0
    matches: int = 0
    refused_slope: float | None = None
    """What no clock does."""
    differs: bool = False
    """The clocks differ by more than chance would make of the jitter."""


def _line(x: Floats, y: Floats) -> _Fit:
    """Return offset at x = 0, slope, and median absolute residual of a Theil-Sen fit."""
    matches = len(x)
    if len(x) > _MAX_POINTS:
        keep = np.linspace(0, len(x) - 1, _MAX_POINTS).astype(np.int64)
        x, y = x[keep], y[keep]
    slope, refused = 0.0, None
    half = len(x) // 2
    # Pairs half the window apart (Siegel's economical form): long baselines only.
    run = x[half : 2 * half] - x[:half]
    rise = y[half : 2 * half] - y[:half]
    far = run > 0
    if len(x) >= MIN_MATCHES and far.any():
        slopes = rise[far] / run[far]
        slope = float(np.median(slopes))
        # A slope smaller than its own uncertainty is left out: it would only add noise.
        spread = 1.4826 * float(np.median(np.abs(slopes - slope)))
        if abs(slope) < 3 * 1.2533 * spread / np.sqrt(len(slopes)):
            slope = 0.0
        if abs(slope) * 1e6 > MAX_DRIFT_PPM:
            slope, refused = 0.0, slope
    rest = y - slope * x
    offset = float(np.median(rest))
    residual = float(np.median(np.abs(rest - offset)))
    middle = offset + slope * float(np.median(x))
    chance = 3 * 1.2533 * 1.4826 * residual / np.sqrt(len(x))
    return _Fit(
        offset=offset,
        slope=slope,
        residual=residual,
        matches=matches,
        refused_slope=refused,
        differs=bool(slope) or abs(middle) > chance,
    )


def _dense(matched: pl.DataFrame) -> list[tuple[Ints, Floats]]:
    """Return, per process group, its hosts and ends ``(collectives, hosts)`` since the origin."""
    found = []
    for part in matched.partition_by("group", maintain_order=True):
        table = part.pivot(on="host", index="sequence", values="since", aggregate_function="first")
        columns = [name for name in table.columns if name != "sequence"]
        ends = table.sort("sequence").select(columns).to_numpy().astype(np.float64)
        found.append((np.array([int(name) for name in columns]), ends))
    return sorted(found, key=lambda pair: (-pair[1].shape[1], -pair[1].shape[0]))


def _spanning(groups: list[tuple[Ints, Floats]], reference: int) -> dict[int, _Fit]:
    """Walk from the reference through common groups, adding up pairwise fits."""
    fits = {reference: _Fit()}
    queue = deque([reference])
    member: dict[int, list[int]] = {}
    for number, (hosts, _) in enumerate(groups):
        for host in hosts.tolist():
            member.setdefault(host, []).append(number)
    done: set[int] = set()
    while queue:
        known = queue.popleft()
        for number in member.get(known, ()):
            if number in done:
                continue
            done.add(number)
            hosts, ends = groups[number]
            base = ends[:, int(np.flatnonzero(hosts == known)[0])]
            true = base - (fits[known].offset + fits[known].slope * base)
            for column, host in enumerate(hosts.tolist()):
                if host in fits:
                    continue
                both = ~np.isnan(true) & ~np.isnan(ends[:, column])
                if int(both.sum()) < MIN_MATCHES:
                    continue
                own = ends[both, column]
                fits[host] = _line(own, own - true[both])
                queue.append(host)
    return fits


def _refined(
    groups: list[tuple[Ints, Floats]], fits: dict[int, _Fit], reference: int
) -> dict[int, _Fit]:
    """Fit each host once more against the median corrected end of its collectives.

    With three or more members the median end is steadier than any single member's.
    """
    points: dict[int, list[tuple[Floats, Floats]]] = {}
    for hosts, ends in groups:
        known = np.array([host in fits for host in hosts.tolist()])
        if known.sum() < 3:
            continue
        line = [fits.get(host, _Fit()) for host in hosts.tolist()]
        offset, slope = np.array([f.offset for f in line]), np.array([f.slope for f in line])
        true = ends - (offset + slope * ends)
        true[:, ~known] = np.nan
        whole = ~np.isnan(true[:, known]).any(axis=1)
        if not whole.any():
            continue
        middle = np.median(true[whole][:, known], axis=1)
        for column, host in enumerate(hosts.tolist()):
            if host in fits:
                own = ends[whole, column]
                points.setdefault(host, []).append((own, own - middle))
    refined = dict(fits)
    for host, parts in points.items():
        x = np.concatenate([part[0] for part in parts])
        y = np.concatenate([part[1] for part in parts])
        if len(x) < MIN_MATCHES:
            continue
        order = np.argsort(x, kind="stable")
        refined[host] = _line(x[order], y[order])
    zero = refined[reference]
    return {
        host: replace(fit, offset=fit.offset - zero.offset, slope=fit.slope - zero.slope)
        for host, fit in refined.items()
    }


def _thinned(closed: pl.DataFrame) -> pl.DataFrame:
    """Keep at most ``_MAX_POINTS`` collectives of each group, evenly over its life."""
    extent = pl.col("sequence").max().over("group") - pl.col("sequence").min().over("group") + 1
    stride = (extent // _MAX_POINTS).clip(lower_bound=1)
    from_first = pl.col("sequence") - pl.col("sequence").min().over("group")
    return closed.filter(from_first % stride == 0)


def estimate_clocks(matched: pl.DataFrame, *, nodes: dict[int, str] | None = None) -> ClockModel:
    """Estimate every host's offset and drift against that of the lowest rank.

    ``matched`` is what :func:`kansoku.trace.collectives.arrivals` returns without a model;
    ``nodes`` maps ranks to hosts. Ranks of one host share one clock and one estimate; a rank whose
    host is not known is taken for a host of its own.
    """
    ranks = sorted(matched["rank"].unique().to_list())
    names = [(nodes or {}).get(rank, f"rank {rank}") for rank in ranks]
    number = {name: n for n, name in enumerate(dict.fromkeys(names))}
    host_of = dict(zip(ranks, (number[name] for name in names), strict=True))
    columns = matched.select("rank", "group", "sequence", "end_ns", "seen")
    closed = columns.filter(pl.col("end_ns").is_not_null() & (pl.col("seen") > 1))
    if closed.is_empty():
        reason = "no collective was seen on two ranks"
        return ClockModel(reference=None, origin_ns=0, offsets=(), applied=False, reason=reason)
    origin = int(closed["end_ns"].min())  # type: ignore[arg-type]
    closed = _thinned(closed).with_columns(
        since=(pl.col("end_ns") - origin).cast(pl.Float64),
        host=pl.col("rank").replace_strict(host_of, return_dtype=pl.Int32),
    )
    ends = closed.group_by("host", "group", "sequence").agg(
        pl.col("since").median(),
        spread=pl.col("since").max() - pl.col("since").min(),
        seen=pl.len(),
    )
    spread = ends.filter(pl.col("seen") > 1)["spread"].median()
    found = ClockModel(
        reference=ranks[0],
        origin_ns=origin,
        offsets=tuple(
            ClockOffset(rank=rank, offset_ns=0.0, drift_ppm=0.0, residual_ns=None, matches=0)
            for rank in ranks
        ),
        applied=False,
        reason="one host, one clock: nothing to correct",
        spread_ns=float(spread) if isinstance(spread, int | float) else None,
    )
    return found if len(number) == 1 else _between_hosts(ends, host_of, list(number), found)


def _between_hosts(
    ends: pl.DataFrame, host_of: dict[int, int], names: list[str], model: ClockModel
) -> ClockModel:
    shared = ends.filter(pl.len().over("group", "sequence") > 1)
    reference = host_of[min(host_of)]
    fits = {reference: _Fit()}
    if not shared.is_empty():
        groups = _dense(shared)
        fits = _refined(groups, _spanning(groups, reference), reference)
    offsets = tuple(
        ClockOffset(
            rank=rank,
            offset_ns=fits[host].offset,
            drift_ppm=fits[host].slope * 1e6,
            residual_ns=fits[host].residual if fits[host].matches else None,
            matches=0 if host == reference else fits[host].matches,
        )
        for rank, host in sorted(host_of.items())
        if host in fits
    )
    notes = tuple(
        f"the ends of {names[host]} seem to drift by {fit.refused_slope * 1e6:+,.0f} ppm: no "
        f"clock does (at most {MAX_DRIFT_PPM:.0f}), so that is noise and no drift is corrected"
        for host, fit in sorted(fits.items())
        if fit.refused_slope is not None
    )
    applied = any(fit.differs for fit in fits.values())
    if len(fits) < 2:
        reason = f"no two hosts share {MIN_MATCHES} collectives: nothing was estimated"
    elif applied:
        reason = "one estimate a host, from the median end of its ranks"
    else:
        reason = "the hosts' clocks agree within what their ends can tell"
    return replace(
        model,
        offsets=offsets,
        applied=applied,
        reason=reason,
        unmatched=tuple(rank for rank, host in sorted(host_of.items()) if host not in fits),
        notes=notes,
    )

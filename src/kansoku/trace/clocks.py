"""Clock offsets between hosts, from the collectives that both took part in.

Nobody leaves an all-reduce before everybody has come, so its ends lie together on the true time
axis, while arrivals do not, and no host can end before another has started. For two hosts the
difference of their ends is their clock difference plus how late each noticed the end, and ends and
starts together bound it: see :mod:`kansoku.trace.clock_pairs` and, for the lines through them,
:mod:`kansoku.trace.clock_fit`. Hosts without a common collective are joined through others.

Ranks of one host read one clock. They are never corrected against each other: what their ends lie
apart is how late each noticed the end, and taking that for a clock would move true times. The end
of a host is the earliest of its ranks', for ends are late and never early; its start is the latest.

What no clock does is no clock: a drift beyond ``MAX_DRIFT_PPM`` is noise, few collectives give no
estimate, operations whose times contradict every clock are not used, and an offset within its own
uncertainty is left out.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.trace.clock_fit import MAX_DRIFT_PPM, MIN_MATCHES, Lines, fit
from kansoku.trace.clock_pairs import FEW, contradicted, pair_up, tightened

__all__ = ["MAX_DRIFT_PPM", "MIN_MATCHES", "ClockModel", "ClockOffset", "estimate_clocks"]

_GOAL_NS = 100e3
"""What is known less closely is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far the clock of a rank's host is ahead of that of the reference rank's."""

    rank: int
    offset_ns: float
    """At ``ClockModel.origin_ns``; positive: this clock shows a later time."""
    drift_ppm: float
    """Nanoseconds gained per millisecond."""
    residual_ns: float | None
    """Median distance of the host's corrected ends from those of others: how they scatter."""
    matches: int
    """Collectives used; 0 on the reference rank's own host."""
    uncertainty_ns: float | None = None
    """Half of the 95 % interval of the offset, at any time of the run."""


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
    # Millions of rows: what is not needed is not copied.
    closed = matched.lazy().filter(pl.col("end_ns").is_not_null() & (pl.col("seen") > 1))
    origin = closed.select(pl.col("end_ns").min()).collect().item()
    if origin is None:
        reason = "no collective was seen on two ranks"
        return ClockModel(reference=None, origin_ns=0, offsets=(), applied=False, reason=reason)
    ends = _hosts(closed, set(matched.columns), host_of, origin)
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


def _hosts(
    closed: pl.LazyFrame, has: set[str], host_of: dict[int, int], origin: int
) -> pl.DataFrame:
    """Return one row a collective and host: its end, its start, and what kind of operation."""
    absent = pl.lit(None, dtype=pl.Int64)
    size = pl.col("bytes").log(2).floor() if "bytes" in has else absent
    return (
        closed.select(
            "sequence",
            # Names repeat millions of times: numbered once.
            group=pl.col("group").cast(pl.Categorical).to_physical(),
            end=(pl.col("end_ns") - origin).cast(pl.Float64),
            start=((pl.col("arrival_ns") - origin) if "arrival_ns" in has else absent).cast(
                pl.Float64
            ),
            op=(pl.col("op") if "op" in has else pl.lit("collective")).cast(pl.Categorical),
            size=size.cast(pl.Float32),
            host=pl.col("rank").replace_strict(host_of, return_dtype=pl.Int32),
        )
        .group_by("host", "group", "sequence")
        .agg(
            pl.col("end").min(),
            pl.col("start").max(),
            pl.col("op").first(),
            pl.col("size").max(),
            spread=pl.col("end").max() - pl.col("end").min(),
            seen=pl.len(),
        )
        .collect()
    )


def _kinds(shared: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Give a number to what is of one name and size, the most frequent first, and name them."""
    # Hosts may have counted bytes differently: a collective is of one kind.
    named = shared.with_columns(
        pl.col("op").cast(pl.String).max().over("group", "sequence"),
        pl.col("size").max().over("group", "sequence"),
    )
    kinds = (
        named.unique(["group", "sequence"])
        .group_by("op", "size")
        .len()
        .sort("len", "op", "size", descending=True)
        .with_row_index("kind")
        .drop("len")
    )
    numbered = named.join(kinds, on=["op", "size"], nulls_equal=True).with_columns(
        pl.col("kind").cast(pl.Int64)
    )
    return numbered.sort("group", "sequence", "host"), kinds["op"].to_list()


def _rare(shared: pl.DataFrame, kinds: int) -> npt.NDArray[np.bool_]:
    """Return for each kind whether it was seen too rarely to say how its ends scatter."""
    counts = shared.unique(["group", "sequence"])["kind"].to_numpy()
    return np.bincount(counts, minlength=kinds) < FEW


def _between_hosts(
    ends: pl.DataFrame, host_of: dict[int, int], names: list[str], model: ClockModel
) -> ClockModel:
    shared = ends.filter(pl.len().over("group", "sequence") > 1)
    reference = host_of[min(host_of)]
    lines: Lines | None = None
    notes: tuple[str, ...] = ()
    if not shared.is_empty():
        shared, kinds = _kinds(shared)
        pairs = pair_up(shared)
        wrong = contradicted(pairs)
        if wrong:
            pairs = pairs.where(~np.isin(pairs.kind, list(wrong)))
            shared = shared.filter(~pl.col("kind").is_in(list(wrong)))
            ops = ", ".join(sorted({kinds[kind] for kind in wrong}))
            said = f"{ops}: ended on one host before another had started, whatever their clocks say"
            notes = (f"{said}; not used to bring clocks together",)
        if len(pairs):
            rare = _rare(shared, len(kinds))
            pairs = tightened(pairs, shared)
            lines = fit(pairs, rare=rare, hosts=len(names), reference=reference)
    return _told(lines, shared, host_of, names, replace(model, notes=notes))


def _told(
    lines: Lines | None,
    shared: pl.DataFrame,
    host_of: dict[int, int],
    names: list[str],
    model: ClockModel,
) -> ClockModel:
    """Return the model that the lines make, and what there is to say of them."""
    reference = host_of[min(host_of)]
    counts = dict(shared.group_by("host").len().iter_rows())
    known = {reference} if lines is None else set(np.flatnonzero(lines.known).tolist())
    offsets = tuple(
        _offset(rank, host, lines, 0 if host == reference else counts.get(host, 0))
        for rank, host in sorted(host_of.items())
        if host in known
    )
    notes = model.notes + tuple(
        f"the ends of {names[host]} seem to drift by {slope * 1e6:+,.0f} ppm: no "
        f"clock does (at most {MAX_DRIFT_PPM:.0f}), so that is noise and no drift is corrected"
        for host, slope in sorted(() if lines is None else lines.refused.items())
    )
    applied = any(o.offset_ns or o.drift_ppm for o in offsets)
    if lines is None or len(known) < 2:
        reason = f"no two hosts share {MIN_MATCHES} collectives: nothing was estimated"
    else:
        worst = int(lines.uncertainty.argmax())
        within = f"{lines.uncertainty[worst] / 1e3:,.0f} µs"
        if applied:
            reason = f"one estimate a host, right to {within} (95 %)"
        else:
            reason = f"the hosts' clocks agree within what their ends can tell ({within}, 95 %)"
        if lines.uncertainty[worst] > _GOAL_NS:
            known_to = f"the clock of {names[worst]} is known to ±{within} only (95 %)"
            count = counts.get(worst, 0)
            notes += (f"{known_to}: its {count:,} collectives end too far apart for more",)
    return replace(
        model,
        offsets=offsets,
        applied=applied,
        reason=reason,
        unmatched=tuple(rank for rank, host in sorted(host_of.items()) if host not in known),
        notes=notes,
    )


def _offset(rank: int, host: int, lines: Lines | None, matches: int) -> ClockOffset:
    if lines is None or not matches:
        return ClockOffset(rank=rank, offset_ns=0.0, drift_ppm=0.0, residual_ns=None, matches=0)
    return ClockOffset(
        rank=rank,
        offset_ns=float(round(lines.offset[host])),  # clocks are read in whole nanoseconds
        drift_ppm=float(lines.slope[host]) * 1e6,
        residual_ns=float(lines.residual[host]),
        matches=matches,
        uncertainty_ns=float(lines.uncertainty[host]),
    )

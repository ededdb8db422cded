"""Joules, bytes and activity per step and phase: fast samples joined with spans by time.

A cumulative counter (energy, bytes) is read every 10-100 ms; between two readings it is taken to
grow evenly. What a span used is the counter at its end minus the counter at its start, so the
phases of a step sum to the step, and steps and the time between them sum to the counter's own
growth, exactly: the sum telescopes. A gauge (power, activity) becomes such a counter by the
trapezoid rule first.

How wrong an edge can be is known too: the counter never falls, so at any moment its true value
lies between the readings around it. The error of a span is the sum of those bounds at its two
edges: an upper limit, not a standard deviation.

A moment before the first or after the last reading is unknown; a step that touches one has null,
never a part.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.model import PHASES, Phase

__all__ = [
    "CUMULATIVE",
    "GAUGES",
    "SAMPLES_SCHEMA",
    "Curve",
    "Place",
    "ResourceUse",
    "curve_of",
    "join_resources",
    "phase_segments",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SAMPLES_SCHEMA: dict[str, pl.DataType] = {
    "node": pl.String(),
    "device": pl.String(),  # gpu0, package-0, NIC name, cpu
    "quantity": pl.String(),  # of CUMULATIVE or GAUGES
    "time_ns": pl.Int64(),  # Unix time of the reading
    "value": pl.Float64(),
}
CUMULATIVE = (
    "energy_j",
    "receive_bytes",
    "transmit_bytes",
    "nvlink_receive_bytes",
    "nvlink_transmit_bytes",
    "cpu_s",
)
GAUGES = ("power_w", "sm_activity", "memory_activity")
_NS = 1e9
_COLLECTIVES = frozenset({"collective", "collective_wait"})
_INHERIT = frozenset({"gc", "compile"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank ran and what of the node is its own."""

    node: str
    gpu: str | None
    """Device of its samples, such as ``gpu3``; None on a node without GPUs."""
    nics: tuple[str, ...] | None = None
    """Its own NICs where the map is known; None: an equal share of all NICs of the node."""
    share: float = 1.0
    """Part of what the node's ranks have in common (CPU energy, NICs): 1 / ranks on the node."""
    gpu_share: float = 1.0
    """Part of its GPU's energy and NVLink bytes: 1 / ranks on that GPU."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A counter over time that never falls."""

    times: Ints
    values: Floats

    def covers(self, start: Ints, end: Ints) -> npt.NDArray[np.bool_]:
        """Say which spans lie wholly between the first and the last reading."""
        if len(self.times) < 2:
            return np.zeros(len(start), dtype=bool)
        inside: npt.NDArray[np.bool_] = (start >= self.times[0]) & (end <= self.times[-1])
        return inside

    def at(self, moments: Ints) -> Floats:
        """Return the counter at moments, growing evenly between readings."""
        base = self.times[0]  # differences keep nanoseconds exact in a double
        grown: Floats = np.interp(moments - base, self.times - base, self.values)
        return grown

    def edge_error(self, moments: Ints) -> Floats:
        """Return by how much ``at`` can be wrong: the readings around bound the truth."""
        after = np.clip(np.searchsorted(self.times, moments, side="left"), 0, len(self.times) - 1)
        before = np.clip(
            np.searchsorted(self.times, moments, side="right") - 1, 0, len(self.times) - 1
        )
        here = self.at(moments)
        return np.maximum(here - self.values[before], self.values[after] - here)


def curve_of(quantity: str, times: Ints, values: Floats) -> Curve:
    """Make a counter that never falls of raw readings of one series, in any order.

    A value below the one before is a reset: the counter began at zero. An energy counter that the
    driver renews less often than it is read keeps only the readings where it moved, or all the
    energy of a renewal would fall into its last few milliseconds.
    """
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    good = np.isfinite(values)
    times, values = times[good], values[good]
    first = np.concatenate([[True], np.diff(times) > 0]) if len(times) else np.empty(0, dtype=bool)
    times, values = times[first], values[first]
    if quantity in GAUGES:
        steps = np.diff(times) / _NS * (values[1:] + values[:-1]) / 2
        return Curve(times, np.concatenate([[0.0], np.cumsum(steps)])[: len(times)])
    growth = np.diff(values)
    growth = np.where(growth < 0, values[1:], growth)
    total = np.concatenate([[0.0], np.cumsum(growth)])[: len(values)]
    if quantity == "energy_j" and len(total) > 2:
        moved = np.concatenate([[True], np.diff(total) > 0])
        moved[-1] = True
        times, total = times[moved], total[moved]
    return Curve(times, total)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUse:
    """What the join gives."""

    steps: pl.DataFrame
    """The steps given, with ``energy_j`` and ``nic_bytes`` filled, and ``energy_error_j``,
    ``nic_error_bytes`` and ``sm_activity`` beside them."""
    phases: pl.DataFrame
    """``rank, phase, duration_ns, energy_j, energy_error_j, nic_bytes, nic_error_bytes,
    nvlink_bytes, sm_activity, memory_activity``: sums over the steps (activities: means over
    the time)."""
    totals: Mapping[str, float | None]
    """``energy_j``, ``nic_bytes``, ``tokens``, ``energy_per_token_j`` …; None where unknown."""
    sampling_ns: int | None
    """Median time between readings of a series."""
    missing: tuple[str, ...]


def phase_segments(steps: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Cut every step into pieces of one phase: ``rank, step, phase, start_ns, end_ns``.

    Each moment of the rank's main thread belongs to the innermost span, by the booking rules of
    the step table: a collective is collective time wherever it stands, forward inside backward is
    backward, evaluation outside any phase and uncovered time are other. The pieces of a step
    follow each other without a gap.
    """
    rows: list[tuple[int, int, str, int, int]] = []
    for (rank,), own in steps.drop_nulls(["rank", "duration_ns"]).group_by(
        "rank", maintain_order=True
    ):
        inner = _main_thread(spans.filter(pl.col("rank") == rank))
        starts = [span[0] for span in inner]
        # The latest end so far: where it passes a step's start, a span may reach into the step.
        reach = np.maximum.accumulate([span[1] for span in inner] or [0])
        for step, start, duration in (
            own.sort("start_ns").select("step", "start_ns", "duration_ns").iter_rows()
        ):
            end = start + duration
            low = int(np.searchsorted(reach, start, side="right"))
            high = int(np.searchsorted(starts, end, side="left"))
            touching = [(max(a, start), b, kind) for a, b, kind in inner[low:high] if b > start]
            for phase, left, right in _cut(start, end, touching):
                rows.append((rank, step, phase, left, right))
    schema = {
        "rank": pl.Int32,
        "step": pl.Int32,
        "phase": pl.String,
        "start_ns": pl.Int64,
        "end_ns": pl.Int64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _main_thread(spans: pl.DataFrame) -> list[tuple[int, int, str]]:
    of_steps = spans.filter(pl.col("kind") == "step")["thread"].drop_nulls()
    inner = spans.filter(
        ~pl.col("kind").is_in(["step", "note"])
        & pl.col("duration_ns").is_not_null()
        & ~pl.col("attributes").fill_null("").str.contains(r'"async":\s*(?:true|1)')
    )
    if len(of_steps):
        inner = inner.filter((pl.col("thread") == of_steps[0]).fill_null(value=True))
    inner = inner.with_columns(end=pl.col("start_ns") + pl.col("duration_ns"))
    inner = inner.sort(["start_ns", "end"], descending=[False, True])
    return list(inner.select("start_ns", "end", "kind").iter_rows())


def _booked(kind: str, around: str) -> str:
    """Return the class of a span inside ``around``; ``evaluation`` is kept apart until the end."""
    if around == Phase.COLLECTIVE or kind in _COLLECTIVES:
        return Phase.COLLECTIVE
    if around == "evaluation" or kind in _INHERIT:
        return around
    if kind == "evaluation":
        return "evaluation" if around == Phase.OTHER else around
    if kind == Phase.FORWARD and around == Phase.BACKWARD:
        return Phase.BACKWARD
    return kind if kind in set(PHASES) else around


def _cut(start: int, end: int, inner: list[tuple[int, int, str]]) -> Iterable[tuple[str, int, int]]:
    stack: list[tuple[int, str]] = [(end, Phase.OTHER)]
    cursor = start
    for left, right, kind in [*inner, (end, end, "")]:
        while len(stack) > 1 and stack[-1][0] <= left:
            until, booked = stack.pop()
            if until > cursor:
                yield _named(booked), cursor, until
                cursor = until
        if left > cursor:
            yield _named(stack[-1][1]), cursor, left
            cursor = left
        around_end, around = stack[-1]
        stack.append((min(right, around_end), _booked(kind, around)))


def _named(booked: str) -> str:
    return Phase.OTHER.value if booked == "evaluation" else str(booked)


def _curves(samples: pl.DataFrame) -> dict[tuple[str, str, str], Curve]:
    return {
        (str(node), str(device), str(quantity)): curve_of(
            str(quantity), rows["time_ns"].to_numpy(), rows["value"].to_numpy()
        )
        for (node, device, quantity), rows in samples.drop_nulls().group_by(
            "node", "device", "quantity"
        )
    }


class _Rank:
    """The curves of one rank: what is its own in full, what is common in part."""

    def __init__(self, place: Place, curves: Mapping[tuple[str, str, str], Curve]) -> None:
        mine = {k[1:]: c for k, c in curves.items() if k[0] == place.node and len(c.times) > 1}
        self.energy: list[tuple[Curve, float]] = []
        self.bytes: list[tuple[Curve, float]] = []
        self.nvlink: list[tuple[Curve, float]] = []
        gpu = place.gpu
        if gpu is not None:
            own = mine.get((gpu, "energy_j")) or mine.get((gpu, "power_w"))
            self.energy += [(own, place.gpu_share)] if own else []
            for way in ("receive", "transmit"):
                link = mine.get((gpu, f"nvlink_{way}_bytes"))
                self.nvlink += [(link, place.gpu_share)] if link else []
        self.sm = mine.get((gpu or "", "sm_activity"))
        self.memory = mine.get((gpu or "", "memory_activity"))
        for (device, quantity), curve in mine.items():
            if quantity == "energy_j" and not device.startswith("gpu"):
                self.energy.append((curve, place.share))
            elif quantity in {"receive_bytes", "transmit_bytes"}:
                if place.nics is None:
                    self.bytes.append((curve, place.share))
                elif device in place.nics:
                    self.bytes.append((curve, 1.0))


def _used(parts: list[tuple[Curve, float]], start: Ints, end: Ints) -> tuple[Floats, Floats]:
    """Return amount and error bound of spans; NaN where a curve does not cover one."""
    amount = np.zeros(len(start))
    error = np.zeros(len(start))
    if not parts:
        amount[:] = error[:] = np.nan
    for curve, share in parts:
        covered = curve.covers(start, end)
        grown = np.where(covered, curve.at(end) - curve.at(start), np.nan)
        amount += share * grown
        error += share * (curve.edge_error(start) + curve.edge_error(end))
    return amount, np.where(np.isnan(amount), np.nan, error)


def _mean(curve: Curve | None, start: Ints, end: Ints) -> Floats:
    if curve is None:
        return np.full(len(start), np.nan)
    seconds = np.maximum((end - start) / _NS, 1e-12)
    covered = curve.covers(start, end)
    return np.where(covered, (curve.at(end) - curve.at(start)) / seconds, np.nan)


def _columns(rank: _Rank, start: Ints, end: Ints) -> dict[str, Floats]:
    energy, energy_error = _used(rank.energy, start, end)
    nic, nic_error = _used(rank.bytes, start, end)
    return {
        "energy_j": energy,
        "energy_error_j": energy_error,
        "nic_bytes": nic,
        "nic_error_bytes": nic_error,
        "nvlink_bytes": _used(rank.nvlink, start, end)[0],
        "sm_activity": _mean(rank.sm, start, end),
        "memory_activity": _mean(rank.memory, start, end),
    }


def join_resources(
    steps: pl.DataFrame,
    spans: pl.DataFrame,
    samples: pl.DataFrame,
    places: Mapping[int, Place],
) -> ResourceUse:
    """Return steps and phases with what they used.

    ``steps`` and ``spans`` follow their tables, ``samples`` :data:`SAMPLES_SCHEMA`; times are on
    the node's Unix clock. ``places`` says where each rank ran; ranks without one have nulls.
    """
    curves = _curves(samples)
    ranks = {rank: _Rank(place, curves) for rank, place in places.items()}
    segments = phase_segments(steps, spans)
    with_use = _with_columns(steps, ranks, "start_ns", pl.col("start_ns") + pl.col("duration_ns"))
    pieces = _with_columns(segments, ranks, "start_ns", pl.col("end_ns"))
    phases = _sum_phases(pieces)
    missing = _missing(with_use, curves, ranks)
    steps_out = steps.drop("energy_j", "nic_bytes", strict=False).hstack(
        with_use.select(
            "energy_j",
            "energy_error_j",
            pl.col("nic_bytes").round().cast(pl.Int64),
            pl.col("nic_error_bytes").round().cast(pl.Int64),
            "sm_activity",
        )
    )
    order = [c for c in steps.columns if c in steps_out.columns]
    steps_out = steps_out.select(order + [c for c in steps_out.columns if c not in order])
    return ResourceUse(
        steps=steps_out,
        phases=phases,
        totals=_totals(with_use),
        sampling_ns=_sampling(curves),
        missing=missing,
    )


def _with_columns(
    rows: pl.DataFrame, ranks: Mapping[int, _Rank], start: str, end: pl.Expr
) -> pl.DataFrame:
    names = list(
        _columns(_Rank(Place(node="", gpu=None), {}), np.empty(0, "i8"), np.empty(0, "i8"))
    )
    values = {name: np.full(len(rows), np.nan) for name in names}
    starts = rows[start].fill_null(0).to_numpy()
    ends = rows.select(end.fill_null(0).alias("e"))["e"].to_numpy()
    of = rows["rank"].fill_null(-1).to_numpy()
    known = (ends > 0) & (starts > 0)
    for number, rank in ranks.items():
        here = (of == number) & known
        for name, found in _columns(rank, starts[here], ends[here]).items():
            values[name][here] = found
    columns = [pl.Series(n, v, nan_to_null=True) for n, v in values.items()]
    return rows.drop(names, strict=False).with_columns(columns)


def _sum_phases(pieces: pl.DataFrame) -> pl.DataFrame:
    length = pl.col("end_ns") - pl.col("start_ns")

    def total(name: str) -> pl.Expr:
        # a sum over pieces of which one is unknown is unknown
        return pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()).alias(name)

    def mean(name: str) -> pl.Expr:
        weighted = (pl.col(name) * length).sum() / length.filter(pl.col(name).is_not_null()).sum()
        return pl.when(pl.col(name).is_not_null().any()).then(weighted).alias(name)

    known = pieces.filter(pl.col("energy_j").is_not_null() | pl.col("nic_bytes").is_not_null())
    order = {phase.value: number for number, phase in enumerate(PHASES)}
    return (
        known.group_by("rank", "phase")
        .agg(
            length.sum().alias("duration_ns"),
            total("energy_j"),
            total("energy_error_j"),
            total("nic_bytes"),
            total("nic_error_bytes"),
            total("nvlink_bytes"),
            mean("sm_activity"),
            mean("memory_activity"),
        )
        .sort("rank", pl.col("phase").replace_strict(order, default=99, return_dtype=pl.Int32))
    )


def _totals(steps: pl.DataFrame) -> dict[str, float | None]:
    known = steps.filter(pl.col("energy_j").is_not_null())
    energy = float(known["energy_j"].sum()) if len(known) else None
    tokens = (
        float(known["tokens"].sum()) if len(known) and known["tokens"].null_count() == 0 else None
    )
    moved = steps["nic_bytes"].drop_nulls()
    return {
        "energy_j": energy,
        "energy_error_j": float(known["energy_error_j"].sum()) if len(known) else None,
        "steps_with_energy": float(len(known)),
        "nic_bytes": float(moved.sum()) if len(moved) else None,
        "tokens": tokens,
        "energy_per_token_j": energy / tokens if energy is not None and tokens else None,
    }


def _sampling(curves: Mapping[tuple[str, str, str], Curve]) -> int | None:
    gaps = [np.median(np.diff(c.times)) for c in curves.values() if len(c.times) > 1]
    return int(np.median(gaps)) if gaps else None


def _missing(
    steps: pl.DataFrame,
    curves: Mapping[tuple[str, str, str], Curve],
    ranks: Mapping[int, _Rank],
) -> tuple[str, ...]:
    said = []
    if not curves:
        return ("no fast samples were recorded: resources per step are unknown",)
    if not any(rank.energy for rank in ranks.values()):
        said.append("no energy or power readings: neither NVML nor RAPL is on these nodes")
    if not any(rank.bytes for rank in ranks.values()):
        said.append("no NIC byte counters were sampled")
    if any(rank.energy for rank in ranks.values()):
        unknown = int(steps["energy_j"].null_count())
        if unknown:
            said.append(f"{unknown} of {len(steps)} steps lie outside the sampled time")
    return tuple(said)

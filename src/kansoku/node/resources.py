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
from typing import TYPE_CHECKING

import polars as pl

from kansoku.model import PHASES, Phase
from kansoku.node.curves import CUMULATIVE, GAUGES, Curve, Floats, Ints, curve_of
from kansoku.node.sharing import NODE, OTHER_RANKS, Others, others_of

if TYPE_CHECKING:
    import numpy as np
else:
    from kansoku.node import later_numpy as np

__all__ = [
    "CUMULATIVE",
    "GAUGES",
    "GPU_INDEX",
    "SAMPLES_SCHEMA",
    "Curve",
    "Place",
    "ResourceUse",
    "curve_of",
    "gpu_uuids",
    "join_resources",
    "join_steps",
    "phase_segments",
]

SAMPLES_SCHEMA: dict[str, pl.DataType] = {
    "node": pl.String(),
    "device": pl.String(),  # gpu0, package-0, NIC name, node; a GPU's UUID with GPU_INDEX
    "quantity": pl.String(),  # of CUMULATIVE or GAUGES, OTHER_RANKS, GPU_INDEX
    "time_ns": pl.Int64(),  # Unix time of the reading
    "value": pl.Float64(),  # null only with OTHER_RANKS: some, and nobody knows how many
}
GPU_INDEX = "index"
"""Quantity that says which device a UUID is: 3 for ``gpu3``."""
_USE = (
    "energy_j",
    "energy_error_j",
    "nic_bytes",
    "nic_error_bytes",
    "nvlink_bytes",
    "sm_activity",
    "memory_activity",
)
_NS = 1e9
_COLLECTIVES = frozenset({"collective", "collective_wait"})
_INHERIT = frozenset({"gc", "compile"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank ran and what of the node is its own."""

    node: str
    gpu: str | None
    """Device of its samples, such as ``gpu3``; None on a node without GPUs, or see ``note``."""
    nics: tuple[str, ...] | None = None
    """Its own NICs where the map is known; None: an equal share of all NICs of the node."""
    share: float = 1.0
    """Part of what the node's ranks have in common (CPU energy, NICs): 1 / ranks on the node."""
    gpu_share: float = 1.0
    """Part of its GPU's energy and NVLink bytes: 1 / ranks on that GPU."""
    note: str | None = None
    """Why nobody knows which GPU it used: its energy is unknown then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUse:
    """What the join gives."""

    steps: pl.DataFrame
    """The steps given, with ``energy_j``, ``energy_error_j``, ``nic_bytes``, ``nic_error_bytes``,
    ``nvlink_bytes``, ``sm_activity`` and ``memory_activity`` filled."""
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
        starts = np.array([span[0] for span in inner], dtype=np.int64)
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
        for (node, device, quantity), rows in samples.filter(
            ~pl.col("quantity").is_in([OTHER_RANKS, GPU_INDEX])
        )
        .drop_nulls()
        .group_by("node", "device", "quantity")
    }


def gpu_uuids(samples: pl.DataFrame) -> dict[str, dict[str, str]]:
    """Return node to UUID to device of the GPUs that were sampled."""
    found: dict[str, dict[str, str]] = {}
    rows = samples.filter(pl.col("quantity") == GPU_INDEX).drop_nulls()
    for node, uuid, index in rows.select("node", "device", "value").unique().iter_rows():
        found.setdefault(node, {})[uuid] = f"gpu{index:.0f}"
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """A counter of which a rank has a share; ``measured`` is as it was read."""

    curve: Curve
    share: float
    measured: Curve


class _Rank:
    """The curves of one rank: what is its own in full, what is common in part."""

    def __init__(
        self,
        place: Place,
        curves: Mapping[tuple[str, str, str], Curve],
        others: Mapping[tuple[str, str], Others],
    ) -> None:
        mine = {k[1:]: c for k, c in curves.items() if k[0] == place.node and len(c.times) > 1}
        self.energy: list[_Part] = []
        self.bytes: list[_Part] = []
        self.nvlink: list[_Part] = []
        self.note = place.note
        gpu = place.gpu
        on_node = others.get((place.node, NODE))
        on_gpu = others.get((place.node, gpu or ""))
        self.shares_node = on_node is not None and on_node.any
        self.shares_gpu = on_gpu is not None and on_gpu.any
        if gpu is not None:
            own = mine.get((gpu, "energy_j")) or mine.get((gpu, "power_w"))
            self.energy += [_part(own, place.gpu_share, on_gpu)] if own else []
            for way in ("receive", "transmit"):
                link = mine.get((gpu, f"nvlink_{way}_bytes"))
                self.nvlink += [_part(link, place.gpu_share, on_gpu)] if link else []
        self.sm = _alone(mine.get((gpu or "", "sm_activity")), on_gpu)
        self.memory = _alone(mine.get((gpu or "", "memory_activity")), on_gpu)
        for (device, quantity), curve in mine.items():
            if quantity == "energy_j" and not device.startswith("gpu") and self.note is None:
                self.energy.append(_part(curve, place.share, on_node))
            elif quantity in {"receive_bytes", "transmit_bytes"}:
                if place.nics is None:
                    self.bytes.append(_part(curve, place.share, on_node))
                elif device in place.nics:
                    self.bytes.append(_part(curve, 1.0, on_gpu, own=1 / place.gpu_share))


def _part(curve: Curve, share: float, others: Others | None, *, own: float | None = None) -> _Part:
    """Return a rank's share of a counter, after other jobs had theirs."""
    if others is None or not others.any:
        return _Part(curve, share, curve)
    return _Part(others.split(curve, own or 1 / share), share, curve)


def _alone(curve: Curve | None, others: Others | None) -> Curve | None:
    if curve is None or others is None or not others.any or len(curve.times) < 2:
        return curve
    return others.alone(curve)


def _used(parts: list[_Part], start: Ints, end: Ints) -> tuple[Floats, Floats]:
    """Return amount and error bound of spans; NaN where a curve does not cover one."""
    amount = np.zeros(len(start))
    error = np.zeros(len(start))
    if not parts:
        amount[:] = error[:] = np.nan
    for part in parts:
        covered = part.curve.covers(start, end)
        grown = np.where(covered, part.curve.at(end) - part.curve.at(start), np.nan)
        amount += part.share * grown
        # Of the readings, not of the part that other jobs left: an upper limit all the more.
        edges = part.measured.edge_error(start) + part.measured.edge_error(end)
        error += part.share * edges
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
    ranks, curves = _ranks(samples, places)
    with_use = _with_use(steps, ranks)
    segments = phase_segments(steps, spans)
    pieces = _with_columns(segments, ranks, "start_ns", pl.col("end_ns"))
    return ResourceUse(
        steps=_joined(steps, with_use),
        phases=_sum_phases(pieces),
        totals=_totals(with_use),
        sampling_ns=_sampling(curves),
        missing=_missing(with_use, curves, ranks),
    )


def join_steps(
    steps: pl.DataFrame, samples: pl.DataFrame, places: Mapping[int, Place]
) -> pl.DataFrame:
    """Return the steps with what they used, as :func:`join_resources`, without their phases."""
    ranks, _ = _ranks(samples, places)
    return _joined(steps, _with_use(steps, ranks))


def _ranks(
    samples: pl.DataFrame, places: Mapping[int, Place]
) -> tuple[dict[int, _Rank], dict[tuple[str, str, str], Curve]]:
    curves, others = _curves(samples), others_of(samples)
    return {rank: _Rank(place, curves, others) for rank, place in places.items()}, curves


def _with_use(steps: pl.DataFrame, ranks: Mapping[int, _Rank]) -> pl.DataFrame:
    end = pl.col("start_ns") + pl.col("duration_ns")
    return _with_columns(steps, ranks, "start_ns", end)


def _joined(steps: pl.DataFrame, with_use: pl.DataFrame) -> pl.DataFrame:
    """Return the steps with the columns of use, in the order of the table."""
    bytes_columns = [n for n in _USE if "bytes" in n]
    used = with_use.select(_USE).with_columns(pl.col(bytes_columns).round().cast(pl.Int64))
    joined = steps.drop(_USE, strict=False).hstack(used)
    order = [c for c in steps.columns if c in joined.columns]
    return joined.select(order + [c for c in joined.columns if c not in order])


def _with_columns(
    rows: pl.DataFrame, ranks: Mapping[int, _Rank], start: str, end: pl.Expr
) -> pl.DataFrame:
    values = {name: np.full(len(rows), np.nan) for name in _USE}
    starts = rows[start].fill_null(0).to_numpy()
    ends = rows.select(end.fill_null(0).alias("e"))["e"].to_numpy()
    of = rows["rank"].fill_null(-1).to_numpy()
    known = (ends > 0) & (starts > 0)
    for number, rank in ranks.items():
        here = (of == number) & known
        for name, found in _columns(rank, starts[here], ends[here]).items():
            values[name][here] = found
    columns = [pl.Series(n, v, nan_to_null=True) for n, v in values.items()]
    return rows.drop(_USE, strict=False).with_columns(columns)


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
    return (*said, *_shared(ranks))


def _shared(ranks: Mapping[int, _Rank]) -> list[str]:
    """Say what is not wholly a rank's own, or nobody knows whose."""
    said = [
        f"rank {number}: energy unknown: {rank.note}" for number, rank in ranks.items() if rank.note
    ]
    if any(rank.shares_node for rank in ranks.values()):
        said.append(f"{_OTHER_JOBS} the node: CPU energy and NIC bytes are {_SPLIT}")
    gpus = [number for number, rank in ranks.items() if rank.shares_gpu]
    if gpus:
        whose = ", ".join(map(str, gpus[:8])) + (" …" if len(gpus) > 8 else "")
        said.append(
            f"{_OTHER_JOBS} a GPU of rank {whose}: its energy and NVLink bytes are {_SPLIT}, "
            "its activity is unknown then"
        )
    return said


_OTHER_JOBS = "other jobs used"
_SPLIT = "split among all ranks seen there, unknown where their number is"

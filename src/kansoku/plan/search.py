"""Enumerate, reject with reasons, evaluate and rank layouts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.models import ModelShape
from kansoku.errors import InputError
from kansoku.model import Mfu
from kansoku.plan.flops import step_flops, utilisation
from kansoku.plan.hardware import Hardware
from kansoku.plan.layout import RECOMPUTE, Layout, LayoutColumns, Training
from kansoku.plan.memory import MemoryColumns, memory_columns
from kansoku.plan.placement import Placement, place
from kansoku.plan.rules import DOES_NOT_FIT, SELECTIVE, reject, split_reasons
from kansoku.plan.timing import TimeColumns, step_time

__all__ = [
    "Candidate",
    "SearchResult",
    "Space",
    "best_of",
    "evaluate",
    "layouts",
    "pareto_front",
    "search",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Values to try; None tries every sensible one."""

    tp: Sequence[int] | None = None
    pp: Sequence[int] | None = None
    cp: Sequence[int] | None = None
    dp: Sequence[int] | None = None
    ep: Sequence[int] | None = None
    vp: Sequence[int] | None = None
    micro_batch: Sequence[int] | None = None
    recompute: Sequence[str] | None = None
    zero: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout with its predicted time and memory."""

    layout: Layout
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: Mfu
    hfu: Mfu
    memory_bytes: float
    breakdown: Mapping[str, float]
    """Seconds by what they are spent on; they sum to ``step_s``."""
    memory: Mapping[str, float]
    """Bytes by part; they sum to ``memory_bytes``."""
    placement: Placement
    fits: bool
    pareto: bool = False
    """No other layout is both faster and smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Candidates, fastest first, and why the rest is out."""

    candidates: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    rejected: Mapping[str, int]
    feasible: int
    tried: int


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def evaluate(
    shape: ModelShape, training: Training, columns: LayoutColumns, hardware: Hardware
) -> tuple[TimeColumns, MemoryColumns]:
    """Return time and memory of valid layouts."""
    memory = memory_columns(shape, training, columns)
    time, _ = step_time(shape, training, columns, hardware)
    return time, memory


def candidate(
    shape: ModelShape,
    training: Training,
    columns: LayoutColumns,
    hardware: Hardware,
    evaluated: tuple[TimeColumns, MemoryColumns],
    *,
    index: int,
    pareto: bool = False,
) -> Candidate:
    """Build the record of one evaluated layout."""
    time, memory = evaluated
    layout = columns.row(index)
    step_s = float(time.total[index])
    used = float(memory.total[index])
    flops = step_flops(
        shape, global_batch=training.global_batch, recompute=layout.recompute, seq=training.seq
    )
    peak = hardware.accelerator.peak(training.precision) * layout.gpus
    source = f"{training.precision} dense x {layout.gpus}: {hardware.accelerator.source}"
    counts = {"parameters", "layer_matrix_parameters"}
    mfu, hfu = (
        utilisation(flops, step_s=step_s, peak_flops=peak, peak_source=source, convention=name)
        for name in ("full_attention", "hardware")
    )
    return Candidate(
        layout=layout,
        step_s=step_s,
        tokens_per_s_per_gpu=training.tokens / step_s / layout.gpus,
        mfu=mfu,
        hfu=hfu,
        memory_bytes=used,
        breakdown={f.name: float(getattr(time, f.name)[index]) for f in fields(time)},
        memory={
            f.name: float(getattr(memory, f.name)[index])
            for f in fields(memory)
            if f.name not in counts
        },
        placement=place(layout, hardware),
        fits=used <= hardware.memory_bytes,
        pareto=pareto,
    )


def _grid(*axes: Sequence[int]) -> list[NDArray[np.int64]]:
    return [
        g.ravel() for g in np.meshgrid(*(np.array(a, dtype=np.int64) for a in axes), indexing="ij")
    ]


def _splits(shape: ModelShape, space: Space, gpus: int) -> list[tuple[int, int, int, int, int]]:
    """Return every (tp, pp, cp, dp, ep) whose product is ``gpus``."""
    found = []
    all_divisors = _divisors(gpus)
    experts = _divisors(shape.experts) if shape.experts else [1]
    for tp in space.tp or all_divisors:
        for pp in space.pp or _divisors(gpus // tp) if gpus % tp == 0 else ():
            rest, odd = divmod(gpus, tp * pp)
            if odd:
                continue
            for cp in space.cp or _divisors(rest):
                dp, odd = divmod(rest, cp)
                if odd or (space.dp is not None and dp not in space.dp):
                    continue
                found += [(tp, pp, cp, dp, ep) for ep in space.ep or experts]
    return found


def _inner(shape: ModelShape, training: Training, space: Space) -> list[NDArray[np.int64]]:
    """Return the grid of (vp, micro-batch, recomputation, ZeRO)."""
    chunks = sorted(set(_divisors(shape.layers)) | set(_divisors(shape.layers + 2)))
    vp = space.vp or [n for n in chunks if n <= MAX_CHUNKS]
    micro = space.micro_batch or [n for n in (1, 2, 4, 8, 16) if n <= training.global_batch]
    recompute = [RECOMPUTE.index(name) for name in space.recompute or RECOMPUTE]
    return _grid(vp, micro, recompute, space.zero if space.zero is not None else (0, 1, 2, 3))


MAX_CHUNKS = 16
"""Interleaving beyond this is not run by any published job."""


def pareto_front(time: NDArray[np.float64], memory: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the rows that nothing beats in both time and memory, fastest first."""
    order = np.lexsort((memory, time))
    lowest = np.minimum.accumulate(memory[order])
    best_before = np.concatenate(([np.inf], lowest[:-1]))
    return order[memory[order] < best_before]


def _asked(space: Space) -> str:
    """Return the sizes that a space was narrowed to, for an error."""
    sizes = {name: getattr(space, name) for name in ("tp", "pp", "cp", "dp", "ep")}
    told = ", ".join(
        f"{name} {'/'.join(map(str, values))}" for name, values in sizes.items() if values
    )
    return f" ({told})" if told else ""


def _enumerate(
    shape: ModelShape,
    training: Training,
    hardware: Hardware,
    space: Space,
    *,
    searching: bool = True,
) -> tuple[LayoutColumns, dict[str, int], int]:
    """Return the valid layouts, the counts of the rest by reason, and how many there were."""
    gpus = hardware.gpus
    splits = np.array(_splits(shape, space, gpus), dtype=np.int64).reshape(-1, 5)
    inner = _inner(shape, training, space)
    width = len(inner[0])
    if not len(splits) or not width:
        raise InputError(
            f"no split of {gpus} GPUs has the sizes asked for{_asked(space)}",
            remedy="tp x pp x cp x dp must equal the number of GPUs",
        )
    # Reasons that concern the split alone are judged once for all its inner combinations.
    ones = np.ones(len(splits), dtype=np.int64)
    tp, pp, cp, dp, ep = splits.T
    outer = LayoutColumns(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vp=ones, micro_batch=ones, recompute=0 * ones,
        zero=0 * ones,
    )  # fmt: skip
    rejected: dict[str, int] = {}
    good = np.ones(len(splits), dtype=np.bool_)
    for reason, bad in split_reasons(shape, training, outer, hardware.scale_up_domain):
        if number := int((good & bad).sum()):
            rejected[reason] = number * width
        good &= ~bad
    outer = outer.take(good)
    rows = len(outer)
    vp, micro, recompute, zero = (np.tile(axis, rows) for axis in inner)
    columns = LayoutColumns(
        **{name: np.repeat(getattr(outer, name), width) for name in ("tp", "pp", "dp", "cp", "ep")},
        vp=vp, micro_batch=micro, recompute=recompute, zero=zero,
    )  # fmt: skip
    good, counts = reject(
        shape, training, columns, domain=hardware.scale_up_domain, searching=searching
    )
    if searching and space.recompute is not None and SELECTIVE in counts:
        # Asked for by name: pointless is no reason.
        good, counts = reject(
            shape, training, columns, domain=hardware.scale_up_domain, searching=False
        )
    rejected |= counts
    return columns.take(good), rejected, len(splits) * width


def layouts(
    shape: ModelShape, training: Training, hardware: Hardware, space: Space
) -> LayoutColumns:
    """Return every valid layout of the space, whether it fits in memory or not."""
    return _enumerate(shape, training, hardware, space)[0]


def search(
    shape: ModelShape,
    training: Training,
    hardware: Hardware,
    *,
    space: Space | None = None,
    top: int = 10,
) -> SearchResult:
    """Rank every layout of the job on ``hardware.gpus`` GPUs by predicted step time.

    Each combination of the space counts once: as a candidate or under its first reason.
    """
    columns, rejected, tried = _enumerate(shape, training, hardware, space or Space())
    memory = memory_columns(shape, training, columns)
    fits = memory.total <= hardware.memory_bytes
    if number := int((~fits).sum()):
        rejected[DOES_NOT_FIT] = number
    columns = columns.take(fits)
    result = SearchResult(
        candidates=(), pareto=(), rejected=rejected, feasible=len(columns), tried=tried
    )
    if not len(columns):
        return result
    evaluated = evaluate(shape, training, columns, hardware)
    total, used = evaluated[0].total, evaluated[1].total
    front = pareto_front(total, used)
    on_front = set(front.tolist())
    order = np.lexsort((used, total))[:top]

    def build(index: int) -> Candidate:
        return candidate(
            shape, training, columns, hardware, evaluated, index=index, pareto=index in on_front
        )

    return SearchResult(
        candidates=tuple(build(int(i)) for i in order),
        pareto=tuple(build(int(i)) for i in front),
        rejected=rejected,
        feasible=len(columns),
        tried=result.tried,
    )


def best_of(shape: ModelShape, training: Training, hardware: Hardware, space: Space) -> Candidate:
    """Return the fastest layout of a narrow space that fits, else the smallest one.

    Raises InputError with the reasons where the space holds no valid layout.
    """
    columns, rejected, _ = _enumerate(shape, training, hardware, space, searching=False)
    if not len(columns):
        reasons = "; ".join(rejected) or "tp x pp x cp x dp does not equal the number of GPUs"
        raise InputError(
            f"this layout is impossible on {hardware.gpus} GPUs: {reasons}",
            remedy="change the sizes given, or leave them out to have them searched",
        )
    memory = memory_columns(shape, training, columns).total
    fits = memory <= hardware.memory_bytes
    columns = columns.take(fits) if fits.any() else columns.take(np.array([int(memory.argmin())]))
    evaluated = evaluate(shape, training, columns, hardware)
    index = int(np.lexsort((evaluated[1].total, evaluated[0].total))[0])
    return candidate(shape, training, columns, hardware, evaluated, index=index)

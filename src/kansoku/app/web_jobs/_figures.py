"""Figures of a run for its pages: rates over steps, the rank × step matrix, one step's spans."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.app.report import LoadedRun, Report
from kansoku.model import PHASES, Phase
from kansoku.trace.throughput import whole_steps

__all__ = [
    "MATRIX",
    "PHASE_TITLES",
    "Matrix",
    "StepSpans",
    "folded",
    "kept_step_spans",
    "matrix",
    "rates",
    "step_collectives",
    "step_spans",
    "steps_with_spans",
]

Ints = npt.NDArray[np.int64]
PHASE_TITLES: Mapping[Phase, str] = {
    Phase.DATA_WAIT: "data wait",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.COLLECTIVE: "collective",
    Phase.CHECKPOINT: "checkpoint",
    Phase.OTHER: "other",
}
MATRIX: Mapping[str, str] = {
    "own": "Own work of every rank",
    "step": "Step time of every rank",
    **{phase.value: f"{PHASE_TITLES[phase].capitalize()} of every rank" for phase in PHASES},
}
"""What the colours of the rank × step matrix may show."""
_POINTS = 600


# Over steps


def rates(answer: Report) -> pl.DataFrame:
    """Return one row per step that is complete on every rank.

    ``step, start_ns, duration_ns`` of the job (:func:`kansoku.trace.throughput.job_steps`),
    ``tokens_per_s_per_gpu`` and ``mfu`` (null where tokens, FLOPs or the peak are unknown), and
    each phase's mean over ranks.
    """
    run = answer.run
    steps = run.steps.filter(pl.col("complete"))
    layout = run.layout
    shards = max(layout.tp * layout.pp * layout.other.get("cp", 1), 1)
    peak = None if answer.mfu is None else answer.mfu.peak_flops
    seconds = pl.col("duration_ns") / 1e9

    def total(name: str) -> pl.Expr:
        # A sum over some of the ranks only would be too low.
        return pl.when(pl.col(name).count() == pl.len()).then(pl.col(name).sum()).alias(name)

    work = steps.group_by("step").agg(total("tokens"), total("flops"))
    return (
        whole_steps(steps, run.clocks)
        .filter(pl.col("duration_ns") > 0)
        .join(work, on="step", how="left", maintain_order="left")
        .with_columns(
            tokens_per_s_per_gpu=pl.col("tokens") / shards / seconds / pl.col("ranks"),
            mfu=pl.col("flops") / seconds / pl.lit(peak, dtype=pl.Float64),
        )
        .drop("ranks", "complete", "tokens", "flops")
    )


def folded(frame: pl.DataFrame, *, points: int = _POINTS) -> pl.DataFrame:
    """Return at most ``points`` rows: means of equal numbers of steps, each named by its first."""
    bucket = max(-(-len(frame) // points), 1)
    if bucket == 1:
        return frame
    first = [name for name in ("step", "start_ns") if name in frame.columns]
    return (
        frame.with_row_index()
        .group_by(pl.col("index") // bucket, maintain_order=True)
        .agg(pl.col(first).first(), pl.exclude("index", *first).mean())
        .drop("index")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A quantity of ranks × steps, ms; NaN where a rank has no such step."""

    quantity: str
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    values: npt.NDArray[np.float32]
    """``(ranks, steps)``."""


def matrix(run: LoadedRun, quantity: str) -> Matrix:
    """Return the quantity (a key of :data:`MATRIX`) of every rank and step."""
    delay = pl.col("run_delay_ns").fill_null(0) if "run_delay_ns" in run.steps.columns else 0
    value = {
        "own": (pl.col("duration_ns") - pl.col("collective_ns").fill_null(0) - delay).clip(0),
        "step": pl.col("duration_ns"),
    }.get(quantity)
    if value is None:
        value = pl.col(f"{quantity}_ns")
    frame = run.steps.filter(pl.col("rank").is_not_null() & pl.col("step").is_not_null()).select(
        "rank", "step", value=value / 1e6
    )
    ranks, rows = np.unique(frame["rank"].to_numpy(), return_inverse=True)
    steps, columns = np.unique(frame["step"].to_numpy(), return_inverse=True)
    values = np.full((len(ranks), len(steps)), np.nan, np.float32)
    values[rows, columns] = frame["value"].cast(pl.Float32).fill_null(np.nan).to_numpy()
    return Matrix(
        quantity=quantity,
        ranks=tuple(int(r) for r in ranks),
        steps=tuple(int(s) for s in steps),
        values=values,
    )


# One step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """Every rank's spans of one step on one clock, in drawing order."""

    step: int
    frame: pl.DataFrame
    """``rank, id, kind, name, start_ns, duration_ns, open, group, sequence, bytes, dtype, cpu_ns,
    parent, lane, depth, join, late, late_ns, wait_ns``, sorted by lane, depth and start."""
    ranks: tuple[int, ...]
    start_ns: int
    """Earliest start."""
    end_ns: int


def steps_with_spans(run: LoadedRun) -> list[int]:
    """Return the steps of which there are more spans than the step itself."""
    inner = run.spans.filter(
        pl.col("step").is_not_null() & (pl.col("kind") != "step") & (pl.col("kind") != "note")
    )
    return sorted(inner["step"].unique().to_list())


_LATE_SHARE = 0.02
"""A collective is held up where its members' arrivals spread over more of the step than this."""


def step_spans(run: LoadedRun, step: int) -> StepSpans:
    """Return the spans of one step, collectives joined across ranks and late arrivals marked.

    Late: the rank came in the later half of the arrivals at a collective whose arrivals spread
    over 2 % of the step or more, and over more than the transfer itself took.
    """
    spans = run.spans.filter(
        (pl.col("step") == step) & pl.col("rank").is_not_null() & (pl.col("kind") != "note")
    )
    start = run.clocks.corrected("start_ns") if run.clocks.applied else pl.col("start_ns")
    spans = spans.with_columns(start_ns=start.cast(pl.Int64))
    ends = spans["start_ns"] + spans["duration_ns"].fill_null(0)
    end = int(ends.to_numpy().max()) if len(spans) else 0
    spans = spans.with_columns(
        open=pl.col("duration_ns").is_null(),
        duration_ns=pl.coalesce("duration_ns", pl.lit(end) - pl.col("start_ns")).clip(0),
    )
    spans = _joined(run, spans, step)
    ranks = tuple(sorted(spans["rank"].unique().to_list()))
    lanes = {rank: number for number, rank in enumerate(ranks)}
    spans = spans.with_columns(
        lane=pl.col("rank").replace_strict(lanes, default=0, return_dtype=pl.Int32)
    )
    spans = spans.with_columns(depth=pl.Series(_depths(spans), dtype=pl.Int32))
    spans = spans.sort("lane", "depth", "start_ns", "id", maintain_order=True)
    first = spans["start_ns"].min()
    return StepSpans(
        step=step,
        frame=spans,
        ranks=ranks,
        start_ns=first if isinstance(first, int) else 0,
        end_ns=end,
    )


_kept: OrderedDict[tuple[int, int], tuple[LoadedRun, StepSpans]] = OrderedDict()
_lock = Lock()


def kept_step_spans(run: LoadedRun, step: int) -> StepSpans:
    """Return :func:`step_spans`, kept for the request that follows the page's own."""
    key = (id(run), step)
    with _lock:
        # The run is held beside the answer, so its id cannot be another's.
        if key in _kept and _kept[key][0] is run:
            return _kept[key][1]
    found = step_spans(run, step)
    with _lock:
        _kept[key] = (run, found)
        while len(_kept) > 1:
            _kept.popitem(last=False)
    return found


def _joined(run: LoadedRun, spans: pl.DataFrame, step: int) -> pl.DataFrame:
    """Add the run-wide group of collectives, their number (``join``) and lateness."""
    keys = run.collectives.filter(pl.col("step") == step).select("rank", "id", key="group")
    met = step_collectives(run, step)
    number = met.select("group", "sequence", join=pl.int_range(pl.len(), dtype=pl.Int32))
    arrived = (
        run.arrivals.filter(pl.col("step") == step)
        .select("rank", "group", "sequence", "late_ns", "wait_ns")
        .join(number, on=["group", "sequence"], how="left")
        .join(
            met.select("group", "sequence", "spread_ns", "held_up"),
            on=["group", "sequence"],
            how="left",
        )
        .unique(["rank", "group", "sequence"], keep="first")
    )
    joined = (
        spans.join(keys.unique(["rank", "id"]), on=["rank", "id"], how="left")
        .with_columns(group=pl.coalesce("key", "group"))
        .drop("key")
        .join(arrived, on=["rank", "group", "sequence"], how="left")
    )
    collective = pl.col("kind") == "collective"
    return joined.with_columns(
        join=pl.when(collective).then("join").fill_null(-1),
        late=(
            collective & pl.col("held_up") & (pl.col("late_ns") * 2 > pl.col("spread_ns"))
        ).fill_null(value=False),
    ).drop("held_up", "spread_ns")


def step_collectives(run: LoadedRun, step: int) -> pl.DataFrame:
    """Return the step's synchronous collectives in order of their first arrival.

    ``group, sequence, op, ranks, first_rank, last_rank, first_ns, spread_ns, transfer_ns, bytes,
    held_up``.
    """
    rows = run.arrivals.filter(pl.col("step") == step)
    duration = run.steps.filter(pl.col("step") == step)["duration_ns"].max()
    least = _LATE_SHARE * (duration if isinstance(duration, int) else 0)
    return (
        rows.group_by("group", "sequence")
        .agg(
            op=pl.col("op").first(),
            ranks=pl.len(),
            first_rank=pl.col("rank").sort_by("arrival_ns").first(),
            last_rank=pl.col("rank").sort_by("arrival_ns").last(),
            first_ns=pl.col("first_ns").min(),
            spread_ns=pl.col("late_ns").max(),
            transfer_ns=(pl.col("finish_ns") - pl.col("last_ns")).clip(0).median(),
            bytes=pl.col("bytes").max(),
        )
        .with_columns(
            held_up=(pl.col("spread_ns") > 0)
            & (pl.col("spread_ns") >= least)
            & (pl.col("spread_ns") > pl.col("transfer_ns").fill_null(0))
        )
        .sort("first_ns", "group", "sequence")
    )


def _depths(spans: pl.DataFrame) -> Ints:
    """Return each span's row within its lane: nested ones by nesting, overlapping ones beside.

    What another thread did, or what was issued without blocking, overlaps the main thread's spans
    without nesting in them; it gets rows of its own below.
    """
    count = len(spans)
    depth = np.zeros(count, np.int64)
    if not count:
        return depth
    main = spans.filter(pl.col("kind") == "step").group_by("rank").agg(pl.col("thread").first())
    threads = dict(main.iter_rows())
    own = pl.col("rank").replace_strict(threads, default=None, return_dtype=pl.Int64)
    aside = (
        spans.select(
            (
                (pl.col("thread") != own).fill_null(value=False)
                | pl.col("attributes")
                .str.contains(r'"async": ?(true|1|"true")')
                .fill_null(value=False)
            )
            & (pl.col("kind") != "step")
        )
        .to_series()
        .to_numpy()
    )
    lane = spans["lane"].to_numpy().astype(np.int64)
    start = spans["start_ns"].to_numpy().astype(np.int64)
    end = start + spans["duration_ns"].to_numpy().astype(np.int64)
    width = int(end.max() - start.min()) + 1
    base = int(start.min())
    place = np.flatnonzero(~aside)
    a, b = start[place] - base + lane[place] * width, end[place] - base + lane[place] * width
    is_step = (spans["kind"] == "step").to_numpy()[place]
    order = np.lexsort((-b, ~is_step, a))
    level = np.arange(len(place)) - np.searchsorted(np.sort(b), a[order], side="right")
    # Zero-length spans end where they begin: they count as closed already.
    depth[place[order]] = np.maximum(level, 0)
    deepest = np.zeros(int(lane.max()) + 1, np.int64)
    np.maximum.at(deepest, lane[place], depth[place] + 1)
    _beside(np.flatnonzero(aside), lane, start, end, depth, deepest)
    return depth


def _beside(where: Ints, lane: Ints, start: Ints, end: Ints, depth: Ints, deepest: Ints) -> None:
    """Give spans that overlap the first free row below their lane's nested ones."""
    free: dict[int, list[int]] = {}
    for n in where[np.lexsort((end[where], start[where]))]:
        rows = free.setdefault(int(lane[n]), [])
        for number, until in enumerate(rows):
            if until <= start[n]:
                rows[number] = int(end[n])
                depth[n] = deepest[lane[n]] + number
                break
        else:
            depth[n] = deepest[lane[n]] + len(rows)
            rows.append(int(end[n]))

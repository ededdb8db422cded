"""Step time, tokens per second, model FLOPs and MFU of a run."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from kansoku.errors import InputError
from kansoku.model.mfu import Mfu, StepWindow
from kansoku.model.phase import PHASES, Phase
from kansoku.model.run import RunFacts
from kansoku.stats.change import ChangePoint, change_point, theil_sen
from kansoku.trace.clocks import ClockModel
from kansoku.trace.layout import Layout

__all__ = ["Throughput", "job_steps", "measure", "model_utilisation", "whole_steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What the job does per second, over its complete steps after warm-up."""

    steps: int
    """Steps begun on any rank; what runs after the last update begins one more."""
    complete_steps: int
    """Steps complete on every rank seen."""
    window: StepWindow | None
    ranks_seen: int
    """Ranks whose steps were seen; tokens and FLOPs are theirs, of fewer than the job has too."""
    mean_step_ns: float | None
    """Time of the window over its steps: what tokens/s and MFU divide by."""
    median_step_ns: float | None
    p95_step_ns: float | None
    trend_ratio: float | None
    """Change of the step time over the window, as a share of the median; None if unclear."""
    change: ChangePoint | None
    """A lasting change of the step time; ``index`` counts from the window's first step."""
    tokens_per_step: float | None
    flops_per_step: float | None
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    breakdown: dict[Phase, float] | None
    """Phase to its share of the ranks' time, summing to 1."""


def job_steps(steps: pl.DataFrame, clocks: ClockModel | None = None) -> pl.DataFrame:
    """Return the steps of the job: ``step, start_ns, duration_ns, ranks, complete``, phases' means.

    A step of the job lasts from when the last rank ended the step before until the last rank ends
    it. A rank's steps follow each other without a gap, so that is from the last start to the last
    end, and the durations add up to the time on the wall. (The longest of the ranks' own durations
    do not: each rank notices the end of a step a little early or late, the longest is the one that
    was late this time, and the more ranks, the more it is too long.) ``steps`` are step rows; of a
    rank that did a step twice, having been started again, the later one counts.
    """
    start = pl.col("start_ns") if clocks is None else clocks.corrected("start_ns")
    if steps["step"].null_count() or steps["duration_ns"].null_count():
        steps = steps.drop_nulls(["step", "duration_ns"])  # a copy: only where it must be
    ends = steps.with_columns(start_ns=start, end_ns=start + pl.col("duration_ns"))
    key = pl.col("rank").cast(pl.Int64) * (1 << 32) + pl.col("step")
    if ends.select(key.n_unique()).item() < len(ends):
        ends = _last_of_each(ends)
    phases = [f"{p.value}_ns" for p in PHASES if f"{p.value}_ns" in steps.columns]
    return (
        ends.group_by("step")
        .agg(
            duration_ns=pl.col("end_ns").max() - pl.col("start_ns").max(),
            start_ns=pl.col("start_ns").max(),
            ranks=pl.len(),
            complete=pl.col("complete").all(),
            **{name: pl.col(name).mean() for name in phases},
        )
        .sort("step")
    )


def _last_of_each(rows: pl.DataFrame) -> pl.DataFrame:
    """Return one row a rank and step: the one that started last."""
    return rows.sort("start_ns").unique(["rank", "step"], keep="last")


def whole_steps(steps: pl.DataFrame, clocks: ClockModel | None = None) -> pl.DataFrame:
    """Return :func:`job_steps` of the steps that are complete on every rank seen."""
    ranks = steps["rank"].n_unique()
    by_step = job_steps(steps, clocks)
    return by_step.filter(pl.col("complete") & (pl.col("ranks") == ranks))


def measure(
    steps: pl.DataFrame, facts: RunFacts, layout: Layout, clocks: ClockModel | None = None
) -> Throughput:
    """Return step time, trend and throughput; warm-up (the first tenth, at least one) is left out.

    Tokens of a step are counted once per replica: tensor, pipeline and context shards see the
    same ones. They are those of the ranks seen: nothing is made up for others.
    """
    whole = whole_steps(steps, clocks)
    begun = steps["step"].n_unique()
    skip = min(max(1, len(whole) // 10), max(len(whole) - 1, 0))
    used = whole[skip:]
    if used.is_empty():
        return _nothing(begun, len(whole))
    window = StepWindow(from_step=int(used["step"][0]), to_step=int(used["step"][-1]))
    durations = used["duration_ns"].to_numpy().astype(np.float64)
    median = float(np.median(durations))
    rows = steps.filter(pl.col("step").is_in(used["step"].implode()))
    if len(rows) > used["ranks"].sum():
        rows = _last_of_each(rows)
    seen = rows["rank"].n_unique()
    total = float(rows["duration_ns"].sum())
    breakdown = {p: float(rows[f"{p.value}_ns"].sum()) / total for p in PHASES} if total else None
    # Seconds per step over the whole window: pauses count, as they do for the user.
    mean_s = float(durations.mean()) * 1e-9
    count = len(used)
    shards = max(layout.tp * layout.pp * layout.other.get("cp", 1), 1)
    tokens = _per_step(rows, "tokens", count, len(facts.ranks))
    tokens = None if tokens is None else tokens / shards
    flops = _per_step(rows, "flops", count, len(facts.ranks))
    change = change_point(durations) if count >= 20 else None
    if change is not None and (
        change.score < 8 or abs(change.after - change.before) < 0.1 * change.before
    ):
        change = None
    slope = theil_sen(np.arange(count), durations).slope
    trend = slope * (count - 1) / median if count >= 20 and median else None
    rate = None if tokens is None or not mean_s else tokens / mean_s
    return Throughput(
        steps=begun,
        complete_steps=len(whole),
        window=window,
        ranks_seen=seen,
        mean_step_ns=mean_s * 1e9,
        median_step_ns=median,
        p95_step_ns=float(np.percentile(durations, 95)),
        trend_ratio=trend,
        change=change,
        tokens_per_step=tokens,
        flops_per_step=flops,
        tokens_per_s=rate,
        tokens_per_s_per_gpu=None if rate is None else rate / seen,
        breakdown=breakdown,
    )


def _nothing(steps: int, whole: int) -> Throughput:
    return Throughput(
        steps=steps,
        complete_steps=whole,
        window=None,
        ranks_seen=0,
        mean_step_ns=None,
        median_step_ns=None,
        p95_step_ns=None,
        trend_ratio=None,
        change=None,
        tokens_per_step=None,
        flops_per_step=None,
        tokens_per_s=None,
        tokens_per_s_per_gpu=None,
        breakdown=None,
    )


def _per_step(rows: pl.DataFrame, column: str, steps: int, ranks: int) -> float | None:
    """Return the job's mean per step; None unless every rank knows its own."""
    known = rows.filter(pl.col(column).is_not_null())
    if known.is_empty() or known["rank"].n_unique() < min(ranks, rows["rank"].n_unique()):
        return None
    return float(known[column].sum()) / steps


def model_utilisation(
    throughput: Throughput, *, convention: str, peak_flops: float | None, peak_source: str
) -> tuple[Mfu | None, str | None]:
    """Return MFU, or None with the reason why there is none."""
    if throughput.flops_per_step is None:
        return None, "the model FLOPs of a step are not known on every rank"
    if peak_flops is None:
        return None, peak_source
    if throughput.window is None or not throughput.mean_step_ns:
        return None, "no step is complete on every rank"
    rate = throughput.flops_per_step / (throughput.mean_step_ns * 1e-9)
    try:
        mfu = Mfu(
            value=rate / peak_flops,
            convention=convention,
            peak_flops=peak_flops,
            peak_source=peak_source,
            window=throughput.window,
        )
    except InputError as error:
        return None, str(error)
    return mfu, None

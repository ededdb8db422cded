"""How reliability falls with job size: MTTF, ETTR, lost GPU-hours, checkpoint interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.jobs.formulas import (
    checkpoint_interval_daly,
    checkpoint_interval_daly_higher_order,
    checkpoint_interval_young,
    expected_ettr,
    rate_per_1000_node_days,
)
from kansoku.jobs.runs import NS_PER_HOUR, SizeBucket, node_buckets, size_buckets
from kansoku.stats.intervals import mean_time_interval, rate_ratio_interval

__all__ = [
    "Answer",
    "Bucket",
    "CheckpointAdvice",
    "CovariateRow",
    "Ettr",
    "LostHours",
    "Reliability",
    "ReliabilityPolicy",
    "Steadier",
    "by_covariate",
    "reliability",
    "steadier",
]

_SECONDS = 3600.0
Answer = str
"""``yes``, ``no`` or ``cannot tell``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityPolicy:
    """What is assumed where the history does not say."""

    confidence: float = 0.9
    """Of the χ² intervals."""
    restart_s: float = 300.0
    """u₀: from the start of an incarnation to its first useful step."""
    write_s: float = 60.0
    """w: seconds that writing a checkpoint blocks the training."""
    interval_s: float = 3600.0
    """Δt: seconds between checkpoints."""
    gpus_per_node: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Failures of jobs of one size. Hours are of running jobs, not of GPUs."""

    low: int
    high: int
    jobs: int
    failures: int
    run_hours: float
    mttf_h: float | None
    """None without a failure: only the lower end of the interval is known then."""
    interval_h: tuple[float | None, float | None]
    projected_mttf_h: float | None
    """From the rate of all nodes, at the run-hour weighted mean size of the bucket."""
    mean_size: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ettr:
    """Effective training time ratio of runs that were interrupted and of all."""

    measured: float | None
    runs: int
    """Logical runs behind ``measured``."""
    interruptions: int
    expected: float | None
    expected_for_gpus: int | None
    """The size that ``expected`` is for: the run-hour weighted mean of multi-node jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostHours:
    """GPU-hours that infrastructure failures cost."""

    without_checkpoints: float
    """Everything that failed incarnations had done."""
    with_checkpoints: float
    """Half an interval and a restart each, never more than was done."""
    share: float | None
    """``with_checkpoints`` of all GPU-hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAdvice:
    """Best interval for one size."""

    gpus: int
    mttf_h: float
    measured: bool
    """False: projected, because too few failures were seen at this size."""
    young_s: float
    daly_s: float
    higher_order_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadier:
    """Whether jobs of ``a`` nodes run longer without failure than jobs of ``b``."""

    a_nodes: int
    b_nodes: int
    answer: Answer
    a: Bucket
    b: Bucket
    ratio: float | None
    """Failure rate per run-hour of b over that of a."""
    ratio_interval: tuple[float | None, float | None]
    projected_ratio: float
    """What independent nodes would give: b / a."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CovariateRow:
    """Failure rate of nodes in one range of a measured quantity."""

    name: str
    unit: str
    low: float
    high: float
    nodes: int
    failures: int
    node_days: float
    rate_per_1000_node_days: float | None
    interval: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Everything ``jobs reliability`` shows."""

    buckets: tuple[Bucket, ...]
    rate_per_1000_node_days: float | None
    rate_interval: tuple[float | None, float | None]
    failures: int
    node_days: float
    ettr: Ettr
    lost: LostHours
    checkpoint: tuple[CheckpointAdvice, ...]
    steadier: Steadier | None
    causes: Mapping[str, tuple[int, float]]
    """Cause to (jobs, GPU-hours)."""
    policy: ReliabilityPolicy


def reliability(
    jobs: pl.DataFrame,
    *,
    policy: ReliabilityPolicy,
    compare: tuple[int, int] | None = None,
) -> Reliability:
    """Answer for jobs of a window.

    ``jobs`` went through in_window, with_outcomes and with_logical_runs and has ``cause`` and
    ``infrastructure`` (boolean) from the attribution.
    """
    # A job that died at once ran for no time, and failed all the same.
    ran = jobs.filter(pl.col("start_ns").is_not_null())
    failures = int(ran["infrastructure"].sum())
    node_hours = float(ran["node_hours"].sum())
    rate = rate_per_1000_node_days(failures, node_hours)
    low, high = _mean_interval(failures, node_hours, policy.confidence)
    gpu_sizes = size_buckets(int(ran["size_gpus"].max() or 1))  # type: ignore[arg-type]
    buckets = tuple(
        bucket
        for size in gpu_sizes
        if (bucket := _bucket(ran, "size_gpus", size, rate, policy)).jobs
    )
    causes = {
        cause: (n, hours)
        for cause, n, hours in ran.group_by("cause")
        .agg(n=pl.len(), hours=pl.col("gpu_hours").sum())
        .sort("hours", descending=True)
        .iter_rows()
    }
    return Reliability(
        buckets=buckets,
        rate_per_1000_node_days=rate,
        rate_interval=(24_000 / high if high else 0.0, 24_000 / low if low else None)
        if node_hours > 0
        else (None, None),
        failures=failures,
        node_days=node_hours / 24,
        ettr=_ettr(ran, rate, policy),
        lost=_lost(ran, policy),
        checkpoint=_checkpoints(buckets, policy),
        steadier=_compare(ran, rate, policy, compare),
        causes=causes,
        policy=policy,
    )


def _mean_interval(
    failures: int, exposure: float, confidence: float
) -> tuple[float | None, float | None]:
    if exposure <= 0:
        return None, None
    return mean_time_interval(failures, exposure, confidence=confidence)


def _bucket(
    ran: pl.DataFrame, column: str, size: SizeBucket, rate: float | None, policy: ReliabilityPolicy
) -> Bucket:
    part = ran.filter(pl.col(column).is_between(*size))
    hours = float(part["run_ns"].sum()) / NS_PER_HOUR
    failures = int(part["infrastructure"].sum())
    mean = nodes = None
    if hours > 0:
        weight = part["run_ns"].cast(pl.Float64)
        total = float(weight.sum())
        mean = float((part[column] * weight).sum()) / total
        nodes = float((part["size_nodes"] * weight).sum()) / total
    projected = 24_000 / (rate * nodes) if rate and nodes else None
    return Bucket(
        low=size[0],
        high=size[1],
        jobs=part.height,
        failures=failures,
        run_hours=hours,
        mttf_h=hours / failures if failures else None,
        interval_h=_mean_interval(failures, hours, policy.confidence),
        projected_mttf_h=projected,
        mean_size=mean,
    )


def _ettr(ran: pl.DataFrame, rate: float | None, policy: ReliabilityPolicy) -> Ettr:
    """Measure: useful time over the time from a run's first start to its last end.

    The useful part of an incarnation is its run without the restart time and, where it was cut
    off by a failure, without half a checkpoint interval (or all of it, if it was shorter).
    """
    many = ran.filter(pl.col("size_nodes") > 1)
    measured, runs, interruptions = None, 0, 0
    if not many.is_empty():
        cut = many["infrastructure"] | ~many["last"]
        half = policy.interval_s / 2
        useful = pl.DataFrame(
            {
                "cluster": many["cluster"], "raw_id": many["raw_id"], "logical": many["logical"],
                "gpus": many["size_gpus"], "start": many["start_ns"], "cut": cut,
                "end": many["start_ns"] + many["run_ns"],
                "useful": many["run_ns"] / 1e9 - policy.restart_s - half * cut.cast(pl.Float64),
            }
        )  # fmt: skip
        grouped = useful.group_by("cluster", "raw_id", "logical").agg(
            useful=pl.col("useful").clip(0, None).sum(),
            wall=(pl.col("end").max() - pl.col("start").min()) / 1e9,
            gpus=pl.col("gpus").max(),
            cut=pl.col("cut").sum(),
        )
        # Runs shorter than the restart time say nothing of effective time.
        grouped = grouped.filter(pl.col("wall") > policy.restart_s)
        runs, interruptions = grouped.height, int(grouped["cut"].sum() or 0)
        weight = float((grouped["wall"] * grouped["gpus"]).sum())
        if weight > 0:
            measured = min(float((grouped["useful"] * grouped["gpus"]).sum()) / weight, 1.0)
    expected = gpus = None
    if rate and not many.is_empty():
        weight = float(many["run_ns"].sum())
        if weight > 0:
            run = many["run_ns"].cast(pl.Float64)
            nodes = float((many["size_nodes"] * run).sum()) / weight
            gpus = round(float((many["size_gpus"] * run).sum()) / weight)
            mttf_s = 24_000 / (rate * nodes) * _SECONDS
            expected = expected_ettr(
                mttf_s, policy.interval_s, restart_s=policy.restart_s, write_s=policy.write_s
            )
    return Ettr(
        measured=measured,
        runs=runs,
        interruptions=interruptions,
        expected=expected,
        expected_for_gpus=gpus,
    )


def _lost(ran: pl.DataFrame, policy: ReliabilityPolicy) -> LostHours:
    failed = ran.filter(pl.col("infrastructure"))
    total = float(ran["gpu_hours"].sum())
    per_failure_h = (policy.interval_s / 2 + policy.restart_s) / _SECONDS
    run_h = failed["run_ns"] / NS_PER_HOUR
    with_checkpoints = float((run_h.clip(0, per_failure_h) * failed["size_gpus"]).sum())
    return LostHours(
        without_checkpoints=float(failed["gpu_hours"].sum()),
        with_checkpoints=with_checkpoints,
        share=with_checkpoints / total if total else None,
    )


def _checkpoints(
    buckets: Sequence[Bucket], policy: ReliabilityPolicy
) -> tuple[CheckpointAdvice, ...]:
    advice = []
    for bucket in buckets:
        # Below five failures the measured mean is mostly chance.
        measured = bucket.mttf_h is not None and bucket.failures >= 5
        mttf = bucket.mttf_h if measured else bucket.projected_mttf_h
        if mttf is None or bucket.high <= policy.gpus_per_node or policy.write_s <= 0:
            continue
        seconds = mttf * _SECONDS
        advice.append(
            CheckpointAdvice(
                gpus=bucket.high,
                mttf_h=mttf,
                measured=measured,
                young_s=checkpoint_interval_young(seconds, policy.write_s),
                daly_s=checkpoint_interval_daly(seconds, policy.write_s),
                higher_order_s=checkpoint_interval_daly_higher_order(seconds, policy.write_s),
            )
        )
    return tuple(advice)


def _compare(
    ran: pl.DataFrame,
    rate: float | None,
    policy: ReliabilityPolicy,
    compare: tuple[int, int] | None,
) -> Steadier | None:
    if compare is None:
        largest = int(ran["size_nodes"].max() or 1)  # type: ignore[arg-type]
        if largest < 2:
            return None
        top = node_buckets(largest)[-2:]
        compare = (top[0][1], top[1][1])
    sizes = [_node_bucket(nodes) for nodes in compare]
    a, b = (_bucket(ran, "size_nodes", size, rate, policy) for size in sizes)
    return steadier(compare, a, b, confidence=policy.confidence)


def _node_bucket(nodes: int) -> SizeBucket:
    """Return the bucket of node counts that holds a size."""
    return next(b for b in node_buckets(max(nodes, 2)) if b[0] <= nodes <= b[1])


def steadier(
    compare: tuple[int, int], a: Bucket, b: Bucket, *, confidence: float = 0.9
) -> Steadier:
    """Compare two sizes; where their MTTF intervals overlap the answer is "cannot tell"."""
    answer = "cannot tell"
    (a_low, a_high), (b_low, b_high) = a.interval_h, b.interval_h
    if a_low is not None and b_high is not None and a_low > b_high:
        answer = "yes"
    elif b_low is not None and a_high is not None and b_low > a_high:
        answer = "no"
    ratio = None
    if a.mttf_h is not None and b.mttf_h is not None:
        ratio = a.mttf_h / b.mttf_h
    return Steadier(
        a_nodes=compare[0],
        b_nodes=compare[1],
        answer=answer,
        a=a,
        b=b,
        ratio=ratio,
        ratio_interval=rate_ratio_interval(
            b.failures, b.run_hours, a.failures, a.run_hours, confidence=confidence
        ),
        projected_ratio=compare[1] / compare[0],
    )


def by_covariate(
    name: str,
    unit: str,
    values: npt.ArrayLike,
    failures: npt.ArrayLike,
    node_days: npt.ArrayLike,
    *,
    parts: int = 3,
    confidence: float = 0.9,
) -> tuple[CovariateRow, ...]:
    """Return the failure rate of nodes grouped by a quantity, such as mean GPU temperature.

    The three arrays have one value a node. Groups hold equally many nodes.
    """
    value = np.asarray(values, dtype=np.float64)
    failed = np.asarray(failures, dtype=np.int64)
    days = np.asarray(node_days, dtype=np.float64)
    order = np.argsort(value, kind="stable")
    rows = []
    for group in np.array_split(order, min(parts, max(len(order), 1))):
        if len(group) == 0:
            continue
        count, exposure = int(failed[group].sum()), float(days[group].sum())
        low, high = _mean_interval(count, exposure, confidence)
        rows.append(
            CovariateRow(
                name=name,
                unit=unit,
                low=float(value[group].min()),
                high=float(value[group].max()),
                nodes=len(group),
                failures=count,
                node_days=exposure,
                rate_per_1000_node_days=count / exposure * 1000 if exposure > 0 else None,
                interval=(
                    1000 / high if high else 0.0,
                    1000 / low if low and math.isfinite(low) else None,
                ),
            )
        )
    return tuple(rows)

"""What the cluster did in a window: outcomes, sizes, durations, waits, utilisation, phases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from kansoku.jobs.runs import (
    RUNNING_STATES,
    SizeBucket,
    bucket_label,
    node_buckets,
    size_buckets,
)
from kansoku.stats.segmentation import change_points

__all__ = ["Outcome", "Phase", "Report", "Share", "SizeRow", "WaitRow", "report"]

_NS_PER_S = 1_000_000_000
_WEEK_NS = 7 * 86400 * _NS_PER_S
_DAY_NS = 86400 * _NS_PER_S
_NOT_ENDED = ("PENDING", *RUNNING_STATES)
_FAILED = ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How jobs of one outcome weigh, by count and by GPU-time."""

    name: str
    jobs: int
    job_share: float
    gpu_hours: float
    gpu_hour_share: float | None
    """None where no GPU-time was spent at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """One bucket of job sizes; quantiles in seconds, None without jobs that ran."""

    low: int
    high: int
    jobs: int
    job_share: float
    gpu_hours: float
    gpu_hour_share: float | None
    ended: int
    """Jobs of the bucket that ended: the number behind ``failed_share``."""
    failed_share: float | None
    ran: int
    """Jobs that ran: the number behind the durations."""
    duration_p50_s: float | None
    duration_p95_s: float | None
    over_week_share: float | None
    utilisation_p50: float | None
    """Median over the jobs of the mean utilisation of their GPUs, 0-1."""
    utilisation_jobs: int
    """Jobs with a known utilisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRow:
    """Waits of one bucket. Felt: from submission; planned: from when it was eligible."""

    low: int
    high: int
    started: int
    felt_p50_s: float | None
    felt_p95_s: float | None
    planned_p50_s: float | None
    planned_p95_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One user, account or partition."""

    name: str | None
    jobs: int
    gpu_hours: float
    gpu_hour_share: float | None
    failed_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of the cluster's life with one mix of job sizes."""

    from_ns: int
    until_ns: int
    gpu_hours: float
    mix: Mapping[str, float]
    """Bucket to its share of GPU-hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything ``jobs report`` shows."""

    since_ns: int
    until_ns: int
    jobs: int
    logical_runs: int
    gpu_hours: float
    outcomes: tuple[Outcome, ...]
    sizes: tuple[SizeRow, ...]
    node_sizes: tuple[SizeRow, ...]
    waits: tuple[WaitRow, ...]
    users: tuple[Share, ...]
    accounts: tuple[Share, ...]
    partitions: tuple[Share, ...]
    phases: tuple[Phase, ...]
    notes: tuple[str, ...] = field(default=())


def report(
    jobs: pl.DataFrame,
    *,
    since_ns: int,
    until_ns: int,
    logical_runs: int | None = None,
    utilisation: pl.DataFrame | None = None,
    top: int = 20,
) -> Report:
    """Answer for jobs that went through in_window and with_outcomes.

    ``utilisation`` has raw_id, submit_ns and utilisation (0-1), the mean over a job's GPUs.
    """
    if utilisation is not None and not utilisation.is_empty():
        jobs = jobs.join(
            utilisation.select("raw_id", "submit_ns", "utilisation"),
            on=["raw_id", "submit_ns"],
            how="left",
        )
    else:
        jobs = jobs.with_columns(utilisation=pl.lit(None, dtype=pl.Float64))
    total = float(jobs["gpu_hours"].sum())
    count = jobs.height
    gpu_largest = int(jobs["size_gpus"].max() or 1) if count else 1  # type: ignore[arg-type]
    node_largest = int(jobs["size_nodes"].max() or 1) if count else 1  # type: ignore[arg-type]
    gpu_sizes = size_buckets(gpu_largest)
    gpu_rows = _sizes(jobs, "size_gpus", gpu_sizes, total)
    notes = []
    if count and total == 0:
        notes.append(
            "No GPU-time in this window: either nothing ran on GPUs or accounting does not count "
            "them (AccountingStorageTRES=gres/gpu)."
        )
    unended = jobs.filter(
        pl.col("end_ns").is_null() & ~pl.col("state").is_in(_NOT_ENDED)
    ).height  # fmt: skip
    if unended:
        notes.append(f"{unended} jobs have an end state but no end time; they count no GPU-time.")
    return Report(
        since_ns=since_ns,
        until_ns=until_ns,
        jobs=count,
        logical_runs=count if logical_runs is None else logical_runs,
        gpu_hours=total,
        outcomes=_outcomes(jobs, total),
        sizes=gpu_rows,
        node_sizes=_sizes(jobs, "size_nodes", node_buckets(node_largest), total),
        waits=_waits(jobs, gpu_sizes),
        users=_shares(jobs, "user", total, top),
        accounts=_shares(jobs, "account", total, top),
        partitions=_shares(jobs, "partition", total, top),
        phases=_phases(jobs, since_ns, until_ns, gpu_sizes),
        notes=tuple(notes),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _outcomes(jobs: pl.DataFrame, total: float) -> tuple[Outcome, ...]:
    grouped = (
        jobs.group_by("outcome")
        .agg(jobs=pl.len(), gpu_hours=pl.col("gpu_hours").sum())
        .sort(["gpu_hours", "jobs"], descending=True)
    )
    return tuple(
        Outcome(
            name=name,
            jobs=n,
            job_share=n / jobs.height,
            gpu_hours=hours,
            gpu_hour_share=_share(hours, total),
        )
        for name, n, hours in grouped.iter_rows()
    )


def _bucket_index(column: str, buckets: Sequence[SizeBucket]) -> pl.Expr:
    lows = [low for low, _ in buckets][1:]
    expr = pl.lit(0, dtype=pl.Int32)
    for low in lows:
        expr = expr + (pl.col(column) >= low).cast(pl.Int32)
    return expr


def _sizes(
    jobs: pl.DataFrame, column: str, buckets: Sequence[SizeBucket], total: float
) -> tuple[SizeRow, ...]:
    ended = ~pl.col("state").is_in(_NOT_ENDED)
    ran = pl.col("start_ns").is_not_null() & (pl.col("end_ns") >= pl.col("start_ns")) & ended
    duration = (pl.col("end_ns") - pl.col("start_ns")).filter(ran) / _NS_PER_S
    grouped = (
        jobs.lazy()
        .with_columns(bucket=_bucket_index(column, buckets))
        .group_by("bucket")
        .agg(
            jobs=pl.len(),
            gpu_hours=pl.col("gpu_hours").sum(),
            ended=ended.sum(),
            failed=pl.col("outcome").is_in(_FAILED).sum(),
            ran=ran.sum(),
            p50=duration.quantile(0.5, "linear"),
            p95=duration.quantile(0.95, "linear"),
            week=(duration > _WEEK_NS / _NS_PER_S).sum(),
            utilisation=pl.col("utilisation").median(),
            known=pl.col("utilisation").count(),
        )
        .sort("bucket")
        .collect()
    )
    rows = []
    for row in grouped.iter_rows(named=True):
        low, high = buckets[row["bucket"]]
        rows.append(
            SizeRow(
                low=low,
                high=high,
                jobs=row["jobs"],
                job_share=row["jobs"] / jobs.height,
                gpu_hours=row["gpu_hours"],
                gpu_hour_share=_share(row["gpu_hours"], total),
                ended=row["ended"],
                failed_share=_share(row["failed"], row["ended"]),
                ran=row["ran"],
                duration_p50_s=row["p50"],
                duration_p95_s=row["p95"],
                over_week_share=_share(row["week"], row["ran"]),
                utilisation_p50=row["utilisation"],
                utilisation_jobs=row["known"],
            )
        )
    return tuple(rows)


def _waits(jobs: pl.DataFrame, buckets: Sequence[SizeBucket]) -> tuple[WaitRow, ...]:
    felt = ((pl.col("start_ns") - pl.col("submit_ns")) / _NS_PER_S).clip(0, None)
    planned = ((pl.col("start_ns") - pl.col("eligible_ns")) / _NS_PER_S).clip(0, None)
    grouped = (
        jobs.lazy()
        .filter(pl.col("start_ns").is_not_null())
        .with_columns(bucket=_bucket_index("size_gpus", buckets))
        .group_by("bucket")
        .agg(
            started=pl.len(),
            felt_p50=felt.quantile(0.5, "linear"),
            felt_p95=felt.quantile(0.95, "linear"),
            planned_p50=planned.quantile(0.5, "linear"),
            planned_p95=planned.quantile(0.95, "linear"),
        )
        .sort("bucket")
        .collect()
    )
    return tuple(
        WaitRow(
            low=buckets[bucket][0],
            high=buckets[bucket][1],
            started=started,
            felt_p50_s=a,
            felt_p95_s=b,
            planned_p50_s=c,
            planned_p95_s=d,
        )
        for bucket, started, a, b, c, d in grouped.iter_rows()
    )


def _shares(jobs: pl.DataFrame, column: str, total: float, top: int) -> tuple[Share, ...]:
    ended = ~pl.col("state").is_in(_NOT_ENDED)
    grouped = (
        jobs.lazy()
        .group_by(column)
        .agg(
            jobs=pl.len(),
            gpu_hours=pl.col("gpu_hours").sum(),
            failed=pl.col("outcome").is_in(_FAILED).sum(),
            ended=ended.sum(),
        )
        .sort(["gpu_hours", "jobs", column], descending=[True, True, False])
        .head(top)
        .collect()
    )
    return tuple(
        Share(
            name=name,
            jobs=n,
            gpu_hours=hours,
            gpu_hour_share=_share(hours, total),
            failed_share=_share(failed, ended_),
        )
        for name, n, hours, failed, ended_ in grouped.iter_rows()
    )


def _phases(
    jobs: pl.DataFrame, since_ns: int, until_ns: int, buckets: Sequence[SizeBucket]
) -> tuple[Phase, ...]:
    """Find when the mix of sizes changed: weeks (days below ten weeks), by share of GPU-hours.

    A job counts in the window in which it ended its middle; for the mix that is near enough and
    keeps one pass over millions of jobs.
    """
    span = until_ns - since_ns
    width = _WEEK_NS if span >= 10 * _WEEK_NS else _DAY_NS
    middle = (pl.col("start_ns") + pl.coalesce("end_ns", pl.lit(until_ns))) // 2
    mix = (
        jobs.lazy()
        .filter(pl.col("gpu_hours") > 0)
        .with_columns(
            window=((middle.clip(since_ns, until_ns - 1) - since_ns) // width),
            bucket=_bucket_index("size_gpus", buckets),
        )
        .group_by("window", "bucket")
        .agg(pl.col("gpu_hours").sum())
        .collect()
    )
    if mix.is_empty():
        return ()
    windows = sorted(mix["window"].unique().to_list())
    place = {window: i for i, window in enumerate(windows)}
    table = [[0.0] * len(buckets) for _ in windows]
    for window, bucket, hours in mix.iter_rows():
        table[place[window]][bucket] = hours
    shares = [[h / sum(row) for h in row] for row in table]
    starts = [0, *change_points(shares, minimum=3)]
    phases = []
    for first, after in zip(starts, [*starts[1:], len(windows)], strict=True):
        rows = table[first:after]
        hours = sum(map(sum, rows))
        phases.append(
            Phase(
                from_ns=since_ns + windows[first] * width,
                until_ns=min(since_ns + (windows[after - 1] + 1) * width, until_ns),
                gpu_hours=hours,
                mix={
                    bucket_label(bucket): part / hours
                    for i, bucket in enumerate(buckets)
                    if (part := sum(row[i] for row in rows)) > 0
                },
            )
        )
    return tuple(phases)

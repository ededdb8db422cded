"""``jobs report``: load, analyse, and write the answer as JSON and View."""

import time
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from kansoku.app.jobs._context import (
    Clock,
    Window,
    cluster_name,
    hours,
    open_history,
    percent,
    resolve_window,
    seconds,
    stamp,
)
from kansoku.errors import InputError
from kansoku.formats.slurm import Quarantined
from kansoku.jobs.edge.history import History
from kansoku.jobs.report import Report, Share, SizeRow
from kansoku.jobs.report import report as analyse
from kansoku.jobs.runs import bucket_label, in_window, with_outcomes
from kansoku.view import Block, Column, Facts, Heading, Line, Sentence, Series, Table, Tone, View

__all__ = ["REPORT_SCHEMA", "load_jobs", "report", "report_json", "report_view"]

REPORT_SCHEMA = "kansoku.jobs.report/1"
_COLUMNS = [
    "cluster", "raw_id", "submit_ns", "user", "account", "partition", "eligible_ns", "start_ns",
    "end_ns", "state", "nodes", "gpus", "requested_gpus", "requested_nodes", "suspended_s",
]  # fmt: skip
_CATEGORIES = ["cluster", "user", "account", "partition", "state", "outcome"]


def load_jobs(
    *,
    store: str | Path | None = None,
    cluster: str | None = None,
    history: History | None = None,
) -> pl.LazyFrame:
    """Return the whole job history (columns of JOB_SCHEMA); raise InputError when it is empty."""
    history = history or open_history(store)
    jobs = history.scan("jobs")
    name = cluster_name(cluster)
    if name is not None:
        jobs = jobs.filter((pl.col("cluster") == name) | (pl.col("cluster") == "?"))
    if jobs.select(pl.len()).collect().item() == 0:
        raise InputError(
            "the job history is empty" if name is None else f"no jobs of cluster {name!r}",
            remedy="kansoku jobs import FILE…, or --live",
        )
    return jobs


def report(
    *,
    since: str | None = None,
    until: str | None = None,
    cluster: str | None = None,
    store: str | Path | None = None,
    top: int = 20,
    history: History | None = None,
    now: Clock = time.time_ns,
) -> Report:
    """Return outcomes, sizes, durations, waits, utilisation, shares and phases of a window."""
    history = history or open_history(store)
    jobs = load_jobs(cluster=cluster, history=history)
    window = resolve_window(since, until, jobs, now=now)
    steps = history.scan("steps")
    frame = (
        with_outcomes(in_window(jobs.select(_COLUMNS), window.since_ns, window.until_ns), steps)
        .drop("requested_gpus", "requested_nodes", "suspended_s", "node_hours", "gpus", "nodes")
        # Few distinct texts over millions of rows: as categories they take a quarter.
        .with_columns(pl.col(_CATEGORIES).cast(pl.Categorical))
        .collect(engine="streaming")
    )
    logical = frame.select("cluster", "raw_id").n_unique()
    return analyse(
        frame,
        since_ns=window.since_ns,
        until_ns=window.until_ns,
        logical_runs=logical,
        utilisation=_utilisation(steps, frame),
        top=top,
    )


def _utilisation(steps: pl.LazyFrame, jobs: pl.DataFrame) -> pl.DataFrame | None:
    """Return each job's mean GPU utilisation where Slurm gathered it in its steps."""
    known = (
        steps.filter(pl.col("gpu_util_ratio").is_not_null() & (pl.col("gpus") > 0))
        .select("cluster", "raw_id", "gpus", "gpu_util_ratio", step_ns=pl.col("start_ns"),
                weight=pl.col("elapsed_s").fill_null(0) * pl.col("gpus"))
        .collect()
    )  # fmt: skip
    if known.is_empty():
        return None
    joined = known.join(
        jobs.select("cluster", "raw_id", "submit_ns", "start_ns", "end_ns"),
        on=["cluster", "raw_id"],
    ).filter(pl.col("step_ns").is_between(pl.col("start_ns"), pl.col("end_ns")))
    # Slurm gives utilisation of a task's GPUs summed; per GPU it is at most 1.
    per_gpu = (
        pl.when(pl.col("gpu_util_ratio") > 1)
        .then(pl.col("gpu_util_ratio") / pl.col("gpus"))
        .otherwise(pl.col("gpu_util_ratio"))
    )
    return joined.group_by("raw_id", "submit_ns").agg(
        utilisation=(per_gpu * pl.col("weight")).sum() / pl.col("weight").sum()
    )


def _size_json(row: SizeRow, unit: str) -> dict[str, object]:
    return {
        f"{unit}_min": row.low,
        f"{unit}_max": row.high,
        "jobs": row.jobs,
        "job_share": row.job_share,
        "gpu_hours": row.gpu_hours,
        "gpu_hour_share": row.gpu_hour_share,
        "failed_share": row.failed_share,
        "ended": row.ended,
        "ran": row.ran,
        "duration_p50_s": row.duration_p50_s,
        "duration_p95_s": row.duration_p95_s,
        "over_week_share": row.over_week_share,
        "utilisation_p50_ratio": row.utilisation_p50,
        "utilisation_jobs": row.utilisation_jobs,
    }


def _share_json(row: Share) -> dict[str, object]:
    return {
        "name": row.name,
        "jobs": row.jobs,
        "gpu_hours": row.gpu_hours,
        "gpu_hour_share": row.gpu_hour_share,
        "failed_share": row.failed_share,
    }


def report_json(result: Report, *, quarantined: Sequence[Quarantined] = ()) -> dict[str, object]:
    """Return the answer of ``jobs report --json``."""
    return {
        "schema": REPORT_SCHEMA,
        "window": Window(since_ns=result.since_ns, until_ns=result.until_ns).to_json(),
        "jobs": result.jobs,
        "logical_runs": result.logical_runs,
        "gpu_hours": result.gpu_hours,
        "quarantined": [entry.to_json() for entry in quarantined],
        "outcomes": {
            "by_count": {o.name: {"jobs": o.jobs, "share": o.job_share} for o in result.outcomes},
            "by_gpu_time": {
                o.name: {"gpu_hours": o.gpu_hours, "share": o.gpu_hour_share}
                for o in result.outcomes
            },
        },
        "sizes": [_size_json(row, "gpus") for row in result.sizes],
        "node_sizes": [_size_json(row, "nodes") for row in result.node_sizes],
        "waits": [
            {
                "gpus_min": row.low,
                "gpus_max": row.high,
                "started": row.started,
                "felt_p50_s": row.felt_p50_s,
                "felt_p95_s": row.felt_p95_s,
                "planned_p50_s": row.planned_p50_s,
                "planned_p95_s": row.planned_p95_s,
            }
            for row in result.waits
        ],
        "phases": [
            {
                "since": stamp(phase.from_ns, "UTC"),
                "until": stamp(phase.until_ns, "UTC"),
                "gpu_hours": phase.gpu_hours,
                "mix": dict(phase.mix),
            }
            for phase in result.phases
        ],
        "users": [_share_json(row) for row in result.users],
        "accounts": [_share_json(row) for row in result.accounts],
        "partitions": [_share_json(row) for row in result.partitions],
        "notes": list(result.notes),
    }


def _number(title: str) -> Column:
    return Column(title=title, numeric=True)


def _size_table(rows: tuple[SizeRow, ...], unit: str) -> Table:
    return Table(
        title=f"Job sizes by {unit}",
        columns=[_number(unit), _number("jobs"), _number("of jobs"), _number("GPU-hours"),
                 _number("of GPU-hours"), _number("failed"), _number("of ended"),
                 _number("run p50"), _number("run p95"), _number("GPU util p50"),
                 _number("of jobs known")],
        rows=[
            [
                bucket_label((r.low, r.high)), f"{r.jobs:,}", percent(r.job_share),
                hours(r.gpu_hours), percent(r.gpu_hour_share), percent(r.failed_share),
                f"{r.ended:,}", seconds(r.duration_p50_s), seconds(r.duration_p95_s),
                percent(r.utilisation_p50), f"{r.utilisation_jobs:,}",
            ]
            for r in rows
        ],
    )  # fmt: skip


def _shares_table(title: str, rows: tuple[Share, ...]) -> Table:
    return Table(
        title=title,
        columns=[Column(title=title.removeprefix("By ")), _number("jobs"), _number("GPU-hours"),
                 _number("of GPU-hours"), _number("failed")],
        rows=[
            [r.name, f"{r.jobs:,}", hours(r.gpu_hours), percent(r.gpu_hour_share),
             percent(r.failed_share)]
            for r in rows
        ],
    )  # fmt: skip


def report_view(result: Report) -> View:
    """Return the screen of ``jobs report``."""
    blocks: list[Block] = [
        Facts(
            items=[
                ("Window", f"{stamp(result.since_ns)} – {stamp(result.until_ns)}"),
                ("Jobs", f"{result.jobs:,} allocations, {result.logical_runs:,} job ids"),
                ("GPU-hours", hours(result.gpu_hours)),
            ]
        ),
        *[Sentence(text=note, tone=Tone.NOTICE) for note in result.notes],
        Table(
            title="Outcomes, by count and by GPU-time",
            columns=[Column(title="outcome"), _number("jobs"), _number("of jobs"),
                     _number("GPU-hours"), _number("of GPU-hours")],
            rows=[
                [o.name, f"{o.jobs:,}", percent(o.job_share), hours(o.gpu_hours),
                 percent(o.gpu_hour_share)]
                for o in result.outcomes
            ],
        ),
        _size_table(result.sizes, "GPUs"),
        _size_table(result.node_sizes, "nodes"),
        Table(
            title="Waits: felt since submission, planned since eligible",
            columns=[_number("GPUs"), _number("started"), _number("felt p50"), _number("felt p95"),
                     _number("planned p50"), _number("planned p95")],
            rows=[
                [bucket_label((w.low, w.high)), f"{w.started:,}", seconds(w.felt_p50_s),
                 seconds(w.felt_p95_s), seconds(w.planned_p50_s), seconds(w.planned_p95_s)]
                for w in result.waits
            ],
        ),
    ]  # fmt: skip
    if len(result.phases) > 1:
        blocks += _phases(result)
    blocks += [
        _shares_table("By user", result.users),
        _shares_table("By account", result.accounts),
        _shares_table("By partition", result.partitions),
    ]
    return View(title="Job history", blocks=blocks)


def _phases(result: Report) -> list[Block]:
    buckets = list(dict.fromkeys(b for phase in result.phases for b in phase.mix))
    return [
        Heading(text="Phases of the cluster's life"),
        Table(
            title="Where the mix of sizes changed (share of GPU-hours by GPUs)",
            columns=[Column(title="from"), Column(title="until"), _number("GPU-hours"),
                     *(_number(b) for b in buckets)],
            rows=[
                [stamp(p.from_ns)[:10], stamp(p.until_ns)[:10], hours(p.gpu_hours),
                 *(percent(p.mix.get(b), 0) for b in buckets)]
                for p in result.phases
            ],
        ),
        Series(
            title="Mix of job sizes",
            x_title="phase",
            y_title="share of GPU-hours",
            style="stacked",
            x_is_time_ns=True,
            lines=[
                Line(
                    name=f"{b} GPUs",
                    x=[float(p.from_ns) for p in result.phases],
                    y=[p.mix.get(b, 0.0) for p in result.phases],
                )
                for b in buckets
            ],
        ),
    ]  # fmt: skip

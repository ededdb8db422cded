"""Job rows made ready for questions: window, outcome, sizes, incarnations of one logical run."""

import polars as pl

__all__ = [
    "RUNNING_STATES",
    "SizeBucket",
    "bucket_label",
    "in_window",
    "node_buckets",
    "size_buckets",
    "with_logical_runs",
    "with_outcomes",
]

NS_PER_HOUR = 3_600_000_000_000
RUNNING_STATES = ("RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING", "STOPPED")
# A requeue writes the end of one incarnation and the submission of the next in the same second;
# a recycled job id comes back after the counter went round.
_REQUEUE_TOLERANCE_NS = 120 * 1_000_000_000

SizeBucket = tuple[int, int]
"""Smallest and largest number of GPUs (or nodes), both included."""


def size_buckets(largest: int) -> list[SizeBucket]:
    """Return the buckets of GPU counts: 0, 1, 2-4, 5-8, 9-16, 17-32 … up to ``largest``."""
    buckets = [(0, 0), (1, 1), (2, 4), (5, 8)]
    high = 8
    while high < largest:
        buckets.append((high + 1, high * 2))
        high *= 2
    return buckets


def node_buckets(largest: int) -> list[SizeBucket]:
    """Return the buckets of node counts: 1, 2, 3-4, 5-8, 9-16 … up to ``largest``."""
    buckets = [(1, 1), (2, 2)]
    high = 2
    while high < largest:
        buckets.append((high + 1, high * 2))
        high *= 2
    return buckets


def bucket_label(bucket: SizeBucket) -> str:
    """Write a bucket: ``1`` or ``9-16``."""
    low, high = bucket
    return str(low) if low == high else f"{low}–{high}"


def in_window(jobs: pl.LazyFrame, since_ns: int, until_ns: int) -> pl.LazyFrame:
    """Keep jobs that existed in the window and add what of them lies inside.

    New columns: ``run_ns`` (allocated time inside the window, without suspension), ``gpu_hours``,
    ``node_hours``, ``size_gpus`` (allocated, else requested), ``size_nodes``. A job that ended
    after the window counts as running. Time outside the window is cut off, so that windows add up.
    """
    until, since = pl.lit(until_ns), pl.lit(since_ns)
    end = pl.coalesce(
        "end_ns",
        # A row that never got its end (a crash of the controller) is not counted as running on.
        pl.when(pl.col("state").is_in(RUNNING_STATES)).then(until).otherwise(pl.col("start_ns")),
    )
    alive_until = pl.coalesce(
        "end_ns",
        pl.when(pl.col("state").is_in(["PENDING", *RUNNING_STATES])).then(until),
        "start_ns",
        "submit_ns",
    )
    begin = pl.max_horizontal(pl.col("start_ns"), since)
    finish = pl.min_horizontal(end, until)
    whole = (end - pl.col("start_ns")).cast(pl.Float64)
    wall = pl.when(pl.col("start_ns").is_not_null()).then((finish - begin).clip(0, None))
    suspended = pl.col("suspended_s").fill_null(0) * 1_000_000_000
    # Slurm gives the length of suspension, not when: it is spread over the job.
    share = pl.when(whole > 0).then((1 - suspended / whole).clip(0, 1)).otherwise(1.0)
    run = (wall * share).fill_null(0).cast(pl.Int64)
    return (
        jobs.filter(
            (pl.col("submit_ns") < until)
            & ((alive_until > since) | ((alive_until == since) & (pl.col("submit_ns") == since)))
        )
        .with_columns(
            run_ns=run,
            state=pl.when(pl.col("end_ns") > until)
            .then(
                pl.when(pl.col("start_ns") < until)
                .then(pl.lit("RUNNING"))
                .otherwise(pl.lit("PENDING"))
            )
            .otherwise(pl.col("state")),
            size_gpus=pl.coalesce("gpus", "requested_gpus", pl.lit(0)),
            size_nodes=pl.coalesce("nodes", "requested_nodes", pl.lit(1)),
        )
        .with_columns(
            gpu_hours=pl.col("run_ns") * pl.col("gpus").fill_null(0) / NS_PER_HOUR,
            node_hours=pl.col("run_ns") * pl.col("nodes").fill_null(0) / NS_PER_HOUR,
        )
    )


def with_outcomes(jobs: pl.LazyFrame, steps: pl.LazyFrame | None = None) -> pl.LazyFrame:
    """Add ``outcome``: the state, or OUT_OF_MEMORY where a step of a failed job says so.

    With cgroups the kernel kills a task and Slurm marks the step, while the job itself reads
    FAILED (exit 0:125 of the step).
    """
    if steps is None:
        return jobs.with_columns(outcome=pl.col("state"))
    killed = (
        steps.filter(pl.col("state") == "OUT_OF_MEMORY")
        .select("cluster", "raw_id", oom_ns=pl.col("start_ns"))
        .collect()
    )
    if killed.is_empty():
        return jobs.with_columns(outcome=pl.col("state"))
    failed = jobs.filter(pl.col("state") == "FAILED").select(
        "cluster", "raw_id", "submit_ns", "start_ns", "end_ns"
    )
    hits = (
        failed.join(killed.lazy(), on=["cluster", "raw_id"], nulls_equal=True)
        .filter(pl.col("oom_ns").is_between(pl.col("start_ns"), pl.col("end_ns")))
        .select("cluster", "raw_id", "submit_ns", oom=pl.lit(value=True))
        .unique()
    )
    return (
        jobs.join(hits, on=["cluster", "raw_id", "submit_ns"], how="left", nulls_equal=True)
        .with_columns(
            outcome=pl.when(pl.col("oom").fill_null(value=False))
            .then(pl.lit("OUT_OF_MEMORY"))
            .otherwise(pl.col("state"))
        )
        .drop("oom")
    )


def with_logical_runs(jobs: pl.DataFrame) -> pl.DataFrame:
    """Chain the incarnations of requeued jobs.

    Adds ``requeue_of_ns`` (submission of the incarnation before), ``incarnation`` (from 0),
    ``logical`` (submission of the first; with cluster and raw_id the identity of the logical run)
    and ``last`` (no later incarnation). An id that was recycled starts a new run.
    """
    key = ["cluster", "raw_id", "job_id"]
    ordered = jobs.sort([*key, "submit_ns", "start_ns"], nulls_last=False)
    before_end = pl.col("end_ns").shift(1)
    same = pl.lit(value=True)
    for column in (*key, "user", "name"):
        same = same & pl.col(column).eq_missing(pl.col(column).shift(1))
    close = (pl.col("submit_ns") - before_end).abs() <= _REQUEUE_TOLERANCE_NS
    again = pl.col("state").shift(1).is_in([
        "REQUEUED", "PREEMPTED", "NODE_FAIL", "FAILED", "CANCELLED", "BOOT_FAIL", "TIMEOUT",
        "COMPLETED", "SPECIAL_EXIT", "LAUNCH_FAILED",
    ])  # fmt: skip
    linked = (same & close & again).fill_null(value=False)
    return (
        ordered.with_columns(
            linked=linked,
            requeue_of_ns=pl.when(linked).then(pl.col("submit_ns").shift(1)),
        )
        .with_columns(
            # Chains lie together: the first of each is carried on to the rest.
            incarnation=pl.int_range(pl.len())
            - pl.when(~pl.col("linked")).then(pl.int_range(pl.len())).forward_fill(),
            logical=pl.when(~pl.col("linked")).then(pl.col("submit_ns")).forward_fill(),
            last=~pl.col("linked").shift(-1, fill_value=False),
        )
        .drop("linked")
    )

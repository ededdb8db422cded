"""``jobs reliability``: attribute failures, then rates, MTTF, ETTR and checkpoint advice."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from kansoku.app.jobs._context import (
    Clock,
    Window,
    hours,
    open_history,
    percent,
    resolve_window,
    seconds,
    stamp,
)
from kansoku.app.jobs._evidence import Evidence, Gather, gather
from kansoku.app.jobs.reporting import load_jobs
from kansoku.errors import InputError
from kansoku.formats.slurm import expand_nodes
from kansoku.jobs.attribution import AttributionPolicy, attribute, broke
from kansoku.jobs.edge.history import History
from kansoku.jobs.reliability import (
    Bucket,
    CovariateRow,
    Reliability,
    ReliabilityPolicy,
    by_covariate,
)
from kansoku.jobs.reliability import reliability as analyse
from kansoku.jobs.runs import bucket_label, in_window, with_logical_runs, with_outcomes
from kansoku.view import Block, Column, Facts, Sentence, Table, Tone, View

__all__ = [
    "RELIABILITY_SCHEMA",
    "ReliabilityAnswer",
    "attributed_jobs",
    "attributions",
    "parse_compare",
    "reliability",
    "reliability_json",
    "reliability_view",
]

RELIABILITY_SCHEMA = "kansoku.jobs.reliability/1"
_COLUMNS = [
    "cluster", "raw_id", "job_id", "submit_ns", "name", "user", "uid", "start_ns", "end_ns",
    "eligible_ns", "state", "reason", "exit_code", "exit_signal", "nodes", "node_list", "gpus",
    "requested_gpus", "requested_nodes", "suspended_s", "cancelled_by", "failed_node",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityAnswer:
    """The analysis, its window, and what it was joined with."""

    window: Window
    result: Reliability
    covariates: tuple[CovariateRow, ...]
    notes: tuple[str, ...]


def attributed_jobs(
    window: Window,
    *,
    store: str | Path | None = None,
    cluster: str | None = None,
    policy: AttributionPolicy | None = None,
    evidence: Evidence | None = None,
    history: History | None = None,
) -> tuple[pl.DataFrame, Evidence]:
    """Return the window's jobs with outcome, logical run and the cause of their end.

    Adds ``cause``, ``domain``, ``evidence``, ``blamed_node`` and ``infrastructure`` (something
    broke that is not the user's).
    """
    history = history or open_history(store)
    jobs = load_jobs(cluster=cluster, history=history)
    evidence = evidence or gather(store, window)
    frame = with_outcomes(
        in_window(jobs.select(_COLUMNS), window.since_ns, window.until_ns), history.scan("steps")
    ).collect(engine="streaming")
    frame = with_logical_runs(frame)
    # Successes need no cause: on a big history that is most of the rows.
    ended = frame.filter(~pl.col("outcome").is_in(["COMPLETED", "PENDING", "RUNNING"]))
    answers = attribute(
        ended,
        node_events=history.scan("node_events").collect(),
        events=evidence.events,
        policy=policy,
    )
    table = pl.DataFrame(
        {
            "cluster": ended["cluster"],
            "raw_id": ended["raw_id"],
            "job_id": ended["job_id"],
            "submit_ns": ended["submit_ns"],
            "cause": [a.cause for a in answers],
            "domain": [a.domain.value if a.domain else None for a in answers],
            "blamed_node": [a.node for a in answers],
            "evidence": [a.evidence for a in answers],
            "infrastructure": [broke(a) for a in answers],
        },
        schema_overrides={"domain": pl.String, "blamed_node": pl.String, "cause": pl.String,
                          "evidence": pl.String, "infrastructure": pl.Boolean},
    )  # fmt: skip
    joined = frame.join(
        table, on=["cluster", "raw_id", "job_id", "submit_ns"], how="left", nulls_equal=True
    ).with_columns(
        pl.col("cause").fill_null("none"), pl.col("infrastructure").fill_null(value=False)
    )
    return joined, evidence


def attributions(
    *,
    since: str | None = None,
    until: str | None = None,
    cluster: str | None = None,
    store: str | Path | None = None,
    now: Clock = time.time_ns,
) -> pl.DataFrame:
    """Return every job of the window with the cause its end was given."""
    jobs = load_jobs(store=store, cluster=cluster)
    window = resolve_window(since, until, jobs, now=now)
    return attributed_jobs(window, store=store, cluster=cluster)[0]


def reliability(  # noqa: PLR0913 - the flags of the command, by keyword
    *,
    since: str | None = None,
    until: str | None = None,
    cluster: str | None = None,
    store: str | Path | None = None,
    policy: ReliabilityPolicy | None = None,
    compare: tuple[int, int] | None = None,
    history: History | None = None,
    gathered: Gather | None = None,
    now: Clock = time.time_ns,
) -> ReliabilityAnswer:
    """Return failures, MTTF per size, ETTR, lost hours, checkpoint advice and the comparison."""
    history = history or open_history(store)
    jobs = load_jobs(cluster=cluster, history=history)
    window = resolve_window(since, until, jobs, now=now)
    evidence = gathered(window) if gathered else gather(store, window, covariates=True)
    frame, evidence = attributed_jobs(window, cluster=cluster, evidence=evidence, history=history)
    result = analyse(frame, policy=policy or _policy(frame), compare=compare)
    notes = list(evidence.notes)
    if not evidence.covariates and not evidence.notes:
        notes.append("No GPU temperature or power in the store: no rate against them.")
    notes.append(
        "Failure rate against the age of parts needs their dates of installation: not known."
    )
    return ReliabilityAnswer(
        window=window,
        result=result,
        covariates=_covariates(frame, evidence),
        notes=tuple(notes),
    )


def _policy(frame: pl.DataFrame) -> ReliabilityPolicy:
    """Take GPUs per node from the jobs that hold most GPUs on their nodes."""
    known = frame.filter((pl.col("gpus") > 0) & (pl.col("nodes") > 0))
    if known.is_empty():
        return ReliabilityPolicy()
    most = (known["gpus"] // known["nodes"]).max()
    return ReliabilityPolicy(gpus_per_node=int(most))  # type: ignore[arg-type]


def _covariates(frame: pl.DataFrame, evidence: Evidence) -> tuple[CovariateRow, ...]:
    if not evidence.covariates:
        return ()
    days: dict[str, float] = {}
    failures: dict[str, int] = {}
    grouped = (
        frame.filter(pl.col("node_list").is_not_null())
        .group_by("node_list")
        .agg(days=pl.col("run_ns").sum() / 86_400e9)
    )
    for text, value in grouped.iter_rows():
        try:
            names = expand_nodes(text)
        except ValueError:
            continue
        for name in names:
            days[name] = days.get(name, 0.0) + value
    broken = frame.filter(pl.col("infrastructure") & pl.col("blamed_node").is_not_null())
    for name in broken["blamed_node"].to_list():
        failures[name] = failures.get(name, 0) + 1
    rows: list[CovariateRow] = []
    for name, (unit, means) in evidence.covariates.items():
        nodes = sorted(set(means) & set(days))
        rows += by_covariate(
            name, unit, [means[n] for n in nodes], [failures.get(n, 0) for n in nodes],
            [days[n] for n in nodes],
        )  # fmt: skip
    return tuple(rows)


def parse_compare(text: str | None) -> tuple[int, int] | None:
    """Read ``32,64``."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text)
    if match is None or match[1] == match[2] or "0" in {match[1], match[2]}:
        raise InputError(
            f"{text!r} is not two numbers of nodes", where="--compare", remedy="give 32,64"
        )
    return int(match[1]), int(match[2])


def _bucket_json(bucket: Bucket, unit: str = "gpus") -> dict[str, object]:
    return {
        f"{unit}_min": bucket.low,
        f"{unit}_max": bucket.high,
        "jobs": bucket.jobs,
        "failures": bucket.failures,
        "run_hours": bucket.run_hours,
        "mttf_h": bucket.mttf_h,
        "mttf_interval_h": list(bucket.interval_h),
        "projected_mttf_h": bucket.projected_mttf_h,
        "mean_size": bucket.mean_size,
    }


def reliability_json(answer: ReliabilityAnswer) -> dict[str, object]:
    """Return the answer of ``jobs reliability --json``."""
    result = answer.result
    policy = result.policy
    compared = result.steadier
    return {
        "schema": RELIABILITY_SCHEMA,
        "window": answer.window.to_json(),
        "buckets": [_bucket_json(bucket) for bucket in result.buckets],
        "failures": result.failures,
        "node_days": result.node_days,
        "rate_per_1000_node_days": result.rate_per_1000_node_days,
        "rate_interval": list(result.rate_interval),
        "confidence": policy.confidence,
        "ettr": {
            "measured": result.ettr.measured,
            "runs": result.ettr.runs,
            "interruptions": result.ettr.interruptions,
            "expected": result.ettr.expected,
            "expected_for_gpus": result.ettr.expected_for_gpus,
            "assumed": {
                "restart_s": policy.restart_s,
                "interval_s": policy.interval_s,
                "write_s": policy.write_s,
            },
        },
        "lost_gpu_hours": {
            "without_checkpoints": result.lost.without_checkpoints,
            "with_checkpoints": result.lost.with_checkpoints,
            "share": result.lost.share,
        },
        "checkpoint": {
            "write_s": policy.write_s,
            "sizes": [
                {
                    "gpus": a.gpus,
                    "mttf_h": a.mttf_h,
                    "mttf": "measured" if a.measured else "projected",
                    "young_s": a.young_s,
                    "daly_s": a.daly_s,
                    "higher_order_s": a.higher_order_s,
                }
                for a in result.checkpoint
            ],
        },
        "steadier": None
        if compared is None
        else {
            "nodes": [compared.a_nodes, compared.b_nodes],
            "answer": compared.answer,
            "measured": [_bucket_json(compared.a, "nodes"), _bucket_json(compared.b, "nodes")],
            "rate_ratio": compared.ratio,
            "rate_ratio_interval": list(compared.ratio_interval),
            "projected_rate_ratio": compared.projected_ratio,
        },
        "causes": {
            name: {"jobs": n, "gpu_hours": value} for name, (n, value) in result.causes.items()
        },
        "covariates": [
            {
                "quantity": row.name,
                "unit": row.unit,
                "from": row.low,
                "to": row.high,
                "nodes": row.nodes,
                "failures": row.failures,
                "node_days": row.node_days,
                "rate_per_1000_node_days": row.rate_per_1000_node_days,
                "interval": list(row.interval),
            }
            for row in answer.covariates
        ],
        "notes": list(answer.notes),
    }


def _number(title: str) -> Column:
    return Column(title=title, numeric=True)


def _interval(pair: tuple[float | None, float | None], digits: str = ".3g") -> str:
    low, high = pair
    if low is None and high is None:
        return "–"
    left = "0" if low is None else format(low, digits)
    return f"{left} – {'∞' if high is None else format(high, digits)}"


def reliability_view(answer: ReliabilityAnswer) -> View:
    """Return the screen of ``jobs reliability``."""
    result = answer.result
    policy = result.policy
    rate = result.rate_per_1000_node_days
    level = f"{policy.confidence * 100:.0f} %"
    blocks: list[Block] = [
        Facts(
            items=[
                ("Window", f"{stamp(answer.window.since_ns)} – {stamp(answer.window.until_ns)}"),
                ("Failures", (f"{result.failures} of infrastructure in "
                 f"{result.node_days:,.1f} node-days")),
                ("Rate", "–" if rate is None else f"{rate:.3g} per 1,000 node-days "
                 f"({level}: {_interval(result.rate_interval)})"),
                ("Lost", (f"{hours(result.lost.with_checkpoints)} GPU-hours, checkpoints every "
                 f"{seconds(policy.interval_s)} ({percent(result.lost.share, 2)}); "
                 f"{hours(result.lost.without_checkpoints)} without")),
                ("ETTR", (f"measured {percent(result.ettr.measured)} over {result.ettr.runs} runs "
                 f"with {result.ettr.interruptions} interruptions; expected "
                 f"{percent(result.ettr.expected)}")),
            ]
        ),
        *_steadier(answer),
        Table(
            title="Mean time to failure by size: measured beside projected from the node-day rate",
            columns=[_number("GPUs"), _number("jobs"), _number("failures"), _number("run hours"),
                     _number("MTTF h"), _number(f"{level} interval"), _number("projected h")],
            rows=[
                [bucket_label((b.low, b.high)), f"{b.jobs:,}", b.failures, hours(b.run_hours),
                 hours(b.mttf_h), _interval(b.interval_h), hours(b.projected_mttf_h)]
                for b in result.buckets
            ],
        ),
        _best_intervals(result)
        if result.checkpoint
        else Sentence(
            text="No checkpoint interval can be advised: no failure of infrastructure was seen.",
            tone=Tone.MUTED,
        ),
        Table(
            title="Why jobs ended",
            columns=[Column(title="cause"), _number("jobs"), _number("GPU-hours")],
            rows=[
                [name.replace("_", " "), f"{n:,}", hours(value)]
                for name, (n, value) in result.causes.items()
            ],
        ),
    ]  # fmt: skip
    if answer.covariates:
        blocks.append(_covariate_table(answer.covariates, level))
    blocks += [Sentence(text=note, tone=Tone.MUTED) for note in answer.notes]
    return View(title="Reliability", blocks=blocks)


_UNITS = {"Cel": "°C"}
"""How people write what UCUM calls otherwise."""


def _best_intervals(result: Reliability) -> Table:
    return Table(
        title=f"Best checkpoint interval for a write of {seconds(result.policy.write_s)}",
        columns=[_number("GPUs"), _number("MTTF h"), Column(title="MTTF is"),
                 _number("Young"), _number("Daly"), _number("higher order")],
        rows=[
            [a.gpus, hours(a.mttf_h), "measured" if a.measured else "projected",
             seconds(a.young_s), seconds(a.daly_s), seconds(a.higher_order_s)]
            for a in result.checkpoint
        ],
    )  # fmt: skip


def _mttf(bucket: Bucket) -> str:
    """Write a mean time to failure: without any failure only its least is known."""
    if bucket.mttf_h is None:
        return f"MTTF above {hours(bucket.interval_h[0])} h"
    return f"MTTF {hours(bucket.mttf_h)} h ({_interval(bucket.interval_h)})"


def _steadier(answer: ReliabilityAnswer) -> Sequence[Block]:
    s = answer.result.steadier
    if s is None:
        return ()
    words = {
        "yes": f"Yes: {s.a_nodes} nodes were steadier than {s.b_nodes}.",
        "no": f"No: {s.a_nodes} nodes were not steadier than {s.b_nodes}; they failed more often.",
        "cannot tell": f"Cannot tell whether {s.a_nodes} nodes are steadier than {s.b_nodes}.",
    }
    detail = "; ".join(
        f"{nodes} nodes: {b.failures} failures in {hours(b.run_hours)} run hours, {_mttf(b)}"
        for nodes, b in ((s.a_nodes, s.a), (s.b_nodes, s.b))
    )
    tone = {"yes": Tone.GOOD, "no": Tone.BAD}.get(s.answer, Tone.NOTICE)
    return [
        Sentence(
            text=words[s.answer],
            tone=tone,
            detail=f"{detail}. Independent nodes would give {s.projected_ratio:.3g} times the "
            "failures.",
        )
    ]


def _covariate_table(rows: Sequence[CovariateRow], level: str) -> Table:
    return Table(
        title="Failure rate of nodes by what telemetry measured",
        columns=[Column(title="quantity"), _number("lowest"), _number("highest"), _number("nodes"),
                 _number("failures"), _number("node-days"), _number("per 1,000 node-days"),
                 _number(f"{level} interval")],
        rows=[
            [f"{r.name} ({_UNITS.get(r.unit, r.unit)})", f"{r.low:.4g}", f"{r.high:.4g}",
             r.nodes, r.failures, f"{r.node_days:.1f}", hours(r.rate_per_1000_node_days),
             _interval(r.interval)]
            for r in rows
        ],
    )  # fmt: skip

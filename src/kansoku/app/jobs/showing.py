"""``jobs show``: one job over its incarnations, what it used, what happened near it."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from kansoku.app.jobs._context import NS, Clock, Window, hours, open_history, seconds, stamp
from kansoku.app.jobs._evidence import gather, store_means
from kansoku.app.jobs.importing import LIVE_COLUMNS
from kansoku.app.jobs.reporting import load_jobs
from kansoku.errors import InputError, KansokuError
from kansoku.formats.slurm import expand_nodes, fold_nodes, read_sacct_text
from kansoku.jobs.attribution import Attribution, attribute, broke
from kansoku.jobs.edge.slurm import LiveSlurm
from kansoku.jobs.runs import in_window, with_logical_runs, with_outcomes
from kansoku.view import Block, Column, Facts, Sentence, Span, Table, Timeline, Tone, View

__all__ = [
    "SHOW_SCHEMA",
    "JobAnswer",
    "admin_comment",
    "show",
    "show_json",
    "show_view",
    "write_admin_comment",
]

SHOW_SCHEMA = "kansoku.jobs.show/1"
_NEAR_NS = 900 * NS


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """One job."""

    job_id: str
    incarnations: pl.DataFrame
    """Rows of the history with outcome, run_ns, gpu_hours, incarnation; oldest first."""
    causes: tuple[Attribution, ...]
    steps: pl.DataFrame
    usage: dict[str, dict[str, float]]
    """Node to mean power_w, utilisation_ratio and memory_ratio of its GPUs during the job."""
    report: dict[str, object] | None
    """The training report, where a run directory of this job is known."""
    report_path: str | None
    incidents: pl.DataFrame
    events: pl.DataFrame
    notes: tuple[str, ...]

    @property
    def infrastructure(self) -> bool:
        """Whether the last incarnation was ended by something that broke."""
        return broke(self.causes[-1])


def show(
    job: str,
    *,
    store: str | Path | None = None,
    cluster: str | None = None,
    runs: Sequence[Path] = (Path("runs"),),
    live: bool = False,
    slurm: LiveSlurm | None = None,
    now: Clock = time.time_ns,
) -> JobAnswer:
    """Return everything known of a job given as 12, 12_3 or 12+1; an array as the task wanted.

    ``live`` asks sacct for this one job instead of the history. An id used twice gives its last.
    """
    if re.fullmatch(r"\d+([_+]\d+)?", job) is None:
        raise InputError(f"{job!r} is not a job id", remedy="give 12, 12_3 or 12+1")
    notes: list[str] = []
    jobs, steps = _rows(job, store, cluster, (slurm or LiveSlurm()) if live else None)
    if jobs.is_empty():
        raise InputError(
            f"no job {job} in the history", remedy="kansoku jobs import --live, or --live here"
        )
    jobs = with_logical_runs(jobs)
    jobs = jobs.filter(pl.col("logical") == pl.col("logical").max())
    since = int(jobs["submit_ns"].min())  # type: ignore[arg-type]
    ends = jobs["end_ns"].to_list()
    until = max(e if e is not None else now() for e in ends) + 1
    window = Window(since_ns=since, until_ns=max(until, since + 1))
    steps = steps.filter(pl.col("start_ns").is_between(since, until))
    frame = (
        with_outcomes(in_window(jobs.lazy(), window.since_ns, window.until_ns), steps.lazy())
        .collect()
        .sort("submit_ns")
    )
    near = Window(since_ns=since - _NEAR_NS, until_ns=until + _NEAR_NS)
    evidence = gather(store, near)
    notes += evidence.notes
    names = {n for text in frame["node_list"].drop_nulls() for n in expand_nodes(text)}
    causes = attribute(
        frame,
        node_events=open_history(store).scan("node_events").collect(),
        events=evidence.events,
    )
    usage, more = store_means(store, window, names)
    notes += more
    path, report = _training_report(job, frame, runs, notes)
    incidents = evidence.incidents
    if not incidents.is_empty():
        about = [f"node:{n}" for n in names] + [f"job:{job}"]
        wanted = pl.col("subject").is_in(about)
        for prefix in ("gpu", "nic"):
            wanted = wanted | pl.col("subject").str.extract(rf"^{prefix}:([^/]+)/").is_in(
                list(names)
            )
        incidents = incidents.filter(wanted)
    return JobAnswer(
        job_id=job,
        incarnations=frame,
        causes=tuple(causes),
        steps=steps.sort("start_ns"),
        usage=usage,
        report=report,
        report_path=path,
        incidents=incidents,
        events=evidence.events.filter(pl.col("node").is_in(list(names))),
        notes=tuple(notes),
    )


def _rows(
    job: str, store: str | Path | None, cluster: str | None, source: LiveSlurm | None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    wanted = pl.col("job_id") == job
    if source is not None:
        text = source.job_text(job, source.known_columns(LIVE_COLUMNS))
        parts = list(read_sacct_text(text, file="sacct", zone="UTC", delimiter="\x1f"))
        jobs = pl.concat([p.jobs for p in parts])
        steps = pl.concat([p.steps for p in parts])
        if job.isdigit():
            wanted = wanted | (pl.col("raw_id") == int(job))
        return jobs.filter(wanted), steps.filter(pl.col("job_id").is_in(jobs["job_id"].to_list()))
    history = load_jobs(store=store, cluster=cluster)
    jobs = history.filter(wanted).collect()
    if jobs.is_empty() and job.isdigit():
        jobs = history.filter(pl.col("raw_id") == int(job)).collect()
    raw = jobs["raw_id"].unique().to_list()
    steps = open_history(store).scan("steps").filter(pl.col("raw_id").is_in(raw)).collect()
    return jobs, steps


def _training_report(
    job: str, frame: pl.DataFrame, runs: Sequence[Path], notes: list[str]
) -> tuple[str | None, dict[str, object] | None]:
    """Find the run directory whose run.json names this job, and make its report."""
    ids = {job, *(str(raw) for raw in frame["raw_id"].to_list())}
    found: list[Path] = []
    for folder in runs:
        for path in [folder / "run.json", *sorted(folder.glob("*/run.json"))]:
            try:
                facts = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(facts, dict) and str(facts.get("slurm_job")) in ids:
                found.append(path.parent)
    if not found:
        return None, None
    from kansoku.app.report import report

    try:
        return str(found[-1]), dict(report(found[-1]).to_json())
    except (KansokuError, OSError, ValueError) as error:
        notes.append(f"{found[-1]}: its report could not be made: {error}")
        return str(found[-1]), None


def _efficiency(answer: JobAnswer) -> dict[str, float | None]:
    """Return CPU efficiency, memory peak and GPU utilisation over the whole job."""
    frame, steps = answer.incarnations, answer.steps
    core_s = sum(
        (cpus or 0) * (run or 0) / NS for cpus, run in frame.select("cpus", "run_ns").iter_rows()
    )
    cpu_s = float(steps["cpu_s"].sum() or 0.0) if not steps.is_empty() else None
    peak = steps["max_rss_bytes"].max() if not steps.is_empty() else None
    ratios = [u["utilisation_ratio"] for u in answer.usage.values() if "utilisation_ratio" in u]
    in_slurm = steps["gpu_util_ratio"].drop_nulls()
    utilisation = sum(ratios) / len(ratios) if ratios else None
    if utilisation is None and len(in_slurm):
        utilisation = float(in_slurm.mean())  # type: ignore[arg-type]
    return {
        "cpu_ratio": cpu_s / core_s if cpu_s is not None and core_s > 0 else None,
        "max_rss_bytes": None if peak is None else float(peak),  # type: ignore[arg-type]
        "gpu_utilisation_ratio": utilisation,
        "gpu_hours": float(frame["gpu_hours"].sum()),
    }


def show_json(answer: JobAnswer) -> dict[str, object]:
    """Return the answer of ``jobs show --json``."""
    rows = []
    for row, cause in zip(answer.incarnations.iter_rows(named=True), answer.causes, strict=True):
        rows.append(
            {
                "submit": stamp(row["submit_ns"], "UTC"),
                "start": None if row["start_ns"] is None else stamp(row["start_ns"], "UTC"),
                "end": None if row["end_ns"] is None else stamp(row["end_ns"], "UTC"),
                "state": row["state"],
                "outcome": row["outcome"],
                "exit_code": row["exit_code"],
                "exit_signal": row["exit_signal"],
                "nodes": row["nodes"],
                "node_list": row["node_list"],
                "gpus": row["gpus"],
                "gpu_hours": row["gpu_hours"],
                "cause": cause.cause,
                "domain": cause.domain.value if cause.domain else None,
                "evidence": cause.evidence,
            }
        )
    first = answer.incarnations.row(0, named=True)
    return {
        "schema": SHOW_SCHEMA,
        "job_id": answer.job_id,
        "cluster": first["cluster"],
        "raw_id": first["raw_id"],
        "name": first["name"],
        "user": first["user"],
        "account": first["account"],
        "partition": first["partition"],
        "incarnations": rows,
        "efficiency": _efficiency(answer),
        "steps": answer.steps.to_dicts(),
        "nodes": answer.usage,
        "training": {"path": answer.report_path, "report": answer.report},
        "incidents": answer.incidents.to_dicts(),
        "events": answer.events.to_dicts(),
        "notes": list(answer.notes),
    }


def admin_comment(answer: JobAnswer) -> str:
    """Return the one-line summary that an epilog writes to AdminComment.

    ``key=value`` joined by semicolons, lower case: sacctmgr lowers the text and turns quotes into
    backticks, so JSON does not survive it.
    """
    last, cause = answer.incarnations.row(-1, named=True), answer.causes[-1]
    efficiency = _efficiency(answer)
    util = efficiency["gpu_utilisation_ratio"]
    summary = {
        "kansoku": "1",
        "outcome": last["outcome"],
        "cause": cause.cause,
        "node": cause.node,
        "incarnations": answer.incarnations.height,
        "gpu_hours": f"{efficiency['gpu_hours'] or 0:.3f}",
        "gpu_util": None if util is None else f"{util:.3f}",
    }
    return ";".join(f"{k}={v}" for k, v in summary.items() if v is not None).lower()


def write_admin_comment(answer: JobAnswer, *, slurm: LiveSlurm | None = None) -> str:
    """Write the summary to the job's AdminComment and return it; needs an operator's right."""
    text = admin_comment(answer)
    raw = int(answer.incarnations["raw_id"][0])
    (slurm or LiveSlurm()).set_admin_comment(str(raw), text)
    return text


def show_view(answer: JobAnswer) -> View:
    """Return the screen of ``jobs show``."""
    frame = answer.incarnations
    first, last = frame.row(0, named=True), frame.row(-1, named=True)
    efficiency = _efficiency(answer)
    cpu, rss = efficiency["cpu_ratio"], efficiency["max_rss_bytes"]
    util = efficiency["gpu_utilisation_ratio"]
    nodes = sorted({n for text in frame["node_list"].drop_nulls() for n in expand_nodes(text)})
    blocks: list[Block] = [
        Facts(
            items=[
                ("Job", f"{answer.job_id} {first['name'] or ''}"),
                ("User", (f"{first['user'] or '?'} ({first['account'] or '?'}), partition "
                 f"{first['partition'] or '?'}")),
                ("Outcome", f"{last['outcome']}: {answer.causes[-1].evidence}"),
                ("Size", f"{last['gpus'] or 0} GPUs on {fold_nodes(nodes) or 'no node'}"),
                ("Waited", seconds(_wait(first))),
                ("GPU-hours", hours(efficiency["gpu_hours"])),
                ("GPU utilisation", "unknown" if util is None else f"{util * 100:.1f} %"),
                ("CPU efficiency", "unknown" if cpu is None else f"{cpu * 100:.1f} %"),
                ("Largest RSS", "unknown" if rss is None else f"{rss / 2**30:.2f} GiB"),
            ]
        ),
        Table(
            title="Incarnations",
            columns=[Column(title="submitted"), Column(title="started"), Column(title="ended"),
                     Column(title="outcome"), Column(title="exit"), Column(title="nodes"),
                     Column(title="GPU-hours", numeric=True), Column(title="cause"),
                     Column(title="evidence")],
            rows=[
                [stamp(r["submit_ns"]), stamp(r["start_ns"]), stamp(r["end_ns"]), r["outcome"],
                 f"{'?' if r['exit_code'] is None else r['exit_code']}:{r['exit_signal'] or 0}",
                 r["node_list"], hours(r["gpu_hours"]), c.cause.replace("_", " "), c.evidence]
                for r, c in zip(frame.iter_rows(named=True), answer.causes, strict=True)
            ],
        ),
        _timeline(answer),
    ]  # fmt: skip
    if answer.usage:
        keys = sorted({k for u in answer.usage.values() for k in u})
        blocks.append(
            Table(
                title="GPUs of each node during the job, mean",
                columns=[Column(title="node"), *(Column(title=k, numeric=True) for k in keys)],
                rows=[
                    [node, *(f"{u[k]:.4g}" if k in u else None for k in keys)]
                    for node, u in sorted(answer.usage.items())
                ],
            )
        )
    if not answer.steps.is_empty():
        blocks.append(_steps(answer.steps))
    blocks += _neighbours(answer)
    return View(title=f"Job {answer.job_id}", blocks=blocks)


def _wait(row: dict[str, object]) -> float | None:
    start, submit = row["start_ns"], row["submit_ns"]
    if not isinstance(start, int) or not isinstance(submit, int):
        return None
    return max((start - submit) / NS, 0.0)


def _timeline(answer: JobAnswer) -> Timeline:
    lanes, spans = ["job"], []
    for row in answer.incarnations.iter_rows(named=True):
        start, end = row["start_ns"], row["end_ns"]
        stop = start if start is not None else end
        if stop is not None and stop > row["submit_ns"]:
            waited = stop - row["submit_ns"]
            spans.append(
                Span(
                    lane=0,
                    start_ns=row["submit_ns"],
                    duration_ns=waited,
                    name="waiting",
                    kind="wait",
                )
            )
        if start is not None:
            spans.append(Span(lane=0, start_ns=start, duration_ns=row["run_ns"],
                              name=row["outcome"], kind="run"))  # fmt: skip
    for row in answer.steps.head(200).iter_rows(named=True):
        if row["start_ns"] is None:
            continue
        lane = f"step {row['step']}"
        if lane not in lanes:
            lanes.append(lane)
        spans.append(
            Span(
                lane=lanes.index(lane),
                start_ns=row["start_ns"],
                duration_ns=max((row["end_ns"] or row["start_ns"]) - row["start_ns"], 0),
                name=row["name"] or row["step"],
                kind=row["state"].lower(),
            )
        )
    return Timeline(title="Timeline", lanes=lanes, spans=spans)


def _steps(steps: pl.DataFrame) -> Table:
    return Table(
        title="Steps",
        columns=[Column(title="step"), Column(title="name"), Column(title="state"),
                 Column(title="ran", numeric=True), Column(title="tasks", numeric=True),
                 Column(title="CPU", numeric=True), Column(title="max RSS", numeric=True)],
        rows=[
            [r["step"], r["name"], r["state"], seconds(r["elapsed_s"]), r["tasks"],
             seconds(r["cpu_s"]),
             None if r["max_rss_bytes"] is None else f"{r['max_rss_bytes'] / 2**20:.0f} MiB"]
            for r in steps.head(50).iter_rows(named=True)
        ],
        note=f"The first 50 of {steps.height}." if steps.height > 50 else None,
    )  # fmt: skip


def _neighbours(answer: JobAnswer) -> list[Block]:
    blocks: list[Block] = []
    if answer.report_path is not None:
        blocks.append(
            Sentence(
                text=f"kansoku saw this job train: {answer.report_path}",
                tone=Tone.GOOD,
                detail=f"kansoku report {answer.report_path}",
            )
        )
    blocks += [
        Sentence(
            text=f"Incident {row['kind']} on {row['subject']} at {stamp(row['onset_ns'])}",
            tone=Tone.BAD,
        )
        for row in answer.incidents.head(10).iter_rows(named=True)
    ]
    for row in answer.events.head(10).iter_rows(named=True):
        text = f"{stamp(row['time_ns'])} {row['node']}: {row['body']}"
        blocks.append(Sentence(text=text, tone=Tone.NOTICE))
    blocks += [Sentence(text=note, tone=Tone.MUTED) for note in answer.notes]
    return blocks

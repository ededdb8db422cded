"""One job: its incarnations, incidents, training and the resources of its nodes."""

from collections.abc import Mapping

import polars as pl

from kansoku.app.report import Report
from kansoku.app.web_columns import timeline_columns
from kansoku.app.web_fleet._window import (
    stamp,
)
from kansoku.app.web_jobs._job_resources import JobFacts, power_columns, resource_blocks
from kansoku.app.web_jobs._jobs import TONES, run_list, state_group
from kansoku.app.web_jobs._run import COLOUR, kept_answer, kept_blocks, kept_matrix
from kansoku.app.web_jobs._runs import known_runs, loaded_report
from kansoku.app.web_page import (
    Columns,
    Missing,
    MissingError,
    Page,
    Parameter,
    Remote,
    Screen,
    ScreenBlock,
    domain_words,
)
from kansoku.app.web_reading import Reading
from kansoku.errors import KansokuError
from kansoku.formats.slurm import expand_nodes, fold_nodes
from kansoku.view import (
    Column,
    Facts,
    Heading,
    Sentence,
    Span,
    Table,
    Timeline,
    Tone,
)
from kansoku.view.units import in_time

__all__ = ["JOB"]

S = 1_000_000_000


def _find(reading: Reading, job: str) -> JobFacts:
    frame = reading.jobs()
    rows = frame.filter(pl.col("job_id") == job)
    if rows.is_empty() and job.isdigit():
        rows = frame.filter(pl.col("raw_id").cast(pl.String) == job)
    ids = {job, *rows["job_id"].to_list(), *(str(r) for r in rows["raw_id"].to_list())}
    runs = tuple(one for one in known_runs(reading) if one.job in ids)
    if rows.is_empty() and not runs:
        raise MissingError(
            f"no job {job!r} is known here",
            remedy="see the jobs page; kansoku jobs import --live brings Slurm's history",
        )
    return JobFacts(job=job, rows=rows, runs=runs)


def _job(reading: Reading, values: Mapping[str, str]) -> Screen:
    found = _find(reading, values["job"])
    now = reading.clock_ns()
    row = found.newest()
    answer, trouble = _training(reading, found)
    blocks: list[ScreenBlock] = []
    if row is not None:
        blocks += [Facts(items=_facts(found, row, now)), _incarnations(found.rows, now)]
        if len(found.rows):
            blocks.append(Remote(title="Waiting and running", name="incarnations", kind="timeline"))
    incidents = _incidents(reading, found, now)
    blocks += _incident_blocks(incidents)
    if answer is not None:
        blocks.append(Heading(text=f"Training run {answer.run.facts.run}"))
        blocks += kept_blocks(reading, found.runs[0].run, values["colour"])
    elif trouble is not None:
        blocks.append(Sentence(text=trouble, tone=Tone.NOTICE))
    else:
        blocks.append(
            Missing(
                text="The training of this job was not recorded.",
                remedy="Start it under observation: step time, phases, MFU and stragglers appear "
                "here while it runs.",
                command="kansoku run -- torchrun … train.py",
            )
        )
    blocks += resource_blocks(reading, found, answer, now)
    if len(found.runs) > 1:
        blocks += run_list(found.runs)
    running = row is not None and row["end_ns"] is None
    return Screen(
        title=f"Job {found.job}",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.job/1",
            "job": found.job,
            "incarnations": found.rows.to_dicts(),
            "nodes": list(found.nodes()),
            "runs": [one.to_json() for one in found.runs],
            "training": None if answer is None else kept_answer(reading, found.runs[0].run),
            "reason": None if answer is not None else trouble or "no run of this job is known",
            "incidents": incidents.to_dicts(),
        },
        trail=(("Cluster", "/cluster"), ("Jobs", "/jobs"))
        if reading.sees_all
        else (("Jobs", "/jobs"),),
        live=("steps", "jobs", "incidents") if running else (),
    )


def _training(reading: Reading, found: JobFacts) -> tuple[Report | None, str | None]:
    if not found.runs:
        return None, None
    try:
        return loaded_report(reading, found.runs[0].run), None
    except KansokuError as error:
        return None, f"Run {found.runs[0].run} cannot be read: {error}"


def _facts(found: JobFacts, row: Mapping[str, object], now: int) -> list[tuple[str, str]]:
    def number(name: str) -> int | None:
        value = row[name]
        return value if isinstance(value, int) else None

    start, end, submit = number("start_ns"), number("end_ns"), number("submit_ns")
    nodes = found.nodes()
    ran = None if start is None else ((end or now) - start) / S
    waited = None if submit is None else ((start or now) - submit) / S
    items = [
        ("Name", str(row["name"] or "–")),
        ("User", f"{row['user'] or 'unknown'} ({row['account'] or 'no account'})"),
        ("Partition", str(row["partition"] or "unknown")),
        ("State", str(row["state"] or "unknown").lower().replace("_", " ")),
        ("Size", f"{row['gpus'] or 0} GPUs, {row['nodes'] or 0} nodes"),
        ("Nodes", ", ".join(f"node:{n}" for n in nodes[:16])
         + (f" … {fold_nodes(list(nodes))}" if len(nodes) > 16 else "") or "none yet"),
        ("Waited", in_time(waited) or "unknown"),
        ("Ran", in_time(ran) or "not yet"),
    ]  # fmt: skip
    limit = number("time_limit_s")
    if limit is not None:
        items.append(("Time limit", in_time(limit) or ""))
    if row["reason"]:
        items.append(("Reason", str(row["reason"])))
    return items


def _incarnations(rows: pl.DataFrame, now: int) -> Table:
    return Table(
        title="Incarnations",
        columns=[
            Column(title="submitted"), Column(title="started"), Column(title="ended"),
            Column(title="state"), Column(title="exit code", numeric=True),
            Column(title="signal", numeric=True), Column(title="ran"),
            Column(title="nodes", numeric=True), Column(title="on"),
        ],
        rows=[
            [
                stamp(r["submit_ns"]), stamp(r["start_ns"]), stamp(r["end_ns"]),
                (r["state"] or "unknown").lower().replace("_", " "), r["exit_code"],
                r["exit_signal"],
                None if r["start_ns"] is None
                else in_time(((r["end_ns"] or now) - r["start_ns"]) / S),
                r["nodes"], _folded(r["node_list"]),
            ]
            for r in rows.iter_rows(named=True)
        ],
        tones=[TONES.get(state_group(s), Tone.PLAIN) for s in rows["state"].to_list()],
    )  # fmt: skip


def _folded(text: str | None) -> str | None:
    if not text:
        return None
    try:
        return fold_nodes(list(expand_nodes(text)))
    except ValueError:
        return text[:200]


def _incidents(reading: Reading, found: JobFacts, now: int) -> pl.DataFrame:
    """Return incidents about the job, or about its nodes while it ran there."""
    frame = reading.query("incidents")
    if frame.is_empty():
        return frame
    about = [f"job:{found.job}", *(f"job:{r}" for r in found.rows["raw_id"].to_list())]
    wanted = pl.col("subject").is_in(about)
    row = found.newest()
    start = row["start_ns"] if row is not None else None
    nodes = list(found.nodes())
    if isinstance(start, int) and nodes and row is not None:
        end = row["end_ns"] if isinstance(row["end_ns"], int) else now
        place = pl.col("subject").str.extract(r"^(?:node|gpu|nic):([^/]+)")
        wanted = wanted | (place.is_in(nodes) & pl.col("onset_ns").is_between(start, end))
    return frame.filter(wanted.fill_null(value=False))


def _incident_blocks(frame: pl.DataFrame) -> list[ScreenBlock]:
    if frame.is_empty():
        return [Sentence(text="No incident of this job or its nodes while it ran.",
                         tone=Tone.GOOD)]  # fmt: skip
    return [
        Table(
            title="Incidents",
            columns=[
                Column(title="incident", link="/incidents/{}"), Column(title="kind"),
                Column(title="subject"), Column(title="domain"), Column(title="onset"),
                Column(title="state"),
            ],
            rows=[
                [r["id"], r["kind"], r["subject"], domain_words(r["domain"]),
                 stamp(r["onset_ns"]), r["state"]]
                for r in frame.head(50).iter_rows(named=True)
            ],
            tones=[
                Tone.MUTED if s == "closed" else Tone.BAD for s in frame["state"].head(50).to_list()
            ],
        )
    ]  # fmt: skip


def _power_columns(reading: Reading, values: Mapping[str, str]) -> Columns:
    return power_columns(reading, _find(reading, values["job"]))


def _incarnation_columns(reading: Reading, values: Mapping[str, str]) -> Columns:
    found = _find(reading, values["job"])
    now = reading.clock_ns()
    lanes, spans = [], []
    for lane, row in enumerate(found.rows.reverse().iter_rows(named=True)):
        lanes.append(stamp(row["submit_ns"]) or f"incarnation {lane + 1}")
        submit, start, end = row["submit_ns"], row["start_ns"], row["end_ns"]
        stop = start if start is not None else end if end is not None else now
        if submit is not None and stop > submit:
            spans.append(
                Span(lane=lane, start_ns=submit, duration_ns=stop - submit, name="waiting",
                     kind="waiting")
            )  # fmt: skip
        if start is not None:
            state = (row["state"] or "unknown").lower().replace("_", " ")
            spans.append(
                Span(lane=lane, start_ns=start, duration_ns=max((end or now) - start, 0),
                     name=state, kind="running",
                     mark="failed" if state_group(row["state"]) == "failed" else None)
            )  # fmt: skip
    return timeline_columns(
        Timeline(title="Waiting and running", lanes=lanes, spans=spans),
        more={"summary": [f"{len(lanes)} incarnations."]},
    )


def _matrix_columns(reading: Reading, values: Mapping[str, str]) -> Columns:
    found = _find(reading, values["job"])
    if not found.runs:
        raise MissingError(
            f"no run of job {found.job!r} is known", remedy="kansoku run -- torchrun … train.py"
        )
    return kept_matrix(reading, found.runs[0].run, values["colour"])


JOB = Page(
    path="/jobs/{job}",
    title="Job",
    build=_job,
    columns={
        "matrix": _matrix_columns,
        "power": _power_columns,
        "incarnations": _incarnation_columns,
    },
    parameters=(
        Parameter(name="job", meaning="id of the job as people write it: 12, 12_3, 12+1",
                  in_path=True, pattern=r"[A-Za-z0-9_.+\-]{1,64}"),
        COLOUR,
    ),
)  # fmt: skip

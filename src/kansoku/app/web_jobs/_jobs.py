"""Jobs: the table of them, and one job with its incarnations, resources, incidents and training."""

from collections.abc import Mapping, Sequence

import polars as pl

from kansoku.app.web_fleet._window import (
    WINDOW_PARAMETERS,
    stamp,
    window_choices,
    window_of,
)
from kansoku.app.web_jobs._runs import KnownRun, known_runs
from kansoku.app.web_page import (
    Card,
    Cards,
    Choice,
    Choices,
    Missing,
    Page,
    Parameter,
    Screen,
    ScreenBlock,
)
from kansoku.app.web_reading import Reading
from kansoku.view import (
    Column,
    Sentence,
    Table,
    Tone,
)
from kansoku.view.units import in_time

__all__ = ["JOBS", "TONES", "run_list", "state_group"]

S = 1_000_000_000
_MOST_JOBS = 1000
_STATES = {
    "any": "any state", "running": "running", "pending": "pending", "completed": "completed",
    "failed": "failed", "cancelled": "cancelled",
}  # fmt: skip
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED")
_FAILED = ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "BOOT_FAIL", "DEADLINE")
_TEXT = r"[^\x00-\x1f]{1,100}"


def state_group(state: str | None) -> str:
    """Return the state as the filter names it."""
    word = (state or "").split(" ")[0].upper()
    if word in _RUNNING:
        return "running"
    if word.startswith("CANCELLED"):
        return "cancelled"
    if word in _FAILED:
        return "failed"
    return word.lower() if word.lower() in _STATES else "other"


TONES = {"running": Tone.GOOD, "failed": Tone.BAD, "cancelled": Tone.MUTED,
          "pending": Tone.NOTICE}  # fmt: skip


def _jobs(reading: Reading, values: Mapping[str, str]) -> Screen:
    now = reading.clock_ns()
    span = window_of(values, now)
    frame = reading.jobs(span.since_ns, span.until_ns)
    known = frame.with_columns(
        group=pl.Series([state_group(s) for s in frame["state"].to_list()], dtype=pl.String)
    )
    shown = _filtered(known, values)
    runs = known_runs(reading)
    counts = dict(known["group"].value_counts().iter_rows())
    blocks: list[ScreenBlock] = [
        Cards(
            cards=[
                Card(label=label, value=f"{counts.get(name, 0):,}", tone=tone,
                     link=f"/jobs?state={name}&window={values['window']}")
                for name, label, tone in (
                    ("running", "Running", Tone.PLAIN), ("pending", "Pending", Tone.PLAIN),
                    ("completed", "Completed", Tone.PLAIN),
                    ("failed", "Failed", Tone.BAD if counts.get("failed") else Tone.GOOD),
                    ("cancelled", "Cancelled", Tone.PLAIN),
                )
            ]
        ),
        Choices(
            choices=(
                Choice(name="state", label="State", options=tuple(_STATES.items()),
                       value=values["state"]),
                Choice(name="user", label="User", value=values.get("user", "")),
                Choice(name="account", label="Account", value=values.get("account", "")),
                Choice(name="partition", label="Partition", value=values.get("partition", "")),
                Choice(name="name", label="Name holds", value=values.get("name", "")),
                *window_choices(values),
            )
        ),
    ]  # fmt: skip
    if len(shown):
        blocks.append(_table(shown, runs, now))
    elif len(known):
        blocks.append(Sentence(text="No job matches these filters.", tone=Tone.NOTICE))
    else:
        blocks.append(
            Missing(
                text="No job waited or ran in this window.",
                remedy="Choose a longer window, or bring the job history here; repeated, this "
                "command adds what is new.",
                command="kansoku jobs import --live",
            )
        )
    blocks += run_list(runs)
    return Screen(
        title="Jobs",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.jobs/1",
            "window": span.to_json(),
            "counts": counts,
            "jobs": shown.drop("group").head(_MOST_JOBS).to_dicts(),
            "runs": [one.to_json() for one in runs],
        },
        live=("jobs",) if span.now else (),
    )


def _filtered(frame: pl.DataFrame, values: Mapping[str, str]) -> pl.DataFrame:
    wanted = pl.lit(value=True)
    if values["state"] != "any":
        wanted &= pl.col("group") == values["state"]
    for name in ("user", "account", "partition"):
        if name in values:
            wanted &= pl.col(name) == values[name]
    if "name" in values:
        wanted &= (
            pl.col("name").str.to_lowercase().str.contains(values["name"].lower(), literal=True)
        )
    return frame.filter(wanted.fill_null(value=False))


def _table(frame: pl.DataFrame, runs: Sequence[KnownRun], now: int) -> Table:
    step = {one.job: one.step_p50_ns for one in reversed(runs) if one.job}
    rows, tones = [], []
    for row in frame.head(_MOST_JOBS).iter_rows(named=True):
        start, end = row["start_ns"], row["end_ns"]
        until = now if end is None else end
        elapsed = None if start is None else max(until - start, 0) / S
        p50 = step.get(row["job_id"])
        rows.append(
            [
                row["job_id"],
                row["name"],
                row["user"],
                row["account"],
                row["partition"],
                (row["state"] or "unknown").lower().replace("_", " "),
                row["nodes"],
                row["gpus"],
                stamp(row["submit_ns"]),
                stamp(start),
                in_time(elapsed),
                None if p50 is None else round(p50 / 1e6, 3),
            ]
        )
        tones.append(TONES.get(row["group"], Tone.PLAIN))
    return Table(
        title="Jobs",
        columns=[
            Column(title="job", link="/jobs/{}"), Column(title="name"), Column(title="user"),
            Column(title="account"), Column(title="partition"), Column(title="state"),
            Column(title="nodes", numeric=True), Column(title="GPUs", numeric=True),
            Column(title="submitted"), Column(title="started"), Column(title="ran"),
            Column(title="step ms", numeric=True),
        ],
        rows=rows,
        tones=tones,
        note=f"The newest {_MOST_JOBS:,} of {len(frame):,}; filter for others."
        if len(frame) > _MOST_JOBS
        else None,
    )  # fmt: skip


def run_list(runs: Sequence[KnownRun]) -> list[ScreenBlock]:
    if not runs:
        return [
            Missing(
                text="No training run was recorded.",
                remedy="Start the job under observation; the node agent sends its steps, and a "
                "run folder in runs/ beside the store shows every span.",
                command="kansoku run --out STORE/runs/NAME -- torchrun … train.py",
            )
        ]
    return [
        Table(
            title="Training runs",
            columns=[
                Column(title="run", link="/runs/{}"), Column(title="job", link="/jobs/{}"),
                Column(title="ranks", numeric=True), Column(title="steps", numeric=True),
                Column(title="median step ms", numeric=True), Column(title="began"),
                Column(title="source"),
            ],
            rows=[
                [one.run, one.job, one.ranks, one.steps,
                 None if one.step_p50_ns is None else round(one.step_p50_ns / 1e6, 3),
                 stamp(one.start_ns), "rows sent" if one.folder is None else "folder"]
                for one in runs[:200]
            ],
            note="Two of them side by side: the comparison page.",
        )
    ]  # fmt: skip


JOBS = Page(
    path="/jobs",
    title="Jobs",
    build=_jobs,
    parameters=(
        Parameter(name="state", meaning="state of the jobs", default="any",
                  choices=tuple(_STATES)),
        Parameter(name="user", meaning="user's name", pattern=_TEXT),
        Parameter(name="account", meaning="account's name", pattern=_TEXT),
        Parameter(name="partition", meaning="partition's name", pattern=_TEXT),
        Parameter(name="name", meaning="part of the job's name", pattern=_TEXT),
        *WINDOW_PARAMETERS,
    ),
    navigation=20,
)  # fmt: skip

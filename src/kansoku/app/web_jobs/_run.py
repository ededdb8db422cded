"""One run: its report with step time, MFU, phases, the rank × step matrix; and one rank of it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote

import numpy as np
import polars as pl

from kansoku.app.report import LoadedRun, Report
from kansoku.app.web_columns import heatmap_columns
from kansoku.app.web_jobs._figures import (
    MATRIX,
    PHASE_TITLES,
    folded,
    matrix,
    rates,
    steps_with_spans,
)
from kansoku.app.web_jobs._runs import RUN_PARAMETER, kept, loaded_report, need_run
from kansoku.app.web_jobs._trace import RUN_TRACE, trace_file
from kansoku.app.web_jobs._uses import use_blocks
from kansoku.app.web_page import (
    Card,
    Cards,
    Choice,
    Choices,
    Columns,
    MissingError,
    Page,
    Parameter,
    Remote,
    Screen,
    ScreenBlock,
)
from kansoku.app.web_reading import Reading
from kansoku.model import PHASES, Verdict
from kansoku.trace.throughput import job_steps
from kansoku.view import (
    Block,
    Column,
    Facts,
    Heading,
    Heatmap,
    Line,
    Sentence,
    Series,
    Table,
    Timeline,
    Tone,
)

__all__ = [
    "COLOUR",
    "RANK",
    "RUN",
    "answer_of",
    "kept_answer",
    "kept_blocks",
    "kept_matrix",
    "matrix_of",
    "run_address",
    "run_blocks",
]

COLOUR = Parameter(
    name="colour", meaning="what the rank × step matrix shows", default="own", choices=tuple(MATRIX)
)
_ROW_LIMIT = 40


def run_address(run: str) -> str:
    """Return the path of a run's page."""
    return f"/runs/{quote(run, safe='')}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.4g} ms"


def cards(answer: Report) -> Cards:
    """Return the key figures of a run."""
    t, run = answer.throughput, answer.run
    slow = answer.stragglers
    gpu = "rank" if run.facts.ranks and run.facts.ranks[0].device == "cpu" else "GPU"
    rate = t.tokens_per_s_per_gpu
    found = Card(
        label="Stragglers",
        value="unknown" if slow.verdict is Verdict.UNKNOWN else "none found",
        note=slow.reason,
        tone=Tone.MUTED if slow.verdict is Verdict.UNKNOWN else Tone.GOOD,
    )
    if slow.stragglers:
        first = slow.stragglers[0]
        found = Card(
            label="Stragglers",
            value=", ".join(f"rank {s.rank}" for s in slow.stragglers[:3])
            + (" …" if len(slow.stragglers) > 3 else ""),
            note=f"{PHASE_TITLES[first.phase]}, {first.ratio:.2f}× its peers",
            tone=Tone.BAD,
            link=f"{run_address(run.facts.run)}/ranks/{first.rank}",
        )
    return Cards(
        cards=(
            Card(
                label="Step time",
                value=_ms(t.median_step_ns),
                note=f"p95 {_ms(t.p95_step_ns)}, {t.complete_steps:,} steps complete",
            ),
            Card(
                label="MFU",
                value="–" if answer.mfu is None else f"{answer.mfu.value:.1%}",
                note=answer.mfu_reason if answer.mfu is None else answer.mfu.convention,
            ),
            Card(
                label=f"Tokens/s/{gpu}",
                value="–" if rate is None else f"{rate:,.0f}",
                note=None if t.tokens_per_s is None else f"{t.tokens_per_s:,.0f} tokens/s in all",
            ),
            Card(
                label="Ranks",
                value=f"{run.layout.world:,}",
                note=" × ".join(f"{k} {v}" for k, v in run.layout.to_json().items() if v > 1)
                or "no parallelism",
            ),
            found,
        )
    )


def rate_series(frame: pl.DataFrame) -> list[Series]:
    """Return MFU and tokens/s/GPU over steps, where they are known."""
    shown = folded(frame)
    x = [float(v) for v in shown["step"].to_list()]
    found = []
    for name, title, y_title, scale in (
        ("mfu", "MFU", "% of the peak", 100.0),
        ("tokens_per_s_per_gpu", "Tokens/s/GPU", "tokens/s/GPU", 1.0),
    ):
        if shown[name].null_count() < len(shown):
            y = [None if v is None else v * scale for v in shown[name].to_list()]
            found.append(
                Series(
                    title=f"{title} over time",
                    x_title="step",
                    y_title=y_title,
                    lines=[Line(name=title, x=x, y=y)],
                )
            )
    return found


def linked(block: Table, run: str) -> Table:
    """Link the ranks and steps that a table names to their pages."""
    patterns = {"rank": "ranks", "step": "steps"}
    columns = []
    for number, column in enumerate(block.columns):
        page = patterns.get(column.title)
        cells = [row[number] for row in block.rows]
        named = page and cells and all(re.fullmatch(r"\d+", str(c)) for c in cells if c is not None)
        link = f"{run_address(run)}/{page}/{{}}" if named else column.link
        columns.append(replace(column, link=link))
    return replace(block, columns=columns)


def run_blocks(answer: Report, colour: str) -> list[ScreenBlock]:
    """Return the page of a run's report; canvases fetch their own columns ``matrix``."""
    run = answer.run.facts.run
    figures, window = rates(answer), answer.throughput.window
    if window is not None:
        figures = figures.filter(pl.col("step").is_between(window.from_step, window.to_step))
    blocks: list[ScreenBlock] = [cards(answer)]
    drawn = False
    timelines = _timelines(answer)
    for block in answer.view().blocks:
        if isinstance(block, Heatmap):
            blocks += _matrix_blocks(colour)
            drawn = True
        elif isinstance(block, Timeline):
            continue
        elif isinstance(block, Heading) and block.text == "What is missing":
            blocks += timelines
            timelines = []
            blocks.append(block)
        elif isinstance(block, Table):
            blocks.append(linked(block, run))
        else:
            blocks.append(block)
            if isinstance(block, Series) and block.title == "Step time":
                blocks += rate_series(figures)
    if not drawn and len(answer.run.steps):
        blocks += _matrix_blocks(colour)
    return blocks + timelines


def _matrix_blocks(colour: str) -> list[ScreenBlock]:
    return [
        Choices(
            choices=(
                Choice(name="colour", label="Colour", options=tuple(MATRIX.items()), value=colour),
            )
        ),
        Remote(
            title=f"{MATRIX[colour]}, by step",
            name="matrix",
            note="Rows are ranks, columns are steps. A bright row is a slow rank, a bright column "
            "a slow step. Enter or a second click opens the step.",
        ),
    ]


def _timelines(answer: Report) -> list[ScreenBlock]:
    """Return the steps whose spans can be looked at, slowest first."""
    run = answer.run
    seen = steps_with_spans(run)
    if not seen:
        return []
    with_spans = run.steps.filter(pl.col("step").is_in(seen))
    slowest = with_spans.group_by("step").agg(
        slowest=pl.col("rank").sort_by("duration_ns").last(),
    )
    by_step = (
        job_steps(with_spans, run.clocks)
        .join(slowest, on="step")
        .select("step", "duration_ns", "slowest", wait="collective_ns")
        .sort("duration_ns", descending=True)
    )
    return [
        Table(
            title="Steps to look into: every rank's spans",
            columns=[
                Column(title="step", numeric=True, link=f"{run_address(run.facts.run)}/steps/{{}}"),
                Column(title="step time ms", numeric=True),
                Column(title="slowest rank", numeric=True),
                Column(title="mean exposed collective ms", numeric=True),
            ],
            rows=[
                [step, round(ns / 1e6, 3), rank, None if wait is None else round(wait / 1e6, 3)]
                for step, ns, rank, wait in by_step.head(_ROW_LIMIT).iter_rows()
            ],
            note=f"The slowest {_ROW_LIMIT} of {len(by_step)} steps with spans."
            if len(by_step) > _ROW_LIMIT
            else None,
        )
    ]


def matrix_of(run: LoadedRun, colour: str) -> Columns:
    """Return the rank × step matrix for the canvas."""
    found = matrix(run, colour)
    address = run_address(run.facts.run)
    known = found.values[np.isfinite(found.values)]
    means = np.nanmean(found.values, axis=1) if known.size else np.array([])
    # A few wild steps (compilation, the first allocation) must not wash the colours out, but one
    # slow rank of a thousand must stand out.
    high = float(max(np.percentile(known, 99.5), means.max())) if known.size else None
    middle = float(np.median(means)) if len(means) else 0.0
    order = np.argsort(-means, kind="stable")[:12]
    table = Table(
        title=f"{MATRIX[colour]}: highest means",
        columns=[
            Column(title="rank", numeric=True),
            Column(title="mean, ms", numeric=True),
            Column(title="of the median rank", numeric=True),
            Column(title="most, ms", numeric=True),
        ],
        rows=[
            [
                found.ranks[n],
                round(float(means[n]), 4),
                round(float(means[n]) / middle, 3) if middle else None,
                round(float(np.nanmax(found.values[n])), 4),
            ]
            for n in order
        ],
    )
    block = Heatmap(
        title=MATRIX[colour],
        row_labels=[str(r) for r in found.ranks],
        column_labels=[str(s) for s in found.steps],
        values=found.values,  # type: ignore[arg-type] # an array serves
        unit="ms",
        low=float(np.percentile(known, 0.5)) if known.size else None,
        high=high,
        row_title="rank",
        column_title="step",
    )
    columns = heatmap_columns(
        block,
        links={
            "row": f"{address}/ranks/{{row}}",
            "cell": f"{address}/steps/{{column}}?rank={{row}}",
        },
        alternative=table,
        summary=[
            (
                f"{len(found.ranks)} ranks by {len(found.steps)} steps; the median rank's mean is "
                f"{middle:.4g} ms."
            )
        ],
    )
    return replace(columns, header={**columns.header, "pool": True})


def answer_of(answer: Report) -> dict[str, object]:
    """Return the report and its figures over steps, at most 600 points, for the JSON twin."""
    shown = folded(rates(answer))
    return {
        "report": answer.to_json(),
        "over_steps": {
            "columns": shown.columns,
            "rows": [list(row) for row in shown.iter_rows()],
        },
        "steps_with_spans": steps_with_spans(answer.run)[:10_000],
    }


def _run(reading: Reading, values: Mapping[str, str]) -> Screen:
    return kept(
        reading, values["run"], ("run", values["colour"]), lambda _: _drawn(reading, values)
    )


def _drawn(reading: Reading, values: Mapping[str, str]) -> Screen:
    known = need_run(reading, values["run"])
    answer = loaded_report(reading, known.run)
    blocks: list[ScreenBlock] = [
        Sentence(
            text=f"Of job:{known.job}." if known.job else "Of no Slurm job that is known here.",
            tone=Tone.MUTED,
        ),
        *run_blocks(answer, values["colour"]),
    ]
    blocks[2:2] = [RUN_TRACE] if len(answer.run.spans) else []
    blocks += [*use_blocks(answer.run.steps), *_windows(known.run, answer.run)]
    return Screen(
        title=f"Run {known.run}",
        blocks=blocks,
        answer={"schema": "kansoku.web.run/1", **known.to_json(), **answer_of(answer)},
        trail=_trail(known.job),
        live=() if answer.run.facts.end_ns else ("steps", "spans"),
    )


def _windows(run: str, loaded: LoadedRun) -> list[ScreenBlock]:
    """Return the form that lays two windows of the run side by side: by default its halves."""
    steps = loaded.steps["step"].drop_nulls().unique().sort().to_list()
    if len(steps) < 4:
        return []
    middle = len(steps) // 2
    bounds = (
        ("a_from", "A from step", steps[0]), ("a_to", "A to step", steps[middle - 1]),
        ("b_from", "B from step", steps[middle]), ("b_to", "B to step", steps[-1]),
    )  # fmt: skip
    return [
        Choices(
            action="/compare",
            hidden=(("a", run), ("b", run)),
            choices=[Choice(name=n, label=label, value=str(step)) for n, label, step in bounds],
            submit="Compare two windows of this run",
        )
    ]


def _trail(job: str | None) -> Sequence[tuple[str, str]]:
    trail = [("Jobs", "/jobs")]
    if job:
        trail.append((f"Job {job}", f"/jobs/{quote(job, safe='')}"))
    return trail


def run_trail(reading: Reading, run: str) -> list[tuple[str, str]]:
    """Return the pages above a part of a run."""
    return [*_trail(need_run(reading, run).job), (f"Run {run}", run_address(run))]


def _matrix_columns(reading: Reading, values: Mapping[str, str]) -> Columns:
    return kept_matrix(reading, values["run"], values["colour"])


def kept_matrix(reading: Reading, run: str, colour: str) -> Columns:
    """Return :func:`matrix_of` a run, made once."""
    return kept(reading, run, ("matrix", colour), lambda loaded: matrix_of(loaded, colour))


def kept_blocks(reading: Reading, run: str, colour: str) -> list[ScreenBlock]:
    """Return :func:`run_blocks` of a run, made once."""
    answer = loaded_report(reading, run)
    return kept(reading, run, ("blocks", colour), lambda _: run_blocks(answer, colour))


def kept_answer(reading: Reading, run: str) -> dict[str, object]:
    """Return :func:`answer_of` a run, made once."""
    answer = loaded_report(reading, run)
    return kept(reading, run, "answer", lambda _: answer_of(answer))


RUN = Page(
    path="/runs/{run}",
    title="Run",
    build=_run,
    columns={"matrix": _matrix_columns},
    files={"trace": trace_file},
    parameters=(RUN_PARAMETER, COLOUR),
)


# One rank


def _rank(reading: Reading, values: Mapping[str, str]) -> Screen:
    return kept(
        reading, values["run"], ("rank", values["rank"]), lambda _: _rank_drawn(reading, values)
    )


def _rank_drawn(reading: Reading, values: Mapping[str, str]) -> Screen:
    answer = loaded_report(reading, values["run"])
    run, rank = answer.run, int(values["rank"])
    own = run.steps.filter((pl.col("rank") == rank) & pl.col("duration_ns").is_not_null())
    if own.is_empty():
        ranks = run.steps["rank"].unique().sort().to_list()
        span = f"{ranks[0]}-{ranks[-1]}" if ranks else "none"
        raise MissingError(
            f"run {run.facts.run!r} has no steps of rank {rank}", remedy=f"its ranks: {span}"
        )
    facts = next((f for f in run.facts.ranks if f.rank == rank), None)
    blocks: list[ScreenBlock] = [_rank_facts(run, rank, facts), *_rank_verdict(answer, rank)]
    blocks += [*_rank_series(run, rank, own), *use_blocks(own), _rank_steps(run, rank, own)]
    means = _phase_means(run, rank)
    blocks.insert(2, _phase_table(means, rank))
    return Screen(
        title=f"Rank {rank}",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.rank/1",
            "run": run.facts.run,
            "rank": rank,
            "node": facts.node if facts is not None and facts.node else None,
            "steps": len(own),
            "phases_ms": means,
        },
        trail=run_trail(reading, run.facts.run),
        live=() if run.facts.end_ns else ("steps",),
    )


def _rank_facts(run: LoadedRun, rank: int, facts: object) -> Block:
    node = getattr(facts, "node", "") or None
    pid = getattr(facts, "pid", 0) or None
    groups = getattr(facts, "groups", ())
    stage = run.layout.stage.get(rank, 0)
    return Facts(
        items=[
            ("Node", f"node:{node}" if node else "unknown"),
            ("Process", "unknown" if pid is None else f"pid {pid}"),
            ("Device", getattr(facts, "device", None) or "unknown"),
            ("Pipeline stage", str(stage) if run.layout.pp > 1 else "none: no pipeline"),
            (
                "Process groups",
                ", ".join(f"{g.description or g.name} ({len(g.ranks)})" for g in groups[:8])
                or "unknown",
            ),
        ]
    )


def _rank_verdict(answer: Report, rank: int) -> list[ScreenBlock]:
    for one in answer.stragglers.stragglers:
        if one.rank == rank:
            return [
                Sentence(
                    text=f"This rank is a straggler in {PHASE_TITLES[one.phase]}: its own work "
                    f"takes {one.ratio:.2f}× its peers'.",
                    tone=Tone.BAD,
                    detail=f"without it a step would take {one.cost_ratio:.0%} less; confidence "
                    f"{one.confidence:.0%}",
                )
            ]
    if answer.stragglers.verdict is Verdict.UNKNOWN:
        return [
            Sentence(text=f"Stragglers: unknown, because {answer.stragglers.reason}.",
                     tone=Tone.MUTED)
        ]  # fmt: skip
    return [Sentence(text="This rank does not hold its peers up.", tone=Tone.GOOD)]


def _phase_means(run: LoadedRun, rank: int) -> dict[str, dict[str, float | None]]:
    """Return phase to its mean a step on this rank and the median of all ranks' means, ms."""
    means = (
        run.steps.filter(pl.col("complete"))
        .group_by("rank")
        .agg(pl.col("duration_ns", *(f"{p.value}_ns" for p in PHASES)).mean() / 1e6)
    )
    mine = means.filter(pl.col("rank") == rank)
    found = {}
    for name in ("duration", *(p.value for p in PHASES)):
        column = f"{name}_ns"
        own = mine[column].to_list()[0] if len(mine) else None
        middle = means[column].median()
        found["step" if name == "duration" else name] = {
            "own": own,
            "median": float(middle) if isinstance(middle, int | float) else None,
        }
    return found


def _phase_table(means: Mapping[str, Mapping[str, float | None]], rank: int) -> Table:
    rows = []
    for name, pair in means.items():
        own, middle = pair["own"], pair["median"]
        if not own and not middle:
            continue
        change = None if own is None or not middle else f"{own / middle - 1:+.1%}"
        rows.append(
            [
                name.replace("_", " "),
                None if own is None else round(own, 3),
                None if middle is None else round(middle, 3),
                change,
            ]
        )
    return Table(
        title="Mean time a step, beside the median rank",
        columns=[
            Column(title="phase"),
            Column(title=f"rank {rank}, ms", numeric=True),
            Column(title="median rank, ms", numeric=True),
            Column(title="difference", numeric=True),
        ],
        rows=rows,
    )


def _rank_series(run: LoadedRun, rank: int, own: pl.DataFrame) -> list[ScreenBlock]:
    middle = run.steps.group_by("step").agg(middle=pl.col("duration_ns").median())
    frame = folded(
        own.select("step", "duration_ns", *(f"{p.value}_ns" for p in PHASES))
        .join(middle, on="step", how="left")
        .sort("step")
    )
    x = [float(v) for v in frame["step"].to_list()]

    def line(name: str, column: str) -> Line:
        return Line(name=name, x=x, y=(frame[column] / 1e6).to_list())

    seen = [p for p in PHASES if (frame[f"{p.value}_ns"].sum() or 0) > 0]
    return [
        Heading(text="Over time"),
        Series(
            title="Step time of this rank and of the median rank",
            x_title="step",
            y_title="ms",
            lines=[line(f"rank {rank}", "duration_ns"), line("median rank", "middle")],
        ),
        Series(
            title="Phases of this rank",
            x_title="step",
            y_title="ms",
            style="stacked",
            lines=[line(PHASE_TITLES[p], f"{p.value}_ns") for p in seen],
        ),
    ]


def _rank_steps(run: LoadedRun, rank: int, own: pl.DataFrame) -> Table:
    slowest = own.top_k(20, by="duration_ns")
    seen = [p for p in PHASES if (own[f"{p.value}_ns"].sum() or 0) > 0]
    return Table(
        title="Its slowest steps",
        columns=[
            Column(
                title="step",
                numeric=True,
                link=f"{run_address(run.facts.run)}/steps/{{}}?rank={rank}",
            ),
            Column(title="step time ms", numeric=True),
            *(Column(title=f"{PHASE_TITLES[p]} ms", numeric=True) for p in seen),
        ],
        rows=[
            [
                row["step"],
                round(row["duration_ns"] / 1e6, 3),
                *(round((row[f"{p.value}_ns"] or 0) / 1e6, 3) for p in seen),
            ]
            for row in slowest.iter_rows(named=True)
        ],
    )


RANK_PARAMETER = Parameter(
    name="rank", meaning="number of the rank", in_path=True, pattern=r"\d{1,7}"
)
RANK = Page(
    path="/runs/{run}/ranks/{rank}",
    title="Rank",
    build=_rank,
    parameters=(RUN_PARAMETER, RANK_PARAMETER),
)

"""Two runs, or two windows of one run, side by side."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from kansoku.app.report import Report, report
from kansoku.app.web_jobs._figures import PHASE_TITLES, folded, rates
from kansoku.app.web_jobs._run import run_address
from kansoku.app.web_jobs._runs import RUN_ID, KnownRun, known_runs, load, windowed
from kansoku.app.web_page import (
    Choice,
    Choices,
    Missing,
    Page,
    Parameter,
    Screen,
    ScreenBlock,
)
from kansoku.app.web_reading import Reading
from kansoku.errors import InputError
from kansoku.model import PHASES
from kansoku.trace.kineto.compare import mann_whitney
from kansoku.view import Column, Line, Sentence, Series, Table, Tone

__all__ = ["COMPARE"]

_STEP = r"\d{1,9}"
_SURE = 0.01
"""Below this probability of chance a difference is said to be one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of the two."""

    name: str
    """``A`` or ``B``."""
    title: str
    answer: Report
    over: pl.DataFrame
    """Figures over steps, of steps after warm-up."""


def _number(values: Mapping[str, str], name: str) -> int | None:
    return int(values[name]) if name in values else None


def _side(reading: Reading, values: Mapping[str, str], letter: str) -> _Side:
    run = values[letter]
    low, high = _number(values, f"{letter}_from"), _number(values, f"{letter}_to")
    if low is not None and high is not None and low > high:
        raise InputError(f"{letter}_from={low} is after {letter}_to={high}")
    answer = report(windowed(load(reading, run), low, high))
    over = rates(answer)
    window = answer.throughput.window
    title = run
    if window is not None:
        over = over.filter(pl.col("step").is_between(window.from_step, window.to_step))
        title += f", steps {window.from_step}-{window.to_step}"
    return _Side(name=letter.upper(), title=title, answer=answer, over=over)


def _compare(reading: Reading, values: Mapping[str, str]) -> Screen:
    runs = known_runs(reading)
    form = _form(runs, values)
    if not runs:
        return _waiting(
            [
                Missing(
                    text="No training run is known.",
                    remedy="Record one, and one more, to lay them side by side.",
                    command="kansoku run --out STORE/runs/NAME -- torchrun … train.py",
                )
            ],
            "no run is known",
        )
    if "a" not in values or "b" not in values:
        text = "Choose two runs, or one run twice with two windows of steps."
        return _waiting([form, Sentence(text=text)], "two runs are not chosen")
    a, b = _side(reading, values, "a"), _side(reading, values, "b")
    rows = _rows(a, b)
    probability = _probability(a, b)
    blocks: list[ScreenBlock] = [
        form,
        _verdict(a, b, probability),
        _table(a, b, rows),
        _phases(a, b),
        *_series(a, b),
        Table(
            title="The two",
            columns=[Column(title="side"), Column(title="run", link="/runs/{}")],
            rows=[["A", values["a"]], ["B", values["b"]]],
        ),
    ]
    return Screen(
        title="Comparison",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.compare/1",
            "a": {"run": values["a"], "title": a.title, "report": a.answer.to_json()},
            "b": {"run": values["b"], "title": b.title, "report": b.answer.to_json()},
            "rows": [
                {"what": name, "unit": unit, "a": x, "b": y, "change_ratio": _change(x, y)}
                for name, unit, x, y in rows
            ],
            "p_value": probability,
            "verdict": "unknown"
            if probability is None
            else "found"
            if probability < _SURE
            else "none",
            "reason": "Mann-Whitney test of the step times after warm-up",
            "pages": [run_address(values["a"]), run_address(values["b"])],
        },
        trail=(("Jobs", "/jobs"),),
    )


def _waiting(blocks: list[ScreenBlock], reason: str) -> Screen:
    return Screen(
        title="Comparison",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.compare/1", "a": None, "b": None, "rows": [],
            "verdict": "unknown", "reason": reason,
        },
        trail=(("Jobs", "/jobs"),),
    )  # fmt: skip


def _form(runs: tuple[KnownRun, ...], values: Mapping[str, str]) -> Choices:
    options = tuple((one.run, one.run) for one in runs[:500])

    def step(name: str, label: str) -> Choice:
        return Choice(name=name, label=label, value=values.get(name, ""))

    return Choices(
        choices=(
            Choice(name="a", label="Run A", options=options, value=values.get("a", "")),
            step("a_from", "A from step"),
            step("a_to", "A to step"),
            Choice(name="b", label="Run B", options=options, value=values.get("b", "")),
            step("b_from", "B from step"),
            step("b_to", "B to step"),
        ),
        submit="Compare",
    )


def _change(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or not a else b / a - 1


def _rows(a: _Side, b: _Side) -> list[tuple[str, str, float | None, float | None]]:
    """Return what, unit, A and B of every figure."""

    def both(get: "object", name: str, unit: str) -> tuple[str, str, float | None, float | None]:
        found = [get(side.answer) for side in (a, b)]  # type: ignore[operator]
        return (name, unit, *found)

    def milliseconds(value: float | None) -> float | None:
        return None if value is None else value / 1e6

    rows = [
        both(lambda r: milliseconds(r.throughput.median_step_ns), "median step time", "ms"),
        both(lambda r: milliseconds(r.throughput.p95_step_ns), "p95 step time", "ms"),
        both(lambda r: r.throughput.tokens_per_s, "tokens/s", "tokens/s"),
        both(lambda r: r.throughput.tokens_per_s_per_gpu, "tokens/s/GPU", "tokens/s/GPU"),
        both(lambda r: None if r.mfu is None else 100 * r.mfu.value, "MFU", "%"),
        both(lambda r: r.run.layout.world, "ranks", ""),
        both(lambda r: r.throughput.complete_steps, "complete steps", ""),
        both(lambda r: len(r.stragglers.stragglers), "stragglers", ""),
    ]
    for phase in PHASES:
        column = f"{phase.value}_ns"
        means = [side.over[column].mean() for side in (a, b)]
        x, y = (float(m) / 1e6 if isinstance(m, int | float) else None for m in means)
        if x or y:
            rows.append((f"{PHASE_TITLES[phase]} a step", "ms", x, y))
    return rows


def _probability(a: _Side, b: _Side) -> float | None:
    """Return how likely chance alone parts the step times so far; None with too few steps."""
    x, y = (side.over["duration_ns"].to_numpy().astype(np.int64) for side in (a, b))
    return mann_whitney(x, y) if min(len(x), len(y)) >= 8 else None


def _verdict(a: _Side, b: _Side, probability: float | None) -> Sentence:
    x, y = a.answer.throughput.median_step_ns, b.answer.throughput.median_step_ns
    if not x or not y or probability is None:
        return Sentence(
            text="Whether they differ is unknown: fewer than eight complete steps after warm-up.",
            tone=Tone.MUTED,
        )
    detail = f"Mann-Whitney test of the step times after warm-up: p = {probability:.2g}"
    if probability >= _SURE:
        return Sentence(
            text="The step times do not differ more than chance explains.",
            tone=Tone.GOOD,
            detail=detail,
        )
    word = "longer" if y > x else "shorter"
    return Sentence(
        text=f"A step of B is {abs(y / x - 1):.1%} {word} than a step of A.",
        tone=Tone.NOTICE if y > x else Tone.GOOD,
        detail=detail,
    )


def _table(a: _Side, b: _Side, rows: list[tuple[str, str, float | None, float | None]]) -> Table:
    def cell(value: float | None) -> str | None:
        if value is None:
            return None
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"

    shown: list[list[str | None]] = []
    for name, unit, x, y in rows:
        change = _change(x, y)
        shown.append(
            [
                name,
                unit,
                cell(x),
                cell(y),
                None if x is None or y is None else cell(y - x),
                None if change is None else f"{change:+.1%}" if abs(change) >= 5e-4 else "0.0%",
            ]
        )
    return Table(
        title="Side by side",
        columns=[
            Column(title="what"), Column(title="unit"), Column(title=f"A: {a.title}", numeric=True),
            Column(title=f"B: {b.title}", numeric=True), Column(title="B − A", numeric=True),
            Column(title="change", numeric=True),
        ],
        rows=shown,
    )  # fmt: skip


def _phases(a: _Side, b: _Side) -> Series:
    seen = [p for p in PHASES if any((s.over[f"{p.value}_ns"].sum() or 0) > 0 for s in (a, b))]
    x = [float(n) for n in range(len(seen))]

    def means(side: _Side) -> list[float | None]:
        found = [side.over[f"{p.value}_ns"].mean() for p in seen]
        return [float(v) / 1e6 if isinstance(v, int | float) else None for v in found]

    return Series(
        title="Phases of a step",
        x_title="phase",
        y_title="ms, mean of steps and ranks",
        style="bar",
        x_labels=[PHASE_TITLES[p] for p in seen],
        lines=[Line(name=side.name, x=x, y=means(side)) for side in (a, b)],
    )


def _series(a: _Side, b: _Side) -> list[Series]:
    found = []
    shown = [(side, folded(side.over)) for side in (a, b)]
    for name, title, y_title, scale in (
        ("duration_ns", "Step time", "ms", 1e-6),
        ("tokens_per_s_per_gpu", "Tokens/s/GPU", "tokens/s/GPU", 1.0),
        ("mfu", "MFU", "% of the peak", 100.0),
    ):
        lines = []
        for side, frame in shown:
            if not len(frame) or frame[name].null_count() == len(frame):
                continue
            first = frame["step"].to_list()[0]
            lines.append(
                Line(
                    name=side.name,
                    x=[float(s - first) for s in frame["step"].to_list()],
                    y=[None if v is None else v * scale for v in frame[name].to_list()],
                )
            )
        if lines:
            found.append(
                Series(
                    title=f"{title}, from each window's first step",
                    x_title="steps since the first",
                    y_title=y_title,
                    lines=lines,
                )
            )
    return found


COMPARE = Page(
    path="/compare",
    title="Comparison",
    build=_compare,
    parameters=(
        Parameter(name="a", meaning="id of one run", pattern=RUN_ID),
        Parameter(name="b", meaning="id of the other run", pattern=RUN_ID),
        Parameter(name="a_from", meaning="first step of A", pattern=_STEP),
        Parameter(name="a_to", meaning="last step of A", pattern=_STEP),
        Parameter(name="b_from", meaning="first step of B", pattern=_STEP),
        Parameter(name="b_to", meaning="last step of B", pattern=_STEP),
    ),
    navigation=25,
)

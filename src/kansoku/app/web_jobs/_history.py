"""The history of the cluster's jobs: report, reliability, idle capacity, health of nodes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import polars as pl

from kansoku.app.jobs import (
    idle_json,
    idle_view,
    nodes,
    nodes_json,
    nodes_view,
    reliability,
    reliability_json,
    reliability_view,
    report,
    report_json,
    report_view,
)
from kansoku.app.jobs._context import Window, open_history
from kansoku.app.jobs._evidence import Evidence, Gather, gather_from
from kansoku.app.jobs.capacity import IdleAnswer
from kansoku.app.web_fleet._heat import HEAT, heat
from kansoku.app.web_fleet._nodes import Fleet, _queue, fleet_now
from kansoku.app.web_fleet._window import WINDOW_PARAMETERS, Span, stamp, window_choices, window_of
from kansoku.app.web_jobs._view import drawable
from kansoku.app.web_page import (
    Card,
    Cards,
    Choices,
    Missing,
    Page,
    Screen,
    ScreenBlock,
)
from kansoku.app.web_reading import Reading
from kansoku.errors import InputError
from kansoku.formats.slurm import JOB_SCHEMA, NODE_EVENT_SCHEMA, STEP_SCHEMA, fold_nodes
from kansoku.jobs.edge.history import Merged
from kansoku.jobs.idle import idle_allocations, power_windows
from kansoku.view import Block, Column, Sentence, Table, Tone, View

__all__ = ["HISTORY", "IDLE", "NODES", "RELIABILITY"]

_SCHEMAS = {"jobs": JOB_SCHEMA, "steps": STEP_SCHEMA, "node_events": NODE_EVENT_SCHEMA}
_PARTS = (
    ("Report", "/history", "who used what, and how it ended"),
    ("Reliability", "/history/reliability", "why jobs failed, and how that grows with size"),
    ("Idle capacity", "/history/idle", "what is free, by Slurm and by power"),
    ("Nodes", "/history/nodes", "health of every node, with its evidence"),
)
_IDLE_WATTS = 150.0
"""A GPU below this does nothing: the default of kansoku jobs idle."""


class _Both:
    """The imported history and the rows that were sent, as one history to read."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def scan(self, table: str) -> pl.LazyFrame:
        """Return the rows of ``jobs``, ``steps`` or ``node_events``."""
        imported = (self._reading.folder / "job-history").is_dir()
        frames = [pl.LazyFrame(schema=_SCHEMAS[table])]
        if imported:
            frames.append(open_history(self._reading.folder).scan(table))
        if table == "jobs":
            sent = self._reading.query("jobs")
            if imported and len(sent):
                keys = ["cluster", "raw_id", "submit_ns", "job_id"]
                known = frames[-1].select(keys).collect()
                sent = sent.join(known, on=keys, how="anti", nulls_equal=True)
            frames.append(_widened(sent).lazy())
        return pl.concat(frames, how="vertical_relaxed")

    def merge(self, table: str, frame: pl.DataFrame) -> Merged:
        """Refuse: pages only read."""
        raise InputError(f"pages never write {table}: {len(frame)} rows")

    def note(self, name: str) -> str | None:
        """Return nothing: notes are the importer's."""
        del name
        return None

    def remember(self, name: str, value: str) -> None:
        """Refuse: pages only read."""
        raise InputError(f"pages never write {name}={value}")


def _widened(sent: pl.DataFrame) -> pl.DataFrame:
    """Return rows of the jobs table in the history's columns; what it lacks is null."""
    return sent.select(
        (pl.col(name) if name in sent.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in JOB_SCHEMA.items()
    )


def _head(values: Mapping[str, str]) -> list[ScreenBlock]:
    parts = [Card(label=text, value=title, link=path) for title, path, text in _PARTS]
    return [Cards(cards=parts), Choices(choices=window_choices(values))]


def _screen(
    title: str, values: Mapping[str, str], answer: Mapping[str, object], view: View | None
) -> Screen:
    blocks = _head(values)
    if view is None:
        blocks.append(
            Missing(
                text="No job is in this window.",
                remedy="Choose another window, or import Slurm's history; repeated, this command "
                "adds what is new.",
                command="kansoku jobs import --live",
            )
        )
    else:
        blocks += drawable(view.blocks)
    return Screen(
        title=title,
        blocks=blocks,
        answer=answer,
        trail=() if title == "Job history" else (("History", "/history"),),
    )


def _text(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 10**9, UTC).isoformat()


def _empty(schema: str, span: Span, error: InputError) -> dict[str, object]:
    return {"schema": schema, "verdict": "unknown", "reason": str(error), **span.to_json()}


def _report(reading: Reading, values: Mapping[str, str]) -> Screen:
    reading.need_all()
    span = window_of(values, reading.clock_ns())
    try:
        found = report(
            history=_Both(reading),
            now=reading.clock_ns,
            since=_text(span.since_ns),
            until=_text(span.until_ns),
        )
    except InputError as error:
        return _screen("Job history", values, _empty("kansoku.jobs.report/1", span, error), None)
    return _screen("Job history", values, report_json(found), report_view(found))


def _gathered(reading: Reading, *, covariates: bool) -> Gather:
    def gather(window: Window) -> Evidence:
        return gather_from(reading.store, window, covariates=covariates)

    return gather


def _reliability(reading: Reading, values: Mapping[str, str]) -> Screen:
    reading.need_all()
    span = window_of(values, reading.clock_ns())
    try:
        found = reliability(
            history=_Both(reading),
            gathered=_gathered(reading, covariates=True),
            now=reading.clock_ns,
            since=_text(span.since_ns),
            until=_text(span.until_ns),
        )
    except InputError as error:
        answer = _empty("kansoku.jobs.reliability/1", span, error)
        return _screen("Reliability", values, answer, None)
    return _screen("Reliability", values, reliability_json(found), reliability_view(found))


def _nodes(reading: Reading, values: Mapping[str, str]) -> Screen:
    reading.need_all()
    span = window_of(values, reading.clock_ns())
    try:
        found = nodes(
            history=_Both(reading),
            gathered=_gathered(reading, covariates=False),
            now=reading.clock_ns,
            since=_text(span.since_ns),
            until=_text(span.until_ns),
        )
    except InputError as error:
        answer = _empty("kansoku.jobs.nodes/1", span, error)
        return _screen("Health of nodes", values, answer, None)
    return _screen("Health of nodes", values, nodes_json(found), nodes_view(found))


def _idle(reading: Reading, values: Mapping[str, str]) -> Screen:
    reading.need_all()
    span = window_of(values, reading.clock_ns())
    fleet = fleet_now(reading, span.until_ns)
    matrix = heat(reading, HEAT["power"], span, columns=720).matrix
    known = bool(np.isfinite(matrix.values).any())
    notes = [] if known else ["No GPU power in the window: idle by power is unknown."]
    queue = _queue(reading, span.until_ns)
    arrays = (matrix.values, matrix.rows, matrix.times_ns, matrix.step_ns)
    answer = IdleAnswer(
        time_ns=span.until_ns,
        least=1,
        now=fleet.free,
        windows=fleet.windows,
        power=tuple(power_windows(*arrays, below=_IDLE_WATTS, least=1)) if known else None,
        allocations=tuple(idle_allocations(*arrays, queue, below=_IDLE_WATTS, unit="W"))
        if known
        else None,
        fits=fleet.fits,
        notes=tuple(notes),
    )
    if not fleet.nodes:
        found = {**idle_json(answer), "verdict": "unknown", "reason": "no node is known"}
        return _screen("Idle capacity", values, found, None)
    view = idle_view(replace(answer, fits=()))
    view = replace(view, blocks=[*view.blocks, _fits(fleet)])
    return _screen("Idle capacity", values, idle_json(answer), view)


_MOST_NODES = 16


def _who(label: str) -> tuple[str, str | None]:
    """Return id and user of a label such as ``job 12 (ann)``."""
    found = re.fullmatch(r"job (\S+) \((.*)\)", label)
    return (found[1], found[2]) if found else (label, None)


def _fits(fleet: Fleet) -> Block:
    """Return which pending job would fit, on which nodes, or else when."""
    if not fleet.fits:
        return Sentence(text="No job waits.", tone=Tone.GOOD)
    rows: list[list[str | int | None]] = []
    for one in fleet.fits:
        where = [name for name, gpus in fleet.room.items() if gpus >= one.gpus_per_node]
        names = fold_nodes(where[:_MOST_NODES]) + (" …" if len(where) > _MOST_NODES else "")
        if one.fits_now:
            answer = f"fits now; Slurm says {one.reason or 'nothing'}"
        elif one.starts_ns is not None:
            answer = f"fits {stamp(one.starts_ns)}, by the running jobs' time limits"
        else:
            answer = "does not fit on the nodes in service"
        rows.append(
            [
                *_who(one.label),
                one.nodes,
                one.gpus_per_node,
                one.free_nodes,
                names or None,
                answer,
            ]
        )
    return Table(
        title="Which pending job would fit where",
        columns=[
            Column(title="job"), Column(title="user"), Column(title="nodes wanted", numeric=True),
            Column(title="GPUs on each", numeric=True),
            Column(title="nodes that fit now", numeric=True), Column(title="which"),
            Column(title="answer"),
        ],
        rows=rows,
        tones=[Tone.GOOD if one.fits_now else Tone.PLAIN for one in fleet.fits],
        note="A job that wants whole nodes does not fit on GPUs that are free here and there.",
    )  # fmt: skip


def _pages() -> Sequence[Page]:
    builders = (_report, _reliability, _idle, _nodes)
    titles = ("History", "Reliability", "Idle capacity", "Health of nodes")
    # A history of a day says little: a month unless asked otherwise.
    window = tuple(
        replace(one, default="30d") if one.name == "window" else one for one in WINDOW_PARAMETERS
    )
    return [
        Page(
            path=path,
            title=title,
            build=build,
            parameters=WINDOW_PARAMETERS if path.endswith("/idle") else window,
            navigation=60 if path == "/history" else None,
            operators_only=True,
        )
        for (_, path, _), title, build in zip(_PARTS, titles, builders, strict=True)
    ]


HISTORY, RELIABILITY, IDLE, NODES = _pages()

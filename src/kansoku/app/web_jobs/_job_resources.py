"""What the nodes of a job did while it ran, beside what its ranks were in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from kansoku.app.report import Report
from kansoku.app.web_columns import heatmap_columns
from kansoku.app.web_jobs._figures import PHASE_TITLES, folded, rates
from kansoku.app.web_jobs._runs import KnownRun
from kansoku.app.web_page import (
    Columns,
    Missing,
    Remote,
    ScreenBlock,
)
from kansoku.app.web_reading import Reading
from kansoku.errors import InputError
from kansoku.formats.slurm import expand_nodes
from kansoku.model import PHASES
from kansoku.view import (
    Column,
    Heading,
    Heatmap,
    Line,
    Series,
    Table,
)

__all__ = ["JobFacts", "power_columns", "resource_blocks"]

S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A job's incarnations, newest first, and its runs."""

    job: str
    rows: pl.DataFrame
    runs: tuple[KnownRun, ...]

    def newest(self) -> Mapping[str, object] | None:
        """Return the newest incarnation that started, or else the newest."""
        started = self.rows.filter(pl.col("start_ns").is_not_null())
        frame = started if len(started) else self.rows
        return frame.row(0, named=True) if len(frame) else None

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes of the newest incarnation."""
        row = self.newest()
        try:
            return tuple(expand_nodes(str(row["node_list"]))) if row and row["node_list"] else ()
        except ValueError:
            return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantity:
    metric: str
    title: str
    y_title: str
    scale: float
    aggregate: str
    hardware: str
    across: str


_QUANTITIES = (
    _Quantity(metric="hw.power", title="GPU power", y_title="W, mean of its GPUs", scale=1.0,
              aggregate="avg", hardware="gpu", across="avg"),
    _Quantity(metric="hw.gpu.utilization", title="GPU utilisation", y_title="%, mean of its GPUs",
              scale=100.0, aggregate="avg", hardware="gpu", across="avg"),
    _Quantity(metric="hw.network.io", title="NIC traffic, both directions",
              y_title="GB/s, sum of its NICs", scale=1e-9, aggregate="rate", hardware="network",
              across="sum"),
)  # fmt: skip
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, 86_400)


def _when(found: JobFacts, now: int) -> tuple[int, int] | None:
    row = found.newest()
    if row is None or not isinstance(row["start_ns"], int):
        return None
    end = row["end_ns"] if isinstance(row["end_ns"], int) else now
    return (row["start_ns"], end) if end > row["start_ns"] else None


def _samples(
    reading: Reading, found: JobFacts, one: _Quantity, now: int, *, columns: int = 300
) -> tuple[pl.DataFrame, int]:
    """Return ``node, device, time_ns, value`` of the job's nodes while it ran, and the step."""
    empty = pl.DataFrame(
        schema={"node": pl.String, "device": pl.String, "time_ns": pl.Int64, "value": pl.Float64}
    )
    when = _when(found, now)
    nodes = list(found.nodes())
    if when is None or not nodes:
        return empty, S
    start, end = when
    least = (end - start) / S / columns
    step = S * next((s for s in _STEPS_S if s >= least), 86_400)
    by = ["host.name", "hw.name", "hw.id", "hw.type"]
    asked = {"start_ns": start, "end_ns": end, "step_ns": step, "aggregate": one.aggregate,
             "by": by, "across": one.across}  # fmt: skip
    try:
        if reading.sees_all:
            matchers = {"host.name": nodes, "hw.type": one.hardware}
            frame = reading.store.metric_range(one.metric, matchers, **asked)  # type: ignore[arg-type]
        else:
            frame = reading.job_metric_range(one.metric, found.job, **asked)  # type: ignore[arg-type]
    except InputError:
        return empty, step
    labels = {text: json.loads(text) for text in frame["labels"].unique().to_list()}
    kept = {k: v for k, v in labels.items() if v.get("hw.type", one.hardware) == one.hardware}

    def named(name: str, other: str = "") -> pl.Expr:
        table = {k: str(v.get(name) or v.get(other) or "") for k, v in kept.items()}
        return pl.col("labels").replace_strict(table, default=None, return_dtype=pl.String)

    return (
        frame.filter(pl.col("labels").is_in(list(kept)))
        .select(node=named("host.name"), device=named("hw.name", "hw.id"), time_ns="time_ns",
                value="value"),
        step,
    )  # fmt: skip


def resource_blocks(
    reading: Reading, found: JobFacts, answer: Report | None, now: int
) -> list[ScreenBlock]:
    """Return what its nodes did beside what its ranks were in, over the same time."""
    blocks: list[ScreenBlock] = []
    series = []
    for one in _QUANTITIES:
        frame, _ = _samples(reading, found, one, now)
        if frame.is_empty():
            continue
        total = pl.col("value").mean() if one.across == "avg" else pl.col("value").sum()
        means = frame.group_by("time_ns").agg(total).sort("time_ns").drop_nulls()
        series.append(
            Series(
                title=one.title,
                x_title="time",
                y_title=one.y_title,
                x_is_time_ns=True,
                lines=[
                    Line(
                        name=one.title,
                        x=[float(t) for t in means["time_ns"].to_list()],
                        y=(means["value"] * one.scale).to_list(),
                    )
                ],
            )
        )
    if not series and not found.nodes():
        return []
    blocks.append(Heading(text="Resources of its nodes beside its phases"))
    if answer is not None:
        phases = _phases_by_time(answer)
        if phases is not None:
            blocks.append(phases)
    if not series:
        blocks.append(
            Missing(
                text="No sample of its nodes is kept.",
                remedy="The node agent sends power, utilisation and traffic; start one on every "
                "node.",
                command="kansoku agent --to http://THIS-SERVER:4318",
            )
        )
        return blocks
    blocks += series
    blocks.append(
        Remote(
            title="GPU power of its nodes",
            name="power",
            note="Rows are GPUs by node, columns are time: a dark row under a running job is a GPU "
            "that does nothing.",
        )
    )
    return blocks


def _phases_by_time(answer: Report) -> Series | None:
    shown = folded(rates(answer), points=300)
    if len(shown) < 2:
        return None
    x = [float(t) for t in shown["start_ns"].to_list()]
    seen = [p for p in PHASES if (shown[f"{p.value}_ns"].sum() or 0) > 0]
    return Series(
        title="Phases by time of day",
        x_title="time",
        y_title="ms a step, mean of the ranks",
        style="stacked",
        x_is_time_ns=True,
        lines=[
            Line(name=PHASE_TITLES[p], x=x, y=(shown[f"{p.value}_ns"] / 1e6).to_list())
            for p in seen
        ],
    )


def power_columns(reading: Reading, found: JobFacts) -> Columns:
    """Return GPU power of its nodes while it ran, for the canvas."""
    now = reading.clock_ns()
    frame, step = _samples(reading, found, _QUANTITIES[0], now, columns=1200)
    rows = sorted(set(frame.select("node", "device").iter_rows()))
    place = {pair: number for number, pair in enumerate(rows)}
    times = np.arange(0)
    matrix = np.zeros((len(rows), 0), np.float32)
    if rows:
        # Columns finer than the samples would be mostly empty.
        gaps = np.diff(np.unique(frame["time_ns"].to_numpy()))
        step = max(step, int(np.median(gaps)) if len(gaps) else step)
        first, last = frame["time_ns"].min(), frame["time_ns"].max()
        times = np.arange(int(first), int(last) + 1, step)  # type: ignore[arg-type]
        matrix = np.full((len(rows), len(times)), np.nan, np.float32)
        row = [place[pair] for pair in frame.select("node", "device").iter_rows()]
        column = (frame["time_ns"].to_numpy() - times[0]) // step
        matrix[row, column] = frame["value"].cast(pl.Float32).fill_null(np.nan).to_numpy()
    groups: list[tuple[str, int, int]] = []
    for number, (node, _) in enumerate(rows):
        if groups and groups[-1][0] == node:
            groups[-1] = (node, groups[-1][1], number)
        else:
            groups.append((node, number, number))
    means = [float(np.nanmean(v)) if np.isfinite(v).any() else None for v in matrix]
    block = Heatmap(
        title="GPU power",
        row_labels=["/".join(pair) for pair in rows],
        column_labels=[],
        column_times_ns=[int(t) for t in times],
        values=matrix,  # type: ignore[arg-type] # an array serves
        unit="W",
        low=0.0,
        row_title="GPU",
        column_title="time",
    )
    lowest = sorted(range(len(rows)), key=lambda n: means[n] if means[n] is not None else 1e9)[:12]  # type: ignore[arg-type,return-value]
    return heatmap_columns(
        block,
        links={"row": "/nodes/{node}"},
        groups=groups,
        summary=[f"{len(rows)} GPUs on {len(groups)} nodes, {step / 1e9:g} s a column."],
        alternative=Table(
            title="Lowest means",
            columns=[Column(title="GPU"), Column(title="mean, W", numeric=True)],
            rows=[
                ["/".join(rows[n]), None if means[n] is None else round(means[n] or 0.0, 1)]
                for n in lowest
            ],
        ),
    )

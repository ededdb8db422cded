"""A quantity of every GPU or NIC over time, with the jobs that held the nodes over it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
import polars as pl

from kansoku.app.web_fleet._nodes import natural
from kansoku.app.web_fleet._window import Span
from kansoku.app.web_reading import Reading
from kansoku.jobs.edge.promql import device_of, node_of
from kansoku.jobs.heatmap import HeatMatrix, JobBox, Quantity, job_boxes
from kansoku.view import Table
from kansoku.view.blocks import Column

__all__ = ["COLUMNS", "HEAT", "Heat", "HeatKind", "heat", "hottest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatKind:
    """One quantity of the cluster's heat map."""

    name: str
    title: str
    unit: str
    metric: str
    aggregate: str
    """Within a series and a column: mean of a gauge, peak, or rate of a counter."""
    matchers: Mapping[str, str | Sequence[str]]
    by: tuple[str, ...]
    """Labels that make a row; directions and priorities are summed over."""
    across: str = "sum"
    high: float | None = None
    low: float = 0.0
    scheme: str = "heat"


_GPU = {"hw.type": "gpu"}
_DEVICE = ("host.name", "hw.name", "hw.id")

HEAT: dict[str, HeatKind] = {
    one.name: one
    for one in (
        HeatKind(name="power", title="GPU power", unit="W", metric="hw.power", aggregate="avg",
                 matchers=_GPU, by=_DEVICE),
        HeatKind(name="utilisation", title="GPU utilisation", unit="ratio",
                 metric="hw.gpu.utilization", aggregate="avg",
                 matchers={**_GPU, "hw.gpu.task": ("", "general")}, by=_DEVICE, high=1.0),
        HeatKind(name="memory", title="GPU memory in use", unit="ratio",
                 metric="hw.gpu.memory.utilization", aggregate="avg", matchers=_GPU, by=_DEVICE,
                 high=1.0),
        HeatKind(name="temperature", title="GPU temperature", unit="°C", metric="hw.temperature",
                 aggregate="max",
                 matchers={**_GPU, "hw.sensor_location": ("", "core", "gpu")}, by=_DEVICE,
                 low=20.0),
        HeatKind(name="nic", title="NIC traffic, both directions", unit="B/s",
                 metric="hw.network.io", aggregate="rate", matchers={"hw.type": "network"},
                 by=_DEVICE),
        HeatKind(name="pfc", title="PFC pause frames", unit="/s",
                 metric="kansoku.nic.pause.frames", aggregate="rate", matchers={},
                 by=("host.name", "network.interface.name"), scheme="fault"),
    )
}  # fmt: skip
COLUMNS = 1440
Rows = tuple[tuple[str, str], ...]
Cells = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """The matrix and what the drawing needs beside it."""

    kind: HeatKind
    matrix: HeatMatrix
    groups: tuple[tuple[str, int, int], ...]
    """A node and its first and last row."""

    @property
    def known(self) -> bool:
        """Whether there is any value."""
        return bool(np.isfinite(self.matrix.values).any())


def heat(
    reading: Reading,
    kind: HeatKind,
    span: Span,
    *,
    columns: int = COLUMNS,
    node: str | None = None,
) -> Heat:
    """Return one quantity over the window; nodes of the cluster file without data get a row."""
    span, step = span.grid(columns)
    width = int((span.until_ns - span.since_ns) // step)
    rows, values = _cells(reading, kind, span, step, node)
    quantity = Quantity(
        name=kind.name, title=kind.title, unit=kind.unit, metrics=(kind.metric,), promql="",
        idle_below=0.0,
    )  # fmt: skip
    bare = HeatMatrix(
        quantity=quantity,
        rows=rows,
        times_ns=span.since_ns + np.arange(width, dtype=np.int64) * step,
        step_ns=step,
        values=values,
    )
    boxes: tuple[JobBox, ...] = ()
    if rows:
        boxes = job_boxes(bare, reading.jobs(span.since_ns, span.until_ns))
    matrix = HeatMatrix(
        quantity=quantity, rows=rows, times_ns=bare.times_ns, step_ns=step, values=values,
        boxes=boxes,
    )  # fmt: skip
    return Heat(kind=kind, matrix=matrix, groups=_groups(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """Cells computed before; columns well before ``read_ns`` do not change any more."""

    span: Span
    rows: Rows
    values: Cells
    read_ns: int
    whole_ns: int
    """When the whole window was last read."""


_AGE_S = 1.5
_SETTLED_NS = 300 * 10**9
"""Samples later than this are seen when the whole window is read again."""
_WHOLE_NS = 900 * 10**9


def _cells(
    reading: Reading, kind: HeatKind, span: Span, step: int, node: str | None
) -> tuple[Rows, Cells]:
    """Return the cells; of a window that moved on, only what is new is asked of the store."""
    nodes = [one.name for one in reading.cluster.nodes] if reading.cluster and not node else []
    width = (span.until_ns - span.since_ns) // step

    def ask(since_ns: int) -> tuple[Rows, Cells]:
        frame = reading.metric_range(
            kind.metric,
            {**kind.matchers, **({"host.name": node} if node else {})},
            start_ns=since_ns,
            end_ns=span.until_ns,
            step_ns=step,
            aggregate=kind.aggregate,
        )
        return _matrix(frame, kind, since_ns, step, (span.until_ns - since_ns) // step, nodes)

    def make(old: _Cells | None) -> tuple[_Cells, int]:
        now = reading.clock_ns()
        whole = now
        settled = None if old is None else (old.read_ns - _SETTLED_NS) // step * step
        if (
            old is not None
            and settled is not None
            and now - old.whole_ns < _WHOLE_NS
            and old.span.since_ns <= span.since_ns < min(settled, span.until_ns)
            and settled - span.since_ns > width * step // 2
        ):
            begin = min(settled, old.span.until_ns, span.until_ns)
            rows, values = _joined(old, span, step, begin, ask(begin) if begin < span.until_ns
                                   else ((), np.zeros((0, 0), np.float32)))  # fmt: skip
            whole = old.whole_ns
        else:
            rows, values = ask(span.since_ns)
        made = _Cells(span=span, rows=rows, values=values, read_ns=now, whole_ns=whole)
        return made, values.nbytes

    found = reading.memory.get(("heat", kind.name, step, width, node, not span.now), _AGE_S, make)
    if found.span != span:  # another window of the same shape was asked for at the same time
        return ask(span.since_ns)
    return found.rows, found.values


def _joined(
    old: _Cells, span: Span, step: int, begin: int, fresh: tuple[Rows, Cells]
) -> tuple[Rows, Cells]:
    """Return old columns up to ``begin`` and fresh ones from there, rows of both."""
    width = int((span.until_ns - span.since_ns) // step)
    skip = int((span.since_ns - old.span.since_ns) // step)
    kept = int((begin - span.since_ns) // step)
    if old.rows == fresh[0]:
        return old.rows, np.hstack([old.values[:, skip : skip + kept], fresh[1]])
    rows = tuple(
        sorted(set(old.rows) | set(fresh[0]), key=lambda k: (natural(k[0]), natural(k[1])))
    )
    seen = {node for node, device in rows if device}
    rows = tuple(key for key in rows if key[1] or key[0] not in seen)
    place = {key: number for number, key in enumerate(rows)}
    values = np.full((len(rows), width), np.nan, dtype=np.float32)
    for source, part, at in (
        (old.rows, old.values[:, skip : skip + kept], 0),
        (*fresh, kept),
    ):
        here = [(place[key], n) for n, key in enumerate(source) if key in place]
        if here and part.shape[1]:
            to, of = (list(side) for side in zip(*here, strict=True))
            values[to, at : at + part.shape[1]] = part[of]
    return rows, values


def _matrix(
    frame: pl.DataFrame, kind: HeatKind, since_ns: int, step_ns: int, width: int, nodes: list[str]
) -> tuple[Rows, Cells]:
    """Place values in cells; series of one row are summed (directions, priorities)."""
    # Rows come series by series: each label text is read once, not a million times.
    labels = frame["labels"]
    codes = labels.rle_id().to_numpy().astype(np.int64)
    first = np.flatnonzero(np.diff(codes, prepend=-1))
    texts = labels.gather(first).to_list()
    keys = [_row(orjson.loads(text), kind) for text in texts]
    known = {key for key in keys if key is not None}
    seen = {node for node, _ in known}
    known |= {(node, "") for node in nodes if node not in seen}
    rows = tuple(sorted(known, key=lambda k: (natural(k[0]), natural(k[1]))))
    place = {key: number for number, key in enumerate(rows)}
    row_of = np.array([-1 if key is None else place[key] for key in keys], dtype=np.int64)
    values = np.full((len(rows), width), np.nan, dtype=np.float32)
    if not len(frame):
        return rows, values
    row = row_of[codes]
    column = (frame["time_ns"].to_numpy() - since_ns) // step_ns
    value = frame["value"].to_numpy().astype(np.float64)
    good = (row >= 0) & (column >= 0) & (column < width) & np.isfinite(value)
    flat = row[good] * width + column[good]
    if len(texts) == len(known & set(keys)):  # one series a row: nothing to sum
        values.reshape(-1)[flat] = value[good]
        return rows, values
    total = np.bincount(flat, weights=value[good], minlength=values.size)
    count = np.bincount(flat, minlength=values.size)
    if kind.across == "avg":
        total = np.divide(total, count, out=total, where=count > 0)
    values.reshape(-1)[:] = np.where(count > 0, total, np.nan)
    return rows, values


def _row(labels: Mapping[str, str], kind: HeatKind) -> tuple[str, str] | None:
    node = node_of(labels)
    if node is None:
        return None
    if "network.interface.name" in kind.by:
        return node, labels.get("network.interface.name", "")
    return node, device_of(labels)


def _groups(rows: Sequence[tuple[str, str]]) -> tuple[tuple[str, int, int], ...]:
    found: list[tuple[str, int, int]] = []
    for number, (node, _) in enumerate(rows):
        if found and found[-1][0] == node:
            found[-1] = (node, found[-1][1], number)
        else:
            found.append((node, number, number))
    return tuple(found)


def hottest(found: Heat, *, most: int = 12) -> Table:
    """Return the rows with the highest means: the text beside the picture."""
    values = found.matrix.values.astype(np.float64)
    good = np.isfinite(values)
    count = good.sum(axis=1)
    total = np.where(good, values, 0.0).sum(axis=1)
    mean = np.divide(total, count, out=np.full(len(values), -np.inf), where=count > 0)
    order = [n for n in np.argsort(-mean, kind="stable")[:most] if count[n]]
    scale = 100.0 if found.kind.unit == "ratio" else 1.0
    unit = "%" if found.kind.unit == "ratio" else found.kind.unit
    return Table(
        title=f"Highest means of {found.kind.title}",
        columns=[
            Column(title="device"),
            Column(title=f"mean, {unit}", numeric=True),
            Column(title=f"least, {unit}", numeric=True),
            Column(title=f"most, {unit}", numeric=True),
            Column(title="columns with data", numeric=True),
        ],
        rows=[
            [
                "/".join(part for part in found.matrix.rows[n] if part),
                round(float(mean[n]) * scale, 4),
                round(float(np.nanmin(values[n])) * scale, 4),
                round(float(np.nanmax(values[n])) * scale, 4),
                int(count[n]),
            ]
            for n in order
        ],
    )

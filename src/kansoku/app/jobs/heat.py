"""``jobs heatmap``: a quantity of every node × GPU over time, from the store or PromQL."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from kansoku.app.jobs._context import (
    Clock,
    Window,
    cluster_name,
    open_history,
    resolve_window,
    stamp,
)
from kansoku.app.jobs._evidence import store_exists
from kansoku.catalog import load_cluster
from kansoku.errors import ConfigurationError, InputError
from kansoku.jobs.edge.promql import device_of, node_of, query_range
from kansoku.jobs.heatmap import (
    QUANTITIES,
    HeatMatrix,
    Sample,
    job_boxes,
    matrix_from_samples,
    to_png,
)
from kansoku.view import Facts, Heatmap, HeatmapBox, Sentence, Tone, View

if TYPE_CHECKING:
    from kansoku.store import Store

__all__ = [
    "HEATMAP_SCHEMA",
    "heatmap",
    "heatmap_json",
    "heatmap_png",
    "heatmap_view",
    "store_samples",
]

HEATMAP_SCHEMA = "kansoku.jobs.heatmap/1"


def heatmap(  # noqa: PLR0913 - the flags of the command, by keyword
    quantity: str = "power",
    *,
    since: str | None = "24h",
    until: str | None = None,
    cluster: str | None = None,
    store: str | Path | None = None,
    promql: str | None = None,
    query: str | None = None,
    columns: int = 720,
    jobs: bool = True,
    now: Clock = time.time_ns,
) -> HeatMatrix:
    """Return the matrix of power, utilisation, memory or nic with the jobs that held the nodes.

    From a PromQL endpoint when ``promql`` is its address (``query`` replaces the built-in one),
    else from the store.
    """
    if quantity not in QUANTITIES:
        raise InputError(f"no quantity {quantity!r}", remedy=f"one of {', '.join(QUANTITIES)}")
    kind = QUANTITIES[quantity]
    window = resolve_window(since, until, None if since else _history(store, cluster), now=now)
    window = Window(since_ns=window.since_ns, until_ns=min(window.until_ns, now()))
    step = max(-(-(window.until_ns - window.since_ns) // columns), 1_000_000_000)
    nodes = _nodes(cluster)
    if promql:
        samples: Iterator[Sample] = query_range(
            promql, query or kind.promql, since_ns=window.since_ns, until_ns=window.until_ns,
            step_ns=step,
        )  # fmt: skip
        series = list(samples)
    elif not store_exists(store):
        series = []
    else:
        from kansoku.app.store import open_store

        opened = open_store(store)
        try:
            series = list(store_samples(opened, kind.metrics[0], window, step, nic=kind.per_nic))
        finally:
            opened.close()
    matrix = matrix_from_samples(
        series,
        quantity=kind,
        since_ns=window.since_ns,
        until_ns=window.until_ns,
        columns=min(columns, max((window.until_ns - window.since_ns) // step, 1)),
        nodes=nodes,
    )
    if not jobs:
        return matrix
    frame = _history(store, cluster).select("job_id", "node_list", "start_ns", "end_ns", "gpus")
    boxes = job_boxes(matrix, frame.collect())
    return HeatMatrix(
        quantity=matrix.quantity,
        rows=matrix.rows,
        times_ns=matrix.times_ns,
        step_ns=matrix.step_ns,
        values=matrix.values,
        boxes=boxes,
    )


def _history(store: str | Path | None, cluster: str | None) -> pl.LazyFrame:
    jobs = open_history(store).scan("jobs")
    name = cluster_name(cluster)
    if name is None:
        return jobs
    return jobs.filter((pl.col("cluster") == name) | (pl.col("cluster") == "?"))


def _nodes(cluster: str | None) -> Sequence[str]:
    if cluster is None:
        return ()
    try:
        return [node.name for node in load_cluster(cluster).nodes]
    except ConfigurationError:
        return ()


def store_samples(
    store: "Store", metric: str, window: Window, step_ns: int, *, nic: bool = False
) -> Iterator[Sample]:
    """Yield series of a metric of GPUs (or NICs) from the store."""
    frame = store.metric_range(
        metric,
        {"hw.type": "network" if nic else "gpu"},
        start_ns=window.since_ns,
        end_ns=window.until_ns,
        step_ns=step_ns,
        aggregate="rate" if nic else "avg",
    )
    for (labels,), part in frame.group_by(["labels"], maintain_order=True):
        named = json.loads(str(labels))
        node = node_of(named)
        if node is not None:
            times = part["time_ns"].to_numpy().astype(np.int64)
            yield node, device_of(named), times, part["value"].to_numpy().astype(np.float64)


def heatmap_png(matrix: HeatMatrix, path: Path) -> None:
    """Write the picture."""
    path.write_bytes(to_png(matrix))


def heatmap_json(matrix: HeatMatrix) -> dict[str, object]:
    """Return the answer of ``jobs heatmap --json``; a cell without data is null."""
    values = matrix.values.astype(object)
    values[np.isnan(matrix.values)] = None
    return {
        "schema": HEATMAP_SCHEMA,
        "quantity": matrix.quantity.name,
        "unit": matrix.quantity.unit,
        "step_s": matrix.step_ns / 1e9,
        "rows": [{"node": node, "device": device} for node, device in matrix.rows],
        "times": [stamp(int(t), "UTC") for t in matrix.times_ns],
        "values": values.tolist(),
        "jobs": [
            {
                "job_id": box.label,
                "rows": [box.row_from, box.row_to],
                "columns": [box.column_from, box.column_to],
            }
            for box in matrix.boxes
        ],
    }


def heatmap_view(matrix: HeatMatrix) -> View:
    """Return the screen of ``jobs heatmap``."""
    known = matrix.values[~np.isnan(matrix.values)]
    quantity = matrix.quantity
    if known.size == 0:
        text = f"No {quantity.title} in this window: no agent or exporter sends it here."
        return View(
            title="Heat map",
            blocks=[
                Sentence(
                    text=text,
                    tone=Tone.NOTICE,
                    detail="kansoku agent sends it to the store; --promql URL reads it elsewhere",
                )
            ],
        )
    nodes = len({node for node, _ in matrix.rows})
    return View(
        title=f"{quantity.title} of {nodes} nodes",
        blocks=[
            Facts(
                items=[
                    ("Window", (f"{stamp(int(matrix.times_ns[0]))} to "
                     f"{stamp(int(matrix.times_ns[-1]) + matrix.step_ns)}")),
                    ("Rows", f"{len(matrix.rows)} on {nodes} nodes"),
                    ("Jobs drawn", str(len({box.label for box in matrix.boxes}))),
                    ("Mean", f"{float(known.mean()):.4g} {quantity.unit}"),
                ]
            ),
            Heatmap(
                title=quantity.title,
                row_labels=[f"{node}/{device}" if device else node for node, device in matrix.rows],
                column_labels=[],
                column_times_ns=matrix.times_ns.tolist(),
                values=matrix.values,  # type: ignore[arg-type] # an array serves
                unit=quantity.unit,
                low=0.0,
                boxes=[
                    HeatmapBox(
                        label=box.label, row_from=box.row_from, row_to=box.row_to,
                        column_from=box.column_from, column_to=box.column_to,
                    )
                    for box in matrix.boxes
                ],
                row_title="node/GPU",
                column_title="time",
            ),
        ],
    )  # fmt: skip

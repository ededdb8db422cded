"""What the store knows of nodes: hardware events, findings and incidents, mean telemetry."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from kansoku.app.jobs._context import Window, store_folder
from kansoku.errors import KansokuError
from kansoku.jobs.edge.promql import node_of

if TYPE_CHECKING:
    from kansoku.store import Store

__all__ = [
    "HARDWARE_EVENT_SCHEMA",
    "Evidence",
    "Gather",
    "gather",
    "gather_from",
    "hardware_events",
    "store_exists",
    "store_means",
]

HARDWARE_EVENT_SCHEMA: dict[str, pl.DataType] = {
    "node": pl.String(),
    "time_ns": pl.Int64(),
    "kind": pl.String(),
    "body": pl.String(),
    "xid": pl.Int64(),
    "domain": pl.String(),
}
_DOMAINS = {
    "xid": "gpu_hardware", "sxid": "gpu_hardware", "ecc": "gpu_hardware", "aer": "host",
    "mce": "host", "edac": "host", "thermal": "host", "link_down": "network",
    "link_flap": "network", "rdma_error": "network", "lustre": "storage", "nfs": "storage",
    "nvme": "storage", "io_error": "storage", "gpu_lost": "gpu_hardware",
    "hung_task": "host", "panic": "host",
}  # fmt: skip
_COVARIATES = {
    "temperature": ("hw.temperature", "Cel"),
    "power": ("hw.power", "W"),
}


class Evidence:
    """What was found, and why the rest was not."""

    def __init__(self) -> None:
        self.events = pl.DataFrame(schema=HARDWARE_EVENT_SCHEMA)
        self.covariates: dict[str, tuple[str, dict[str, float]]] = {}
        self.incidents = pl.DataFrame()
        self.notes: list[str] = []


Gather = Callable[[Window], Evidence]
"""Reads what is known of nodes in a window, for those who hold a store open already."""


def hardware_events(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the events table's rows that speak of hardware, with the node they are about."""
    rows = []
    for time_ns, subject, severity, kind, body, attributes in frame.select(
        "time_ns", "subject", "severity", "kind", "body", "attributes"
    ).iter_rows():
        match = re.match(r"(node|gpu|nic|storage):([^/]+)", subject or "")
        if match is None or kind not in _DOMAINS or severity == "info":
            continue
        extra = json.loads(attributes) if attributes else {}
        code = str(extra.get("code", extra.get("xid", "")))
        rows.append(
            {
                "node": match[2],
                "time_ns": time_ns,
                "kind": kind,
                "body": body,
                "xid": int(code) if kind == "xid" and code.isdigit() else None,
                "domain": extra.get("domain") or _DOMAINS[kind],
            }
        )
    return pl.DataFrame(rows, schema=HARDWARE_EVENT_SCHEMA, orient="row")


def gather(store: str | Path | None, window: Window, *, covariates: bool = False) -> Evidence:
    """Read the store where there is one; what cannot be read is a note, never a failure."""
    found = Evidence()
    from kansoku.app.store import open_store

    if not store_exists(store):
        found.notes.append("No telemetry store here: failures are judged by Slurm alone.")
        return found
    try:
        opened = open_store(store)
    except KansokuError as error:
        found.notes.append(f"The telemetry store was not read: {error}")
        return found
    try:
        return gather_from(opened, window, covariates=covariates)
    finally:
        opened.close()


def gather_from(opened: "Store", window: Window, *, covariates: bool = False) -> Evidence:
    """Read an open store, which stays open."""
    found = Evidence()
    try:
        found.events = hardware_events(opened.events(window.since_ns, window.until_ns))
        found.incidents = opened.table("incidents", window.since_ns, window.until_ns)
        if covariates:
            for name, (metric, unit) in _COVARIATES.items():
                means = _node_means(opened, metric, window)
                if means:
                    found.covariates[name] = (unit, means)
    except KansokuError as error:
        found.notes.append(f"The telemetry store was not read: {error}")
    return found


def _node_means(store: "Store", metric: str, window: Window) -> dict[str, float]:
    step = max((window.until_ns - window.since_ns) // 500, 60_000_000_000)
    frame = store.metric_range(
        metric,
        {"hw.type": "gpu"},
        start_ns=window.since_ns,
        end_ns=window.until_ns,
        step_ns=step,
        by=["host.name"],
    )
    values: dict[str, list[float]] = {}
    for labels, value in frame.select("labels", "value").iter_rows():
        node = node_of(json.loads(labels))
        if node is not None and value is not None:
            values.setdefault(node, []).append(value)
    return {node: float(np.mean(v)) for node, v in values.items()}


_USAGE = {
    "power_w": "hw.power",
    "utilisation_ratio": "hw.gpu.utilization",
    "memory_ratio": "hw.gpu.memory.utilization",
}


def store_means(
    store: str | Path | None, window: Window, nodes: set[str]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return each node's mean GPU power, utilisation and memory in the window, and notes."""
    from kansoku.app.store import open_store

    if not nodes or not store_exists(store):
        return {}, []
    usage: dict[str, dict[str, float]] = {}
    try:
        opened = open_store(store)
    except KansokuError as error:
        return {}, [f"The telemetry store was not read: {error}"]
    try:
        for name, metric in _USAGE.items():
            for node, mean in _node_means(opened, metric, window).items():
                if node in nodes:
                    usage.setdefault(node, {})[name] = mean
    except KansokuError as error:
        return usage, [f"The telemetry store was not read: {error}"]
    finally:
        opened.close()
    return usage, []


def store_exists(store: str | Path | None) -> bool:
    """Return whether a store is there to read; opening one would create it."""
    if store is not None and re.match(r"https?://", str(store)):
        return True
    folder = store_folder(store)
    return any(folder.glob("*.duckdb")) or any(folder.glob("*.db"))

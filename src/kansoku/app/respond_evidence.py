"""Pack the evidence bundle for the vendor of a node that was taken out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.app.respond import Driver
from kansoku.diagnose.edge.evidence import NodeLogs, read_node_logs, table_text, write_bundle
from kansoku.diagnose.life import NodeLife, Stage, lives_of
from kansoku.diagnose.vendor import (
    HARDWARE_METRICS,
    device_labels,
    hardware_line,
    redact_incident,
    redacted_events,
    xid_row,
)
from kansoku.store import Store

__all__ = ["Packed", "pack_evidence"]

SCHEMA = "kansoku.evidence/1"
_SECOND = 1_000_000_000
_BEFORE_NS, _AFTER_NS = 1800 * _SECOND, 600 * _SECOND
_STEP_NS = 10 * _SECOND
_INFO = "kansoku.gpu.info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What was packed."""

    target: Path
    counts: Mapping[str, int]
    missing: tuple[str, ...]


def _of_store(store: Store, node: str, onset_ns: int, logs: NodeLogs) -> list[dict[str, Any]]:
    """Add the node's kernel events and serial numbers; return its metrics around the onset."""
    since, until = onset_ns - _BEFORE_NS, onset_ns + _AFTER_NS
    events = store.table("events", since, until).filter(
        pl.col("subject").fill_null("").str.contains(rf"^\w+:{_escaped(node)}(?:/|$)")
    )
    for body, time_ns in events.select("body", "time_ns").iter_rows():
        told = hardware_line(body or "")
        if told is None:
            logs.left_out += 1
            continue
        message, text = told
        logs.kernel.append(f"{time_ns} {text}")
        row = xid_row(message, text, "store: events")
        logs.codes += [row] if row else []
    rows: list[dict[str, Any]] = []
    for name in store.series().get_column("metric").unique().sort().to_list():
        if not name.startswith(HARDWARE_METRICS):
            continue
        frame = store.metric_range(
            name, {"host.name": node}, start_ns=since, end_ns=until, step_ns=_STEP_NS
        )
        for labels, time_ns, value in frame.select("labels", "time_ns", "value").iter_rows():
            kept = device_labels(json.loads(labels))
            rows.append(
                {"metric": name, "time_ns": time_ns, "value": value, "labels": json.dumps(kept)}
            )
            if name == _INFO and kept not in logs.devices:
                logs.devices.append(kept)
    return rows


def _escaped(node: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else f"\\{c}" for c in node)


def _devices(rows: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(rows, indent=1) + "\n" if rows else ""


def pack_evidence(
    driver: Driver,
    node: str,
    target: Path,
    *,
    incident: Mapping[str, Any] | None = None,
    logs: Path | None = None,
    store: Store | None = None,
) -> Packed:
    """Write the bundle of a node and note it in its life.

    Kernel lines, driver codes and devices come from ``logs`` and the store, metrics from the store
    around the incident's onset (without an incident: when the node was taken out).
    """
    now = driver.now_ns()
    life = lives_of(driver.journal.lives()).get(node) or NodeLife(node=node, events=())
    onset = int((incident or {}).get("onset_ns") or life.last_ns(Stage.SERVICED_OUT) or now)
    found = read_node_logs(logs, node) if logs is not None else NodeLogs()
    metrics = _of_store(store, node, onset, found) if store is not None else []
    told, dropped = redact_incident(incident, node) if incident else (None, 0)
    parts = {
        "incident.json": json.dumps(told, indent=1) + "\n" if told else "",
        "life.json": json.dumps(redacted_events(life.events), indent=1) + "\n",
        "kernel.log": "".join(f"{line}\n" for line in found.kernel),
        "codes.csv": table_text(found.codes),
        "devices.json": _devices(found.devices),
        "metrics.csv": table_text(metrics),
    }
    missing = tuple(f"{name}: nothing was found" for name, text in parts.items() if not text)
    manifest = {
        "schema": SCHEMA, "node": node, "created_ns": now, "onset_ns": onset,
        "times_out": len(life.out_ns), "missing": list(missing),
        "left_out": {"log lines": found.left_out, "evidence": dropped},
    }  # fmt: skip
    write_bundle(target, node, parts, manifest, time_ns=now)
    driver.journal.life(
        {"time_ns": now, "node": node, "event": str(Stage.EVIDENCE), "reason": str(target)}
    )
    counts = {
        "kernel lines": len(found.kernel), "driver codes": len(found.codes),
        "device facts": len(found.devices), "samples": len(metrics),
        "lines left out": found.left_out + dropped,
    }  # fmt: skip
    return Packed(target=target, counts=counts, missing=missing)

"""A window's outcome as rows for the store."""

import json
import math
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import polars as pl

    from kansoku.fabric.controller import Controller, Outcome

__all__ = ["outcome_tables", "save_outcomes"]

_STAMPS = {-1: None, 0: "hardware", 1: "kernel", 2: "application"}


def outcome_tables(controller: "Controller", outcome: "Outcome") -> "dict[str, pl.DataFrame]":
    """Return a window as rows of ``probes``, ``findings``, ``events`` and ``metrics``."""
    return {
        "probes": _probe_rows(controller, outcome),
        "findings": _finding_rows(outcome),
        "events": _event_rows(outcome),
        "metrics": _metric_rows(outcome),
    }


def _probe_rows(controller: "Controller", outcome: "Outcome") -> "pl.DataFrame":
    import numpy as np
    import polars as pl

    from kansoku.fabric.pinglist import KINDS, tuple_keys
    from kansoku.model import table_schema

    rows, topology = outcome.window.rows, controller.topology
    names = np.array(topology.rnics, dtype=object)
    numbers = controller.book.numbers_of(
        tuple_keys(rows.source, rows.target, rows.port, len(topology.rnics))
    )
    paths = {n: ">".join(controller.book.hops_of(int(n))) or None for n in np.unique(numbers)}

    def whole(values: Any) -> list[int | None]:
        return [None if math.isnan(v) else int(v) for v in values.tolist()]

    frame = pl.DataFrame(
        {
            "time_ns": np.full(len(rows), outcome.window.start_ns, dtype=np.int64),
            "window_ns": np.full(
                len(rows), outcome.window.end_ns - outcome.window.start_ns, dtype=np.int64
            ),
            "source": names[rows.source].tolist(),
            "target": names[rows.target].tolist(),
            "kind": [KINDS[k] for k in rows.kind.tolist()],
            "path": [paths[n] for n in numbers.tolist()],
            "source_port": rows.port.tolist(),
            "probes": rows.probes.tolist(),
            "lost": rows.lost.tolist(),
            "rtt_p50_ns": whole(rows.rtt_p50_ns),
            "rtt_p99_ns": whole(rows.rtt_p99_ns),
            "responder_delay_p50_ns": whole(rows.responder_p50_ns),
            "responder_delay_p99_ns": whole(rows.responder_p99_ns),
            "prober_delay_p99_ns": whole(rows.prober_p99_ns),
            "stamp_source": [_STAMPS[s] for s in rows.stamps.tolist()],
            "outcome": [
                "lost" if n == lost else "partial" if lost else "ok"
                for n, lost in zip(rows.probes.tolist(), rows.lost.tolist(), strict=True)
            ],
        },
        schema_overrides={"path": pl.String, "stamp_source": pl.String},
    )
    schema = table_schema("probes")
    return frame.select(
        [
            (pl.col(name) if name in frame.columns else pl.lit(None)).cast(kind).alias(name)
            for name, kind in schema.items()
        ]
    )


def _finding_rows(outcome: "Outcome") -> "pl.DataFrame":
    import polars as pl

    from kansoku.model import table_schema

    rows = []
    for change in outcome.changes:
        entry, anomaly = change.entry, change.entry.anomaly
        found = change.state == "open"
        # A silent host and a congested link lose nothing: the evidence says what they are.
        loss = anomaly.loss_ratio
        what = f"{loss:.1%} of probes lost" if loss else "; ".join(anomaly.evidence[:1])
        rows.append(
            {
                "id": f"fabric.{anomaly.kind}",
                "subject": anomaly.subject,
                "domain": "host" if anomaly.kind == "host" else "network",
                "onset_ns": entry.onset_ns,
                "time_ns": change.time_ns,
                "verdict": "found" if found else "none",
                "severity": (
                    "info" if not found else "critical" if anomaly.impact == "P0" else "warning"
                ),
                "confidence": anomaly.confidence,
                "sentence": (
                    f"{anomaly.subject} at fault: {what} ({anomaly.impact})"
                    if found
                    else f"{anomaly.subject} is well again"
                    + (": network cleared" if anomaly.kind != "host" else "")
                ),
                "evidence": json.dumps(
                    [
                        {"sentence": text, "source": "fabric probes", "time_ns": entry.last_ns}
                        for text in anomaly.evidence
                    ]
                ),
                "source": "fabric",
            }
        )
    return pl.DataFrame(rows, schema=table_schema("findings"))


def _event_rows(outcome: "Outcome") -> "pl.DataFrame":
    import polars as pl

    from kansoku.model import table_schema

    rows = [
        {
            "time_ns": change.time_ns,
            "source": "fabric",
            "subject": change.entry.anomaly.subject,
            "severity": "warning" if change.state == "open" else "info",
            "kind": f"fabric.{change.state}",
            "body": "; ".join(change.entry.anomaly.evidence),
            "attributes": json.dumps({"impact": change.entry.anomaly.impact}),
        }
        for change in outcome.changes
    ]
    return pl.DataFrame(rows, schema=table_schema("events"))


def _metric_rows(outcome: "Outcome") -> "pl.DataFrame":
    import polars as pl

    from kansoku.model import table_schema

    rows: list[dict[str, object]] = []

    def add(metric: str, value: object, **labels: str) -> None:
        if isinstance(value, int | float):
            named = {f"kansoku.{name}": text for name, text in sorted(labels.items())}
            rows.append(
                {
                    "metric": metric,
                    "labels": json.dumps(named),
                    "time_ns": outcome.window.end_ns,
                    "value": float(value),
                }
            )

    analysis = outcome.analysis
    for scope, sla in analysis.sla.items():
        if sla is None:
            continue
        add("kansoku.fabric.probes", sla["probes"], scope=scope)
        add("kansoku.fabric.drop", sla["drop_ratio"], scope=scope)
        for metric, key in (
            ("rtt", "rtt_us"), ("responder.delay", "responder_delay_us"),
            ("prober.delay", "prober_delay_us"),
        ):  # fmt: skip
            values = sla[key]
            if isinstance(values, dict):
                for quantile, value in values.items():
                    if value is not None:
                        add(f"kansoku.fabric.{metric}", value / 1e6, scope=scope, quantile=quantile)
    for kind in ("rnic", "link", "switch", "host"):
        count = sum(a.kind == kind for a in analysis.anomalies)
        add("kansoku.fabric.anomalies", count, kind=kind)
    return pl.DataFrame(rows, schema=table_schema("metrics"))


class save_outcomes:  # noqa: N801 - used as a context, like contextlib's
    """A callback that keeps windows in a store; does nothing without one.

    Set ``controller`` before the first window.
    """

    def __init__(self, store: str | None) -> None:
        """Open the store (folder or URL) when one is given."""
        self.controller: Controller | None = None
        self._where = store
        self._store: Any = None

    def __enter__(self) -> Self:
        """Open the store."""
        if self._where is not None:
            from kansoku.app.store import open_store

            self._store = open_store(self._where)
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._store.close()

    def __call__(self, outcome: "Outcome") -> None:
        if self._store is None or self.controller is None:
            return
        for table, frame in outcome_tables(self.controller, outcome).items():
            if frame.height:
                self._store.append(table, frame)

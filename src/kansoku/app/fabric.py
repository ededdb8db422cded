"""The fabric watch: controller, agent, status, matrix, and its rows for the store."""

import json
import math
import os
import secrets
import socket
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kansoku.errors import ConfigurationError, InputError, PlatformError

if TYPE_CHECKING:
    import polars as pl
    from starlette.applications import Starlette

    from kansoku.fabric.controller import Controller, Outcome
    from kansoku.fabric.edge.agent import Agent
    from kansoku.fabric.edge.http import FabricService
    from kansoku.fabric.settings import Settings
    from kansoku.model import RunFacts
    from kansoku.view import View

__all__ = [
    "Address",
    "agent",
    "controller_app",
    "load_settings",
    "make_service",
    "matrix",
    "matrix_view",
    "outcome_tables",
    "save_outcomes",
    "serve_controller",
    "service_end",
    "service_start",
    "status",
    "status_view",
]

STATUS_SCHEMA = "kansoku.fabric.status/1"
MATRIX_SCHEMA = "kansoku.fabric.matrix/1"
DEFAULT_CONTROLLER = "http://127.0.0.1:8080"


def load_settings(path: str | Path | None = None) -> tuple["Settings", dict[str, str]]:
    """Return fabric settings and the switch names of hop addresses from a TOML file.

    Keys of ``[settings]`` are those of :class:`kansoku.fabric.settings.Settings`; ``[switches]``
    maps a switch to the list of its addresses.
    """
    from kansoku.fabric.settings import Settings

    if path is None:
        return Settings(), {}
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(str(error), where=str(path)) from None
    known = Settings.__dataclass_fields__
    given = data.get("settings", {})
    if unknown := set(given) - set(known):
        raise ConfigurationError(
            f"unknown setting {', '.join(sorted(unknown))}",
            where=str(path),
            remedy=f"known: {', '.join(known)}",
        )
    switches = {
        address: name
        for name, addresses in data.get("switches", {}).items()
        for address in addresses
    }
    return Settings(**given), switches


# -- controller -----------------------------------------------------------------------------


def make_service(
    cluster: str | Path,
    *,
    settings: "Settings",
    switches: Mapping[str, str] | None = None,
    on_outcome: "Callable[[Outcome], None] | None" = None,
    token: str | None = None,
    clock: Callable[[], int] = time.time_ns,
) -> "FabricService":
    """Return a controller with its HTTP routes (``.routes``); call ``start`` and ``stop``.

    ``kansoku serve`` adds the routes to its own application and passes an ``on_outcome`` that
    saves :func:`outcome_tables`.
    """
    from kansoku.catalog import load_cluster
    from kansoku.fabric.controller import Controller
    from kansoku.fabric.edge.http import FabricService
    from kansoku.fabric.topology import topology_of

    controller = Controller(
        topology_of(load_cluster(cluster)), settings, now_ns=clock(), switch_of_address=switches
    )
    return FabricService(
        controller, clock=clock, status=status_json, matrix=matrix_json,
        on_outcome=on_outcome, token=token,
    )  # fmt: skip


def controller_app(service: "FabricService") -> "Starlette":
    """Return an ASGI application that serves a controller alone."""
    import contextlib
    from collections.abc import AsyncIterator

    from starlette.applications import Starlette

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    return Starlette(routes=list(service.routes), lifespan=lifespan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a controller listens: a TCP host and port, or a UNIX socket."""

    host: str | None = None
    port: int | None = None
    path: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read ``HOST:PORT`` or ``unix:/PATH``."""
        if text.startswith("unix:"):
            return cls(path=text.removeprefix("unix:"))
        host, _, port = text.rpartition(":")
        if not port.isdigit():
            raise InputError(f"{text!r} is not HOST:PORT or unix:/PATH")
        return cls(host=host.strip("[]") or "127.0.0.1", port=int(port))


def serve_controller(
    service: "FabricService", listen: Address, *, token: str | None = None
) -> None:
    """Serve a controller alone until SIGINT or SIGTERM.

    Raises PlatformError for an address that is taken, and for one beyond loopback without a
    token.
    """
    import uvicorn

    if listen.path is None and token is None and listen.host not in {"127.0.0.1", "::1"}:
        raise PlatformError(
            f"refusing to listen on {listen.host} without a token",
            remedy="set KANSOKU_FABRIC_TOKEN, or listen on 127.0.0.1",
        )
    try:
        sock = _listener(listen)
    except OSError as error:
        raise PlatformError(f"cannot listen on {listen.path or listen.port}: {error}") from None
    config = uvicorn.Config(controller_app(service), log_level="warning", access_log=False)
    try:
        uvicorn.Server(config).run(sockets=[sock])
    finally:
        sock.close()
        if listen.path:
            Path(listen.path).unlink(missing_ok=True)


def _listener(listen: Address) -> socket.socket:
    if listen.path is not None:
        Path(listen.path).unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(listen.path)
        Path(listen.path).chmod(0o600)
    else:
        sock = socket.create_server((listen.host or "127.0.0.1", listen.port or 0))
    sock.listen(128)
    return sock


# -- agent ----------------------------------------------------------------------------------


def agent(
    node: str,
    rnics: Sequence[tuple[str, str]],
    controller: str = DEFAULT_CONTROLLER,
    *,
    stamps: str = "kernel",
    transport: str = "udp",
    port: int | None = None,
    token: str | None = None,
    bind_device: bool = False,
) -> "Agent":
    """Return the fabric agent of a host; call ``run``, and ``stop`` from a signal handler.

    ``rnics`` are (device, address) pairs. ``stamps`` is ``hardware``, ``kernel`` or
    ``application``. Every start draws new queue pair numbers, as an RNIC would.
    """
    from kansoku.fabric.edge.agent import Agent
    from kansoku.fabric.edge.transport import Transport
    from kansoku.fabric.edge.udp import UdpTransport
    from kansoku.fabric.edge.uplink import Line
    from kansoku.fabric.edge.worker import Worker
    from kansoku.fabric.probe import StampSource
    from kansoku.fabric.settings import Settings

    if not rnics:
        raise InputError("no RNIC to probe from", remedy="give --rnic DEVICE=ADDRESS")
    families = {":" in address for _, address in rnics}
    if transport == "udp" and len(families) > 1:
        raise InputError(
            "IPv4 and IPv6 addresses on one host",
            remedy="give all RNICs of the fabric addresses of one family: pairs must not mix them",
        )
    settings = Settings()
    incarnation = time.time_ns()
    workers = []
    for device, address in rnics:
        qpn = secrets.randbelow((1 << 24) - 2) + 2
        made: Transport
        if transport == "verbs":
            from kansoku.fabric.edge.verbs import VerbsTransport

            made = VerbsTransport(device, address)
        else:
            made = UdpTransport(
                address, port or settings.port, qpn, stamps=StampSource(stamps),
                device=device if bind_device else None,
            )  # fmt: skip
        name = f"{node}/{device}"
        workers.append(Worker(name, made, settings, seed=incarnation ^ hash(name)))
    line = Line(controller, token=token or os.environ.get("KANSOKU_FABRIC_TOKEN"))
    return Agent(node, workers, line, incarnation=incarnation)


# -- status ---------------------------------------------------------------------------------


def status_json(controller: "Controller") -> dict[str, object]:
    """Return the answer of ``fabric status``: the last window with hysteresis applied."""
    topology = controller.topology
    members = controller.members()
    base: dict[str, object] = {"schema": STATUS_SCHEMA}
    agents = {
        "rnics": len(topology.rnics),
        "registered": len(members),
        "jobs": controller.services(),
        "self": controller.agents,
    }
    if not controller.history:
        return base | {
            "window": None, "verdict": "unknown", "reason": "no window is complete yet",
            "anomalies": [], "sla": {"cluster": None, "service": None}, "fabric": agents,
            "events": [],
        }  # fmt: skip
    last = controller.history[-1].analysis
    entries = controller.ledger.open()
    verdict, reason = last.verdict, last.reason
    if verdict != "unknown":
        # The ledger decides: a single weak window neither condemns nor, once open, clears.
        verdict = entries[0].anomaly.kind if entries else "clear"
        if entries and not last.anomalies:
            reason = "the last window is clean; waiting for another before closing"
        elif not entries and last.anomalies:
            reason = "weak signs in one window; waiting for a second one before raising"
    return base | {
        "window": {
            "start_ns": last.start_ns, "end_ns": last.end_ns,
            "probes": last.probes, "lost": last.lost, "excluded": last.excluded,
        },
        "verdict": verdict,
        "reason": reason,
        "anomalies": [
            {
                "kind": entry.anomaly.kind,
                "subject": entry.anomaly.subject,
                "loss_ratio": entry.anomaly.loss_ratio,
                "votes": entry.anomaly.votes,
                "evidence": list(entry.anomaly.evidence),
                "impact": entry.anomaly.impact,
                "scope": entry.anomaly.scope,
                "confidence": round(entry.anomaly.confidence, 3),
                "onset_ns": entry.onset_ns,
                "windows": entry.windows,
                "tied_with": list(entry.anomaly.tied_with),
            }
            for entry in entries
        ],
        "sla": dict(last.sla),
        "fabric": agents | {"coverage": last.coverage},
        "policy": _policy(controller.settings),
        "events": [
            {
                "time_ns": change.time_ns, "state": change.state,
                "subject": change.entry.anomaly.subject, "kind": change.entry.anomaly.kind,
            }
            for change in list(controller.events)[-100:]
        ],
    }  # fmt: skip


def _policy(settings: "Settings") -> dict[str, object]:
    return {name: getattr(settings, name) for name in type(settings).__dataclass_fields__}


def _ask(controller: str, path: str, *, token: str | None = None) -> dict[str, Any]:
    import httpx

    token = token or os.environ.get("KANSOKU_FABRIC_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    uds = controller.removeprefix("unix:") if controller.startswith("unix:") else None
    base = "http://localhost" if uds else controller
    try:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=uds), timeout=10, headers=headers
        ) as client:
            answer = client.get(base.rstrip("/") + path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PlatformError(
            f"no fabric controller at {controller}: {error}",
            remedy="start one with: kansoku fabric controller --cluster FILE",
        ) from None
    if answer.status_code != 200:
        raise PlatformError(f"{controller}{path} answered {answer.status_code}: {answer.text}")
    data: dict[str, Any] = answer.json()
    return data


def status(controller: str = DEFAULT_CONTROLLER) -> dict[str, Any]:
    """Return the fabric's verdict from a running controller (``kansoku.fabric.status/1``)."""
    return _ask(controller, "/fabric/status")


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} µs"


def status_view(answer: Mapping[str, Any]) -> "View":
    """Return what ``fabric status`` shows."""
    from kansoku.view import Block, Column, Facts, Sentence, Table, Tone, View

    verdict = answer["verdict"]
    tone = {"clear": Tone.GOOD, "unknown": Tone.NOTICE}.get(verdict, Tone.BAD)
    text = answer["reason"]
    if answer["anomalies"]:
        worst = answer["anomalies"][0]
        loss = worst["loss_ratio"]
        detail = "silent" if loss is None else f"{loss:.1%} of the probes over it lost"
        text = f"It is the {worst['kind']}: {worst['subject']} ({detail}, {worst['impact']})"
    blocks: list[Block] = [Sentence(text=text[0].upper() + text[1:], tone=tone)]
    if answer["anomalies"]:
        blocks.append(
            Table(
                title="Anomalies",
                columns=[
                    Column(title="kind"), Column(title="subject"),
                    Column(title="loss", numeric=True), Column(title="votes", numeric=True),
                    Column(title="impact"), Column(title="since"), Column(title="evidence"),
                ],
                rows=[
                    [
                        a["kind"], a["subject"],
                        None if a["loss_ratio"] is None else f"{a['loss_ratio']:.1%}",
                        a["votes"], a["impact"], _clock(a["onset_ns"]), "; ".join(a["evidence"]),
                    ]
                    for a in answer["anomalies"]
                ],
                tones=[Tone.BAD if a["impact"] == "P0" else Tone.NOTICE
                       for a in answer["anomalies"]],
            )
        )  # fmt: skip
    for scope, sla in answer["sla"].items():
        if sla is None:
            blocks.append(
                Sentence(text=f"{scope.capitalize()}: no probes in the window", tone=Tone.MUTED)
            )
            continue
        items = [("probes", f"{sla['probes']}, {sla['drop_ratio']:.3%} lost")]
        for title, key in (("RTT", "rtt_us"), ("responder delay", "responder_delay_us")):
            values = sla[key]
            items.append(
                (
                    title,
                    " / ".join(_us(values[q]) for q in ("p50", "p90", "p99", "p99_9"))
                    + "  (P50/P90/P99/P99.9)",
                )
            )
        items.append(("stamps", sla["stamp_source"]))
        blocks += [Sentence(text=f"{scope.capitalize()}:"), Facts(items=items)]
    return View(title="Fabric", blocks=blocks)


def _clock(time_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_ns / 1e9))


# -- matrix ---------------------------------------------------------------------------------


def matrix_json(controller: "Controller", query: Mapping[str, str]) -> dict[str, object]:
    """Return a matrix of the last window, or the tuples and paths of one pair.

    Query: ``by`` is ``tor`` or ``rnic``; ``source`` and ``target`` ask for one pair's drill-down.
    """
    by = query.get("by", "tor")
    if by not in {"tor", "rnic"}:
        raise InputError(f"matrix by {by!r}: tor or rnic")
    topology = controller.topology
    labels = list(topology.tors if by == "tor" else topology.rnics)
    answer: dict[str, object] = {"schema": MATRIX_SCHEMA, "by": by, "labels": labels}
    if "source" in query or "target" in query:
        return answer | {"pair": _pair(controller, query, by, labels)}
    tables = controller.matrix(by_tor=by == "tor")
    for name, values in tables.items():
        answer[name] = [[None if math.isnan(v) else float(v) for v in row] for row in values]
    return answer


def _pair(
    controller: "Controller", query: Mapping[str, str], by: str, labels: Sequence[str]
) -> dict[str, object]:
    from kansoku.fabric.pinglist import KINDS, tuple_keys

    try:
        a, b = labels.index(query.get("source", "")), labels.index(query.get("target", ""))
    except ValueError:
        raise InputError(f"source and target must be among {', '.join(labels[:8])} …") from None
    topology = controller.topology
    rows_out: list[dict[str, object]] = []
    if controller.history:
        rows = controller.history[-1].window.rows
        place = topology.rnic_tor if by == "tor" else None
        source = rows.source if place is None else place[rows.source]
        target = rows.target if place is None else place[rows.target]
        count = len(topology.rnics)
        for i in ((source == a) & (target == b)).nonzero()[0].tolist():
            s, t, port = int(rows.source[i]), int(rows.target[i]), int(rows.port[i])
            forward = controller.book.known(int(tuple_keys(s, t, port, count)))
            back = controller.book.known(int(tuple_keys(t, s, port, count)))
            rtt = float(rows.rtt_p50_ns[i])
            rows_out.append(
                {
                    "source": topology.rnics[s], "target": topology.rnics[t],
                    "source_port": port, "kind": KINDS[int(rows.kind[i])],
                    "probes": int(rows.probes[i]), "lost": int(rows.lost[i]),
                    "rtt_p50_us": None if math.isnan(rtt) else rtt / 1e3,
                    "path": controller.book.hops_of(forward),
                    "ack_path": controller.book.hops_of(back),
                }
            )  # fmt: skip
    return {"source": labels[a], "target": labels[b], "tuples": rows_out}


def matrix(
    controller: str = DEFAULT_CONTROLLER,
    *,
    by: str = "tor",
    source: str | None = None,
    target: str | None = None,
) -> dict[str, Any]:
    """Return the matrix of a running controller, or one pair's tuples and paths."""
    import urllib.parse

    query = {"by": by, "source": source, "target": target}
    given = urllib.parse.urlencode({k: v for k, v in query.items() if v is not None})
    return _ask(controller, f"/fabric/matrix?{given}")


def matrix_view(answer: Mapping[str, Any]) -> "View":
    """Return what ``fabric matrix`` shows: heat maps, or the paths of a pair."""
    from kansoku.view import Block, Column, Heatmap, Sentence, Table, View

    if "pair" in answer:
        pair = answer["pair"]
        rows = [
            [
                t["source"], t["target"], t["source_port"], t["kind"], t["probes"], t["lost"],
                None if t["rtt_p50_us"] is None else round(t["rtt_p50_us"], 1),
                " > ".join(t["path"]) or None, " > ".join(t["ack_path"]) or None,
            ]
            for t in pair["tuples"]
        ]  # fmt: skip
        titles = ("source", "target", "port", "kind", "probes", "lost", "RTT P50 µs", "path",
                  "ACK path")  # fmt: skip
        numeric = {"port", "probes", "lost", "RTT P50 µs"}
        table = Table(
            title=f"{pair['source']} to {pair['target']}",
            columns=[Column(title=t, numeric=t in numeric) for t in titles],
            rows=rows,
        )
        return View(title="Fabric matrix", blocks=[table])
    labels = answer["labels"]
    by = "ToR" if answer["by"] == "tor" else "RNIC"
    blocks: list[Block] = [
        Heatmap(
            title=f"{title}, {by} to {by}", row_labels=labels, column_labels=labels,
            values=[[None if v is None else v * scale for v in row] for row in answer[key]],
            unit=unit, low=low, row_title="from", column_title="to",
        )
        for title, key, unit, scale, low in (
            ("Loss", "loss_ratio", "%", 100, 0.0), ("Median RTT", "rtt_us", "µs", 1, None),
        )
    ]  # fmt: skip
    flag = answer["by"]
    blocks.append(
        Sentence(text=f"Paths of a pair: kansoku fabric matrix --by {flag} --source A --target B")
    )
    return View(title="Fabric matrix", blocks=blocks)


# -- services -------------------------------------------------------------------------------


def service_start(controller: str, run: "RunFacts", cluster: str | Path) -> int:
    """Tell a controller the paths of a running job; return how many tuples it took."""
    from kansoku.catalog import load_cluster
    from kansoku.fabric.edge.uplink import ControllerAway, Line
    from kansoku.fabric.service import tuples_of_run

    tuples = tuples_of_run(run, load_cluster(cluster))
    try:
        answer = Line(controller).request(
            "PUT", f"/fabric/service/{run.slurm_job or run.run}", tuples, dict[str, int]
        )
    except ControllerAway as away:
        raise PlatformError(f"controller {controller}: {away}") from None
    return 0 if answer is None else answer["tuples"]


def service_end(controller: str, job: str) -> None:
    """Tell a controller that a job has ended."""
    from kansoku.fabric.edge.uplink import ControllerAway, Line

    try:
        Line(controller).request("DELETE", f"/fabric/service/{job}", None, dict)
    except ControllerAway as away:
        raise PlatformError(f"controller {controller}: {away}") from None


# -- rows for the store ---------------------------------------------------------------------


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
            "stamp_source": [("hardware", "kernel", "application")[s] for s in rows.stamps],
            "outcome": [
                "lost" if n == lost else "partial" if lost else "ok"
                for n, lost in zip(rows.probes.tolist(), rows.lost.tolist(), strict=True)
            ],
        },
        schema_overrides={"path": pl.String},
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
        loss = "" if anomaly.loss_ratio is None else f", {anomaly.loss_ratio:.1%} of probes lost"
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
                    f"{anomaly.kind} {anomaly.subject} at fault{loss} ({anomaly.impact})"
                    if found
                    else f"{anomaly.kind} {anomaly.subject} is well again: network cleared"
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
            rows.append(
                {
                    "metric": metric, "labels": json.dumps(labels, sort_keys=True),
                    "time_ns": outcome.window.end_ns, "value": float(value),
                }
            )  # fmt: skip

    analysis = outcome.analysis
    for scope, sla in analysis.sla.items():
        if sla is None:
            continue
        add("kansoku.fabric.probes", sla["probes"], scope=scope)
        add("kansoku.fabric.drop.ratio", sla["drop_ratio"], scope=scope)
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

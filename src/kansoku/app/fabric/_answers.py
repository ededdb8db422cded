"""What controller and commands answer: status and matrix, as JSON and as Views."""

import json
import math
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kansoku.app.fabric._control import DEFAULT_CONTROLLER, controller_tls, controller_token
from kansoku.errors import InputError, PlatformError

if TYPE_CHECKING:
    from kansoku.fabric.analyser import Analysis
    from kansoku.fabric.controller import Controller
    from kansoku.fabric.settings import Settings
    from kansoku.view import Block, View

__all__ = [
    "matrix",
    "matrix_json",
    "matrix_view",
    "status",
    "status_json",
    "status_view",
]

STATUS_SCHEMA = "kansoku.fabric.status/1"
MATRIX_SCHEMA = "kansoku.fabric.matrix/1"


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
        "history": [_past(outcome.analysis) for outcome in controller.history],
        "events": [
            {
                "time_ns": change.time_ns, "state": change.state,
                "subject": change.entry.anomaly.subject, "kind": change.entry.anomaly.kind,
            }
            for change in list(controller.events)[-100:]
        ],
    }  # fmt: skip


def _past(analysis: "Analysis") -> dict[str, object]:
    """Return one window in short, for curves over time."""
    cluster = analysis.sla.get("cluster") or {}
    rtt = cluster.get("rtt_us")
    return {
        "end_ns": analysis.end_ns,
        "verdict": analysis.verdict,
        "probes": analysis.probes,
        "lost": analysis.lost,
        "rtt_p50_us": rtt.get("p50") if isinstance(rtt, dict) else None,
        "rtt_p99_us": rtt.get("p99") if isinstance(rtt, dict) else None,
    }


def _policy(settings: "Settings") -> dict[str, object]:
    return {name: getattr(settings, name) for name in type(settings).__dataclass_fields__}


def _check_address(controller: str) -> None:
    """Raise InputError for what cannot be a controller's address."""
    parts = urllib.parse.urlsplit(controller)
    named = bool(parts.path) if parts.scheme == "unix" else bool(parts.netloc)
    if parts.scheme not in {"http", "https", "unix"} or not named:
        raise InputError(
            f"controller address {controller!r} is not http://HOST:PORT, https://… or unix:/PATH",
            where="--controller",
        )


def _ask(controller: str, path: str, *, token: str | None = None) -> dict[str, Any]:
    import httpx

    _check_address(controller)
    token = controller_token(token)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    uds = controller.removeprefix("unix:") if controller.startswith("unix:") else None
    base = "http://localhost" if uds else controller
    try:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=uds, verify=controller_tls() or True),
            timeout=10,
            headers=headers,
        ) as client:
            answer = client.get(base.rstrip("/") + path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PlatformError(
            f"no fabric controller at {controller}: {error}",
            remedy="start one: kansoku serve --cluster FILE, or kansoku fabric controller",
        ) from None
    return _read(answer.status_code, answer.content, f"{controller}{path}")


def _read(status_code: int, body: bytes, where: str) -> dict[str, Any]:
    """Return a controller's answer; raise PlatformError for a refusal, and for another server's."""
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    error = data.get("error") if isinstance(data, dict) else None
    if status_code != 200 and isinstance(error, str):
        token = "set KANSOKU_FABRIC_TOKEN to the controller's" if status_code == 401 else None
        raise PlatformError(f"refused ({status_code}): {error}", where=where, remedy=token)
    if not isinstance(data, dict) or not str(data.get("schema")).startswith("kansoku.fabric."):
        raise PlatformError(
            f"answered {status_code}, and not as a fabric controller does",
            where=where,
            remedy="is it the right port? Kansoku serve needs --cluster with a fabric",
        )
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
    blocks += _history_blocks(answer.get("history", []))
    return View(title="Fabric", blocks=blocks)


def _history_blocks(history: Sequence[Mapping[str, Any]]) -> "list[Block]":
    from kansoku.view import Line, Series

    if len(history) < 3:
        return []
    times = [float(window["end_ns"]) for window in history]
    loss = [100 * w["lost"] / w["probes"] if w["probes"] else None for w in history]
    return [
        Series(
            title="Probes lost", x_title="time", y_title="%", x_is_time_ns=True,
            lines=[Line(name="lost", x=times, y=loss)],
        ),
        Series(
            title="Network RTT", x_title="time", y_title="µs", x_is_time_ns=True,
            lines=[
                Line(name="P50", x=times, y=[w["rtt_p50_us"] for w in history]),
                Line(name="P99", x=times, y=[w["rtt_p99_us"] for w in history]),
            ],
        ),
    ]  # fmt: skip


def _clock(time_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_ns / 1e9))


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

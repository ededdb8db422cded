"""``jobs nodes``: health score and lemon candidates, with evidence."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from kansoku.app.jobs._context import Clock, Window, hours, open_history, resolve_window, stamp
from kansoku.app.jobs._evidence import Gather, gather
from kansoku.app.jobs.reliable import attributed_jobs
from kansoku.app.jobs.reporting import load_jobs
from kansoku.catalog import load_cluster
from kansoku.errors import ConfigurationError
from kansoku.formats.slurm import expand_nodes
from kansoku.jobs.attribution import AttributionPolicy
from kansoku.jobs.edge.history import History
from kansoku.jobs.nodes import NodeHealth, NodePolicy, node_health
from kansoku.view import Column, Facts, Sentence, Table, Tone, View

__all__ = ["NODES_SCHEMA", "NodesAnswer", "excluded_nodes", "nodes", "nodes_json", "nodes_view"]

NODES_SCHEMA = "kansoku.jobs.nodes/1"
# The node takes no blame for what users wish or limits end.
_BLAMELESS = frozenset({
    "none", "cancelled_by_user", "cancelled_by_other", "time_limit", "deadline", "preempted",
    "requeued",
})  # fmt: skip
_EXCLUDE = re.compile(r"(?:^|\s)(?:-x\s*|--exclude[= ])([^\s-][^\s]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAnswer:
    """Every node, sickest first."""

    window: Window
    nodes: tuple[NodeHealth, ...]
    notes: tuple[str, ...]


def excluded_nodes(jobs: pl.DataFrame) -> dict[str, list[str]]:
    """Return the users who keep away from a node by ``--exclude`` in their submit lines."""
    found: dict[str, set[str]] = {}
    lines = jobs.select("user", "submit_line").drop_nulls().unique()
    wanted = lines.filter(pl.col("submit_line").str.contains(r"(^|\s)(-x|--exclude)"))
    for user, line in wanted.iter_rows():
        for text in _EXCLUDE.findall(line):
            try:
                names = expand_nodes(text.strip("'\""))
            except ValueError:
                continue
            for name in names:
                found.setdefault(name, set()).add(user)
    return {name: sorted(users) for name, users in found.items()}


def nodes(
    *,
    since: str | None = None,
    until: str | None = None,
    cluster: str | None = None,
    store: str | Path | None = None,
    policy: NodePolicy | None = None,
    history: History | None = None,
    gathered: Gather | None = None,
    now: Clock = time.time_ns,
) -> NodesAnswer:
    """Return health and lemon candidates of every node seen in the window."""
    history = history or open_history(store)
    jobs = load_jobs(cluster=cluster, history=history)
    window = resolve_window(since, until, jobs, now=now)
    evidence = gathered(window) if gathered else gather(store, window)
    frame, evidence = attributed_jobs(window, cluster=cluster, evidence=evidence, history=history)
    events = history.scan("node_events")
    inside = events.filter(
        (pl.col("start_ns") < window.until_ns)
        & (pl.col("end_ns").fill_null(window.until_ns) > window.since_ns)
    ).collect()
    users_fault = AttributionPolicy().user_xids
    xids = evidence.events.filter(
        (pl.col("kind").is_in(["xid", "sxid"])) & ~pl.col("xid").fill_null(-1).is_in(users_fault)
    )
    lines = (
        jobs.filter(pl.col("submit_ns").is_between(window.since_ns, window.until_ns))
        .select("user", "submit_line")
        .collect()
    )
    judged = frame.with_columns(
        blamed=~pl.col("cause").is_in(list(_BLAMELESS)) & pl.col("start_ns").is_not_null()
    )
    known: list[str] = []
    if cluster is not None:
        try:
            known = [node.name for node in load_cluster(cluster).nodes]
        except ConfigurationError:
            known = []
    answers = node_health(
        judged,
        node_events=inside,
        xids=dict(xids.group_by("node").len().iter_rows()),
        exclusions=excluded_nodes(lines),
        known_nodes=known,
        policy=policy,
    )
    return NodesAnswer(window=window, nodes=tuple(answers), notes=tuple(evidence.notes))


def nodes_json(answer: NodesAnswer) -> dict[str, object]:
    """Return the answer of ``jobs nodes --json``."""
    lemons = [node.node for node in answer.nodes if node.lemon]
    judged = [node for node in answer.nodes if not node.greyed]
    verdict = "found" if lemons else ("none" if judged else "unknown")
    reason = {
        "found": f"{len(lemons)} of {len(judged)} judged nodes fail more than their share",
        "none": f"none of {len(judged)} judged nodes fails more than its share",
        "unknown": "no node has enough jobs to be judged",
    }[verdict]
    return {
        "schema": NODES_SCHEMA,
        "window": answer.window.to_json(),
        "verdict": verdict,
        "reason": reason,
        "lemons": lemons,
        "nodes": [
            {
                "node": n.node,
                "score": n.score,
                "lemon": n.lemon,
                "greyed": n.greyed,
                "jobs": n.jobs,
                "run_hours": n.run_hours,
                "blame": n.blame,
                "expected_blame": n.expected_blame,
                "chance": n.chance,
                "node_fails": n.node_fails,
                "failed_node": n.failed_node,
                "downs": n.downs,
                "xids": n.xids,
                "excluded_by": n.excluded_by,
                "evidence": list(n.evidence),
            }
            for n in answer.nodes
        ],
        "notes": list(answer.notes),
    }


def nodes_view(answer: NodesAnswer, *, most: int = 40) -> View:
    """Return the screen of ``jobs nodes``."""
    lemons = [n for n in answer.nodes if n.lemon]
    head = (
        Sentence(
            text=f"{len(lemons)} lemon candidates: {', '.join(n.node for n in lemons[:10])}",
            tone=Tone.BAD,
        )
        if lemons
        else Sentence(text=str(nodes_json(answer)["reason"]).capitalize() + ".", tone=Tone.PLAIN)
    )
    shown = answer.nodes[:most]
    return View(
        title="Node health",
        blocks=[
            Facts(items=[("Window", (f"{stamp(answer.window.since_ns)} – "
                          f"{stamp(answer.window.until_ns)}")),
                         ("Nodes", str(len(answer.nodes)))]),
            head,
            Table(
                title="Nodes, sickest first (grey: fewer than five jobs)",
                columns=[Column(title="node"), Column(title="score", numeric=True),
                         Column(title="jobs", numeric=True), Column(title="hours", numeric=True),
                         Column(title="blame", numeric=True),
                         Column(title="expected", numeric=True),
                         Column(title="downs", numeric=True), Column(title="Xids", numeric=True),
                         Column(title="evidence")],
                rows=[
                    [n.node, f"{n.score:.2g}", n.jobs, hours(n.run_hours), f"{n.blame:.2f}",
                     f"{n.expected_blame:.2f}", n.downs, n.xids, "; ".join(n.evidence)]
                    for n in shown
                ],
                tones=[
                    Tone.MUTED if n.greyed else Tone.BAD if n.lemon else Tone.PLAIN for n in shown
                ],
                note=f"The first {most} of {len(answer.nodes)}."
                if len(answer.nodes) > most
                else None,
            ),
            *[Sentence(text=note, tone=Tone.MUTED) for note in answer.notes],
        ],
    )  # fmt: skip

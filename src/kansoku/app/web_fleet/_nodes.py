"""Every node's state now: what Slurm says, what runs there, when it was last heard, incidents."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from kansoku.app.web_reading import Reading
from kansoku.catalog import Cluster
from kansoku.formats.slurm import NodeState, QueuedJob, expand_nodes
from kansoku.jobs.edge.promql import node_of
from kansoku.jobs.idle import Fit, FreeWindow, IdleNow, fits, free_windows, idle_now
from kansoku.model import Subject

__all__ = ["Fleet", "NodeNow", "fleet_now", "natural", "open_incidents"]

STALE_NS = 300 * 10**9
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED"}
_HEARD = ("kansoku.agent.samples", "hw.power", "system.cpu.time")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNow:
    """One node at one moment."""

    name: str
    slurm: tuple[str, ...]
    """State and flags; empty where nobody says."""
    jobs: tuple[str, ...]
    gpus: int | None
    watts: float | None
    """Sum over its GPUs."""
    heard_ns: int | None
    """Its newest sample."""
    incidents: tuple[str, ...]
    reserved: bool

    @property
    def usable(self) -> bool:
        """Whether Slurm may start a job on it; yes where nobody says otherwise."""
        return not ({s.upper() for s in self.slurm} & _UNAVAILABLE)


_UNAVAILABLE = {
    "DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "NOT_RESPONDING",
    "MAINT", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED", "UNKNOWN", "FUTURE",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All nodes and what is free."""

    time_ns: int
    nodes: tuple[NodeNow, ...]
    free: IdleNow
    windows: tuple[FreeWindow, ...]
    running: int
    pending: int
    fits: tuple[Fit, ...]
    """What each pending job finds."""
    room: Mapping[str, int]
    """GPUs free on every node that a job may be started on."""

    def silent(self) -> frozenset[str]:
        """Nodes that were heard once (or belong to the cluster) and are not heard now."""
        return _silent(self.nodes)


def _silent(nodes: Sequence[NodeNow]) -> frozenset[str]:
    newest = max((n.heard_ns for n in nodes if n.heard_ns is not None), default=None)
    if newest is None:
        return frozenset()
    return frozenset(n.name for n in nodes if n.heard_ns is None or newest - n.heard_ns > STALE_NS)


def open_incidents(reading: Reading) -> pl.DataFrame:
    """Return the newest version of incidents that are not closed, newest first."""
    frame = reading.query("incidents")
    return frame.filter(pl.col("state").fill_null("open") != "closed")


_AGE_S = 2.0


def fleet_now(reading: Reading, at_ns: int) -> Fleet:
    """Return every node known to the cluster file, to Slurm's series or to its own samples."""
    reading.need_all()
    return reading.memory.get(
        ("fleet", at_ns), _AGE_S, lambda _: (made := _fleet(reading, at_ns), 2000 * len(made.nodes))
    )


def _fleet(reading: Reading, at_ns: int) -> Fleet:
    heard, watts, gpus = _heard(reading, at_ns)
    states = _slurm_states(reading, at_ns)
    queue = _queue(reading, at_ns)
    running: dict[str, list[str]] = {}
    held: dict[str, int] = {}
    for job in queue:
        if job.state in _RUNNING:
            share = -(-(job.gpus or 0) // max(len(job.node_list), 1))
            for node in job.node_list:
                running.setdefault(node, []).append(job.job_id)
                held[node] = held.get(node, 0) + share
    cluster = reading.cluster
    known = {n.name: n for n in cluster.nodes} if cluster else {}
    troubled = _troubled(open_incidents(reading))
    names = sorted(set(heard) | set(states) | set(running) | set(known), key=natural)
    nodes = tuple(
        NodeNow(
            name=name,
            slurm=tuple(states.get(name, ())),
            jobs=tuple(running.get(name, ())),
            gpus=_gpus(cluster, name) or gpus.get(name),
            watts=watts.get(name),
            heard_ns=heard.get(name),
            incidents=tuple(troubled.get(name, ())),
            reserved=name in known and known[name].reserved,
        )
        for name in names
    )
    silent = _silent(nodes)
    # Where Slurm says nothing of a node, one that is not heard cannot be called free.
    usable = {n.name for n in nodes if n.usable and (n.slurm or n.name not in silent)}
    slurm = [
        NodeState(
            name=n.name,
            base="DOWN" if n.name not in usable else "ALLOCATED" if n.jobs else "IDLE",
            flags=() if n.usable else tuple(s.upper() for s in n.slurm),
            gpus=n.gpus,
            gpus_used=min(held.get(n.name, 0), n.gpus or 0),
            cpus=None,
            cpus_idle=None,
            partitions=(),
            reason=None if n.name in usable else ", ".join(n.slurm) or "not heard",
        )
        for n in nodes
    ]
    return Fleet(
        time_ns=at_ns,
        nodes=nodes,
        free=idle_now(slurm, reserved=[n.name for n in nodes if n.reserved]),
        windows=tuple(free_windows(slurm, queue, least=1, now_ns=at_ns)),
        running=sum(j.state in _RUNNING for j in queue),
        pending=sum(j.state == "PENDING" for j in queue),
        fits=tuple(fits(slurm, queue, now_ns=at_ns)),
        room={
            n.name: max((n.gpus or 0) - (n.gpus_used or 0), 0) for n in slurm if n.name in usable
        },
    )


def natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts c2 before c10."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", text)]


def _gpus(cluster: Cluster | None, name: str) -> int | None:
    if cluster is None:
        return None
    return next((n.kind.gpus for n in cluster.nodes if n.name == name), None)


def _heard(reading: Reading, at_ns: int) -> tuple[dict[str, int], dict[str, float], dict[str, int]]:
    """Return each node's newest sample, its GPUs' power and their number."""
    heard: dict[str, int] = {}
    watts: dict[str, float] = {}
    gpus: dict[str, int] = {}
    for metric in _HEARD:
        frame = _latest(reading, metric, at_ns)
        for text, time_ns, value in frame.select("labels", "time_ns", "value").iter_rows():
            labels = json.loads(text)
            node = node_of(labels)
            if node is None:
                continue
            heard[node] = max(heard.get(node, 0), time_ns)
            if metric == "hw.power" and labels.get("hw.type") == "gpu":
                watts[node] = watts.get(node, 0.0) + value
                gpus[node] = gpus.get(node, 0) + 1
    _last_words(reading, at_ns, heard, gpus)
    return heard, watts, gpus


def _latest(reading: Reading, metric: str, at_ns: int) -> pl.DataFrame:
    """Return each series' sample of the five minutes before a moment.

    The store has every series' last sample at hand, and asks its rows only for the past: where
    some sample is later than the moment.
    """
    frame = reading.latest(metric)
    newest = frame["time_ns"].max()
    if isinstance(newest, int) and newest > at_ns:
        return reading.latest(metric, at_ns=at_ns)
    return frame.filter(pl.col("time_ns") >= at_ns - STALE_NS)


def _last_words(reading: Reading, at_ns: int, heard: dict[str, int], gpus: dict[str, int]) -> None:
    """Add nodes that are not heard now: when they last were, to five minutes, within a day."""
    labels = [json.loads(text) for text in reading.store.series("hw.power")["labels"]]
    silent: dict[str, int] = {}
    for one in labels:
        node = node_of(one)
        if node is not None and node not in heard:
            silent[node] = silent.get(node, 0) + (one.get("hw.type") == "gpu")
    if not silent:
        return
    names = sorted(
        {one["host.name"] for one in labels if one.get("host.name") and node_of(one) in silent}
    )
    frame = reading.metric_range(
        "hw.power", {"host.name": names[:200]}, start_ns=at_ns - 86_400 * 10**9, end_ns=at_ns,
        step_ns=STALE_NS, aggregate="count", by=["host.name"],
    )  # fmt: skip
    last = dict(frame.group_by("labels").agg(pl.col("time_ns").max()).iter_rows())
    for node, count in silent.items():
        heard.setdefault(node, 0)
        gpus.setdefault(node, count)
    for text, time_ns in last.items():
        node = node_of(json.loads(text))
        if node in silent:
            heard[node] = max(heard[node], time_ns)


def _slurm_states(reading: Reading, at_ns: int) -> dict[str, list[str]]:
    states: dict[str, list[str]] = {}
    frame = _latest(reading, "kansoku.slurm.node.state", at_ns)
    for text, value in frame.select("labels", "value").iter_rows():
        labels = json.loads(text)
        if value and "slurm.node.name" in labels and "slurm.state" in labels:
            states.setdefault(labels["slurm.node.name"], []).append(labels["slurm.state"])
    return states


def _queue(reading: Reading, at_ns: int) -> list[QueuedJob]:
    """Return jobs that run or wait at a moment."""
    frame = reading.jobs(at_ns - 1, at_ns + 1)
    queue = []
    for row in frame.iter_rows(named=True):
        start, end = row["start_ns"], row["end_ns"]
        if end is not None and end <= at_ns:
            continue
        runs = start is not None and start <= at_ns and row["node_list"]
        # A row that says neither start nor end is of a job that waits, unless its state is final.
        if not runs and (row["state"] or "PENDING") not in {"PENDING", "RUNNING"}:
            continue
        limit = row["time_limit_s"]
        queue.append(
            QueuedJob(
                raw_id=row["raw_id"], job_id=row["job_id"] or str(row["raw_id"]),
                name=row["name"], user=row["user"], account=row["account"],
                partition=row["partition"], state="RUNNING" if runs else "PENDING",
                reason=row["reason"], nodes=row["nodes"], gpus=row["gpus"],
                submit_ns=row["submit_ns"], start_ns=start,
                end_ns=start + limit * 10**9 if runs and limit else None,
                time_limit_s=limit, node_list=_nodes(row["node_list"]) if runs else (),
                excluded=(), restarts=None,
            )
        )  # fmt: skip
    return queue


def _nodes(text: str) -> tuple[str, ...]:
    try:
        return tuple(expand_nodes(text))
    except ValueError:
        return ()


def _troubled(incidents: pl.DataFrame) -> dict[str, list[str]]:
    """Return node to the open incidents about it or its devices."""
    found: dict[str, list[str]] = {}
    subjects: Sequence[tuple[str, str | None]] = incidents.select("id", "subject").rows()
    for number, text in subjects:
        try:
            subject = Subject.parse(text or "")
        except Exception:  # noqa: BLE001, S112 - a subject of another form names no node
            continue
        if subject.kind in {"node", "gpu", "nic"}:
            found.setdefault(subject.name.split("/")[0], []).append(number)
    return found

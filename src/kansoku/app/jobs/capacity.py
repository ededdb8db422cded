"""``jobs idle``: free capacity now and to come, idle allocations, what would fit."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kansoku.app.jobs._context import Clock, resolve_window, seconds, stamp
from kansoku.app.jobs.heat import heatmap
from kansoku.catalog import load_cluster
from kansoku.errors import ConfigurationError, InputError, KansokuError
from kansoku.formats.slurm import (
    NodeState,
    QueuedJob,
    fold_nodes,
    read_scontrol_nodes,
    read_sinfo_json,
    read_squeue_json,
)
from kansoku.jobs.edge.slurm import LiveSlurm
from kansoku.jobs.idle import (
    Fit,
    FreeWindow,
    IdleAllocation,
    IdleNow,
    fits,
    free_windows,
    idle_allocations,
    idle_now,
    power_windows,
)
from kansoku.view import Block, Column, Facts, Sentence, Table, Tone, View

__all__ = ["IDLE_SCHEMA", "IdleAnswer", "idle", "idle_json", "idle_view"]

IDLE_SCHEMA = "kansoku.jobs.idle/1"
NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleAnswer:
    """Everything ``jobs idle`` shows."""

    time_ns: int
    least: int
    now: IdleNow
    windows: tuple[FreeWindow, ...]
    """By Slurm: from now to a week ahead."""
    power: tuple[FreeWindow, ...] | None
    """By power, in the past window; None where no power is known."""
    allocations: tuple[IdleAllocation, ...] | None
    """None where no telemetry is known."""
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]


def idle(  # noqa: PLR0913 - the flags of the command, by keyword
    *,
    least: int = 1,
    since: str | None = "24h",
    until: str | None = None,
    cluster: str | None = None,
    store: str | Path | None = None,
    promql: str | None = None,
    query: str | None = None,
    quantity: str = "power",
    below: float | None = None,
    nodes_file: Path | None = None,
    queue_file: Path | None = None,
    slurm: LiveSlurm | None = None,
    now: Clock = time.time_ns,
) -> IdleAnswer:
    """Return free capacity of a live Slurm, or of saved sinfo/scontrol and squeue outputs.

    With saved outputs "now" is when the newest job of the queue last changed, so that an answer
    about an old file is an answer about its own moment.
    """
    notes: list[str] = []
    states, queue = _slurm(nodes_file, queue_file, slurm, notes)
    moment = now()
    if queue_file is not None:
        # A pending job's start is Slurm's plan, so it says nothing of when this was written.
        known = [q.submit_ns for q in queue] + [q.start_ns for q in queue if q.state != "PENDING"]
        moment = max((t for t in known if t), default=moment)
    reserved: tuple[str, ...] = ()
    if cluster is not None:
        try:
            reserved = tuple(n.name for n in load_cluster(cluster).nodes if n.reserved)
        except ConfigurationError as error:
            notes.append(f"Reserved nodes unknown: {error}")
    power, allocations = None, None
    try:
        window = resolve_window(since, until, None, now=now)
        # Exporters sample once a minute: finer columns would be full of holes.
        columns = min(max((window.until_ns - window.since_ns) // (120 * NS), 1), 720)
        matrix = heatmap(
            quantity, since=since, until=until, cluster=None, store=store, promql=promql,
            query=query, columns=columns, jobs=False, now=now,
        )  # fmt: skip
    except KansokuError as error:
        notes.append(f"No {quantity}: {error}")
    else:
        if np.isnan(matrix.values).all():
            notes.append(
                f"No GPU {quantity} in the window: allocated-but-idle GPUs and idle windows by "
                "power are unknown."
            )
        else:
            limit = matrix.quantity.idle_below if below is None else below
            power = tuple(
                power_windows(matrix.values, matrix.rows, matrix.times_ns, matrix.step_ns,
                              below=limit, least=least)
            )  # fmt: skip
            allocations = tuple(
                idle_allocations(matrix.values, matrix.rows, matrix.times_ns, matrix.step_ns,
                                 queue, below=limit, unit=matrix.quantity.unit)
            )  # fmt: skip
    return IdleAnswer(
        time_ns=moment,
        least=least,
        now=idle_now(states, reserved=reserved),
        windows=tuple(free_windows(states, queue, least=least, now_ns=moment)),
        power=power,
        allocations=allocations,
        fits=tuple(fits(states, queue, now_ns=moment)),
        notes=tuple(notes),
    )


def _slurm(
    nodes_file: Path | None, queue_file: Path | None, slurm: LiveSlurm | None, notes: list[str]
) -> tuple[list[NodeState], list[QueuedJob]]:
    if (nodes_file is None) != (queue_file is None):
        raise InputError("saved outputs come in pairs", remedy="give --nodes-file and --queue-file")
    if nodes_file is not None and queue_file is not None:
        data = _bytes(nodes_file)
        if data.lstrip()[:1] == b"{":
            states = read_sinfo_json(data, file=str(nodes_file))
        else:
            states = read_scontrol_nodes(data)
        return states, read_squeue_json(_bytes(queue_file), file=str(queue_file))
    live = slurm or LiveSlurm()
    # scontrol's text is the same in every version, unlike the JSON of sinfo.
    states = read_scontrol_nodes(live.nodes_text())
    if not states:
        notes.append("Slurm answered no nodes.")
    return states, read_squeue_json(live.queue())


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(error.strerror or "cannot be read", where=str(path)) from None


def _window_json(window: FreeWindow) -> dict[str, object]:
    return {
        "from": stamp(window.from_ns, "UTC"),
        "until": None if window.until_ns is None else stamp(window.until_ns, "UTC"),
        "nodes": window.nodes,
    }


def idle_json(answer: IdleAnswer) -> dict[str, object]:
    """Return the answer of ``jobs idle --json``."""
    current = answer.now
    return {
        "schema": IDLE_SCHEMA,
        "time": stamp(answer.time_ns, "UTC"),
        "nodes": {
            "all": current.nodes,
            "usable": current.usable,
            "idle": list(current.idle),
            "reserved_idle": list(current.reserved),
            "down": [{"node": node, "reason": reason} for node, reason in current.down],
        },
        "gpus": {"all": current.gpus, "free": current.gpus_free},
        "at_least_nodes": answer.least,
        "windows": [_window_json(w) for w in answer.windows],
        "past_windows_by_power": None
        if answer.power is None
        else [_window_json(w) for w in answer.power],
        "allocated_but_idle": None
        if answer.allocations is None
        else [
            {
                "job_id": a.job_id,
                "user": a.user,
                "account": a.account,
                "name": a.name,
                "gpus": a.gpus,
                "allocated_gpus": a.allocated,
                "since": stamp(a.since_ns, "UTC"),
                "mean": a.value,
                "unit": a.unit,
            }
            for a in answer.allocations
        ],
        "pending": [
            {
                "job": f.label,
                "nodes": f.nodes,
                "gpus_per_node": f.gpus_per_node,
                "fits_now": f.fits_now,
                "free_nodes": f.free_nodes,
                "starts": None if f.starts_ns is None else stamp(f.starts_ns, "UTC"),
                "reason": f.reason,
            }
            for f in answer.fits
        ],
        "notes": list(answer.notes),
    }


def _windows(title: str, rows: tuple[FreeWindow, ...]) -> Table:
    return Table(
        title=title,
        columns=[Column(title="from"), Column(title="until"), Column(title="length", numeric=True),
                 Column(title="nodes", numeric=True)],
        rows=[
            [stamp(w.from_ns), "no end known" if w.until_ns is None else stamp(w.until_ns),
             "–" if w.until_ns is None else seconds((w.until_ns - w.from_ns) / NS), w.nodes]
            for w in rows
        ],
    )  # fmt: skip


def _or_more(least: int) -> str:
    return f"{least} node{'s' * (least != 1)} or more"


def idle_view(answer: IdleAnswer) -> View:
    """Return the screen of ``jobs idle``."""
    current = answer.now
    blocks: list[Block] = [
        Facts(
            items=[
                ("Time", stamp(answer.time_ns)),
                ("Nodes", (f"{len(current.idle)} idle of {current.usable} usable, "
                 f"{current.nodes} in all")),
                ("GPUs", f"{current.gpus_free} free of {current.gpus}"),
                ("Idle", fold_nodes(list(current.idle)) if current.idle else "none"),
            ]
        )
    ]  # fmt: skip
    if current.reserved:
        blocks.append(Sentence(text=f"Kept as spares: {fold_nodes(list(current.reserved))}."))
    if answer.windows:
        title = f"{_or_more(answer.least)} free, by Slurm's time limits"
        blocks.append(_windows(title, answer.windows))
    else:
        blocks.append(
            Sentence(
                text=f"No window with {_or_more(answer.least)} free within a week.",
                tone=Tone.NOTICE,
            )
        )
    if answer.power is not None:
        blocks.append(_windows(f"{_or_more(answer.least)} idle, by power", answer.power))
    if answer.allocations:
        blocks.append(
            Table(
                title="Allocated but idle",
                columns=[Column(title="job"), Column(title="user"), Column(title="account"),
                         Column(title="GPUs idle", numeric=True),
                         Column(title="of", numeric=True), Column(title="since"),
                         Column(title="mean", numeric=True)],
                rows=[
                    [a.job_id, a.user, a.account, a.gpus, a.allocated, stamp(a.since_ns),
                     f"{a.value:.3g} {a.unit}"]
                    for a in answer.allocations
                ],
            )
        )  # fmt: skip
    if answer.fits:
        blocks.append(
            Table(
                title="What pending jobs would find",
                columns=[Column(title="job"), Column(title="nodes", numeric=True),
                         Column(title="GPUs each", numeric=True),
                         Column(title="nodes that fit", numeric=True), Column(title="answer")],
                rows=[
                    [f.label, f.nodes, f.gpus_per_node, f.free_nodes,
                     f"fits now; Slurm says {f.reason}" if f.fits_now
                     else f"fits {stamp(f.starts_ns)}" if f.starts_ns
                     else "does not fit on the nodes in service"]
                    for f in answer.fits
                ],
            )
        )  # fmt: skip
    if current.down:
        blocks.append(
            Table(
                title="Out of service",
                columns=[Column(title="node"), Column(title="reason")],
                rows=[[node, reason] for node, reason in current.down],
            )
        )
    blocks += [Sentence(text=note, tone=Tone.MUTED) for note in answer.notes]
    return View(title="Free capacity", blocks=blocks)

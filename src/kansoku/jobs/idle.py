"""Free capacity: now, to come, allocated but unused, and what would fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kansoku.formats.slurm import NodeState, QueuedJob

__all__ = [
    "Fit",
    "FreeWindow",
    "IdleAllocation",
    "IdleNow",
    "fits",
    "free_windows",
    "idle_allocations",
    "idle_now",
    "power_windows",
]

_HORIZON_NS = 7 * 86_400 * 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleNow:
    """Capacity as Slurm sees it now."""

    nodes: int
    usable: int
    idle: tuple[str, ...]
    gpus: int
    gpus_free: int
    """On usable nodes, also beside running jobs."""
    reserved: tuple[str, ...]
    """Idle nodes that the cluster file keeps as spares."""
    down: tuple[tuple[str, str], ...]
    """Node and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeWindow:
    """A stretch with at least that many nodes free."""

    from_ns: int
    until_ns: int | None
    """None: no running job is known to end it within the horizon."""
    nodes: int
    """Fewest nodes free during it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleAllocation:
    """GPUs that a job holds and does not use."""

    job_id: str
    user: str | None
    account: str | None
    name: str | None
    gpus: int
    """GPUs below the threshold."""
    allocated: int
    since_ns: int
    value: float
    """Mean of the quantity over them."""
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a pending job (or a size asked for) finds."""

    label: str
    nodes: int
    gpus_per_node: int
    fits_now: bool
    free_nodes: int
    """Usable nodes with so many GPUs free each."""
    starts_ns: int | None
    """When running jobs will have left enough nodes, by their time limits."""
    reason: str | None
    """Why Slurm holds it, if it fits and does not run."""


def idle_now(nodes: Sequence[NodeState], *, reserved: Sequence[str] = ()) -> IdleNow:
    """Return what is free on the nodes."""
    spare = set(reserved)
    usable = [n for n in nodes if n.usable]
    return IdleNow(
        nodes=len(nodes),
        usable=len(usable),
        idle=tuple(n.name for n in usable if n.idle and n.name not in spare),
        gpus=sum(n.gpus or 0 for n in nodes),
        gpus_free=sum(_free(n) for n in usable if n.name not in spare),
        reserved=tuple(n.name for n in usable if n.idle and n.name in spare),
        down=tuple((n.name, n.reason or n.base) for n in nodes if not n.usable),
    )


def _free(node: NodeState) -> int:
    return max((node.gpus or 0) - (node.gpus_used or 0), 0)


def free_windows(
    nodes: Sequence[NodeState],
    queue: Sequence[QueuedJob],
    *,
    least: int,
    now_ns: int,
    horizon_ns: int = _HORIZON_NS,
) -> list[FreeWindow]:
    """Return when at least ``least`` whole nodes are free, from now to the horizon.

    Running jobs leave at their time limits at the latest, so nodes only become free with time;
    pending jobs with a planned start take theirs (Slurm's backfill plan).
    """
    usable = {n.name for n in nodes if n.usable}
    busy_until: dict[str, int] = {}
    plan: list[tuple[int, int, int]] = []
    for job in queue:
        if job.state in {"RUNNING", "SUSPENDED", "COMPLETING"}:
            end = job.end_ns if job.end_ns and job.end_ns > now_ns else now_ns + horizon_ns
            for name in job.node_list:
                busy_until[name] = max(busy_until.get(name, 0), end)
        elif job.state == "PENDING" and job.start_ns and job.start_ns > now_ns:
            end = job.start_ns + (job.time_limit_s or 0) * 1_000_000_000
            plan.append((job.start_ns, end if job.time_limit_s else 2**62, job.nodes or 1))
    limit = now_ns + horizon_ns
    moments = sorted(
        {now_ns, limit}
        | {t for t in busy_until.values() if now_ns < t < limit}
        | {t for start, end, _ in plan for t in (start, end) if now_ns < t < limit}
    )
    windows: list[FreeWindow] = []
    open_from: int | None = None
    fewest = 0
    for moment in moments[:-1]:
        free = sum(busy_until.get(name, 0) <= moment for name in usable)
        free -= sum(n for start, end, n in plan if start <= moment < end)
        if free >= least:
            fewest = min(fewest, free) if open_from is not None else free
            open_from = moment if open_from is None else open_from
        elif open_from is not None:
            windows.append(FreeWindow(from_ns=open_from, until_ns=moment, nodes=fewest))
            open_from = None
    if open_from is not None:
        windows.append(FreeWindow(from_ns=open_from, until_ns=None, nodes=fewest))
    return windows


def fits(nodes: Sequence[NodeState], queue: Sequence[QueuedJob], *, now_ns: int) -> list[Fit]:
    """Return for each pending size whether it fits now and, if not, when it will.

    Free GPUs scattered over nodes do not fit a job that wants whole nodes: that is fragmentation.
    """
    free = {n.name: _free(n) for n in nodes if n.usable}
    capacity = {n.name: n.gpus or 0 for n in nodes if n.usable}
    answers = []
    for job in queue:
        if job.state != "PENDING":
            continue
        wanted = max(job.nodes or 1, 1)
        per_node = -(-(job.gpus or 0) // wanted)
        allowed = {name for name in free if name not in job.excluded}
        now = sum(free[name] >= per_node for name in allowed)
        starts = None
        if now < wanted:
            starts = _when(job, wanted, per_node, allowed, free, capacity, queue, now_ns)
        answers.append(
            Fit(
                label=f"job {job.job_id} ({job.user or '?'})",
                nodes=wanted,
                gpus_per_node=per_node,
                fits_now=now >= wanted,
                free_nodes=now,
                starts_ns=starts,
                reason=job.reason if now >= wanted else None,
            )
        )
    return answers


def _when(
    job: QueuedJob,
    wanted: int,
    per_node: int,
    allowed: set[str],
    free: Mapping[str, int],
    capacity: Mapping[str, int],
    queue: Sequence[QueuedJob],
    now_ns: int,
) -> int | None:
    if job.start_ns and job.start_ns > now_ns:
        return job.start_ns
    running = sorted(
        (q for q in queue if q.state == "RUNNING" and q.end_ns and q.end_ns > now_ns),
        key=lambda q: q.end_ns or 0,
    )
    now_free = dict(free)
    for other in running:
        share = -(-(other.gpus or 0) // max(len(other.node_list), 1))
        for name in other.node_list:
            if name in now_free:
                now_free[name] = min(now_free[name] + share, capacity[name])
        if sum(now_free[name] >= per_node for name in allowed) >= wanted:
            return other.end_ns
    return None


def power_windows(
    values: npt.NDArray[np.float32],
    rows: Sequence[tuple[str, str]],
    times_ns: npt.NDArray[np.int64],
    step_ns: int,
    *,
    below: float,
    least: int,
) -> list[FreeWindow]:
    """Return when at least ``least`` nodes had every GPU below the threshold.

    ``values`` has shape ``(rows, columns)``; a node without data is not called idle.
    """
    nodes = sorted({node for node, _ in rows})
    quiet = np.zeros((len(nodes), values.shape[1]), dtype=bool)
    for i, name in enumerate(nodes):
        part = values[[k for k, (node, _) in enumerate(rows) if node == name]]
        known = ~np.isnan(part)
        quiet[i] = known.any(axis=0) & (~known | (part < below)).all(axis=0)
    count = quiet.sum(axis=0)
    windows: list[FreeWindow] = []
    start: int | None = None
    for i, enough in enumerate([*(count >= least), False]):
        if enough and start is None:
            start = i
        elif not enough and start is not None:
            windows.append(
                FreeWindow(
                    from_ns=int(times_ns[start]),
                    until_ns=int(times_ns[i - 1]) + step_ns,
                    nodes=int(count[start:i].min()),
                )
            )
            start = None
    return windows


def idle_allocations(
    values: npt.NDArray[np.float32],
    rows: Sequence[tuple[str, str]],
    times_ns: npt.NDArray[np.int64],
    step_ns: int,
    queue: Sequence[QueuedJob],
    *,
    below: float,
    unit: str,
) -> list[IdleAllocation]:
    """Return running jobs with GPUs that stayed below the threshold, the most GPUs first.

    They did so since the job started, or since the values begin.

    Where a job holds a part of a node, the node's quietest GPUs are counted, at most as many as
    it holds: which ones they are the values do not say.
    """
    by_node: dict[str, list[int]] = {}
    for k, (node, _) in enumerate(rows):
        by_node.setdefault(node, []).append(k)
    answers = []
    for job in queue:
        if job.state != "RUNNING" or not job.gpus or job.start_ns is None:
            continue
        inside = times_ns + step_ns > job.start_ns
        if not inside.any():
            continue
        share = -(-job.gpus // max(len(job.node_list), 1))
        quiet: list[float] = []
        for name in job.node_list:
            peaks = []
            for k in by_node.get(name, ()):
                known = values[k, inside]
                known = known[~np.isnan(known)]
                if known.size and float(known.max()) < below:
                    peaks.append(float(known.mean()))
            quiet += sorted(peaks)[:share]
        if quiet:
            answers.append(
                IdleAllocation(
                    job_id=job.job_id,
                    user=job.user,
                    account=job.account,
                    name=job.name,
                    gpus=min(len(quiet), job.gpus),
                    allocated=job.gpus,
                    since_ns=max(job.start_ns, int(times_ns[0])),
                    value=float(np.mean(quiet)),
                    unit=unit,
                )
            )
    return sorted(answers, key=lambda a: (-a.gpus, a.job_id))

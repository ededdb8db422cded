"""Slurm's view of this node: which job holds which GPU, the node's state and reason."""

from collections.abc import Iterable

from ClusterShell.NodeSet import NodeSet, NodeSetException

from kansoku.formats.slurm_node import JobOnNode, parse_jobs, parse_node_states
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Event, Sample, labels

__all__ = ["Slurm"]

_TIMEOUT_S = 10.0


def _expand(hosts: str) -> list[str]:
    try:
        return list(NodeSet(hosts, resolver=None))
    except NodeSetException as error:
        raise ValueError(str(error)) from None


class Slurm(Collector):
    """``squeue`` and ``scontrol`` for this node only, twice a minute."""

    name = "slurm"
    title = "Slurm jobs on this node"
    metrics = ("kansoku.slurm.job.gpu", "kansoku.slurm.job.state", "kansoku.slurm.node.state")
    interval_s = 30.0

    def __init__(self, *, slurm_node: str | None = None) -> None:
        """``slurm_node`` is the node's name in Slurm where it is not the host's."""
        self._node = slurm_node
        self._jobs: dict[str, JobOnNode] | None = None
        self._state: tuple[tuple[str, ...], str | None] | None = None

    def absent(self, host: Host) -> str | None:
        """No client programs, or no controller that answers."""
        if host.find_program("scontrol") is None:
            return "no Slurm client programs (scontrol) in PATH"
        answer = host.run(
            ["scontrol", "show", "node", self._node or host.name], timeout_s=_TIMEOUT_S
        )
        if answer.code != 0:
            said = (answer.stderr or answer.stdout).strip().splitlines()
            return f"Slurm does not know this node: {said[0][:200] if said else answer.code}"
        return None

    def collect(self, host: Host) -> Iterable[Sample | Event]:
        """Return the one series that joins job, node and GPU; device series carry no job id."""
        node = self._node or host.name
        yield from self._node_state(host, node)
        queue = host.run(
            ["squeue", "--noheader", f"--nodelist={node}", "--states=R,CG,S", "--format=%A"],
            timeout_s=_TIMEOUT_S,
        )
        if queue.code != 0:
            raise OSError(f"squeue: {queue.stderr.strip()[:200]}")
        jobs: dict[str, JobOnNode] = {}
        for number in dict.fromkeys(queue.stdout.split()):
            shown = host.run(["scontrol", "--details", "show", "job", number], timeout_s=_TIMEOUT_S)
            # a job may end between the two questions
            found, _ = parse_jobs(shown.stdout if shown.code == 0 else "", node, _expand)
            jobs.update({job.job_id: job for job in found})
        for job in jobs.values():
            yield from _samples(job)
        if self._jobs is not None:
            for job_id in sorted(jobs.keys() - self._jobs.keys()):
                yield _event(host, jobs[job_id], "job_started")
            for job_id in sorted(self._jobs.keys() - jobs.keys()):
                yield _event(host, self._jobs[job_id], "job_left")
        self._jobs = jobs

    def _node_state(self, host: Host, node: str) -> Iterable[Sample | Event]:
        answer = host.run(["scontrol", "show", "node", node], timeout_s=_TIMEOUT_S)
        for found in parse_node_states(answer.stdout):
            for state in found.states:
                series = labels(("slurm.node.name", found.name), ("slurm.state", state))
                yield Sample("kansoku.slurm.node.state", series, 1.0)
            now = (found.states, found.reason)
            if self._state is not None and now != self._state:
                bad = {"down", "drain", "fail", "not_responding"} & set(found.states)
                reason = f": {found.reason}" if found.reason else ""
                yield Event(
                    time_ns=host.now_ns(),
                    source="slurm",
                    subject=f"node:{node}",
                    severity="warning" if bad else "info",
                    kind="node_state",
                    body=f"{'+'.join(self._state[0])} → {'+'.join(found.states)}{reason}",
                )
            self._state = now


def _samples(job: JobOnNode) -> Iterable[Sample]:
    who = (
        ("slurm.job.id", job.job_id),
        ("slurm.user", job.user),
        ("slurm.account", job.account),
        ("slurm.partition", job.partition),
    )
    yield Sample("kansoku.slurm.job.state", labels(*who, ("slurm.state", job.state)), 1.0)
    for gpu in job.gpus:
        yield Sample("kansoku.slurm.job.gpu", labels(*who, ("hw.name", f"gpu{gpu}")), 1.0)


def _event(host: Host, job: JobOnNode, kind: str) -> Event:
    gpus = ",".join(map(str, job.gpus)) or "none"
    return Event(
        time_ns=host.now_ns(),
        source="slurm",
        subject=f"job:{job.job_id}",
        severity="info",
        kind=kind,
        body=f"job {job.job_id} on {host.name}, GPUs {gpus}",
        attributes={"slurm.user": job.user, "slurm.account": job.account},
    )

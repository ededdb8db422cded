"""Service tracing: the tuples of running jobs.

Where nothing can be learned from the kernel (no RDMA, no rights), the run's process groups say
who talks to whom: collectives run rings, so each rank talks to its neighbour in every group. The
ports of the real queue pairs stay unknown then; enough tuples per pair cover all parallel paths
instead. A learner that sees real tuples (kprobes on modify_qp) implements :class:`Learner`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kansoku.catalog.cluster import Cluster
from kansoku.errors import ConfigurationError
from kansoku.fabric.ecmp import FIRST_PORT, PORTS, port_of_label, smallest_k
from kansoku.fabric.messages import ServiceTuple
from kansoku.model import RunFacts

__all__ = ["Learner", "QueuePair", "tuple_of_queue_pair", "tuples_of_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePair:
    """A connected queue pair seen in the kernel."""

    node: str
    device: str
    qpn: int
    peer_qpn: int
    peer_gid: str
    flow_label: int | None
    traffic_class: int | None
    pid: int
    source_port: int | None = None
    """Where the driver does not derive it from the flow label."""
    gone: bool = False
    """The queue pair was destroyed."""


class Learner(Protocol):
    """Learns the tuples of running jobs, such as by kprobes on modify_qp and destroy_qp."""

    source: str
    """How it learns, for the record."""

    def poll(self) -> list[QueuePair]:
        """Return what was connected or destroyed since the last call; never block."""


def tuple_of_queue_pair(pair: QueuePair, rnic_of_gid: dict[str, str]) -> ServiceTuple | None:
    """Return the path of a queue pair; None where peer or port cannot be known."""
    target = rnic_of_gid.get(pair.peer_gid)
    port = pair.source_port
    if port is None and pair.flow_label is not None:
        port = port_of_label(pair.flow_label)
    if target is None or port is None:
        return None
    return ServiceTuple(source=f"{pair.node}/{pair.device}", target=target, port=port)


def tuples_of_run(run: RunFacts, cluster: Cluster) -> list[ServiceTuple]:
    """Return the tuples of a run from its process groups, ring neighbours on other nodes.

    The RNIC of a rank is the one under its GPU (local rank). Ranks whose node the cluster file
    does not know are left out.
    """
    rnic: dict[int, str] = {}
    groups: set[tuple[int, ...]] = set()
    for facts in run.ranks:
        groups |= {group.ranks for group in facts.groups}
        if facts.rank is None:
            continue
        try:
            nics = cluster.node(facts.node).kind.fabric_nics
        except ConfigurationError:
            continue
        if nics:
            local = facts.local_rank or 0
            mine = [nic for nic in nics if nic.gpu == local] or [nics[local % len(nics)]]
            rnic[facts.rank] = f"{facts.node}/{mine[0].device}"
    spines = len(cluster.fabric.spines) if cluster.fabric else 1
    k = smallest_k(max(spines, 1))
    return [
        ServiceTuple(source=a, target=b, port=FIRST_PORT + (7919 * number + 104729 * slot) % PORTS)
        for number, (a, b) in enumerate(sorted(_neighbours(groups, rnic)))
        for slot in range(k)
    ]


def _neighbours(groups: Iterable[tuple[int, ...]], rnic: dict[int, str]) -> set[tuple[str, str]]:
    pairs = set()
    for ranks in groups:
        for first, second in zip(ranks, (*ranks[1:], *ranks[:1]), strict=True):
            a, b = rnic.get(first), rnic.get(second)
            if a and b and a.split("/")[0] != b.split("/")[0]:
                pairs |= {(a, b), (b, a)}
    return pairs

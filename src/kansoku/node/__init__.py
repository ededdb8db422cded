"""The node agent's collectors: GPU, NIC, RDMA, storage, host, kernel log, Slurm, switches.

A collector (plug-in point: :mod:`kansoku.node.collector`) sees the machine through
:class:`Host`; :class:`Rounds` runs them; ``edge`` holds the real machine.
"""

from kansoku.node.collector import Collector, load_collectors
from kansoku.node.host import CommandResult, Host, Space
from kansoku.node.rounds import CollectorStatus, Round, Rounds
from kansoku.node.sample import Event, Labels, Sample, canonical_labels, labels

__all__ = [
    "Collector",
    "CollectorStatus",
    "CommandResult",
    "Event",
    "Host",
    "Labels",
    "Round",
    "Rounds",
    "Sample",
    "Space",
    "canonical_labels",
    "labels",
    "load_collectors",
]

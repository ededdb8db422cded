"""What a diagnosis knows beside the observations: the job's nodes and ranks, and when it got on."""

import re
from dataclasses import dataclass

from kansoku.diagnose.observation import Observation
from kansoku.model import Domain

__all__ = ["Context", "Progress", "is_elsewhere"]

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """When ranks got on: the last step seen, by rank (None: a log without ranks)."""

    last_ns: dict[int | None, int]
    first_ns: int | None = None

    @property
    def latest_ns(self) -> int | None:
        """The last progress of any rank."""
        return max(self.last_ns.values(), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What is known beside the observations."""

    progress: Progress
    job_nodes: frozenset[str] = frozenset()
    """Nodes of the job; empty where unknown."""
    nodes: frozenset[str] = frozenset()
    """All nodes that anything was read of."""
    ranks: frozenset[int] = frozenset()
    """Ranks that the job should have."""
    node_of_rank: dict[int, str] | None = None
    ended: bool | None = None
    """The job is over; None where nobody knows."""
    ended_well: bool = False
    """It said that it is done, or Slurm said COMPLETED."""


def is_elsewhere(one: Observation, context: Context) -> bool:
    """Say whether it is on a node that is not the job's.

    Servers and switches are no job's nodes and serve all; they bear other names.
    """
    if not context.job_nodes or one.node is None or one.node in context.job_nodes:
        return False
    if one.domain not in {Domain.STORAGE, Domain.NETWORK}:
        return True
    shapes = {_NUMBERS.sub("#", node) for node in context.job_nodes}
    return _NUMBERS.sub("#", one.node) in shapes

"""What a diagnosis knows beside the observations: the job's nodes and ranks, and when it got on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kansoku.diagnose.observation import Observation
from kansoku.model import Domain

__all__ = ["Context", "DaemonStart", "Progress", "Signs", "is_elsewhere"]

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
class DaemonStart:
    """What a scheduler's record of a node says of the node's daemon."""

    booted_ns: int
    """When the node booted, Unix ns, as its daemon said when it last registered."""
    began_ns: int
    """When that daemon began, Unix ns."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Signs of life of nodes that a scheduler gave up."""

    ended_tasks: Mapping[str, str] = field(default_factory=dict)
    """``{node: file:row}``: the launcher heard of the end of its tasks after the word of its loss,
    in a log without times."""
    went_on: Mapping[str, str] = field(default_factory=dict)
    """``{node: file:row}``: lines of further steps follow the word of its loss, in such a log."""
    daemons: Mapping[str, DaemonStart] = field(default_factory=dict)
    samples: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """When numbers were taken on the node itself, Unix ns, ascending."""


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
    signs: Signs = field(default_factory=Signs)


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

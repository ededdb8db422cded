"""What one rank said when it hung, whatever the file it came from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Group", "Operation", "RankState", "Status"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One process group as a rank knows it."""

    name: str
    """The same on every member."""
    description: str | None
    ranks: tuple[int, ...]
    """Global ranks in group order; empty where the file does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One collective or point-to-point operation in a rank's recorder."""

    group: str
    sequence: int | None
    """Position among the group's collectives, the same on every member."""
    p2p_sequence: int | None
    name: str
    """Such as ``all_reduce`` or ``send``."""
    peer: int | None
    """Peer's position in the group, for point-to-point."""
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    state: str
    """``scheduled`` (the host issued it), ``started`` (the device runs it) or ``completed``."""
    created_ns: int | None
    """Unix time on the rank's host."""

    @property
    def is_p2p(self) -> bool:
        """A send or receive."""
        return self.name in {"send", "recv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far a rank got in one group."""

    enqueued: int
    """Last collective that the host issued."""
    completed: int
    """Last collective that ended."""
    started: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank at the time of its dump."""

    rank: int
    file: str
    groups: Mapping[str, Group] = field(default_factory=dict)
    status: Mapping[str, Status] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()
    notes: tuple[str, ...] = ()

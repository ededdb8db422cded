"""Where a batch of rows came from, and what the store answered."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Origin", "Receipt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One numbered batch of one sender: the store commits it with the rows, once."""

    agent: str
    """Sender: the identity of its spool, kept with the spool, so a fresh spool is a new sender."""
    sequence: int
    """Number of the batch, unique in the sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What became of a batch; it exists only after the rows are durable."""

    rows: Mapping[str, int] = field(default_factory=dict)
    """Table to rows kept."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    """Reason to rows refused for good: sending them again will not help."""
    duplicate: bool = False
    """The batch had been committed before; nothing was added."""

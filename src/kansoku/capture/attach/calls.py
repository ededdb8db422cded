"""One call seen from outside, and what is kept of those that are not over."""

from __future__ import annotations

from dataclasses import dataclass, field

from kansoku.capture.attach.probes import Probe

__all__ = ["Call", "Open", "Operation", "Thread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a probed function, its arguments understood."""

    probe: Probe
    time_ns: int
    thread: int
    leads: bool
    """The thread is the process's first."""
    stack: int
    this: int
    """The object, or a communicator."""
    number: int = -1
    """Sequence, count or peer, as the role asks."""
    group: str = ""
    peer: int = -1
    bytes: int = -1
    dtype: str = ""
    device: str = ""
    text: str = ""
    returned: bool = False
    """The call is over: this is where it returned to."""
    blind: bool = False
    """The place it returns to is only now being watched."""


@dataclass(slots=True)
class Operation:
    """One collective on its way."""

    call: Call
    name: str
    start_ns: int
    span: int = 0
    pending: int = 0
    works: int = 0
    last_ns: int = 0
    closed: bool = False
    issued: bool = False
    """Its thread has gone on to something else: no more work will be added."""
    failed: bool = False


@dataclass(slots=True)
class Open:
    """A phase that has begun."""

    span: int
    kind: int
    start_ns: int
    template: bytes
    stack: int = 0
    trains: bool = True
    blind: bool = False
    """Its return may not be seen: it is over when the next phase begins."""


@dataclass(slots=True)
class Thread:
    """What a thread is in."""

    marks: list[Open | None] = field(default_factory=list)
    ended: tuple[int, int] = (0, 0)
    """Stack and time of the last end of a mark that was seen by its entry."""
    operation: Operation | None = None

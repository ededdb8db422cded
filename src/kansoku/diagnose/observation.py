"""Observations: what one line, finding or metric says, before any conclusion."""

from dataclasses import dataclass

from kansoku.model import Domain, Evidence, Subject

__all__ = ["FABRIC_KINDS", "Observation"]

FABRIC_KINDS = ("link", "switch")
"""Subjects between nodes: the target names them in full, ``link:A-B``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One fact that may speak for a cause."""

    rule: str
    """What recognised it: a signature's id, ``xid.79``, ``exception``, ``concept``, ``metric``,
    ``finding``."""
    text: str
    source: str
    """``file:row``, or metric and series."""
    kind: str
    """Where it was seen: ``job``, ``kernel``, ``scheduler``, ``metric``, ``trace``, ``other``."""
    domain: Domain
    component: str
    role: str
    """As in the signature catalogue."""
    strength: float
    """0-1."""
    meaning: str
    action: str
    time_ns: int | None = None
    last_ns: int | None = None
    """Time of the last repeat."""
    repeats: int = 1
    node: str | None = None
    rank: int | None = None
    device: str | None = None
    """GPU index or PCI address, NIC or link name."""
    target: str | None = None
    """What it complains about: a peer, a storage target, ``job:ID``."""
    locates: bool = False
    """It says where, hardly why: it supports whatever else is known of its rank or node."""

    handled: bool = False
    """The program met it and went on."""
    programs: int = 1
    """Different processes that it happened to."""
    healed_ns: int | None = None
    """When the same thing said that it is well again; None where it did not."""

    @property
    def subject(self) -> Subject | None:
        """The narrowest thing that the observation is about."""
        if self.domain is Domain.STORAGE and self.target:
            return Subject(kind="storage", name=self.target)
        if self.node and self.device and self.domain is Domain.GPU_HARDWARE:
            return Subject(kind="gpu", name=f"{self.node}/{self.device}")
        if self.node and self.device and self.domain is Domain.NETWORK:
            return Subject(kind="nic", name=f"{self.node}/{self.device}")
        if self.rank is not None and self.domain in {Domain.APPLICATION, Domain.FRAMEWORK}:
            return Subject(kind="rank", name=str(self.rank))
        if self.node:
            return Subject(kind="node", name=self.node)
        if self.rank is not None:
            return Subject(kind="rank", name=str(self.rank))
        kind, _, name = (self.target or "").partition(":")
        if kind in {*FABRIC_KINDS, "job"} and name:
            return Subject(kind=kind, name=name)
        return None

    def evidence(self) -> Evidence:
        """Return the observation as evidence a person can check."""
        text = self.text.strip()
        if len(text) > 240:
            text = text[:237] + "..."
        again = f" ({self.repeats} times)" if self.repeats > 1 else ""
        return Evidence(
            sentence=f"{text}{again}" + (f": {self.meaning}" if self.meaning else ""),
            source=self.source,
            time_ns=self.time_ns,
        )

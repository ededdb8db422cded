"""Findings (one observation with evidence) and incidents (findings that share a cause)."""

from dataclasses import dataclass
from enum import StrEnum

from kansoku.model.subject import Domain, Subject, Verdict

__all__ = ["Action", "Evidence", "Finding", "Hypothesis", "Incident", "Severity"]


class Severity(StrEnum):
    """How much a finding matters to its reader."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One fact that speaks for or against something."""

    sentence: str
    """A plain sentence with its numbers and units."""
    source: str
    """Where it was seen: file and row, metric and series, table and key."""
    time_ns: int | None = None
    """Unix time of the fact, if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One observation of any part, with evidence."""

    id: str
    """Stable kind of the finding, such as ``straggler.forward``."""
    subject: Subject
    domain: Domain | None
    """None where the part cannot tell whose fault it is."""
    verdict: Verdict
    severity: Severity
    confidence: float
    """0-1."""
    sentence: str
    """What a person should read."""
    evidence: tuple[Evidence, ...]
    source: str
    """The part that found it, such as ``trace`` or ``fabric``."""
    onset_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something an operator or developer should do."""

    sentence: str
    command: str | None = None
    """A command to copy, if one does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One possible cause of an incident."""

    domain: Domain
    component: str
    """The part at fault, such as ``gpu memory`` or ``data loader``."""
    subject: Subject | None
    confidence: float
    """0-1."""
    evidence_for: tuple[Evidence, ...]
    evidence_against: tuple[Evidence, ...]
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Findings that share a cause."""

    id: str
    onset_ns: int
    kind: str
    """``stop``, ``hang``, ``slow`` or ``numerics``."""
    subject: Subject | None
    verdict: Verdict
    hypotheses: tuple[Hypothesis, ...]
    """Most likely first; empty when the verdict is unknown or none."""
    cascades: tuple[Evidence, ...]
    """Consequences set aside: they never win over an earlier cause."""
    state: str
    """``open``, ``updated``, ``closed``."""

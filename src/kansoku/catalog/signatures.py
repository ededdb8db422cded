"""Failure signatures: what lines of job, kernel, scheduler and storage logs mean.

Each row is data with its source: a regular expression, the domain it speaks for, and its role:
``root`` (a cause), ``either`` (cause or consequence, the context decides), ``symptom`` (something
is wrong, not why), ``cascade`` (follows from an earlier cause, never one itself), ``info`` and
``noise``. Operators add rows in a file of the same columns.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from kansoku.errors import ConfigurationError
from kansoku.model import Domain

__all__ = ["ROLES", "Signature", "read_signatures", "signatures"]

ROLES = ("root", "either", "symptom", "cascade", "info", "noise")
_STRENGTHS = {"strong": 1.0, "medium": 0.7, "weak": 0.4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One kind of log line."""

    id: str
    pattern: re.Pattern[str]
    sample: str
    """A line that matches."""
    domain: Domain
    component: str
    """The part at fault, such as ``gpu memory`` or ``lustre``."""
    role: str
    strength: float
    """How far one such line convinces, 0-1."""
    generic: bool
    """Matches wide; a specific signature on the same line wins."""
    meaning: str
    action: str
    source: str


def _signature(row: Mapping[str, str], where: str) -> Signature:
    try:
        pattern = re.compile(row["regex"])
    except re.error as error:
        raise ConfigurationError(f"regex: {error}", where=where) from None
    if row["role"] not in ROLES:
        raise ConfigurationError(
            f"role {row['role']!r} is not one of {', '.join(ROLES)}", where=where
        )
    if row["strength"] not in _STRENGTHS:
        raise ConfigurationError(
            f"strength {row['strength']!r} is not one of {', '.join(_STRENGTHS)}", where=where
        )
    try:
        domain = Domain(row["category"])
    except ValueError:
        raise ConfigurationError(
            f"category {row['category']!r} is not one of {', '.join(Domain)}", where=where
        ) from None
    return Signature(
        id=row["id"],
        pattern=pattern,
        sample=row["sample"],
        domain=domain,
        component=row["subcategory"],
        role=row["role"],
        strength=_STRENGTHS[row["strength"]],
        generic=row["generic"] == "yes",
        meaning=row["meaning"],
        action=row["usual_action"],
        source=row["source"],
    )


def _read(lines: Iterable[str], where: str) -> tuple[Signature, ...]:
    found: dict[str, Signature] = {}
    reader = csv.DictReader(lines)
    needed = {"id", "regex", "sample", "category", "subcategory", "role", "strength", "generic",
              "meaning", "usual_action", "source"}  # fmt: skip
    if missing := needed - set(reader.fieldnames or ()):
        raise ConfigurationError(f"missing column {', '.join(sorted(missing))}", where=where)
    for number, row in enumerate(reader, start=2):
        entry = _signature(row, f"{where}:{number}")
        if entry.id in found:
            raise ConfigurationError(f"id {entry.id!r} stands twice", where=f"{where}:{number}")
        if not entry.pattern.search(entry.sample):
            raise ConfigurationError(
                "regex does not match its own sample", where=f"{where}:{number}"
            )
        found[entry.id] = entry
    return tuple(found.values())


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the shipped signatures."""
    file = resources.files("kansoku.catalog") / "data" / "failure_signatures.csv"
    return _read(file.read_text("utf-8").splitlines(), "failure_signatures.csv")


def read_signatures(path: Path) -> tuple[Signature, ...]:
    """Read an operator's own signatures; raise ConfigurationError naming the row."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(str(error), where=str(path)) from None
    return _read(text.splitlines(), str(path))

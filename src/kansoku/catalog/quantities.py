"""What a node's numbers mean, whatever their exporter calls them."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from kansoku.errors import ConfigurationError
from kansoku.model import Domain

__all__ = ["TESTS", "Quantity", "quantities", "quantity_of", "words_of"]

TESTS = ("low", "high", "grows", "set", "empty", "full", "down", "numerics", "none")
_CUT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One kind of number and what it says when it stands out."""

    name: str
    words: re.Pattern[str]
    excluded: re.Pattern[str] | None
    test: str
    """One of :data:`TESTS`; ``none`` says nothing about faults."""
    domain: Domain | None
    component: str
    ratio: float
    """How far from the peers: a factor, below 1 for ``low``."""
    least: float
    """And at least by this much, in the number's own unit."""
    strength: float
    """How far one that stands out convinces, 0-1."""
    role: str
    """As in the signature catalogue."""
    wide: bool
    """A change of all together means something as well."""
    rate: bool
    """A counter of traffic: its growth is what is compared."""


def words_of(name: str) -> str:
    """Return a metric's name in lower-case words."""
    return " ".join(word.lower() for word in _CUT.split(name) if word)


@cache
def quantities() -> tuple[Quantity, ...]:
    """Return every quantity, narrow ones first."""
    file = resources.files("kansoku.catalog") / "data" / "quantities.toml"
    found = []
    for row in tomllib.loads(file.read_text("utf-8"))["quantity"]:
        if row["test"] not in TESTS:
            raise ConfigurationError(f"{row['name']}: test {row['test']!r}", where=str(file))
        found.append(
            Quantity(
                name=row["name"],
                words=re.compile(row["words"]),
                excluded=re.compile(row["not"]) if "not" in row else None,
                test=row["test"],
                domain=Domain(row["domain"]) if "domain" in row else None,
                component=row.get("component", ""),
                ratio=float(row.get("ratio", 1.0)),
                least=float(row.get("least", 0.0)),
                strength=float(row.get("strength", 0.0)),
                role=row.get("role", "info"),
                wide=row.get("peers") == "wide",
                rate=bool(row.get("rate", False)),
            )
        )
    return tuple(found)


@cache
def quantity_of(name: str) -> Quantity | None:
    """Return what a metric of this name measures, or None where nothing is known of it."""
    text = words_of(name)
    for one in quantities():
        if one.words.search(text) and not (one.excluded and one.excluded.search(text)):
            return one
    return None

"""Component and fault words, for log lines that no signature knows."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from kansoku.model import Domain

__all__ = ["Concept", "concepts", "fault_level"]

_LEVELS = {"fatal": 1.0, "failed": 0.75, "odd": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Concept:
    """A component and the words that name it."""

    component: str
    domain: Domain
    pattern: re.Pattern[str]


def _words(words: list[str]) -> re.Pattern[str]:
    # An underscore or a digit may touch a part's name (mlx5_0, nvme0n1, rank3_gpu2).
    return re.compile(rf"(?<![A-Za-z])(?:{'|'.join(words)})(?![A-Za-z])", re.IGNORECASE)


@cache
def _table() -> dict[str, dict[str, object]]:
    file = resources.files("kansoku.catalog") / "data" / "concepts.toml"
    return tomllib.loads(file.read_text("utf-8"))


@cache
def concepts() -> tuple[Concept, ...]:
    """Return every component with its words."""
    rows: dict[str, dict[str, object]] = _table()["components"]  # type: ignore[assignment]
    return tuple(
        Concept(
            component=name,
            domain=Domain(str(row["domain"])),
            pattern=_words(list(row["words"])),  # type: ignore[call-overload]
        )
        for name, row in rows.items()
    )


@cache
def _faults() -> tuple[tuple[float, re.Pattern[str]], ...]:
    rows: dict[str, list[str]] = _table()["faults"]  # type: ignore[assignment]
    return tuple((_LEVELS[name], _words(words)) for name, words in rows.items())


def fault_level(text: str) -> float:
    """Return how bad the worst fault word of the text sounds, 0-1; 0 for none."""
    return max((level for level, pattern in _faults() if pattern.search(text)), default=0.0)

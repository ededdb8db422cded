"""Small pure drawings: sparks, bars, phase strips, numbers."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from rich.text import Text

from kansoku.model import PHASES, Phase

__all__ = [
    "LATE", "PHASE_LETTERS", "PHASE_STYLES", "bar", "number", "phase_strip", "rate",
    "spark",
]  # fmt: skip

LATE = "bold white on red"
"""A rank the others wait for. Red on black alone is nearly black where colour is off."""
_SPARKS = "▁▂▃▄▅▆▇█"
# Letters carry the meaning where colour is missing.
PHASE_LETTERS = {
    Phase.DATA_WAIT: "d",
    Phase.FORWARD: "f",
    Phase.BACKWARD: "b",
    Phase.OPTIMIZER: "o",
    Phase.COLLECTIVE: "c",
    Phase.CHECKPOINT: "k",
    Phase.OTHER: "·",
}
PHASE_STYLES = {
    Phase.DATA_WAIT: "black on magenta",
    Phase.FORWARD: "black on green",
    Phase.BACKWARD: "black on cyan",
    Phase.OPTIMIZER: "black on yellow",
    Phase.COLLECTIVE: "white on blue",
    Phase.CHECKPOINT: "white on red",
    Phase.OTHER: "dim",
}


def spark(values: Sequence[float], width: int) -> str:
    """Draw the newest ``width`` values between their own minimum and maximum."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high <= low:
        return _SPARKS[0] * len(shown)
    scale = (len(_SPARKS) - 1) / (high - low)
    return "".join(_SPARKS[round((value - low) * scale)] for value in shown)


def phase_strip(shares: Mapping[Phase, float], width: int) -> Text:
    """Draw shares that sum to 1 as one strip of letters, largest remainders first."""
    exact = {phase: shares.get(phase, 0.0) * width for phase in PHASES}
    cells = {phase: int(value) for phase, value in exact.items()}
    left = width - sum(cells.values())
    order = sorted(PHASES, key=lambda phase: cells[phase] - exact[phase])
    for phase in order[: max(left, 0)]:
        cells[phase] += 1
    return _strip(tuple(cells[phase] for phase in PHASES)).copy()


@lru_cache(maxsize=4096)
def _strip(cells: tuple[int, ...]) -> Text:
    # Ranks that do the same share their strip, from second to second too.
    strip = Text()
    for phase, count in zip(PHASES, cells, strict=True):
        strip.append(PHASE_LETTERS[phase] * count, PHASE_STYLES[phase])
    return strip


def bar(ratio: float | None, width: int) -> str:
    """Draw a ratio 0-1; a dash where it is unknown."""
    if ratio is None:
        return "–"
    filled = round(min(max(ratio, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def number(value: float | None, unit: str = "", digits: int = 0) -> str:
    """Write a number with its unit; a dash where it is unknown."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def rate(value: float | None) -> str:
    """Write bytes per second readably."""
    if value is None:
        return "–"
    amount = value
    for prefix in ("", "k", "M", "G"):
        if amount < 1000:
            return f"{amount:.3g} {prefix}B/s"
        amount /= 1000
    return f"{amount:.3g} TB/s"

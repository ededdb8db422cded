"""Hysteresis: anomalies open, go on and close; a single weak window opens nothing."""

from dataclasses import dataclass, replace

from kansoku.fabric.analyser import Analysis, Anomaly
from kansoku.fabric.settings import Settings

__all__ = ["Change", "Ledger", "Open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """An anomaly that is open."""

    anomaly: Anomaly
    """As seen last."""
    onset_ns: int
    """Start of the first window that showed it."""
    last_ns: int
    """End of the last window that showed it."""
    windows: int
    clean: int = 0
    """Windows in a row without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An anomaly that opened or closed."""

    state: str
    """``open`` or ``closed``."""
    time_ns: int
    entry: Open


class Ledger:
    """The anomalies over time."""

    def __init__(self, settings: Settings) -> None:
        """Start with nothing known."""
        self._settings = settings
        self._entries: dict[tuple[str, str], Open] = {}
        self._candidates: dict[tuple[str, str], Open] = {}

    def open(self) -> list[Open]:
        """Return what is open, highest impact first."""
        return sorted(self._entries.values(), key=lambda e: (e.anomaly.impact, -e.anomaly.votes))

    def update(self, analysis: Analysis) -> list[Change]:
        """Take a window; return what opened and closed. An unknown window changes nothing."""
        if analysis.verdict == "unknown":
            return []
        changes = []
        seen = {(a.scope, a.subject): a for a in analysis.anomalies}
        candidates: dict[tuple[str, str], Open] = {}
        for key, anomaly in seen.items():
            before = self._entries.get(key) or self._candidates.get(key)
            entry = Open(
                anomaly=anomaly,
                onset_ns=before.onset_ns if before else analysis.start_ns,
                last_ns=analysis.end_ns,
                windows=before.windows + 1 if before else 1,
            )
            if key in self._entries:
                self._entries[key] = entry
            elif anomaly.strong or entry.windows >= 2:
                self._entries[key] = entry
                changes.append(Change(state="open", time_ns=analysis.end_ns, entry=entry))
            else:
                candidates[key] = entry
        self._candidates = candidates
        for key in [key for key in self._entries if key not in seen]:
            entry = replace(self._entries[key], clean=self._entries[key].clean + 1)
            self._entries[key] = entry
            if entry.clean >= self._settings.clear_after:
                del self._entries[key]
                changes.append(Change(state="closed", time_ns=analysis.end_ns, entry=entry))
        return changes

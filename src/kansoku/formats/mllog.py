"""MLPerf training logs: ``:::MLLOG {json}`` lines among whatever else a job prints.

Lines may carry a prefix (rank, host, time) before the token. Bytes that are not UTF-8 are
replaced; a line with the token but broken JSON is quarantined with its row, never guessed.
Source: mlcommons/logging, the log format of MLPerf Training v0.7 and later.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kansoku.errors import InputError

__all__ = ["MlEvent", "MlLog", "Quarantined", "read_log"]

_TOKEN = b":::MLLOG "
# Longer lines are data dumps that happen to hold the token, not log events.
_LONGEST_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MlEvent:
    """One log event."""

    row: int
    """Line number in the file, from 1."""
    time_ms: float
    """Unix time in milliseconds, of the host that logged."""
    key: str
    value: object
    metadata: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A line that has the token but no readable event."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MlLog:
    """All events of one file, in file order."""

    file: str
    events: tuple[MlEvent, ...]
    lines: int
    quarantined: tuple[Quarantined, ...]

    def of(self, key: str) -> Iterator[MlEvent]:
        """Yield the events of one key in file order."""
        return (event for event in self.events if event.key == key)

    def first(self, key: str) -> MlEvent | None:
        """Return the first event of a key; several ranks often log the same."""
        return next(self.of(key), None)

    def last(self, key: str) -> MlEvent | None:
        """Return the last event of a key."""
        return next((event for event in reversed(self.events) if event.key == key), None)


class _Raw(msgspec.Struct):
    key: str
    time_ms: float
    value: object = None
    metadata: dict[str, object] | None = None


def read_log(path: Path) -> MlLog:
    """Read one log file; raise InputError if it cannot be read at all."""
    decoder = msgspec.json.Decoder(_Raw, strict=False)
    events: list[MlEvent] = []
    quarantined: list[Quarantined] = []
    row = 0
    try:
        with path.open("rb") as file:
            for row, line in enumerate(file, start=1):
                at = line.rfind(_TOKEN)
                if at < 0:
                    continue
                if len(line) > _LONGEST_LINE_BYTES:
                    quarantined.append(Quarantined(row=row, reason="longer than 1 MiB"))
                    continue
                text = line[at + len(_TOKEN) :].decode("utf-8", errors="replace")
                try:
                    raw = decoder.decode(text)
                except (msgspec.DecodeError, msgspec.ValidationError) as error:
                    quarantined.append(Quarantined(row=row, reason=str(error)))
                    continue
                events.append(
                    MlEvent(
                        row=row,
                        time_ms=raw.time_ms,
                        key=raw.key,
                        value=raw.value,
                        metadata=raw.metadata or {},
                    )
                )
    except OSError as error:
        raise InputError(
            f"the log cannot be read: {error.strerror or error}",
            where=str(path),
            remedy="check the path and its rights",
        ) from None
    return MlLog(file=str(path), events=tuple(events), lines=row, quarantined=tuple(quarantined))

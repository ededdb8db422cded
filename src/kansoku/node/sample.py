"""What collectors return: samples of catalogue metrics, and events."""

from dataclasses import dataclass, field

import orjson

__all__ = ["Event", "Labels", "Sample", "canonical_labels", "labels"]

Labels = tuple[tuple[str, str], ...]
"""Attribute and value pairs, sorted by attribute."""


def labels(*pairs: tuple[str, str | None], **plain: str) -> Labels:
    """Sort pairs by attribute; pairs without a value are left out."""
    known = [(key, value) for key, value in pairs if value is not None]
    return tuple(sorted([*known, *plain.items()]))


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series. Positional, unlike other records: thousands a round."""

    metric: str
    """Name in the catalogue."""
    labels: Labels
    value: float
    """In the catalogue's unit; counters are cumulative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One log line or state change."""

    time_ns: int
    """Unix time."""
    source: str
    """``kernel``, ``slurm``, ``agent`` …"""
    subject: str
    """``node:NAME``, ``gpu:NODE/I``, ``nic:NODE/DEV`` …"""
    severity: str
    """``info``, ``warning``, ``error``, ``critical``."""
    kind: str
    body: str
    attributes: dict[str, str] = field(default_factory=dict)


def canonical_labels(series: Labels, host: str) -> str:
    """Return labels and ``host.name`` as the JSON object the metrics table holds."""
    return orjson.dumps({**dict(series), "host.name": host}, option=orjson.OPT_SORT_KEYS).decode()

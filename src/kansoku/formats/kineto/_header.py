"""What a trace says of itself before and after its events, read leniently."""

import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Metadata", "rank_from_name", "read_metadata"]

_DECODER = json.JSONDecoder(strict=False)
_FIELDS = ("distributedInfo", "baseTimeNanoseconds", "deviceProperties", "traceName")
_LIMIT = 32 << 20
_RANK_DIGITS = 9
_MOST_RANKS = 10**_RANK_DIGITS
"""What tables hold, in 32 bits; longer numbers are dates and the like."""
_NAME_RANKS = (
    re.compile(r"(?i)(?<![a-z])(?:global_?)?rank[-_.=]?(\d+)"),
    re.compile(r"(?i)(?<![a-z])worker[-_.]?(\d+)"),
    re.compile(r"(?i)(?<![a-z0-9])(?:r|gpu|device|trainer)[-_.]?(\d+)(?![a-z0-9])"),
    re.compile(r"(?i)^(?:trace|kineto|profile)[-_.](\d{1,6})(?=\.|_|$)"),
    re.compile(r"^(\d{1,6})(?:[._-](?:pt\.|trace|kineto)|\.json)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Facts of the file; None where it does not say."""

    rank: int | None
    world_size: int | None
    backend: str | None
    base_ns: int | None
    """``baseTimeNanoseconds``: Unix time of stamp zero."""
    device_name: str | None
    groups: tuple[dict[str, Any], ...]
    """``pg_config`` of distributedInfo."""


def read_metadata(texts: list[str]) -> Metadata:
    """Read the fields that analyses use out of the text around the events."""
    found: dict[str, Any] = {}
    for text in texts:
        for name in _FIELDS:
            if name in found:
                continue
            for match in re.finditer(rf'"{name}"\s*:\s*', text[:_LIMIT]):
                try:
                    found[name], _ = _DECODER.raw_decode(text, match.end())
                except (ValueError, RecursionError):
                    continue
                break
    info = found.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    devices = found.get("deviceProperties")
    groups = info.get("pg_config")
    return Metadata(
        rank=_rank(info.get("rank")),
        world_size=_rank(info.get("world_size")),
        backend=info.get("backend") if isinstance(info.get("backend"), str) else None,
        base_ns=_base(found.get("baseTimeNanoseconds")),
        device_name=_device_name(devices),
        groups=tuple(g for g in groups if isinstance(g, dict)) if isinstance(groups, list) else (),
    )


def _device_name(devices: Any) -> str | None:
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        name = devices[0].get("name")
        return name if isinstance(name, str) else None
    return None


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        value = int(value) if len(value) < 20 else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 1 << 62 else None


def _base(value: Any) -> int | None:
    """Return Unix ns below 2**61 (until 2043), so that any stamp of the file may be added."""
    number = _whole(value)
    return number if number is not None and number < 1 << 61 else None


def _rank(value: Any) -> int | None:
    """Return a rank or a number of ranks; None for one that no job has."""
    number = _whole(value)
    return number if number is not None and number < _MOST_RANKS else None


def rank_from_name(file_name: str) -> int | None:
    """Return the rank that a file name tells, such as ``rank3.json`` or ``worker3_step_12…``."""
    for pattern in _NAME_RANKS:
        if (match := pattern.search(file_name)) and len(match[1]) <= _RANK_DIGITS:
            return int(match[1])
    return None

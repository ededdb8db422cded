"""Lustre client files under /proc/fs/lustre and /sys/kernel/debug/lustre."""

import re
from dataclasses import dataclass

from kansoku.formats.procfs import whole_number

__all__ = ["LustreStat", "filesystem_of", "parse_import_state", "parse_lustre_stats"]

_INSTANCE = re.compile(r"(?P<name>.+?)-(?:ff[0-9a-f]{6,}|[0-9a-f]{16})")


@dataclass(frozen=True, slots=True, kw_only=True)
class LustreStat:
    """One line of a ``stats`` file."""

    count: int
    unit: str
    """``bytes``, ``usecs``, ``usec`` (old), ``regs``, ``reqs``."""
    total: int | None
    """Sum in ``unit``; None where the line has only a count."""


def filesystem_of(folder: str) -> str:
    """Return the file system's name of a client folder such as ``scratch-ffff9f3a1c2d4800``."""
    match = _INSTANCE.fullmatch(folder)
    return match["name"] if match else folder


def parse_lustre_stats(text: str) -> tuple[dict[str, LustreStat], int]:
    """Read ``llite/*/stats``: name → count and sum; also return the number of bad lines.

    Lines read ``write_bytes 12 samples [bytes] 4096 1048576 8392704``, newer ones end with a sum
    of squares; ``snapshot_time`` and the start and elapsed times are left out.
    """
    found: dict[str, LustreStat] = {}
    bad = 0
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] in {"snapshot_time", "start_time", "elapsed_time"}:
            continue
        count = whole_number(words[1]) if len(words) >= 3 else None
        if count is None or words[2] != "samples":
            bad += 1
            continue
        unit = words[3].strip("[]") if len(words) > 3 else "reqs"
        total = whole_number(words[6]) if len(words) > 6 else None
        found[words[0]] = LustreStat(count=count, unit=unit, total=total)
    return found, bad


_STATE = re.compile(r"^\s*(?:current_)?state:\s*([A-Z_]+)\s*$", re.MULTILINE)
_TARGET = re.compile(r"^\s*target:\s*(\S{1,128})\s*$", re.MULTILINE)


def parse_import_state(text: str) -> tuple[str | None, str | None]:
    """Return (target, state) of an ``import`` file; None where a line is missing.

    FULL is connected, IDLE was disconnected on purpose for want of use; all others are trouble
    when they last.
    """
    state, target = _STATE.search(text), _TARGET.search(text)
    return (
        target[1].removesuffix("_UUID") if target else None,
        state[1] if state else None,
    )

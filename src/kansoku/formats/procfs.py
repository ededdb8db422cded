"""Text of /proc and /sys files to numbers. Nothing raises: bad lines are left out and counted."""

import re
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = [
    "CPU_MODES",
    "Disk",
    "Interface",
    "Mount",
    "Parsed",
    "parse_diskstats",
    "parse_key_values",
    "parse_meminfo",
    "parse_mounts",
    "parse_net_dev",
    "parse_pressure",
    "parse_stat",
    "whole_number",
]

T = TypeVar("T")

CPU_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "softirq", "steal")
"""Columns of a cpu line, under OpenTelemetry's names; guest time is part of user already."""

_DIGITS = re.compile(r"[0-9]{1,20}")
_SECTOR_BYTES = 512  # /proc/diskstats counts in 512-byte sectors whatever the disk's own are


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(Generic[T]):
    """What was read, and how many lines made no sense."""

    value: T
    bad_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Counters of one block device since boot."""

    reads: int
    read_bytes: int
    read_ms: int
    writes: int
    written_bytes: int
    write_ms: int
    busy_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """Counters of one network interface since it came up."""

    receive_bytes: int
    receive_packets: int
    receive_errors: int
    receive_dropped: int
    transmit_bytes: int
    transmit_packets: int
    transmit_errors: int
    transmit_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of /proc/mounts."""

    device: str
    mountpoint: str
    kind: str


def whole_number(text: str) -> int | None:
    """Return a non-negative whole number of at most 20 ASCII digits, else None."""
    return int(text) if _DIGITS.fullmatch(text) else None


def _numbers(words: list[str]) -> list[int] | None:
    found = [whole_number(word) for word in words]
    return None if None in found else [n for n in found if n is not None]


def parse_stat(text: str) -> Parsed[dict[str, list[int]]]:
    """Read /proc/stat: each line's first word to its numbers (cpu lines in clock ticks)."""
    value: dict[str, list[int]] = {}
    bad = 0
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] in {"intr", "softirq"}:  # hundreds of columns nobody asks for
            continue
        numbers = _numbers(words[1:])
        if numbers is None or not numbers:
            bad += 1
        else:
            value[words[0]] = numbers
    return Parsed(value=value, bad_lines=bad)


def parse_key_values(text: str) -> Parsed[dict[str, int]]:
    """Read lines of a name and a whole number, as in /proc/vmstat or numastat."""
    value: dict[str, int] = {}
    bad = 0
    for line in text.splitlines():
        words = line.split()
        number = whole_number(words[1]) if len(words) == 2 else None
        if number is None:
            bad += bool(words)
        else:
            value[words[0]] = number
    return Parsed(value=value, bad_lines=bad)


def parse_meminfo(text: str) -> Parsed[dict[str, int]]:
    """Read /proc/meminfo, or a NUMA node's, to bytes (counts without kB stay counts)."""
    value: dict[str, int] = {}
    bad = 0
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        number = whole_number(words[0]) if words else None
        if not colon or not name.strip() or number is None:
            bad += bool(line.strip())
            continue
        # A NUMA node's lines begin with "Node 0 ".
        value[name.split()[-1]] = number * (1024 if words[1:] == ["kB"] else 1)
    return Parsed(value=value, bad_lines=bad)


def parse_pressure(text: str) -> Parsed[dict[str, int]]:
    """Read a PSI file: ``some`` and ``full`` to the microseconds stalled since boot."""
    value: dict[str, int] = {}
    bad = 0
    for line in text.splitlines():
        words = line.split()
        total = next((w[6:] for w in words[1:] if w.startswith("total=")), "")
        number = whole_number(total)
        if number is None or words[0] not in {"some", "full"}:
            bad += bool(words)
        else:
            value[words[0]] = number
    return Parsed(value=value, bad_lines=bad)


def parse_diskstats(text: str) -> Parsed[dict[str, Disk]]:
    """Read /proc/diskstats; loop and RAM devices are left out."""
    value: dict[str, Disk] = {}
    bad = 0
    for line in text.splitlines():
        words = line.split()
        numbers = _numbers(words[3:13]) if len(words) >= 13 else None
        if numbers is None:
            bad += bool(words)
        elif not words[2].startswith(("loop", "ram", "zram")):
            value[words[2]] = Disk(
                reads=numbers[0],
                read_bytes=numbers[2] * _SECTOR_BYTES,
                read_ms=numbers[3],
                writes=numbers[4],
                written_bytes=numbers[6] * _SECTOR_BYTES,
                write_ms=numbers[7],
                busy_ms=numbers[9],
            )
    return Parsed(value=value, bad_lines=bad)


def parse_net_dev(text: str) -> Parsed[dict[str, Interface]]:
    """Read /proc/net/dev."""
    value: dict[str, Interface] = {}
    bad = 0
    for line in text.splitlines():
        name, colon, rest = line.rpartition(":")
        if not colon:
            continue  # the two title lines
        numbers = _numbers(rest.split())
        if numbers is None or len(numbers) < 16:
            bad += 1
            continue
        value[name.strip()] = Interface(
            receive_bytes=numbers[0],
            receive_packets=numbers[1],
            receive_errors=numbers[2],
            receive_dropped=numbers[3],
            transmit_bytes=numbers[8],
            transmit_packets=numbers[9],
            transmit_errors=numbers[10],
            transmit_dropped=numbers[11],
        )
    return Parsed(value=value, bad_lines=bad)


_OCTAL = re.compile(r"\\([0-7]{3})")


def parse_mounts(text: str) -> Parsed[list[Mount]]:
    """Read /proc/mounts; octal escapes (space, tab, backslash) are undone."""
    value: list[Mount] = []
    bad = 0
    for line in text.splitlines():
        words = [_OCTAL.sub(lambda m: chr(int(m[1], 8)), w) for w in line.split(" ")]
        if len(words) < 4:
            bad += bool(line.strip())
        else:
            value.append(Mount(device=words[0], mountpoint=words[1], kind=words[2]))
    return Parsed(value=value, bad_lines=bad)

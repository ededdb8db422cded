"""What the files of a bundle say of each other: boot times, the cluster's zone, the job's nodes."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import orjson
from ClusterShell.NodeSet import NodeSet, NodeSetParseError

from kansoku.diagnose.context import DaemonStart
from kansoku.diagnose.device_text import DeviceFact
from kansoku.formats.job_log import Clock, parse_line

__all__ = [
    "accounted_nodes",
    "allocated_nodes",
    "boot_times",
    "daemon_starts",
    "library_facts",
    "nodes_of_ranks",
    "planned_step",
    "zone_minutes",
]

_SMALL_BYTES = 16 * 1024
_LARGEST_PLAN_BYTES = 4 << 20
_BOOT_FILE = re.compile(r"uptime|boot|who-?b|proc[-_.]stat", re.IGNORECASE)
_BOOT_LINE = re.compile(r"^\s*(?:(?:system boot|up since|boot time:?)\s+)?(?=\d{4}-\d\d-\d\d[ T])")
_BTIME = re.compile(r"^btime (\d{10})\s*$", re.MULTILINE)
_ZONED = re.compile(r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?([+-]\d\d:?\d\d|Z)\b")
_NAMED_ZONE = re.compile(r"\bzone:?\s+([A-Z][A-Za-z]+/[A-Z][A-Za-z_]+|UTC)\b", re.IGNORECASE)
_ALLOCATION = re.compile(r"\bAllocate JobId=(\d+)\b[^\n]*?\bNodeList=(\S+)")
_JOB_IN_NAME = re.compile(r"(?:slurm|job)[-_.](\d{2,})\b")
_DAEMON_START = re.compile(
    r"\bNodeName=(\S+)(?:(?!\bNodeName=)[\s\S]){1,8000}?"
    r"\bBootTime=(\d\S+)\s+SlurmdStartTime=(\d\S+)"
)
_NCCL_VERSION = re.compile(
    r"([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] NCCL INFO NCCL version ([\d.]+\+?\w*[\d.]*)"
)
_NCCL_RANK = re.compile(
    r"([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] NCCL INFO [^\n]*?\brank (\d+) nranks (\d+)"
)


def _start(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_SMALL_BYTES).decode("utf-8", "replace")


def zone_minutes(texts: Sequence[tuple[Path, str]]) -> int:
    """Return the zone of naive stamps: the one that is named, else that of most zoned stamps.

    A cluster shares its zone. ``Z`` counts least: services write it wherever they stand.
    """
    seen: Counter[int] = Counter()
    universal = False
    for path, _ in texts[:2000]:
        if path.suffix == ".gz":
            continue
        start = _start(path)
        named = _NAMED_ZONE.search(start) if path.stat().st_size < _SMALL_BYTES else None
        if named is not None and (minutes := _minutes_of(named[1], start)) is not None:
            return minutes
        match = _ZONED.search(start[:4096])
        if match is None:
            continue
        digits = match[1].replace(":", "")
        if digits == "Z":
            universal = True
            continue
        minutes = int(digits[1:3]) * 60 + int(digits[3:])
        seen[-minutes if digits.startswith("-") else minutes] += 1
    return 0 if universal and not seen else (seen.most_common(1)[0][0] if seen else 0)


def _minutes_of(name: str, text: str) -> int | None:
    """Return a named zone's distance from UTC at the text's own date, else at mid-winter."""
    try:
        zone = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        return None
    date = re.search(r"\b(20\d\d)-(\d\d)-(\d\d)\b", text)
    year, month, day = (int(g) for g in date.groups()) if date else (2026, 1, 15)
    try:
        offset = datetime(year, month, day, 12, tzinfo=UTC).astimezone(zone).utcoffset()
    except ValueError:
        return None
    return None if offset is None else round(offset.total_seconds() / 60)


def boot_times(texts: Iterable[tuple[Path, str, str | None]], minutes: int) -> dict[str, int]:
    """Return when nodes booted, in Unix ns, from ``uptime -s``, ``who -b`` or ``/proc/stat``.

    ``texts`` are path, name and node of each file; ``minutes`` is the zone of naive stamps.
    """
    found = {}
    for path, name, node in texts:
        base = name.rsplit("/", 1)[-1]
        if node is None or not _BOOT_FILE.search(base) or path.stat().st_size > _SMALL_BYTES:
            continue
        text = _start(path)
        btime = _BTIME.search(text)
        if btime is not None:
            found[node] = int(btime[1]) * 1_000_000_000
            continue
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) == 1 and (match := _BOOT_LINE.match(lines[0])) is not None:
            clock = Clock(reference_ns=0, utc_offset_minutes=minutes)
            # `who` leaves the seconds out.
            moment = re.sub(r"( \d\d:\d\d)\s*$", r"\1:00", lines[0][match.end() :])
            stamp = parse_line(moment, clock).time_ns
            if stamp is not None:
                found[node] = stamp
    return found


def daemon_starts(text: str, name: str, minutes: int) -> dict[str, DaemonStart]:
    """Return what ``scontrol show node`` says of nodes' boots and daemons.

    ``name`` is the text's file, ``minutes`` the zone of its stamps.
    """
    clock = Clock(reference_ns=0, utc_offset_minutes=minutes)
    found = {}
    for match in _DAEMON_START.finditer(text):
        booted, began = (parse_line(match[n], clock).time_ns for n in (2, 3))
        if booted is not None and began is not None:
            source = f"{name}:{text.count(chr(10), 0, match.end()) + 1}"
            found[match[1]] = DaemonStart(booted_ns=booted, began_ns=began, source=source)
    return found


def _node_set(text: str) -> set[str]:
    """Return the nodes of a Slurm node list; empty where it is none."""
    try:
        return set(NodeSet(text, resolver=None))
    except NodeSetParseError:
        return set()


def accounted_nodes(text: str) -> set[str]:
    """Return the nodes of an accounting table that tells of one job; empty otherwise."""
    rows = [line.split("|") for line in text.splitlines() if "|" in line]
    if not rows or "JobID" not in rows[0] or "NodeList" not in rows[0]:
        return set()
    job, nodes = rows[0].index("JobID"), rows[0].index("NodeList")
    whole = [row for row in rows[1:] if len(row) > max(job, nodes)]
    if len({row[job].partition(".")[0] for row in whole}) != 1:
        return set()
    return set().union(*(_node_set(row[nodes]) for row in whole))


def allocated_nodes(log: str, names: Iterable[str]) -> set[str]:
    """Return the nodes that the controller's log gave the one job that the bundle is about."""
    given = dict(_ALLOCATION.findall(log))
    if len(given) > 1:
        told = {match[1] for name in names if (match := _JOB_IN_NAME.search(name))}
        given = {job: nodes for job, nodes in given.items() if job in told}
    return _node_set(next(iter(given.values()))) if len(given) == 1 else set()


def planned_step(path: Path) -> float | None:
    """Return the step time in seconds of a plan's JSON answer; None where it is something else."""
    if path.suffix == ".gz" or path.stat().st_size > _LARGEST_PLAN_BYTES:
        return None
    data = path.read_bytes()
    if b'"kansoku.plan' not in data[:256]:
        return None
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    step_s = answer.get("step_s") if isinstance(answer, dict) else None
    return float(step_s) if isinstance(step_s, int | float) and step_s > 0 else None


def library_facts(head: str, name: str) -> list[DeviceFact]:
    """Return the NCCL versions that nodes name."""
    return [
        DeviceFact(node=host, device=None, key="nccl version", value=version, source=f"{name}:1")
        for host, version in dict.fromkeys(_NCCL_VERSION.findall(head))
    ]


def nodes_of_ranks(head: str) -> dict[int, dict[int, str]]:
    """Return ``{world: {rank: node}}`` of what NCCL says of its communicators."""
    found: dict[int, dict[int, str]] = {}
    if "nranks" in head:
        for host, rank, world in _NCCL_RANK.findall(head):
            found.setdefault(int(world), {})[int(rank)] = host
    return found

"""Who said a log line, and when: stamps, hosts and ranks in the many prefixes of the field.

Job output, torchrun, srun --label, glog (NCCL, c10d), syslog, journalctl, dmesg, Slurm daemons and
plain Python logging all write differently. What a line does not say is None; a stamp without a
year or date takes it from the file's :class:`Clock`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone

__all__ = ["Clock", "LineFacts", "host_in_path", "parse_line", "rank_in_path"]

_MONTHS = {
    name: number
    for number, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
    )
}
_ISO = re.compile(
    r"(?P<y>\d{4})[-/](?P<mo>\d\d)[-/](?P<d>\d\d)[ T_](?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)"
    r"(?:[.,](?P<f>\d{1,9}))?(?P<z>Z|[+-]\d\d:?\d\d)?"
)
_CTIME = re.compile(
    r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\s+(?P<mon>[A-Z][a-z]{2})\s+(?P<d>\d{1,2})\s+"
    r"(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)\s+(?P<y>\d{4})"
)
_SYSLOG = re.compile(
    r"^(?P<mon>[A-Z][a-z]{2})\s+(?P<d>\d{1,2})\s+(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)"
    r"(?:\.(?P<f>\d{1,9}))?\s"
)
# Switches put the year first.
_YEAR_SYSLOG = re.compile(
    r"^(?P<y>\d{4})\s+(?P<mon>[A-Z][a-z]{2})\s+(?P<d>\d{1,2})\s+"
    r"(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?:\.(?P<f>\d{1,9}))?\s"
)
_GLOG = re.compile(
    r"(?:^|[\[\s])[IWEF](?P<mo>\d{1,2})(?P<d>\d\d)\s+(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)\.(?P<f>\d{1,9})"
)
_EPOCH = re.compile(r"(?<![\d.])(?P<e>1[5-9]\d{8})(?:\.(?P<f>\d{1,9}))?(?![\d.])")
_EPOCH_LONG = re.compile(r"(?<![\d.])(?P<e>1[5-9]\d{11}|1[5-9]\d{14}|1[5-9]\d{17})(?![\d.])")
_UPTIME = re.compile(r"(?:^|kernel:\s*)(?:<\d+>)?\[\s*(?P<u>\d{1,9}\.\d{6})\]")
_TIME_ONLY = re.compile(r"(?<![\d:-])(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?")

_RANK = (
    re.compile(r"\[rank\s?(\d{1,6})\]", re.IGNORECASE),
    re.compile(r"\[default(\d{1,6})\]"),
    re.compile(r"\b(?:global[_ ])?rank[ =:_#]+(\d{1,6})\b", re.IGNORECASE),
    re.compile(r"^(\d{1,6}): "),
    re.compile(r"\bsrun: \w+: \S+: tasks? (\d{1,6}): "),
)
_HOST_AFTER_STAMP = re.compile(r"^\s*(?P<host>[A-Za-z][\w.-]{0,62})\s+[\w./()-]+(?:\[\d+\])?:")
# After an ISO stamp stands a level or a module as often as a host; hosts of clusters have a number.
_HOST_WITH_NUMBER = re.compile(r"^\s*(?P<host>[A-Za-z][\w.-]*\d[\w.-]*)\s+[\w./()-]+(?:\[\d+\])?:")
_HOST_BEFORE = re.compile(r"^\s*\[?(?P<host>[A-Za-z][A-Za-z.-]*\d[\w.-]*)\]?\s*[:|]\s")
# Names that sites give their nodes; a bare word such as "worker" alone is not one.
_HOST_NAME = (
    r"(?:node|host|compute|gpu|dgx|hgx|cn|nid|worker|server|srv|hpc|n|c)"
    r"[-_]?[a-z]{0,8}[-_]?\d{1,6}(?:-\d{1,6})?"
)
_HOST_IN_PATH = re.compile(rf"(?<![A-Za-z0-9])({_HOST_NAME})(?![A-Za-z0-9])", re.IGNORECASE)
_RANK_IN_PATH = re.compile(r"(?:^|[^a-z])(?:rank|global_rank)[-_.]?(\d{1,6})", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """What completes a stamp that lacks a year, a date or an epoch."""

    reference_ns: int
    """A time near the lines': the file's own dated lines, or its modification time."""
    boot_ns: int | None = None
    """Unix time of the kernel's zero, where it is known."""
    utc_offset_minutes: int = 0
    """Of stamps that name no zone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFacts:
    """What a line says of itself."""

    time_ns: int | None
    host: str | None
    rank: int | None


def _fraction_ns(text: str | None) -> int:
    return int((text or "0")[:9].ljust(9, "0"))


def _zone(text: str | None, clock: Clock) -> timezone:
    if text in {None, ""}:
        return timezone(timedelta(minutes=clock.utc_offset_minutes))
    if text == "Z":
        return UTC
    sign = -1 if text[0] == "-" else 1
    digits = text[1:].replace(":", "")
    return timezone(sign * timedelta(hours=int(digits[:2]), minutes=int(digits[2:])))


def _unix_ns(
    clock: Clock, match: re.Match[str], *, year: int, month: int, day: int, zone: str | None = None
) -> int | None:
    try:
        moment = datetime(
            year, month, day, int(match["h"]), int(match["mi"]), int(match["s"]),
            tzinfo=_zone(zone, clock),
        )  # fmt: skip
    except ValueError:
        return None
    groups = match.groupdict()
    return int(moment.timestamp()) * 1_000_000_000 + _fraction_ns(groups.get("f"))


def _nearest_year(clock: Clock, match: re.Match[str], month: int, day: int) -> int | None:
    """Take the year that puts the stamp nearest to the reference."""
    year = datetime.fromtimestamp(clock.reference_ns / 1e9, UTC).year
    near = [
        stamp
        for candidate in (year - 1, year, year + 1)
        if (stamp := _unix_ns(clock, match, year=candidate, month=month, day=day)) is not None
    ]
    return min(near, key=lambda stamp: abs(stamp - clock.reference_ns), default=None)


def _iso(match: re.Match[str], clock: Clock) -> int | None:
    return _unix_ns(
        clock, match, year=int(match["y"]), month=int(match["mo"]), day=int(match["d"]),
        zone=match["z"],
    )  # fmt: skip


def _ctime(match: re.Match[str], clock: Clock) -> int | None:
    month = _MONTHS.get(match["mon"].lower())
    if month is None:
        return None
    return _unix_ns(clock, match, year=int(match["y"]), month=month, day=int(match["d"]))


def _syslog(match: re.Match[str], clock: Clock) -> int | None:
    month = _MONTHS.get(match["mon"].lower())
    return None if month is None else _nearest_year(clock, match, month, int(match["d"]))


def _glog(match: re.Match[str], clock: Clock) -> int | None:
    return _nearest_year(clock, match, int(match["mo"]), int(match["d"]))


def _epoch(match: re.Match[str], _clock: Clock) -> int | None:
    return int(match["e"]) * 1_000_000_000 + _fraction_ns(match["f"])


def _epoch_long(match: re.Match[str], _clock: Clock) -> int | None:
    return int(match["e"].ljust(19, "0"))


def _uptime(match: re.Match[str], clock: Clock) -> int | None:
    return None if clock.boot_ns is None else clock.boot_ns + round(float(match["u"]) * 1e9)


def _time_only(match: re.Match[str], clock: Clock) -> int | None:
    """Take the day that puts the stamp nearest to the reference."""
    base = datetime.fromtimestamp(clock.reference_ns / 1e9, UTC)
    near = []
    for shift in (-1, 0, 1):
        day = base + timedelta(days=shift)
        stamp = _unix_ns(clock, match, year=day.year, month=day.month, day=day.day)
        if stamp is not None:
            near.append(stamp)
    return min(near, key=lambda stamp: abs(stamp - clock.reference_ns), default=None)


_STAMPS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], Clock], int | None]], ...] = (
    (_ISO, _iso),
    (_CTIME, _ctime),
    (_SYSLOG, _syslog),
    (_YEAR_SYSLOG, _ctime),
    (_GLOG, _glog),
    (_UPTIME, _uptime),
    (_EPOCH, _epoch),
    (_EPOCH_LONG, _epoch_long),
    (_TIME_ONLY, _time_only),
)
# Stamps stand in the prefix; numbers further on belong to the message.
_PREFIX_CHARACTERS = 120


def parse_line(line: str, clock: Clock) -> LineFacts:
    """Return time, host and rank that the line itself states."""
    head = line[:_PREFIX_CHARACTERS]
    time_ns, host = None, None
    for pattern, read in _STAMPS:
        match = pattern.search(head)
        if match is not None:
            time_ns = read(match, clock)
            rest = head[match.end() :]
            if pattern is _SYSLOG:
                host = _HOST_AFTER_STAMP.match(rest)
            elif pattern in {_ISO, _EPOCH, _EPOCH_LONG}:
                host = _HOST_WITH_NUMBER.match(rest)
            break
    host = host or _HOST_BEFORE.match(head)
    rank = None
    for pattern in _RANK:
        found = pattern.search(head)
        if found is not None:
            rank = int(found[1])
            break
    return LineFacts(time_ns=time_ns, host=host["host"] if host else None, rank=rank)


def host_in_path(path: str) -> str | None:
    """Return a node name in a file's path, the last part first."""
    for part in reversed(path.replace("\\", "/").split("/")):
        match = _HOST_IN_PATH.search(part)
        if match is not None:
            return match[1]
    return None


def rank_in_path(path: str) -> int | None:
    """Return a rank in a file's path, the last part first."""
    for part in reversed(path.replace("\\", "/").split("/")):
        match = _RANK_IN_PATH.search(part)
        if match is not None:
            return int(match[1])
    return None

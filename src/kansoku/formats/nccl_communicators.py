"""What NCCL itself says of its communicators: RAS output (JSON, text) and debug logs.

RAS: ``ncclras`` and ``ncclras -f json`` (NCCL 2.24; JSON from 2.28.7), one snapshot of a whole job.
Debug logs: ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL``, one or many processes in a file.
"""

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kansoku.errors import InputError

__all__ = [
    "Communicator",
    "Launch",
    "Member",
    "parse_debug_log",
    "parse_ras_json",
    "parse_ras_text",
    "read_communicators",
    "sniff",
]

_LARGEST_BYTES = 1 << 30
_LARGEST_SIZE = 1 << 20
_KEPT_LAUNCHES = 64
_HEAD_BYTES = 65536
_LONGEST_LINE = 65536

_DTYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "bfloat16", "float8_e4m3", "float8_e5m2",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One collective that a process launched."""

    number: int
    """Among the communicator's operations, from 1."""
    name: str
    elements: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank of a communicator."""

    rank: int
    """Within the communicator."""
    process: str | None
    """``HOST:PID:DEVICE``; None where the output does not say."""
    launched: int | None
    """Operations launched so far; None: it did not answer."""
    launches: tuple[Launch, ...] = ()
    """The last ones, where known."""
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One communicator as one snapshot or set of logs shows it."""

    name: str
    """Its hash or id, the same on every member."""
    size: int
    members: tuple[Member, ...]
    """Those that are listed."""
    others_launched: int | None = None
    """What every member that is not listed has launched; None: nobody is left out."""


def sniff(head: bytes) -> str | None:
    """Return ``ras_json``, ``ras_text`` or ``debug_log`` by the first bytes; None for others."""
    if head[:1] == b"\x80":
        return None
    if head.lstrip()[:1] == b"{":
        return "ras_json" if b'"communicators' in head or b'"nccl_version"' in head else None
    if b"Communicators..." in head and b"=====" in head:
        return "ras_text"
    return "debug_log" if b"NCCL INFO" in head else None


def read_communicators(path: Path) -> list[Communicator] | None:
    """Return a file's communicators, None if it is of another kind; raise InputError if broken."""
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
            kind = sniff(head)
            if kind is None:
                return None
            if path.stat().st_size > _LARGEST_BYTES:
                raise InputError("larger than 1 GiB", where=str(path))
            if kind == "debug_log":
                stream.seek(0)
                lines = iter(lambda: stream.readline(_LONGEST_LINE), b"")
                return parse_debug_log(line.decode("utf-8", "replace") for line in lines)
            text = (head + stream.read()).decode("utf-8", "replace")
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
    try:
        return parse_ras_json(text) if kind == "ras_json" else parse_ras_text(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"not a RAS report, or cut off: {error}", where=str(path)) from None


def parse_ras_json(text: str) -> list[Communicator]:
    """Return the communicators of ``ncclras -f json``."""
    found: list[Communicator] = []
    for one in json.loads(text)["communicators"]:
        size = _size(one["size"])
        members = [
            Member(
                rank=int(row["rank"]),
                process=_process(row),
                launched=sum(int(n) for n in row.get("collective_counts", {}).values()),
                note=_status(row.get("status", {})),
            )
            for row in one.get("ranks", [])
        ]
        members += [
            Member(
                rank=int(row["rank"]),
                process=_process(row),
                launched=None,
                note="considered dead"
                if row.get("status", {}).get("considered_dead")
                else "did not answer",
            )
            for row in one.get("missing_ranks", [])
        ]
        name = str(one["hash"])
        if any(other.name == name for other in found):
            name = f"{name}/{one.get('secondary_hash')}"
        found.append(Communicator(name=name, size=size, members=tuple(members)))
    return found


def _size(value: object) -> int:
    size = int(str(value))
    if not 0 < size <= _LARGEST_SIZE:
        raise ValueError(f"a communicator of {size} ranks")
    return size


def _process(row: Mapping[str, Any]) -> str:
    return f"{row.get('host')}:{row.get('pid')}:{row.get('cuda_dev')}"


def _status(status: Mapping[str, Any]) -> str | None:
    words = []
    if status.get("init_state") not in (0, None):
        words.append("still initialising" if status["init_state"] == 7 else "failed to initialise")
    if status.get("async_error"):
        words.append(f"asynchronous error {status['async_error']}")
    words += [
        word
        for key, word in (("abort_flag", "aborted"), ("destroy_flag", "destroyed"))
        if status.get(key)
    ]
    return ", ".join(words) or None


_SUMMARY = re.compile(
    r"^[ \t]*(\d+)[ \t]+(\d+)[ \t]+[\d-]+[ \t]+[\d-]+[ \t]+(\d+)[ \t]+\d+[ \t]+[A-Z]", re.MULTILINE
)
_HEADING = re.compile(r"^\s*#(\d+)-(\d+) \(([0-9a-fx]+)\) (\S+)", re.MULTILINE)
_COUNTS_OF = re.compile(r"Communicator ranks have different (\S+) operation counts")
_SOME = re.compile(r"(\d+) ranks have (?:launched up to operation (\d+)|not launched any)")
_ONE = re.compile(
    r"Rank (\d+)(?: has (?:launched up to operation (\d+)|(not) launched any operations))?"
    r" -- (?:GPU (\S+) managed by process (\d+) on node (\S+)|\[)"
)
_MISSING = re.compile(r"The missing ranks?: ([\d, ]+)")


def parse_ras_text(text: str) -> list[Communicator]:
    """Return the communicators of which ``ncclras`` reports something.

    The report names the ranks that differ; of the others it says only how many operations they
    have launched. Counts by operation type (NCCL 2.26) are added.
    """
    sizes = {int(m[1]): _size(m[3]) for m in _SUMMARY.finditer(text)}
    headings = list(_HEADING.finditer(text))
    found: dict[str, _TextComm] = {}
    for number, heading in enumerate(headings):
        end = headings[number + 1].start() if number + 1 < len(headings) else len(text)
        size = sizes.get(int(heading[1]))
        if size is not None:
            found.setdefault(heading[3], _TextComm(size)).read(text[heading.end() : end])
    return [one.communicator(name) for name, one in found.items()]


class _TextComm:
    """A communicator's paragraphs of the text report."""

    def __init__(self, size: int):
        self.size = size
        self.common = 0
        self.counts: dict[int, int] = defaultdict(int)
        self.missing: set[int] = set()
        self.processes: dict[int, str] = {}

    def read(self, text: str) -> None:
        """Take one paragraph: sections of counts, missing ranks."""
        sections: list[list[tuple[int, int | None, list[int]]]] = []
        missing = False
        for line in text.splitlines():
            if line[:1].isupper() and line.strip().isupper():
                break  # another heading, such as TIMEOUT
            if _COUNTS_OF.search(line):
                sections.append([])
                missing = False
            elif match := _MISSING.search(line):
                self.missing |= {int(n) for n in match[1].replace(",", " ").split()}
            elif "issing communicator data" in line or "The missing ranks" in line:
                missing, sections = True, sections or []
            elif (match := _SOME.search(line)) and sections:
                sections[-1].append((int(match[1]), int(match[2] or 0), []))
            elif match := _ONE.search(line):
                rank = int(match[1])
                if match[5]:
                    self.processes[rank] = f"{match[6]}:{match[5]}:{match[4]}"
                if missing and not (match[2] or match[3]):
                    self.missing.add(rank)
                elif sections and (match[2] or match[3]):
                    sections[-1].append((1, int(match[2] or 0), [rank]))
                elif sections and sections[-1]:
                    sections[-1][-1][2].append(rank)
        for section in sections:
            self._add(section)

    def _add(self, section: list[tuple[int, int | None, list[int]]]) -> None:
        """Add one operation type's counts; the unlisted have the most frequent count."""
        unlisted = [row for row in section if not row[2]]
        if not unlisted:
            return
        usual = max(unlisted, key=lambda row: row[0])[1] or 0
        self.common += usual
        for _, count, ranks in section:
            for rank in ranks:
                self.counts[rank] += (count or 0) - usual

    def communicator(self, name: str) -> Communicator:
        """Return it."""
        if self.missing and not self.common:
            self.common = 1  # no counts are shown, but whoever misses a member waits for it
        listed = sorted(self.counts.keys() | self.missing)
        return Communicator(
            name=name,
            size=self.size,
            members=tuple(
                Member(
                    rank=rank,
                    process=self.processes.get(rank),
                    launched=None if rank in self.missing else self.common + self.counts[rank],
                    note="did not answer" if rank in self.missing else None,
                )
                for rank in listed
            ),
            others_launched=self.common,
        )


_LINE = re.compile(r"([\w.-]+):(\d+):\d+ \[(\d+)\] NCCL INFO (.*)")
_INIT = re.compile(
    r"comm (0x[0-9a-f]+) rank (\d+) n[rR]anks (\d+) .*?(?:commId (0x[0-9a-f]+) )?- Init COMPLETE"
)
_LAUNCH = re.compile(
    r"(\w+): opCount ([0-9a-f]+) sendbuff \S+ recvbuff \S+ count (\d+) datatype (\d+) .*?"
    r"comm (0x[0-9a-f]+) \[nranks=(\d+)\]"
)


@dataclass(slots=True)
class _LogComm:
    name: str
    rank: int
    size: int
    launched: int = 0
    launches: deque[Launch] = field(default_factory=lambda: deque(maxlen=_KEPT_LAUNCHES))


def parse_debug_log(lines: Iterable[str]) -> list[Communicator]:
    """Return the communicators of debug logs; sends and receives are passed over.

    A communicator without an id (NCCL before 2.18) is known by its size.
    """
    comms: dict[tuple[str, str], _LogComm] = {}
    for line in lines:
        if "NCCL INFO" not in line:
            continue
        head = _LINE.search(line)
        if head is None:
            continue
        process, body = f"{head[1]}:{head[2]}:{head[3]}", head[4]
        if (init := _INIT.search(body)) is not None:
            name = init[4] or f"size{init[3]}"
            comms[process, init[1]] = _LogComm(name, int(init[2]), int(init[3]))
        elif (launch := _LAUNCH.search(body)) is not None:
            comm = comms.get((process, launch[5]))
            if comm is None or launch[1] in {"Send", "Recv"}:
                continue
            number, dtype = int(launch[2], 16) + 1, int(launch[4])
            comm.launched = max(comm.launched, number)
            comm.launches.append(
                Launch(
                    number=number,
                    name=launch[1],
                    elements=int(launch[3]),
                    dtype=_DTYPES[dtype] if dtype < len(_DTYPES) else f"type{dtype}",
                )
            )
    found: dict[str, dict[int, Member]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for (process, _), comm in comms.items():
        if not 0 < comm.size <= _LARGEST_SIZE:
            continue
        sizes[comm.name] = comm.size
        found[comm.name][comm.rank] = Member(
            rank=comm.rank,
            process=process,
            launched=comm.launched,
            launches=tuple(comm.launches),
        )
    return [
        Communicator(name=name, size=sizes[name], members=tuple(members.values()))
        for name, members in found.items()
    ]

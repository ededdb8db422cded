"""From suspicious lines of one file to observations: who, when, what, how often."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kansoku.catalog.signatures import Signature
from kansoku.diagnose.names import host_of_nccl
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.recognise import Recognised, placed, progress_of, recognise, says_healed
from kansoku.formats.job_log import Clock, LineFacts, parse_line
from kansoku.model import Domain

__all__ = ["SUSPICIOUS", "FileFacts", "LineReader", "says_it_ended_well"]

# A line without any of these says nothing bad; a fast scan drops it before any pattern is tried.
# Lower case; every signature's sample holds one (a test checks it).
SUSPICIOUS: tuple[str, ...] = (
    " inf ", ": inf", "= inf", "=inf", "abort", "acs ", "acsctl", "already in use", "assert",
    "async ", "bad ", "below", "blocked", "broken", "bug:", "cancelled", "cannot", "checkpoint",
    "clock step", "closed", "completed with", "compromised", "connection", "correct result",
    "corrupt", "could not", "couldn't", "crash", "critical", "dead", "defunct", "degraded",
    "denied", "desync", "did not get", "died", "disabled", "down", "drain", "drop", "dump",
    "duplicate", "edac", "errno", "error", "evict", "exceed", "exception", "exhaust", "exit",
    "expelled", "expired", "fail", "fallen", "fatal", "fault", "flap", "flight recorder",
    "garbage", "gc.", "gc: ", "gdr", "gid table", "gpu direct", "heartbeat", "hung", "illegal",
    "imagepull", "imex", "infinite", "insufficient", "interrupt", "invalid", "kill", "lanes",
    "limit ", "limited", "link", "lockup", "lost", "low on resource", "machine check", "mce:",
    "mismatch", "missing", "module event", "modulenotfound", "nan", "no cuda", "no device",
    "no path", "no route", "no space", "nodenotready", "nonzero", "not a", "not connected",
    "not found", "not known", "not reachable", "not ready", "not reproduc", "not respond",
    "nvrm", "oom", "oops", "out of memory", "overheat", "overrun", "panic", "pause", "pci",
    "pending", "pfc", "possible ", "power", "preempt", "quota", "read-only",
    "reconnect", "recovered", "reduce your request", "refused", "reject", "remap",
    "request sent", "reset", "respond", "restored",
    "retr", "root cause", "running", "segmentation", "server", "severity", "shm", "sigbus",
    "signal", "sigsegv", "sigterm", "skew", "slow", "socket", "spike", "stale", "stall", "state=",
    "status=", "straggler", "stuck", "suspend", "symbol", "temperature", "terminated", "thermal",
    "throttl", "time has been changed", "time limit", "timed out", "timelimit", "timeout",
    "too high", "too many", "transient", "transport", "unable", "unavailable", "uncorr",
    "unexpected", "unhandled", "unreachable", "unresponsive", "using network", "violation",
    "warn", "watchdog", "wrong", "xid", "zombie", "|completed",
    " full", " gone", "capped", "congest", "deadlock", "disappear", "drift", "dropped", "halted",
    "hot", "inaccess", "jitter", "lagging", "lags", "no longer", "not answer", "offline",
    "out of service", "powered off", "reduced", "saturat", "shut", "starved", "stopped", "storm",
    "trip", "unreadable", "vanish", "wedged",
)  # fmt: skip

_KERNEL_LINE = re.compile(r"\bkernel:|NVRM:|^\s*(?:<\d+>)?\[\s*\d+\.\d{6}\]")
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+")
_GUESSED_NS = 3600 * 1_000_000_000
_PROGRAM = re.compile(r"\bpid[ =:']+(\d+)", re.IGNORECASE)
_PARTITION = re.compile(r"\bgpu\w*\*|\|gpu\w*\||gres[/:=]|partition", re.IGNORECASE)
_LONGEST_CACHED = 400
_NUMBER_MATTERS = re.compile(r"xid|status|exit|signal|errno|rc\b", re.IGNORECASE)
_TELLING = re.compile(
    r"(?:xid[^\n]{0,40}?\)\s*[:=]?\s*"
    r"|(?:xid|status|exit\w*|signal|errno|error|err|code|rc|http\S*|detected)\D{0,24})(\d+)",
    re.IGNORECASE,
)
_MOST_KNOWN = 100_000
# Labels of launchers stand where other tools put the host.
_LABEL = re.compile(r"(?:rank|default|local_?rank|node_?rank|gpu|task)[-_]?\d+", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What a file's name and head say about all its lines."""

    name: str
    """As it is shown in evidence."""
    kind: str
    """``job``, ``kernel``, ``scheduler`` or ``other``."""
    clock: Clock
    node: str | None = None
    rank: int | None = None
    estimated: bool = False
    """Its clock is a guess: its times only tell what is old."""


_DONE = re.compile(
    r"\b(?:training|job|run|all)\b[^.]{0,24}?\b(?:complete|completed|finished|done|"
    r"successful(?:ly)?)\b"
    r"|\bfinished training\b|\b(?:exit(?:ed)?|return)[ _]?(?:code|status)?[ :=]*0\b|"
    r"COMPLETED.{0,12}\b0:0",
    re.IGNORECASE,
)
_NOT_DONE = re.compile(
    r"\b(?:not|never|before|abort\w*|error|fail\w*|fatal|exception|traceback|killed|"
    r"signal|cancel\w*"
    r"|NODE_FAIL|TIMEOUT|OUT_OF_MEMORY|timed out)\b",
    re.IGNORECASE,
)


def says_it_ended_well(tail: Sequence[str]) -> bool | None:
    """Return whether the last lines of a log say that the job is done; None where they do not."""
    for line in reversed(tail):
        if _NOT_DONE.search(line):
            return False
        if _DONE.search(line):
            return True
    return None


def _names_a_partition(found: Recognised, line: str) -> bool:
    """Say whether a GPU is only named by a partition or resource: that tells nothing of one."""
    return (
        found.domain is Domain.GPU_HARDWARE
        and found.rule.startswith("concept.")
        and bool(_PARTITION.search(line))
    )


def _host(said: LineFacts, line: str) -> str | None:
    if said.host is None:
        return host_of_nccl(line)
    return None if _LABEL.fullmatch(said.host) else said.host


def _stamp_of(before: Sequence[bytes], clock: Clock) -> int | None:
    """Return the time of the last stamped line among those before."""
    for raw in reversed(before):
        time_ns = parse_line(raw[:256].decode("utf-8", "replace"), clock).time_ns
        if time_ns is not None:
            return time_ns
    return None


def _again(known: Observation, found: Recognised, line: str, source: str) -> Observation:
    """Return what is known of a thing after a further line: the more serious one stands for it."""
    if known.role == "symptom" and found.role in {"root", "either"}:
        return replace(
            known, role=found.role, strength=found.strength, text=line[:2000], source=source
        )
    if known.role == found.role and found.strength > known.strength:
        return replace(known, strength=found.strength)
    return known


class LineReader:
    """Turns lines into observations, folding repeats of one rule on one thing into one."""

    def __init__(self, extra: Sequence[Signature] = ()) -> None:
        self._extra = extra
        self._known: dict[tuple[str, ...], Recognised | None] = {}
        self._programs: dict[tuple[object, ...], set[str]] = {}
        self._seen: dict[tuple[object, ...], Observation] = {}
        self.last_progress_ns: dict[int | None, int] = {}
        self.first_progress_ns: int | None = None
        self.ranks: set[int] = set()
        self.node_of_rank: dict[int, str] = {}
        self.addresses: dict[str, str] = {}

    @property
    def observations(self) -> list[Observation]:
        """Everything seen so far; peers are named by node where their address is known."""
        return [
            replace(one, target=self.addresses[one.target]) if one.target in self.addresses else one
            for one in self._seen.values()
        ]

    def _recognise(self, text: str) -> Recognised | None:
        """Recognise with a cache over lines that differ in numbers that mean nothing.

        Numbers carry meaning in codes: those belong to the key.
        """
        if len(text) > _LONGEST_CACHED:
            return recognise(text, extra=self._extra)
        key = (_VARIABLE.sub("#", text), *_TELLING.findall(text))
        if key not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known[key] = recognise(text, extra=self._extra)
            return self._known[key]
        known = self._known[key]
        if known is not None and known.rule == "node-lost":
            return recognise(text, extra=self._extra)  # its target is a node's name
        if known is not None and (known.device is not None or known.target is not None):
            return placed(known, text)
        return known

    def matters(self, line: str) -> bool:
        """Say whether a line, or another that differs in digits alone, may tell something."""
        if says_healed(line) or _NUMBER_MATTERS.search(line):
            return True
        found = self._recognise(line)
        return found is not None and found.role not in {"info", "noise"}

    def read(self, rows: Iterable[tuple[int, str, Sequence[bytes]]], facts: FileFacts) -> None:
        """Take the suspicious lines of one file, as ``(row, line, lines before)`` in file order."""
        last_ns: int | None = None
        for row, line, before in rows:
            said = parse_line(line, facts.clock)
            # A line without a stamp belongs to the stamped line before it (tracebacks).
            time_ns = said.time_ns
            if time_ns is None:
                time_ns = _stamp_of(before, facts.clock) or last_ns
            last_ns = time_ns
            if facts.estimated and time_ns is not None:
                time_ns = time_ns if time_ns < facts.clock.reference_ns - _GUESSED_NS else None
            rank = said.rank if said.rank is not None else facts.rank
            host = _host(said, line)
            own = facts.kind == "kernel" and host is not None
            node = host if own else facts.node or host
            if rank is not None:
                self.ranks.add(rank)
                if node is not None:
                    self.node_of_rank.setdefault(rank, node)
            if says_healed(line):
                self._heal(line, node, time_ns)
            found = self._recognise(line)
            if found is None or found.role in {"info", "noise"}:
                continue
            if facts.kind == "other" and found.rule.startswith("concept."):
                continue  # inventories name every part; words alone say nothing there
            if facts.kind == "scheduler" and _names_a_partition(found, line):
                continue
            if found.rule == "node-lost":
                node, found = found.target or node, replace(found, target=None)
            kind = "kernel" if _KERNEL_LINE.search(line[:200]) else facts.kind
            key = (found.rule, found.component, node, rank, found.device, found.target, kind)
            known = self._seen.get(key)
            program = _PROGRAM.search(line) if found.rule.startswith("xid.") else None
            programs = self._programs.setdefault(key, set()) if program else set()
            if program:
                programs.add(program[1])
            if known is not None:
                self._seen[key] = replace(
                    _again(known, found, line, f"{facts.name}:{row}"),
                    repeats=known.repeats + 1,
                    last_ns=time_ns or known.last_ns,
                    healed_ns=None,
                    programs=max(1, len(programs)),
                )
                continue
            self._seen[key] = Observation(
                rule=found.rule,
                text=line[:2000],
                source=f"{facts.name}:{row}",
                kind=kind,
                domain=found.domain,
                component=found.component,
                role=found.role,
                strength=found.strength,
                meaning=found.meaning,
                action=found.action,
                time_ns=time_ns,
                last_ns=time_ns,
                node=node,
                rank=rank,
                device=found.device,
                target=found.target,
                handled=found.handled,
            )

    def _heal(self, line: str, node: str | None, time_ns: int | None) -> None:
        """Mark earlier complaints of the thing that is well again."""
        for key, one in self._seen.items():
            if one.healed_ns is not None or one.kind in {"metric", "trace"}:
                continue
            things = [t for t in (one.device, one.target) if t]
            if one.rule == "node-lost":
                things, same = [one.node or ""], True
            else:
                same = one.node == node and bool(things)
            if same and any(t and t in line for t in things):
                self._seen[key] = replace(one, healed_ns=time_ns or one.last_ns or 0)

    def read_progress(self, lines: Iterable[str], facts: FileFacts) -> None:
        """Note when ranks got on; ``lines`` are the head or, last first, the tail of a file.

        The first line that tells of a rank is enough.
        """
        told: set[int | None] = set()
        for line in lines:
            said = parse_line(line, facts.clock)
            rank = said.rank if said.rank is not None else facts.rank
            if rank in told or said.time_ns is None or progress_of(line) is None:
                continue
            self._got_on(said, facts, line)
            if facts.rank is not None:
                return
            told.add(rank)

    def _got_on(self, said: LineFacts, facts: FileFacts, line: str) -> None:
        time_ns = said.time_ns
        if time_ns is None:
            return
        rank = said.rank if said.rank is not None else facts.rank
        if rank is not None:
            self.ranks.add(rank)
            if node := facts.node or _host(said, line):
                self.node_of_rank.setdefault(rank, node)
        self.last_progress_ns[rank] = max(self.last_progress_ns.get(rank, time_ns), time_ns)
        if self.first_progress_ns is None or time_ns < self.first_progress_ns:
            self.first_progress_ns = time_ns

"""The values inside Slurm's texts: ids, states, durations, sizes, TRES, exit codes, host lists.

Each function reads one value as any Slurm version writes it and returns None for the words that
mean "no value". What it cannot read raises ValueError saying what was expected, so that a reader
can quarantine the row with its reason.
"""

import re
from dataclasses import dataclass

from ClusterShell.NodeSet import NodeSet, NodeSetException

__all__ = [
    "MAX_NODES",
    "STATES",
    "JobId",
    "State",
    "Tres",
    "expand_nodes",
    "fold_nodes",
    "parse_duration_s",
    "parse_exit",
    "parse_job_id",
    "parse_size_bytes",
    "parse_state",
    "parse_time_limit_s",
    "parse_tres",
]

# Slurm's own cap on one host list expression (MAX_RANGE in hostlist.c).
MAX_NODES = 65536
_NO_VALUE = frozenset({"", "None", "Unknown", "(null)", "N/A", "n/a", "INVALID", "None assigned"})

STATES = frozenset({
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL",
    "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED", "REQUEUED", "RESIZING",
    "COMPLETING", "CONFIGURING", "LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUE_FED",
    "REQUEUE_HOLD", "RESV_DEL_HOLD", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED",
    "UPDATE_DB", "EXPEDITING",
})  # fmt: skip
_BASE_STATES = frozenset({
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL",
    "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
})  # fmt: skip
_SHORT_STATES = {
    "PD": "PENDING", "R": "RUNNING", "S": "SUSPENDED", "CD": "COMPLETED", "CA": "CANCELLED",
    "F": "FAILED", "TO": "TIMEOUT", "NF": "NODE_FAIL", "PR": "PREEMPTED", "BF": "BOOT_FAIL",
    "DL": "DEADLINE", "OOM": "OUT_OF_MEMORY", "RQ": "REQUEUED", "RV": "REVOKED", "RS": "RESIZING",
    "CG": "COMPLETING", "CF": "CONFIGURING",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobId:
    """A JobID taken apart: ``12``, ``12_3``, ``12_[1-5%2]``, ``12+1``, ``12_3.batch`` …."""

    job: int
    task: int | None
    """Array task; None outside arrays and for tasks still pending together."""
    pending_tasks: str | None
    """The bracket of tasks not yet split off, such as ``1-5%2``."""
    het_offset: int | None
    step: str | None
    """``batch``, ``extern``, ``interactive`` or a number; with ``+n`` in heterogeneous steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state taken apart."""

    name: str
    """One of STATES."""
    cancelled_by: str | None
    """User id or name after ``CANCELLED by``."""
    flags: tuple[str, ...]
    """Flags printed beside or instead of the base state, such as ``COMPLETING``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tres:
    """Trackable resources, the GPUs counted once."""

    gpus: int | None
    """None where there is no text at all; 0 where resources are listed and no GPU is."""
    gpu_kind: str | None
    """``h100``; several kinds joined by ``+``."""
    nodes: int | None
    cpus: int | None
    memory_bytes: int | None
    billing: int | None
    energy_j: int | None


_JOB_ID = re.compile(
    r"(?P<job>\d+)(?:_(?:(?P<task>\d+)|\[(?P<tasks>[^\]]*)\]?(?:\.\.\.)?))?(?:\+(?P<het>\d+))?"
    r"(?:\.(?P<step>batch|extern|interactive|\d+(?:\+\d+)?|TBD))?"
)


def parse_job_id(text: str) -> JobId:
    """Read a JobID or JobIDRaw in any of its forms."""
    match = _JOB_ID.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a job id such as 12, 12_3, 12_[4-9], 12+1 or 12.batch")
    task, het = match["task"], match["het"]
    return JobId(
        job=int(match["job"]),
        task=None if task is None else int(task),
        pending_tasks=match["tasks"],
        het_offset=None if het is None else int(het),
        step=match["step"],
    )


def parse_state(text: str) -> State:
    """Read ``COMPLETED``, ``CANCELLED by 0``, ``CANCELLED+``, ``RUNNING,COMPLETING``, ``CG`` …."""
    head, _, by = text.strip().partition(" by ")
    words = [w.strip().rstrip("+") for w in re.split(r"[,|+]", head) if w.strip()]
    names = [_SHORT_STATES.get(w.upper(), w.upper()) for w in words]
    unknown = [n for n in names if n not in STATES]
    if not names or unknown:
        raise ValueError(f"{text!r} is not a job state")
    bases = [n for n in names if n in _BASE_STATES]
    name = bases[0] if bases else names[0]
    return State(
        name=name,
        cancelled_by=by.strip() or None,
        flags=tuple(n for n in names if n != name),
    )


_DURATION = re.compile(
    r"(?:(?P<days>\d+)-)?(?:(?P<a>\d+):)?(?:(?P<b>\d+):)?(?P<c>\d+)(?P<fraction>\.\d+)?"
)


def parse_duration_s(text: str) -> float | None:
    """Read ``[days-]hours:minutes:seconds[.fraction]``, ``minutes:seconds`` or plain seconds.

    ``####`` (a column too narrow) and the words for nothing give None.
    """
    word = text.strip()
    if word in _NO_VALUE or word.strip("#") == "":
        return None
    match = _DURATION.fullmatch(word)
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 1-02:03:04, 02:03.5 or 120")
    parts = [int(match[k]) for k in ("a", "b", "c") if match[k] is not None]
    if match["days"] is not None:
        # After days the first number is hours: 1-02, 1-02:03, 1-02:03:04.
        parts += [0] * (3 - len(parts))
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + part
    return int(match["days"] or 0) * 86400 + seconds + float(match["fraction"] or 0)


def parse_time_limit_s(text: str, *, minutes: bool = False) -> int | None:
    """Read a time limit; None for UNLIMITED and Partition_Limit.

    ``minutes`` says that a plain number counts minutes, as in TimelimitRaw.
    """
    word = text.strip()
    if word in {"UNLIMITED", "Partition_Limit", "NOT_SET", "INFINITE"}:
        return None
    value = parse_duration_s(word)
    if value is None:
        return None
    return round(value * 60) if minutes and word.isdigit() else round(value)


def parse_exit(text: str) -> tuple[int | None, int | None]:
    """Read ``code:signal``; the signal is None where it is 0. ``0:9`` is signal 9, not success."""
    word = text.strip()
    if word in _NO_VALUE:
        return None, None
    code, colon, number = word.partition(":")
    if not colon or not code.isdigit() or not number.isdigit():
        raise ValueError(f"{text!r} is not an exit code such as 1:0 or 0:9")
    return int(code), int(number) or None


_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTPE]?)[iB]*([cn?])?")
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def parse_size_bytes(text: str, *, unit: str = "") -> int | None:
    """Read ``12616K``, ``7812.50G``, ``4000Mc``; ``unit`` is meant by a plain number."""
    word = text.strip()
    if word in _NO_VALUE or word.strip("#") == "":
        return None
    match = _SIZE.fullmatch(word)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512K or 1.5G")
    return round(float(match[1]) * 1024.0 ** _UNITS[match[2] or unit])


def _count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTPE]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a count")
    # Counts are abbreviated in thousands of 1,000 (energy=1.2K); memory alone is binary.
    return round(float(match[1]) * 1000.0 ** _UNITS[match[2]])


def parse_tres(text: str) -> Tres:
    """Read ``cpu=4,mem=8G,node=2,gres/gpu=16,gres/gpu:h100=16`` or the older ``gpu:4``.

    The untyped GPU count already holds the typed ones: they are never summed.
    """
    untyped: int | None = None
    typed: dict[str, int] = {}
    numbers: dict[str, int | None] = {}
    seen = False
    for entry in text.split(","):
        if not entry.strip() or entry.strip() in _NO_VALUE:
            continue
        seen = True
        key, equals, value = entry.strip().partition("=")
        if not equals:
            key, value = _old_gres(key)
        if key == "gres/gpu":
            untyped = _count(value)
        elif key.startswith("gres/gpu:"):
            kind = key.removeprefix("gres/gpu:")
            typed[kind] = typed.get(kind, 0) + _count(value)
        elif key == "mem":
            numbers[key] = parse_size_bytes(value, unit="M")
        elif key in {"node", "cpu", "billing", "energy"}:
            numbers[key] = None if value in _NO_VALUE else _count(value)
    return Tres(
        gpus=untyped if untyped is not None else (sum(typed.values()) if seen else None),
        gpu_kind="+".join(sorted(typed)) or None,
        nodes=numbers.get("node"),
        cpus=numbers.get("cpu"),
        memory_bytes=numbers.get("mem"),
        billing=numbers.get("billing"),
        energy_j=numbers.get("energy"),
    )


def _old_gres(text: str) -> tuple[str, str]:
    """Turn ``gpu:4``, ``gpu:h100:4`` or ``gres:gpu:4`` (AllocGRES, ReqGRES) into key and value."""
    words = text.removeprefix("gres:").split(":")
    if len(words) == 1:
        return f"gres/{words[0]}", "1"
    if len(words) == 2:
        return f"gres/{words[0]}", words[1].split("(")[0]
    return f"gres/{words[0]}:{words[1]}", words[2].split("(")[0]


def expand_nodes(text: str | None) -> tuple[str, ...]:
    """Return the names in a host list, in its order; () for no node.

    Raises ValueError for broken lists and for more than MAX_NODES names.
    """
    if text is None or text.strip() in _NO_VALUE:
        return ()
    _bound(text)
    try:
        nodes = NodeSet(text, resolver=None)
    except NodeSetException as error:
        raise ValueError(f"host list {text[:80]!r}: {error}") from None
    if len(nodes) > MAX_NODES:
        raise ValueError(f"host list {text[:80]!r} names {len(nodes)} nodes, more than {MAX_NODES}")
    return tuple(nodes)


def _bound(text: str) -> None:
    """Refuse a list that would expand beyond the cap, before anything is expanded."""
    total = 0
    for word in re.split(r",(?![^\[]*\])", text):
        product = 1
        for bracket in re.findall(r"\[([^\]]*)\]", word):
            size = 0
            for part in bracket.split(","):
                low, dash, high = part.partition("-")
                high = high.split("/")[0]
                if dash and low.isdigit() and high.isdigit():
                    if len(low) > 18 or len(high) > 18:
                        raise ValueError(f"host list {text[:80]!r}: range {part!r} is too wide")
                    size += max(int(high) - int(low) + 1, 0)
                else:
                    size += 1
            product *= max(size, 1)
        total += product
    if total > MAX_NODES:
        raise ValueError(f"host list {text[:80]!r} names {total} nodes, more than {MAX_NODES}")


def fold_nodes(names: list[str] | tuple[str, ...]) -> str:
    """Return names as one host list, such as ``c[001-003]``."""
    return str(NodeSet(",".join(names), resolver=None)) if names else ""

"""What Slurm says of now: nodes (sinfo), queue (squeue), node events (sacctmgr), scontrol texts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import polars as pl

from kansoku.errors import InputError
from kansoku.formats.slurm import values

__all__ = [
    "NODE_EVENT_SCHEMA",
    "NodeState",
    "QueuedJob",
    "read_node_events",
    "read_scontrol",
    "read_scontrol_nodes",
    "read_sinfo_json",
    "read_squeue_json",
]

_NS = 1_000_000_000
NODE_EVENT_SCHEMA: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "node": pl.String(),
    "start_ns": pl.Int64(),
    "end_ns": pl.Int64(),  # null while it lasts
    "state": pl.String(),  # DOWN, DRAIN, FAIL … with * where the node does not answer
    "reason": pl.String(),
    "user": pl.String(),
}
_UNAVAILABLE = frozenset({
    "DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "MAINT", "NOT_RESPONDING", "UNKNOWN",
    "POWERED_DOWN", "POWERING_DOWN", "REBOOT_REQUESTED", "REBOOT_ISSUED", "ERROR", "INVAL",
    "NO_RESPOND", "FUTURE",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node as Slurm sees it now."""

    name: str
    base: str
    """IDLE, MIXED, ALLOCATED, DOWN …"""
    flags: tuple[str, ...]
    gpus: int | None
    gpus_used: int | None
    cpus: int | None
    cpus_idle: int | None
    partitions: tuple[str, ...]
    reason: str | None
    memory_bytes: int | None = None

    @property
    def usable(self) -> bool:
        """Whether Slurm may start a job on it."""
        return not ({self.base, *self.flags} & _UNAVAILABLE)

    @property
    def idle(self) -> bool:
        """Whether it is usable and holds no job."""
        return self.usable and self.base == "IDLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """One job of the queue: running or pending."""

    raw_id: int
    job_id: str
    name: str | None
    user: str | None
    account: str | None
    partition: str | None
    state: str
    reason: str | None
    nodes: int | None
    gpus: int | None
    submit_ns: int | None
    start_ns: int | None
    end_ns: int | None
    """When its time limit ends it, or it ended."""
    time_limit_s: int | None
    node_list: tuple[str, ...]
    excluded: tuple[str, ...]
    """Nodes that the user keeps away from."""
    restarts: int | None


def _load(data: bytes, key: str, file: str, command: str) -> list[dict[str, Any]]:
    try:
        content = orjson.loads(data)
        rows = content[key]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(
            f"not the JSON of {command}: {error}", where=file, remedy=f"write it with {command}"
        ) from None
    if not isinstance(rows, list):
        raise InputError(f"{key} is not a list", where=file)
    return rows


def _number(value: Any) -> int | None:
    if isinstance(value, Mapping):
        if value.get("infinite") or not value.get("set", True):
            return None
        value = value.get("number")
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time(value: Any) -> int | None:
    number = _number(value)
    return number * _NS if number else None


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return [w for w in re.split(r"[+,\s]", value) if w]
    return [str(w) for w in value or ()]


def read_sinfo_json(data: bytes, *, file: str = "sinfo --json") -> list[NodeState]:
    """Read ``sinfo --json`` or ``scontrol show nodes --json`` of any version."""
    content = orjson.loads(data) if data[:1] in b"{[" else {}
    if isinstance(content, dict) and "nodes" not in content and "sinfo" in content:
        return _sinfo_groups(content["sinfo"])
    nodes = []
    for row in _load(data, "nodes", file, "sinfo --json"):
        # 22.05 writes "mixed"; later ["MIXED", "DRAIN"]; state_flags only in the older ones.
        states = [w.upper().rstrip("*~#$@^-!%") for w in _words(row.get("state"))]
        flags = [*states[1:], *(w.upper() for w in _words(row.get("state_flags")))]
        tres = values.parse_tres(str(row.get("tres") or ""))
        used = values.parse_tres(str(row.get("tres_used") or ""))
        gres_used = values.parse_tres(_gres(row.get("gres_used")))
        nodes.append(
            NodeState(
                name=row["name"],
                base=states[0] if states else "UNKNOWN",
                flags=tuple(flags),
                gpus=tres.gpus if tres.gpus is not None else values.parse_tres(
                    _gres(row.get("gres"))).gpus,
                gpus_used=used.gpus or gres_used.gpus,
                cpus=_number(row.get("cpus")),
                cpus_idle=_number(row.get("idle_cpus", row.get("alloc_idle_cpus"))),
                partitions=tuple(_words(row.get("partitions"))),
                reason=row.get("reason") or None,
                memory_bytes=tres.memory_bytes,
            )
        )  # fmt: skip
    return nodes


def _gres(value: Any) -> str:
    """Keep ``gpu:h100:8`` of ``gpu:h100:8(IDX:0-7)``; drop what is not a GPU."""
    words = re.split(r",(?![^(]*\))", str(value or ""))
    return ",".join(w.split("(")[0] for w in words if w.startswith("gpu"))


def _sinfo_groups(groups: list[dict[str, Any]]) -> list[NodeState]:
    """Newer sinfo answers groups of nodes alike; one entry per node is made of them."""
    nodes: dict[str, NodeState] = {}
    for group in groups:
        states = [w.upper() for w in _words((group.get("node") or {}).get("state"))]
        gres = group.get("gres") or {}
        partition = (group.get("partition") or {}).get("name")
        for name in (group.get("nodes") or {}).get("nodes") or ():
            before = nodes[name].partitions if name in nodes else ()
            nodes[name] = NodeState(
                name=name,
                base=states[0] if states else "UNKNOWN",
                flags=tuple(states[1:]),
                gpus=values.parse_tres(_gres(gres.get("total"))).gpus,
                gpus_used=values.parse_tres(_gres(gres.get("used"))).gpus,
                cpus=_number((group.get("cpus") or {}).get("maximum")),
                cpus_idle=None,
                partitions=tuple(dict.fromkeys([*before, *([partition] if partition else [])])),
                reason=((group.get("reason") or {}).get("description")) or None,
            )
    return list(nodes.values())


def read_squeue_json(data: bytes, *, file: str = "squeue --json") -> list[QueuedJob]:
    """Read ``squeue --json`` of any version."""
    jobs = []
    for row in _load(data, "jobs", file, "squeue --json"):
        state = values.parse_state(",".join(_words(row.get("job_state"))) or "PENDING")
        allocated = values.parse_tres(str(row.get("tres_alloc_str") or ""))
        requested = values.parse_tres(str(row.get("tres_req_str") or ""))
        limit = _number(row.get("time_limit"))
        array, task = _number(row.get("array_job_id")), _number(row.get("array_task_id"))
        raw = int(row["job_id"])
        tasks = row.get("array_task_string")
        printed = str(raw)
        if array and task is not None:
            printed = f"{array}_{task}"
        elif array and tasks:
            printed = f"{array}_[{tasks}]"
        running = state.name in {"RUNNING", "SUSPENDED", "COMPLETING"}
        counted = allocated if running else requested
        jobs.append(
            QueuedJob(
                raw_id=raw,
                job_id=printed,
                name=row.get("name") or None,
                user=row.get("user_name") or None,
                account=row.get("account") or None,
                partition=row.get("partition") or None,
                state=state.name,
                reason=row.get("state_reason") or None,
                nodes=counted.nodes or _number(row.get("node_count")),
                gpus=counted.gpus,
                submit_ns=_time(row.get("submit_time")),
                start_ns=_time(row.get("start_time")),
                end_ns=_time(row.get("end_time")),
                time_limit_s=None if limit is None else limit * 60,
                node_list=values.expand_nodes(row.get("nodes") or None) if running else (),
                excluded=values.expand_nodes(row.get("excluded_nodes") or None),
                restarts=_number(row.get("restart_cnt")),
            )
        )
    return jobs


def read_node_events(data: bytes, *, zone: str = "UTC", file: str = "events") -> pl.DataFrame:
    """Read ``sacctmgr -P show event format=Cluster,NodeName,TimeStart,TimeEnd,State,Reason,User``.

    Reasons may hold the delimiter: the cells left over belong to them.
    """
    lines = data.decode("utf-8", "replace").splitlines()
    if not lines or "NodeName" not in lines[0]:
        raise InputError("no line of column names with NodeName", where=file)
    names = lines[0].split("|")
    reason = names.index("Reason") if "Reason" in names else len(names) - 1
    rows = []
    for line in lines[1:]:
        cells = line.split("|")
        extra = len(cells) - len(names)
        if extra < 0:
            continue
        cells[reason : reason + extra + 1] = ["|".join(cells[reason : reason + extra + 1])]
        row = dict(zip(names, cells, strict=True))
        if row.get("NodeName"):
            rows.append(row)
    frame = pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String))

    def time(name: str) -> pl.Expr:
        naive = pl.col(name).str.to_datetime("%Y-%m-%dT%H:%M:%S", time_unit="ns", strict=False)
        stamp = naive.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
        epoch = pl.col(name).cast(pl.Int64, strict=False) * _NS
        return pl.coalesce(stamp.cast(pl.Int64), epoch)

    def text(name: str) -> pl.Expr:
        if name not in names:
            return pl.lit(None, dtype=pl.String)
        return pl.when(pl.col(name) != "").then(pl.col(name))

    return frame.select(
        cluster=text("Cluster"),
        node=pl.col("NodeName"),
        start_ns=time("TimeStart"),
        end_ns=time("TimeEnd"),
        state=text("State"),
        reason=text("Reason"),
        user=text("User").str.replace(r"\(\d+\)$", ""),
    ).drop_nulls(["node", "start_ns"])


def read_scontrol(data: bytes) -> list[dict[str, str]]:
    """Read the ``Key=Value`` blocks of ``scontrol show job|node|partition|reservation``.

    A value runs to the next ``Key=`` on its line; Reason and the like keep their spaces.
    """
    blocks: list[dict[str, str]] = []
    for chunk in re.split(r"\n\s*\n", data.decode("utf-8", "replace")):
        block: dict[str, str] = {}
        for line in chunk.splitlines():
            marks = list(re.finditer(r"(?:^|\s)([A-Z][A-Za-z0-9/:._-]*)=", line))
            for mark, after in zip(marks, [*marks[1:], None], strict=True):
                end = after.start() if after else len(line)
                block.setdefault(mark[1], line[mark.end() : end].strip())
        if block:
            blocks.append(block)
    return blocks


def read_scontrol_nodes(data: bytes) -> list[NodeState]:
    """Read ``scontrol show nodes``, which has no JSON before 23.02."""
    nodes = []
    for block in read_scontrol(data):
        if "NodeName" not in block:
            continue
        states = [w.rstrip("*~#$@^-!%") for w in block.get("State", "UNKNOWN").split("+")]
        answers = not block.get("State", "").split("+")[0].endswith("*")
        total = values.parse_tres(block.get("CfgTRES", ""))
        used = values.parse_tres(block.get("AllocTRES", ""))
        cpus, busy = block.get("CPUTot", ""), block.get("CPUAlloc", "")
        nodes.append(
            NodeState(
                name=block["NodeName"],
                base=states[0],
                flags=(*states[1:], *(() if answers else ("NOT_RESPONDING",))),
                gpus=total.gpus,
                gpus_used=used.gpus or 0,
                cpus=int(cpus) if cpus.isdigit() else None,
                cpus_idle=int(cpus) - int(busy) if cpus.isdigit() and busy.isdigit() else None,
                partitions=tuple(_words(block.get("Partitions"))),
                reason=block.get("Reason", "").split(" [")[0] or None,
                memory_bytes=total.memory_bytes,
            )
        )
    return nodes

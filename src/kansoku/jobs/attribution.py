"""Whose fault a failed job was: a ladder of evidence, the strongest first.

1. The scheduler's own word: NODE_FAIL, BOOT_FAIL, launch failures, preemption, requeue by an
   operator. 2. A hardware event (Xid, ECC, link, thermal) or a node taken down or drained for
   hardware, on an allocated node within the window around the end. 3. Limits and wishes: TIMEOUT,
   DEADLINE, OUT_OF_MEMORY, cancelled. 4. Otherwise the program of the user.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from kansoku.errors import InputError
from kansoku.formats.slurm import expand_nodes
from kansoku.model import Domain

__all__ = [
    "INFRASTRUCTURE",
    "Attribution",
    "AttributionPolicy",
    "Confusion",
    "attribute",
    "broke",
    "confusion",
]

NS = 1_000_000_000
INFRASTRUCTURE = frozenset({
    Domain.GPU_HARDWARE, Domain.NETWORK, Domain.STORAGE, Domain.HOST, Domain.SCHEDULER,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionPolicy:
    """When evidence on a node explains a job's end."""

    before_s: float = 600.0
    """A hardware event this long before the end counts: a hang after it ends late."""
    after_s: float = 300.0
    """The same after the end: logs and health checks come late."""
    user_xids: tuple[int, ...] = (13, 31, 43, 45, 68, 109)
    """Xids that a program's own fault raises as well; alone they do not blame the hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The cause given to one job's end."""

    raw_id: int
    submit_ns: int
    cause: str
    """``node_fail``, ``hardware_event``, ``node_drained``, ``launch_failure``, ``preempted``,
    ``requeued``, ``cancelled_by_user``, ``cancelled_by_other``, ``time_limit``, ``deadline``,
    ``out_of_memory``, ``user_program`` or ``none`` for success."""
    domain: Domain | None
    """None where nothing failed or nobody's fault is meant."""
    node: str | None
    evidence: str


_HARDWARE = re.compile(
    r"(?P<network>\b(?:link|nic|infiniband|mlx5|roce|port|transceiver|cable|switch)\b)"
    r"|(?P<storage>\b(?:lustre|nfs|mount|disk|nvme|storage)\b)"
    r"|(?P<gpu_hardware>\bxid\b|\becc\b|\bgpus?\b|\bgpu\d|nvlink|nvswitch|hbm|row.?remap|sxid)"
    r"|(?P<host>not responding|kernel|panic|mce|memory|dimm|thermal|power|hang|unexpectedly|"
    r"low real|fail)",
    re.IGNORECASE,
)
_PLANNED = re.compile(
    r"maint|upgrade|reboot|reserv|test|update|planned|epilog cleanup", re.IGNORECASE
)
_LAUNCH_SIGNALS = (53,)  # sbatch could not start the script: 0:53


def _domain_of(text: str) -> Domain | None:
    """Return the domain that a reason or log line names, None for planned work or nothing."""
    match = _HARDWARE.search(text)
    if match is None or match.lastgroup is None:
        return None
    if _PLANNED.search(text) and match.lastgroup == "host":
        return None
    return Domain(match.lastgroup)


def attribute(
    jobs: pl.DataFrame,
    *,
    node_events: pl.DataFrame | None = None,
    events: pl.DataFrame | None = None,
    policy: AttributionPolicy | None = None,
) -> list[Attribution]:
    """Return the cause of every job's end, in the order of the rows.

    ``jobs`` went through with_outcomes; ``node_events`` has NODE_EVENT_SCHEMA; ``events`` are
    hardware events: node, time_ns, kind, body, xid (null unless an Xid), domain.
    """
    policy = policy or AttributionPolicy()
    by_node = _by_node(node_events, events, policy)
    # Without facts near it, an end is judged by few columns alone: millions of rows share answers.
    known: dict[tuple[object, ...], _Answer] = {}
    answers = []
    for values in jobs.select(_USED).iter_rows():
        row = dict(zip(_USED, values, strict=True))
        alone = not by_node or not _nearby(row, by_node, policy)
        key = values[_FIRST_JUDGED:]
        answer = known.get(key) if alone else None
        if answer is None:
            answer = _one(row, by_node, policy)
            if alone:
                known[key] = answer
        cause, domain, node, evidence = answer
        answers.append(
            Attribution(
                raw_id=row["raw_id"],
                submit_ns=row["submit_ns"],
                cause=cause,
                domain=domain,
                node=node,
                evidence=evidence,
            )
        )
    return answers


_USED = (
    "raw_id", "submit_ns", "start_ns", "end_ns", "node_list", "outcome", "exit_code",
    "exit_signal", "user", "uid", "cancelled_by", "failed_node",
)  # fmt: skip
_FIRST_JUDGED = _USED.index("outcome")
_Fact = tuple[int, str, Domain, str]
"""Time, cause, domain, sentence."""


def _by_node(
    node_events: pl.DataFrame | None, events: pl.DataFrame | None, policy: AttributionPolicy
) -> dict[str, list[_Fact]]:
    facts: dict[str, list[_Fact]] = {}
    if node_events is not None:
        for row in node_events.iter_rows(named=True):
            reason = row["reason"] or ""
            domain = _domain_of(reason)
            if domain is not None and row["node"]:
                sentence = f"{row['node']} went {row['state']}: {reason}"
                facts.setdefault(row["node"], []).append(
                    (row["start_ns"], "node_drained", domain, sentence)
                )
    if events is not None:
        for row in events.iter_rows(named=True):
            if row["xid"] in policy.user_xids:
                continue
            domain = Domain(row["domain"]) if row["domain"] else _domain_of(row["body"] or "")
            if domain is not None and row["node"]:
                sentence = f"{row['node']}: {row['kind']}: {(row['body'] or '')[:160]}"
                facts.setdefault(row["node"], []).append(
                    (row["time_ns"], "hardware_event", domain, sentence)
                )
    for entries in facts.values():
        entries.sort(key=lambda fact: fact[0])
    return facts


_Answer = tuple[str, Domain | None, str | None, str]


def _one(  # noqa: PLR0911 - one return per rung of the ladder
    row: Mapping[str, object], by_node: Mapping[str, Sequence[_Fact]], policy: AttributionPolicy
) -> _Answer:
    outcome = str(row["outcome"])
    exit_text = f"exit {_text(row['exit_code'])}:{row['exit_signal'] or 0}"
    if outcome == "COMPLETED":
        return "none", None, None, "completed"
    if outcome in {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING"}:
        return "none", None, None, "not ended"
    nearby = _nearby(row, by_node, policy)
    if outcome in {"NODE_FAIL", "BOOT_FAIL"}:
        # The scheduler is sure that it was the node; the node's own events say what of it.
        node = nearby[0] if nearby else _text_or_none(row.get("failed_node"))
        domain = nearby[1][2] if nearby else Domain.HOST
        said = nearby[1][3] if nearby else f"Slurm's state is {outcome}"
        return "node_fail", domain, node, said
    if outcome == "PREEMPTED":
        return "preempted", Domain.SCHEDULER, None, "preempted for a job of higher priority"
    if outcome == "LAUNCH_FAILED" or (
        outcome == "FAILED" and row["exit_signal"] in _LAUNCH_SIGNALS
    ):
        return (
            "launch_failure",
            Domain.HOST,
            None,
            f"the batch script was not started ({exit_text})",
        )
    if outcome in {"CANCELLED", "REVOKED"}:
        return _cancelled(row)
    if nearby is not None and outcome in {"FAILED", "TIMEOUT", "REQUEUED", "SPECIAL_EXIT"}:
        node, fact = nearby
        return fact[1], fact[2], node, fact[3]
    if outcome == "REQUEUED":
        return "requeued", Domain.SCHEDULER, None, "requeued by its owner or an operator"
    if outcome == "TIMEOUT":
        return "time_limit", Domain.APPLICATION, None, "reached its time limit"
    if outcome == "DEADLINE":
        return "deadline", Domain.APPLICATION, None, "could not end before its deadline"
    if outcome == "OUT_OF_MEMORY":
        return "out_of_memory", Domain.APPLICATION, None, "a step was killed for memory"
    return "user_program", Domain.APPLICATION, None, f"the program failed ({exit_text})"


def _text(value: object) -> str:
    return "?" if value is None else str(value)


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _cancelled(row: Mapping[str, object]) -> _Answer:
    by = row.get("cancelled_by")
    own = by is None or str(by) in {str(row.get("user")), str(row.get("uid"))}
    if by is None:
        return "cancelled_by_user", None, None, "cancelled, by whom is not recorded"
    if own:
        return "cancelled_by_user", None, None, "cancelled by its owner"
    return "cancelled_by_other", None, None, f"cancelled by {by}"


def _nearby(
    row: Mapping[str, object], by_node: Mapping[str, Sequence[_Fact]], policy: AttributionPolicy
) -> tuple[str, _Fact] | None:
    """Return the fact on an allocated node nearest to the job's end, inside the window."""
    end, start, nodes = row["end_ns"], row["start_ns"], row["node_list"]
    if not by_node or not isinstance(end, int) or not isinstance(start, int):
        return None
    low = max(start, end - round(policy.before_s * NS))
    high = end + round(policy.after_s * NS)
    try:
        names = expand_nodes(_text_or_none(nodes))
    except ValueError:
        return None
    found: list[tuple[int, str, _Fact]] = [
        (abs(fact[0] - end), name, fact)
        for name in names
        for fact in by_node.get(name, ())
        if low <= fact[0] <= high
    ]
    if not found:
        return None
    # A hardware event says more than the drain that followed it.
    best = min(found, key=lambda f: (f[2][1] != "hardware_event", f[0], f[1]))
    return best[1], best[2]


# Preemption and requeue by an operator end an incarnation, but nothing broke.
_NOT_BROKEN = frozenset({"preempted", "requeued"})


def broke(answer: Attribution) -> bool:
    """Return whether something that is not the user's broke."""
    return answer.domain in INFRASTRUCTURE and answer.cause not in _NOT_BROKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Confusion:
    """Causes given against causes known."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """``(true, given)``."""

    @property
    def accuracy(self) -> float:
        """Share on the diagonal."""
        total = sum(map(sum, self.counts))
        right = sum(row[i] for i, row in enumerate(self.counts))
        return right / total if total else float("nan")

    def __str__(self) -> str:
        width = max(len(label) for label in self.labels)
        head = " " * width + "  " + " ".join(f"{i:>4}" for i in range(len(self.labels)))
        lines = [
            f"{label:>{width}}  " + " ".join(f"{n:>4}" for n in row) + f"   = {i}"
            for i, (label, row) in enumerate(zip(self.labels, self.counts, strict=True))
        ]
        return "\n".join([head, *lines])


def confusion(true: Sequence[str], given: Sequence[str]) -> Confusion:
    """Count how causes given compare with causes known."""
    if len(true) != len(given):
        raise InputError(f"{len(true)} labels but {len(given)} answers")
    labels = tuple(sorted({*true, *given}))
    index = {label: i for i, label in enumerate(labels)}
    counts = [[0] * len(labels) for _ in labels]
    for a, b in zip(true, given, strict=True):
        counts[index[a]][index[b]] += 1
    return Confusion(labels=labels, counts=tuple(map(tuple, counts)))

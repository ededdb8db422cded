"""A response to an incident as a state machine: what was done, what comes next.

Pure: it takes facts about the cluster and gives back the next deed; doing it and telling time is
the edge's work. Every state can be saved and taken up again, so whoever drives it may die between
any two lines: a deed is recorded as begun before it is done, and each deed can be done twice.

=========  ===============================  ==========  =============
state      deed                             on success  on failure
=========  ===============================  ==========  =============
planned    drain the bad node               drained     escalated
drained    choose a reserved node           chosen      escalated
chosen     health check on it               validated   drained (next)
validated  admit it to the partition        admitted    drained (next)
admitted   requeue the job without the bad  requeued    escalated
requeued   wait for progress                recovered   escalated
=========  ===============================  ==========  =============
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from kansoku.diagnose.checkpoints import CheckpointState
from kansoku.diagnose.life import lemon
from kansoku.errors import InputError

__all__ = [
    "BreakerState",
    "Deed",
    "DeedKind",
    "NodeFacts",
    "Response",
    "ResponsePolicy",
    "State",
    "after",
    "allowed",
    "next_deed",
    "plan",
]

_HOUR_NS = 3600 * 1_000_000_000


class State(StrEnum):
    """Where a response stands."""

    PLANNED = "planned"
    DRAINED = "drained"
    CHOSEN = "chosen"
    VALIDATED = "validated"
    ADMITTED = "admitted"
    REQUEUED = "requeued"
    RECOVERED = "recovered"
    ESCALATED = "escalated"


FINAL = frozenset({State.RECOVERED, State.ESCALATED})


class DeedKind(StrEnum):
    """What is done to the cluster."""

    DRAIN = "drain"
    CHOOSE = "choose"
    VALIDATE = "validate"
    ADMIT = "admit"
    REQUEUE = "requeue"
    WATCH = "watch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One thing to do."""

    kind: DeedKind
    node: str | None
    job: str | None
    sentence: str
    """What a person reads in a dry run and in the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePolicy:
    """Circuit breakers and limits. Operators change them in a file."""

    most_drained_share: float = 0.05
    """Of all nodes, those drained by kansoku at one time; at least one node may be drained."""
    most_responses_per_hour: int = 4
    most_restarts_without_progress: int = 3
    """Restarts of one job that brought it no step further."""
    least_confidence: float = 0.6
    domains: tuple[str, ...] = ("gpu_hardware", "host", "network")
    """Domains for which a node is taken out."""
    progress_within_s: int = 900
    """The requeued job must make progress by then."""
    lemon_incidents: int = 3
    """Taken out so often within ``lemon_days``, a node replaces no other, whatever its check says,
    and is returned only after a repair."""
    lemon_days: int = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node as Slurm sees it."""

    name: str
    states: tuple[str, ...]
    """Upper case, such as ``IDLE`` and ``DRAIN``."""
    reserved: bool
    """Kept free to replace a failed node."""
    drained_by_us: bool = False
    incidents: int = 0
    """How often it was taken out within the policy's ``lemon_days``."""

    @property
    def is_free(self) -> bool:
        """Nothing runs on it and nothing is wrong with it."""
        bad = {"DOWN", "FAIL", "NOT_RESPONDING", "ALLOCATED", "MIXED", "COMPLETING", "REBOOT"}
        return not bad & set(self.states) and ("IDLE" in self.states or self.reserved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response to one incident."""

    id: str
    incident: str
    node: str
    job: str | None
    reason: str
    state: State = State.PLANNED
    spare: str | None = None
    rejected: tuple[str, ...] = ()
    """Reserved nodes that failed their check."""
    step_before: int | None = None
    """Last step of the job before it was requeued."""
    begun_ns: int = 0
    changed_ns: int = 0
    note: str = ""
    resumes_from: str | None = None
    """The last complete checkpoint when the job was requeued; None where no folder was named."""
    ways: dict[str, Any] = field(default_factory=dict)
    """The options that it was begun with: reserved nodes, check, folders, limits."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the state file."""
        return {**asdict(self), "state": str(self.state), "rejected": list(self.rejected)}

    @classmethod
    def from_json(cls, data: dict[str, Any], where: str) -> "Response":
        """Read the state file back; raise InputError for anything else."""
        try:
            return cls(
                **{**data, "state": State(data["state"]), "rejected": tuple(data["rejected"])}
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not a response: {error}", where=where) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerState:
    """What the circuit breakers remember. Once open they stay open until a person clears them."""

    open_reason: str | None = None
    begun_ns: tuple[int, ...] = ()
    """Start of each response."""
    restarts: dict[str, int]
    """Job to restarts without progress."""


def allowed(
    breaker: BreakerState,
    policy: ResponsePolicy,
    nodes: Sequence[NodeFacts],
    *,
    node: str,
    job: str | None,
    now_ns: int,
) -> str | None:
    """Return why a new response must not begin, or None."""
    if breaker.open_reason is not None:
        return f"stopped before: {breaker.open_reason}"
    recent = [t for t in breaker.begun_ns if now_ns - t < _HOUR_NS]
    if len(recent) >= policy.most_responses_per_hour:
        return f"{len(recent)} responses in the last hour (limit {policy.most_responses_per_hour})"
    known = {facts.name: facts for facts in nodes}
    if node not in known:
        return f"Slurm has no node {node}"
    drained = sum(facts.drained_by_us for facts in nodes if facts.name != node)
    limit = max(1, int(policy.most_drained_share * len(nodes)))
    if drained >= limit:
        return f"{drained} of {len(nodes)} nodes are drained by kansoku already (limit {limit})"
    if job is not None and breaker.restarts.get(job, 0) >= policy.most_restarts_without_progress:
        return f"job {job} was restarted {breaker.restarts[job]} times without progress"
    return None


def plan(
    response: Response,
    nodes: Sequence[NodeFacts] = (),
    policy: ResponsePolicy | None = None,
    *,
    checkpoint: CheckpointState | None = None,
) -> list[str]:
    """Return what will be done, for a dry run."""
    policy = policy or ResponsePolicy()
    lines = [f"drain {response.node}: {response.reason}"]
    before = next((facts.incidents for facts in nodes if facts.name == response.node), 0)
    if before:
        again = lemon(
            response.node, before + 1, limit=policy.lemon_incidents, days=policy.lemon_days
        )
        lines.append(
            f"note that {again}: it needs a repair before it returns"
            if again
            else f"note that {response.node} was taken out {before} times before"
            f" in {policy.lemon_days} days"
        )
    lines.append("choose a free reserved node and run the node check on it")
    lines += [f"pass over {name}: {said}" for name, said in _lemons(nodes, policy)]
    lines.append("admit it to the job's partition")
    if response.job:
        lines.append(f"requeue job {response.job} without {response.node}; {_resumes(checkpoint)}")
        if checkpoint is not None:
            lines += [f"set aside {c.name}: {c.problem}" for c in checkpoint.incomplete]
        lines.append(f"watch that job {response.job} makes progress, else escalate")
    return lines


def _resumes(checkpoint: CheckpointState | None) -> str:
    if checkpoint is None:
        return "it resumes from its checkpoint"
    if checkpoint.last is None:
        return "no complete checkpoint was found: it starts anew"
    return f"it resumes from {checkpoint.last.name}"


def _lemons(nodes: Sequence[NodeFacts], policy: ResponsePolicy) -> list[tuple[str, str]]:
    """Return the reserved nodes that came back too often, each with its sentence."""
    limit, days = policy.lemon_incidents, policy.lemon_days
    said = [(n.name, lemon(n.name, n.incidents, limit=limit, days=days)) for n in nodes
            if n.reserved]  # fmt: skip
    return [(name, text) for name, text in said if text]


def _choose(response: Response, nodes: Sequence[NodeFacts], policy: ResponsePolicy) -> Deed:
    lemons = dict(_lemons(nodes, policy))
    free = [
        facts.name
        for facts in nodes
        if facts.reserved
        and facts.is_free
        and facts.name not in {response.node, *response.rejected, *lemons}
    ]
    chosen = min(free, default=None)
    sentence = f"choose reserved node {chosen}" if chosen else "no reserved node is free"
    passed = [text for name, text in lemons.items() if name != response.node]
    if passed:
        sentence += f" (passed over: {'; '.join(passed)})"
    return Deed(kind=DeedKind.CHOOSE, node=chosen, job=response.job, sentence=sentence)


def next_deed(
    response: Response, nodes: Sequence[NodeFacts], policy: ResponsePolicy
) -> Deed | None:
    """Return what to do next; None when the response is over."""
    job, spare = response.job, response.spare
    if response.state is State.PLANNED:
        sentence = f"drain {response.node}: {response.reason}"
        return Deed(kind=DeedKind.DRAIN, node=response.node, job=job, sentence=sentence)
    if response.state is State.DRAINED:
        return _choose(response, nodes, policy)
    if response.state is State.CHOSEN:
        return Deed(
            kind=DeedKind.VALIDATE, node=spare, job=job, sentence=f"run the node check on {spare}"
        )
    if response.state is State.VALIDATED:
        return Deed(kind=DeedKind.ADMIT, node=spare, job=job, sentence=f"admit {spare}")
    if response.state is State.ADMITTED and job is not None:
        sentence = f"requeue job {job} without {response.node}"
        return Deed(kind=DeedKind.REQUEUE, node=response.node, job=job, sentence=sentence)
    if response.state is State.REQUEUED and job is not None:
        sentence = f"watch job {job} for progress, at most {policy.progress_within_s} s"
        return Deed(kind=DeedKind.WATCH, node=None, job=job, sentence=sentence)
    return None


_AFTER = {
    DeedKind.DRAIN: State.DRAINED,
    DeedKind.CHOOSE: State.CHOSEN,
    DeedKind.VALIDATE: State.VALIDATED,
    DeedKind.ADMIT: State.ADMITTED,
    DeedKind.REQUEUE: State.REQUEUED,
    DeedKind.WATCH: State.RECOVERED,
}


def after(response: Response, deed: Deed, *, failure: str | None, now_ns: int) -> Response:
    """Return the response after a deed; ``failure`` says why it did not work, None that it did.

    A spare that fails its check or cannot be admitted is set aside and the next is tried. Anything
    else that fails is escalated to a person.
    """
    if failure is None:
        state = _AFTER[deed.kind]
        if state is State.ADMITTED and response.job is None:
            state = State.RECOVERED
        spare = deed.node if deed.kind is DeedKind.CHOOSE else response.spare
        if deed.kind is DeedKind.CHOOSE and deed.node is None:
            return replace(response, state=State.ESCALATED, changed_ns=now_ns, note=deed.sentence)
        return replace(response, state=state, spare=spare, changed_ns=now_ns, note="")
    if deed.kind in {DeedKind.VALIDATE, DeedKind.ADMIT}:
        return replace(
            response,
            state=State.DRAINED,
            spare=None,
            rejected=(*response.rejected, deed.node or ""),
            changed_ns=now_ns,
            note=f"{deed.node}: {failure}",
        )
    return replace(
        response, state=State.ESCALATED, changed_ns=now_ns, note=f"{deed.kind}: {failure}"
    )

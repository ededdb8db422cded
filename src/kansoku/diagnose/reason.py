"""From observations to ranked causes.

1. Find when the trouble began: the first complaint of the last cluster of complaints, and the last
   progress before it.
2. Weigh each observation by its role, its strength and when it came: before the first complaint
   counts, after it is a consequence, long before it (or survived by much progress) is background.
3. Group by domain, part and subject; several independent rules for one group add up, repeats of one
   rule hardly do.
4. Let scope correct the domain: one device against the whole job, many clients of one target, a
   peer that died first.
5. Too little evidence is the verdict unknown, never a guess.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kansoku.diagnose.actions import actions_for
from kansoku.diagnose.daemons import TOLD_OF_LOSS, silent_daemons
from kansoku.diagnose.kinds import NUMERICS, kind_of, stuck_since
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.policy import Policy
from kansoku.diagnose.recognise import HANDLED_WEIGHT
from kansoku.model import Domain, Evidence, Hypothesis, Incident, Subject, Verdict

__all__ = ["Context", "Progress", "diagnose"]

_MANY_RANKS = 4
# Smaller "times" are step numbers.
_LEAST_DATE_NS = 10**17
_NARROW = {"pcie-degraded", "metric:PCIe link width or generation"}
_OWN_LIMITS = {"host memory limit", "kubernetes memory limit"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """When ranks got on: the last step seen, by rank (None: a log without ranks)."""

    last_ns: dict[int | None, int]
    first_ns: int | None = None

    @property
    def latest_ns(self) -> int | None:
        """The last progress of any rank."""
        return max(self.last_ns.values(), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What is known beside the observations."""

    progress: Progress
    job_nodes: frozenset[str] = frozenset()
    """Nodes of the job; empty where unknown."""
    nodes: frozenset[str] = frozenset()
    """All nodes that anything was read of."""
    ranks: frozenset[int] = frozenset()
    """Ranks that the job should have."""
    node_of_rank: dict[int, str] | None = None
    ended: bool | None = None
    """The job is over; None where nobody knows."""
    ended_well: bool = False
    """It said that it is done, or Slurm said COMPLETED."""


@dataclass(slots=True)
class _Group:
    """Observations that share domain, part and subject."""

    domain: Domain
    subject: Subject | None
    members: list[tuple[float, Observation]]

    @property
    def score(self) -> float:
        best: dict[str, float] = {}
        for weight, seen in self.members:
            # A rule that fires again adds little; another rule on the same thing adds a lot.
            bonus = 1 + 0.05 * math.log2(max(seen.repeats, 1))
            best[seen.rule] = max(best.get(seen.rule, 0.0), min(weight * bonus, 1.0))
        missing = 1.0
        for value in best.values():
            missing *= 1 - 0.9 * value
        return 1 - missing

    @property
    def first_ns(self) -> int | None:
        """The first time of what weighs; words of a part that come earlier date nothing."""
        least = 0.5 * max(weight for weight, _ in self.members)
        return min((o.time_ns for w, o in self.members if o.time_ns and w >= least), default=None)

    @property
    def lead(self) -> Observation:
        return max(self.members, key=lambda m: (m[0], -(m[1].time_ns or 0)))[1]


def _complaints(seen: Iterable[Observation]) -> list[Observation]:
    wanted = {"root", "either", "symptom", "cascade"}
    return [o for o in seen if o.role in wanted and o.time_ns is not None and o.kind != "metric"]


def _slow_since(seen: Iterable[Observation]) -> int | None:
    """Return when steps became slower, where a dated change was seen."""
    times = [
        o.time_ns
        for o in seen
        if o.rule in {"metric:step time", "finding.slow"} and (o.time_ns or 0) >= _LEAST_DATE_NS
    ]
    return min((t for t in times if t is not None), default=None)


def _came_with(seen: Observation, slow_ns: int | None, policy: Policy) -> bool:
    """Say whether it began about when the steps became slower: the job goes on, but slower."""
    if slow_ns is None or seen.time_ns is None:
        return False
    return -policy.before_slow_ns <= seen.time_ns - slow_ns <= policy.after_slow_ns


def _onset(seen: Sequence[Observation], context: Context, policy: Policy) -> int | None:
    """Return the first complaint of the last cluster, preferring what the job itself said.

    What the job survived is not the begin of its end.
    """
    timed = _complaints(seen)
    own = [o for o in timed if o.kind in {"job", "trace"} and o.strength > 0.3]
    times = sorted(o.time_ns or 0 for o in own or timed)
    slow_ns = _slow_since(seen)
    if slow_ns is not None:
        # Mere symptoms after steps became slower tell of the same, and what came with it.
        later = [o for o in own or timed if (o.time_ns or 0) > slow_ns - policy.clock_slack_ns]
        if all(o.role == "symptom" or (not own and _came_with(o, slow_ns, policy)) for o in later):
            return slow_ns
    if not times:
        return None
    progress = context.progress.latest_ns
    if progress is not None:
        times = [t for t in times if t >= progress - policy.survived_ns] or times
    onset = times[-1]
    for time_ns in reversed(times):
        if onset - time_ns > policy.cluster_gap_ns:
            break
        onset = time_ns
    return onset


def _was_over(seen: Observation, onset_ns: int | None, policy: Policy) -> bool:
    """Say whether it had healed before the trouble began, or came apart from it and healed."""
    if seen.healed_ns is None or seen.repeats >= policy.flaps:
        return False
    return (
        onset_ns is None
        or onset_ns - seen.healed_ns > policy.healed_gap_ns
        or (seen.time_ns or 0) - onset_ns > policy.clock_slack_ns
    )


def _counts_fully(seen: Observation, last_ns: int, onset_ns: int, policy: Policy) -> bool:
    """Say whether its time cannot count against it."""
    time_ns = seen.time_ns or 0
    if seen.kind == "metric" and time_ns < onset_ns:
        return True  # it lasts: numbers are compared over the whole time
    if seen.rule == "node-lost" and 0 <= time_ns - onset_ns < policy.survived_ns * 5:
        return True  # schedulers notice after minutes
    return seen.programs >= policy.other_programs and onset_ns - last_ns <= policy.old_ns


def _time_weight(
    seen: Observation,
    onset_ns: int | None,
    context: Context,
    policy: Policy,
    slow_ns: int | None = None,
) -> tuple[float, str | None]:
    """Return how an observation's time counts, and why if it counts against it."""
    if _was_over(seen, onset_ns, policy):
        return policy.healed_weight, "it was well again before the trouble"
    if seen.time_ns is None or onset_ns is None or seen.time_ns < _LEAST_DATE_NS:
        return 0.8, None
    last = seen.last_ns or seen.time_ns
    if _counts_fully(seen, last, onset_ns, policy) or _came_with(seen, slow_ns, policy):
        return 1.0, None
    progress = context.progress.latest_ns
    if onset_ns - last > policy.old_ns:
        return policy.old_weight, "it came long before the trouble"
    if (
        progress is not None
        and progress - last > policy.survived_ns
        and seen.kind not in {"metric", "trace"}
    ):
        return policy.survived_weight, "the job went on long after it"
    if seen.time_ns - onset_ns > policy.clock_slack_ns:
        return policy.late_weight, "it came after the first complaint"
    return 1.0, None


_NUMBERS = re.compile(r"\d+")


def _is_elsewhere(one: Observation, context: Context) -> bool:
    """Say whether it is on a node that is not the job's.

    Servers and switches are no job's nodes and serve all; they bear other names.
    """
    if not context.job_nodes or one.node is None or one.node in context.job_nodes:
        return False
    if one.domain not in {Domain.STORAGE, Domain.NETWORK}:
        return True
    shapes = {_NUMBERS.sub("#", node) for node in context.job_nodes}
    return _NUMBERS.sub("#", one.node) in shapes


def _of_device_or_daemon(one: Observation, policy: Policy, *, daemon_died: bool) -> Observation:
    """Correct what the scheduler's daemon or a shared device explains better."""
    if daemon_died and one.rule in {"node-lost", "sch-state-node-fail"}:
        return replace(one, role="cascade")  # the daemon died, not its node
    if (
        one.rule.startswith("xid.")
        and one.domain is Domain.APPLICATION
        and one.programs >= policy.other_programs
    ):
        # One device in the hands of several programs: the device is what they share.
        return replace(one, domain=Domain.GPU_HARDWARE, component="gpu", role="root")
    return one


def _without_space(seen: Iterable[Observation]) -> frozenset[int | None]:
    """Return the ranks that had no space or quota left to write."""
    return frozenset(o.rank for o in seen if o.rule in {"app-disk-full", "app-quota"})


def _accused(seen: Iterable[Observation]) -> str | None:
    """Return the peer that most of several complaining nodes cannot reach."""
    by_peer: dict[str, set[str]] = defaultdict(set)
    nodes = set()
    for one in seen:
        if one.domain is Domain.NETWORK and one.role == "either" and one.node and one.target:
            by_peer[one.target].add(one.node)
            nodes.add(one.node)
    if len(nodes) < 2:
        return None
    peer = max(by_peer, key=lambda p: len(by_peer[p]))
    mine = len(by_peer[peer] - {peer})
    alike = [p for p in by_peer if p != peer and len(by_peer[p]) >= mine]
    return peer if mine >= 2 and 2 * mine > len(nodes) and not alike else None


def _slowed_by_retries(
    seen: Iterable[Observation], slow_ns: int | None, policy: Policy
) -> list[Observation]:
    """Give back their weight to the many retries that began when steps became slower.

    What a program gets over kills nobody, but each time costs.
    """
    return [
        replace(one, role="either", strength=min(one.strength / HANDLED_WEIGHT, 1.0))
        if one.handled and one.repeats >= policy.many_retries and _came_with(one, slow_ns, policy)
        else one
        for one in seen
    ]


def _set_up_otherwise(seen: Iterable[Observation], context: Context) -> str | None:
    """Return the node that alone fails at start-up and alone is set up otherwise than its peers.

    The same line in the middle of a run would be the job's own.
    """
    if context.progress.latest_ns is not None or len(context.nodes) < 2:
        return None
    failing, odd = set(), set()
    for one in seen:
        if one.rule == "odd-configuration":
            odd.add(one.node)
        elif one.role == "either" and one.domain is Domain.APPLICATION:
            failing.add(one.node)
    return next(iter(failing)) if len(failing) == 1 and failing <= odd else None


def _by_storage_way(one: Observation, clients: int, targets: int, context: Context) -> Observation:
    """Correct a storage complaint by how many clients and targets share it."""
    if clients > 1 or targets < 2:
        return one
    # One client that loses many targets has lost its own way to them.
    new = replace(one, target=None)
    if targets > 2 and len(context.job_nodes or context.nodes) > 1:
        # Its peers reach the same servers: the way is what is broken.
        new = replace(new, domain=Domain.NETWORK, component="path to the storage")
    return new


def _explained(
    one: Observation,
    *,
    lost: bool,
    corrupts: bool,
    narrow: Mapping[str, Observation],
    driverless: frozenset[str | None],
    full: frozenset[int | None],
) -> Observation:
    """Return an observation as the consequence, or the place, that another has told."""
    if lost and one.rule in TOLD_OF_LOSS:
        return replace(one, role="cascade")
    if corrupts and one.rule in NUMERICS and one.domain is Domain.APPLICATION:
        # Wrong numbers that a repeat does not give are the device's: NaN is what it made.
        return replace(one, role="cascade")
    if one.rule == "app-ckpt-corrupt" and one.rank in full:
        return replace(one, role="symptom")  # the file was cut off where the space ended
    if one.component == "driver" and one.node in driverless:
        # A tool that cannot reach the GPU has no driver to ask.
        return replace(one, domain=Domain.HOST)
    if one.component == "pcie" and one.node and one.node in narrow and not one.device:
        # The same line, read with the device that it belongs to.
        link = narrow[one.node]
        return replace(one, domain=link.domain, device=link.device)
    return one


def _by_scope(
    seen: Sequence[Observation], onset_ns: int | None, context: Context, policy: Policy
) -> list[Observation]:
    """Correct domain and subject of observations by how wide they are seen."""
    slow_ns = _slow_since(seen)
    present = [
        o
        for o in seen
        if _time_weight(o, onset_ns, context, policy, slow_ns)[1] is None
        and not _is_elsewhere(o, context)
    ]
    daemons = {o.node for o in seen if o.component == "node daemon"}
    hardware = {
        (o.node, o.device)
        for o in present
        if o.domain is Domain.GPU_HARDWARE and o.role == "root" and o.strength >= 0.7
    }
    hardware_nodes = {node for node, _ in hardware if node}
    dead = {
        o.node
        for o in present
        if o.node
        and o.domain in {Domain.HOST, Domain.GPU_HARDWARE}
        and (o.role == "root" or o.rule == "node-lost")
    }
    clients: dict[str, set[str]] = defaultdict(set)
    for one in seen:
        if one.domain is Domain.STORAGE and one.target and one.node:
            clients[one.target].add(one.node)
    targets: dict[str, set[str]] = defaultdict(set)
    for target, nodes in clients.items():
        for node in nodes:
            targets[node].add(target)
    limited = {o.node for o in seen if o.component in _OWN_LIMITS and o.role == "root"}
    # A repeat of the step comes after the NaN that it explains.
    corrupts = any(
        o.component == "silent corruption"
        and o.role == "root"
        and onset_ns is not None
        and abs((o.time_ns or onset_ns) - onset_ns) <= policy.old_ns
        for o in seen
    )
    driverless = frozenset(
        o.node for o in seen if o.domain is Domain.HOST and o.component == "driver" and o.node
    )
    narrow = {o.node: o for o in seen if o.rule in _NARROW and o.device and o.node}
    lost = {o.node for o in seen if o.rule in {"node-lost", "silence.node"}}
    accused = _accused(present)
    full = _without_space(present)
    odd = _set_up_otherwise(present, context)
    changed = []
    for one in seen:
        new = _explained(
            one, lost=bool(lost), corrupts=corrupts, narrow=narrow, driverless=driverless, full=full
        )
        if new is one:
            new = _of_device_or_daemon(one, policy, daemon_died=bool(daemons))
        if new is not one:
            changed.append(new)
            continue
        if one.rule == "host-oom-killer" and one.node in limited:
            # The kernel tells the limit that was hit in another line of the same kill.
            new = replace(one, domain=Domain.APPLICATION, component="host memory limit")
        elif one.rule in {"app-sigkill", "rank.gone"} and limited:
            # The kill is known: it was the job's own limit.
            new = replace(one, role="cascade")
        elif (
            one.role == "either"
            and one.domain is Domain.APPLICATION
            and one.node is not None
            and (one.node in hardware_nodes or one.node == odd)
        ) and one.rule != "odd-configuration":
            # The node's hardware or set-up complains too: the crash is its consequence.
            new = replace(one, role="symptom")
        elif one.role == "either" and one.domain is Domain.NETWORK and dead:
            # A peer that died first looks like a network that lost it.
            new = replace(one, role="symptom" if one.node not in dead else "cascade")
        elif one.domain is Domain.NETWORK and accused and one.target == accused:
            # Those that wait for one peer are its victims.
            new = replace(one, node=accused, rank=None, device=None)
        elif one.domain is Domain.STORAGE and one.node and one.target:
            new = _by_storage_way(one, len(clients[one.target]), len(targets[one.node]), context)
        changed.append(new)
    return changed


def _groups(
    seen: Sequence[Observation], onset_ns: int | None, context: Context, policy: Policy
) -> tuple[list[_Group], dict[int, str]]:
    table: dict[tuple[Domain, str], _Group] = {}
    doubts: dict[int, str] = {}
    slow_ns = _slow_since(seen)
    for one in sorted(seen, key=lambda o: o.locates):
        weight = policy.role_weight(one.role) * one.strength
        if weight == 0:
            continue
        factor, doubt = _time_weight(one, onset_ns, context, policy, slow_ns)
        if context.ended_well and one.kind not in {"metric", "trace"}:
            factor, doubt = factor * policy.ended_well_weight, "the job ended well all the same"
        if _is_elsewhere(one, context):
            factor, doubt = factor * policy.elsewhere_weight, "it is on a node outside the job"
        if doubt:
            doubts[id(one)] = doubt
        if one.locates:
            backed = [g for g in table.values() if _same_place(one, g)]
            for group in backed:
                group.members.append((weight * factor * policy.locates_weight, one))
            if backed:
                continue
        subject = one.subject
        key = (one.domain, str(subject) if subject else "")
        group = table.setdefault(key, _Group(domain=one.domain, subject=subject, members=[]))
        group.members.append((weight * factor, one))
    return list(table.values()), doubts


def _same_place(one: Observation, group: _Group) -> bool:
    """Say whether a group has evidence of its own on the rank or node of ``one``."""
    for _, other in group.members:
        if other.role == "cascade" or other.locates:
            continue
        if one.rank is not None and other.rank == one.rank:
            return True
        if one.node is not None and other.node == one.node and other.rank is None:
            return True
    return False


def _placed(seen: Iterable[Observation], nodes: Mapping[int, str] | None) -> list[Observation]:
    """Give observations of a rank its node."""
    nodes = nodes or {}
    return [
        replace(o, node=nodes[o.rank])
        if o.node is None and o.rank is not None and o.rank in nodes
        else o
        for o in seen
    ]


def _of_the_job(members: list[_Group], many: int) -> list[_Group]:
    """Join the groups of many ranks that share a rule: that complaint is the job's."""
    sharing: dict[str, list[_Group]] = defaultdict(list)
    for group in members:
        if group.subject and group.subject.kind in {"rank", "node"}:
            for rule in {o.rule for _, o in group.members if o.role != "cascade"}:
                sharing[rule].append(group)
    ranks = max(sharing.values(), key=len, default=[])
    placed = sum(g.subject is not None and g.subject.kind in {"rank", "node"} for g in members)
    if len(ranks) < many or 2 * len(ranks) <= placed:
        return members
    joined = _Group(
        domain=ranks[0].domain, subject=None, members=[m for g in ranks for m in g.members]
    )
    rest = [g for g in members if g not in ranks]
    return sorted([joined, *rest], key=lambda g: g.score, reverse=True)


def _merged(groups: list[_Group], known_ranks: int) -> list[_Group]:
    """Fold groups without a subject, or of a device's node, into the strongest of their domain."""
    by_domain: dict[Domain, list[_Group]] = defaultdict(list)
    for group in groups:
        by_domain[group.domain].append(group)
    merged = []
    many = min(_MANY_RANKS, max(2, known_ranks))
    for domain, unsorted in by_domain.items():
        members = sorted(unsorted, key=lambda g: g.score, reverse=True)
        if domain in {Domain.APPLICATION, Domain.FRAMEWORK}:
            members = _of_the_job(members, many)
        lead = members[0]
        for other in members[1:]:
            place = None if other.subject is None else other.subject.name
            whole = lead.subject.name if lead.subject else ""
            of_job = other.subject is not None and other.subject.kind == "job"
            if other.subject is None or of_job or (place and whole.startswith(f"{place}/")):
                lead.members += other.members
                lead.subject = lead.subject or other.subject
            else:
                merged.append(other)
        merged.append(lead)
    return merged


def _hypothesis(group: _Group, total: float, doubts: dict[int, str]) -> Hypothesis:
    members = sorted(group.members, key=lambda m: -m[0])
    score = group.score
    # Confidence is the score, less where another cause scores as well.
    share = score / total if total else 0.0
    supporting = [o for _, o in members if id(o) not in doubts][:6]
    doubted = [o for _, o in members if id(o) in doubts][:3]
    against = tuple(
        replace(o.evidence(), sentence=f"{doubts[id(o)]}: {o.evidence().sentence}") for o in doubted
    )
    lead = group.lead
    return Hypothesis(
        domain=group.domain,
        component=lead.component,
        subject=group.subject,
        confidence=round(min(0.97, score * (0.4 + 0.6 * share)), 3),
        evidence_for=tuple(o.evidence() for o in supporting) or (lead.evidence(),),
        evidence_against=against,
        actions=actions_for(group.domain, group.subject, lead),
    )


def _cascades(seen: Sequence[Observation]) -> tuple[Evidence, ...]:
    firsts: dict[str, Observation] = {}
    for one in seen:
        if one.role == "cascade":
            known = firsts.get(one.rule)
            if known is None or (one.time_ns or 0) < (known.time_ns or 0):
                firsts[one.rule] = one
    return tuple(o.evidence() for o in firsts.values())


def _is_serious(one: Observation, context: Context) -> bool:
    """Say whether it is trouble even where no cause can be named."""
    if one.rule == "finding.slow":
        return True  # also of a job that came to its end, only later
    if context.ended_well:
        return False
    if one.rule == "metric:step time":
        return True
    if one.kind == "job":
        return (one.strength >= 0.3 and one.role != "symptom") or one.strength >= 0.7
    return one.kind == "trace" and one.role in {"root", "either", "cascade"}


def diagnose(
    seen: Sequence[Observation], context: Context, policy: Policy | None = None
) -> Incident | None:
    """Return the incident that the observations tell of; None where nothing is wrong.

    The incident's verdict is unknown, without hypotheses, where something is wrong but no cause
    has enough evidence.
    """
    policy = policy or Policy()
    seen = _placed(seen, context.node_of_rank)
    seen += silent_daemons(seen, context.progress.latest_ns, context.job_nodes)
    wrong = [o for o in seen if o.role in {"root", "either", "symptom", "cascade"}]
    if not wrong:
        return None
    onset_ns = _onset(seen, context, policy)
    seen = _slowed_by_retries(seen, _slow_since(seen), policy)
    scoped = _by_scope(seen, onset_ns, context, policy)
    groups, doubts = _groups(scoped, onset_ns, context, policy)
    ranked = sorted(
        _merged(groups, len(context.ranks)), key=lambda g: (-g.score, g.lead.time_ns or 0)
    )
    ranked = [g for g in ranked if any(o.role != "cascade" for _, o in g.members)]
    noticed = not context.ended_well and any(
        (o.kind == "job" and o.strength >= 0.3) or o.kind == "trace" for o in wrong
    )
    # Totals without a time may be from before a job that ended well.
    noticed = noticed or any(
        o.kind in {"metric", "trace"} and (o.time_ns is not None or not context.ended_well)
        for o in wrong
    )
    enough = policy.enough if noticed else policy.enough_unnoticed
    found = [g for g in ranked if g.score >= enough]
    if not found and (not noticed or not any(_is_serious(o, context) for o in wrong)):
        return None
    total = sum(g.score for g in ranked) or 1.0
    first = found[0].first_ns if found else None
    begin = min(t for t in (first, onset_ns) if t) if first or onset_ns else 0
    if first is not None and onset_ns is not None and onset_ns - first > policy.old_ns:
        begin = onset_ns
    lead = found[0].lead if found else None
    kind = kind_of(
        seen, lead, progress_ns=context.progress.latest_ns, ended=context.ended, policy=policy
    )
    if kind == "hang" and begin:
        begin = stuck_since(seen, begin)
    return Incident(
        id=f"{lead.rule if lead else 'unknown'}@{begin}",
        onset_ns=begin,
        kind=kind,
        subject=found[0].subject if found else None,
        verdict=Verdict.FOUND if found else Verdict.UNKNOWN,
        hypotheses=tuple(_hypothesis(g, total, doubts) for g in found[: policy.alternatives]),
        cascades=_cascades(scoped),
        state="open",
    )

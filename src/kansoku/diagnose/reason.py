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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kansoku.diagnose.actions import actions_for
from kansoku.diagnose.context import Context, is_elsewhere
from kansoku.diagnose.daemons import silent_daemons, undecided, with_alternative
from kansoku.diagnose.kinds import SET_UP, SLOW_TOLD, kind_of, stuck_since, survived
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.policy import Policy
from kansoku.diagnose.recognise import HANDLED_WEIGHT
from kansoku.diagnose.scope import by_scope
from kansoku.diagnose.timing import came_with, onset_of, slow_since, time_weight
from kansoku.model import Domain, Evidence, Hypothesis, Incident, Subject, Verdict

__all__ = ["diagnose"]

_MANY_RANKS = 4


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


def _slowed_by_retries(
    seen: Iterable[Observation], slow_ns: int | None, policy: Policy
) -> list[Observation]:
    """Give back their weight to the many retries that began when steps became slower.

    What a program gets over kills nobody, but each time costs.
    """
    return [
        replace(one, role="either", strength=min(one.strength / HANDLED_WEIGHT, 1.0))
        if one.handled and one.repeats >= policy.many_retries and came_with(one, slow_ns, policy)
        else one
        for one in seen
    ]


def _groups(
    seen: Sequence[Observation], onset_ns: int | None, context: Context, policy: Policy
) -> tuple[list[_Group], dict[int, str]]:
    table: dict[tuple[Domain, str], _Group] = {}
    doubts: dict[int, str] = {}
    slow_ns = slow_since(seen)
    for one in sorted(seen, key=lambda o: o.locates):
        weight = policy.role_weight(one.role) * one.strength
        if weight == 0:
            continue
        factor, doubt = time_weight(one, onset_ns, context, policy, slow_ns)
        if context.ended_well and one.kind not in {"metric", "trace"}:
            factor, doubt = factor * policy.ended_well_weight, "the job ended well all the same"
        if is_elsewhere(one, context):
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


def _is_trouble(one: Observation) -> bool:
    """Say whether it is more than a consequence, or than words about the set-up."""
    return one.role != "cascade" and one.rule not in SET_UP


def _is_noticed(wrong: Iterable[Observation], context: Context, policy: Policy) -> bool:
    """Say whether the job complained of what it did not get over, or numbers or traces tell."""
    if not context.ended_well and any(
        one.kind == "job"
        and one.strength >= 0.3
        and one.rule not in SET_UP
        # Slow steps are no less slow for being made.
        and (one.rule == SLOW_TOLD or not survived(one, context.progress.latest_ns, policy))
        for one in wrong
    ):
        return True
    # Totals without a time may be from before a job that ended well.
    return any(
        one.kind in {"metric", "trace"} and (one.time_ns is not None or not context.ended_well)
        for one in wrong
    )


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
    seen += silent_daemons(seen, context)
    wrong = [o for o in seen if o.role in {"root", "either", "symptom", "cascade"}]
    if not wrong:
        return None
    onset_ns = onset_of(seen, context, policy)
    seen = _slowed_by_retries(seen, slow_since(seen), policy)
    scoped = by_scope(seen, onset_ns, context, policy)
    groups, doubts = _groups(scoped, onset_ns, context, policy)
    ranked = sorted(
        _merged(groups, len(context.ranks)), key=lambda g: (-g.score, g.lead.time_ns or 0)
    )
    ranked = [g for g in ranked if any(o.role != "cascade" for _, o in g.members)]
    noticed = _is_noticed(wrong, context, policy)
    if not noticed:
        ranked = [g for g in ranked if any(_is_trouble(o) for _, o in g.members)]
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
    hypotheses = [_hypothesis(g, total, doubts) for g in found[: policy.alternatives]]
    if lead is not None and undecided(scoped, lead, context):
        hypotheses = with_alternative(hypotheses, lead, context)[: policy.alternatives]
    return Incident(
        id=f"{lead.rule if lead else 'unknown'}@{begin}",
        onset_ns=begin,
        kind=kind,
        subject=found[0].subject if found else None,
        verdict=Verdict.FOUND if found else Verdict.UNKNOWN,
        hypotheses=tuple(hypotheses),
        cascades=_cascades(scoped),
        state="open",
    )

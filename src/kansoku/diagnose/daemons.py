"""A node that the scheduler gave up while its job went on: the daemon alone was silent."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from kansoku.diagnose.context import Context, DaemonStart, Signs
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.recognise import progress_of
from kansoku.model import Action, Domain, Hypothesis

__all__ = ["TOLD_OF_LOSS", "signs_of_output", "silent_daemons", "undecided", "with_alternative"]

TOLD_OF_LOSS = frozenset(
    ("sch-nodefail-step", "sch-state-node-fail", "sch-cancel", "sch-requeue", "sch-node-down",
     "sch-node-not-responding", "sch-state-cancelled")
)  # fmt: skip
"""What a scheduler says and does once it has lost a node."""

_SECOND = 1_000_000_000
_SLACK_NS = 2 * _SECOND
"""Schedulers ask for a third of their patience or longer before they say that a node is silent: a
node that died made no progress for at least some seconds before."""
_OF_A_JOB = re.compile(r"(?i)\bjob|\bsrun\b|\bstep\b")


_STEP_DAEMON = re.compile(r"(?:^|\] )\[\d+\.(?:\d+|batch|extern|interactive)\] ")
"""How a step's own daemon begins its lines in the log of its node's slurmd."""


def _step_daemon_wrote(
    seen: Iterable[Observation], lost: Observation, lost_ns: int
) -> Observation | None:
    """Return what a step's daemon wrote on a node after the node was given up.

    A node that died and came back has no such daemon any more.
    """
    later = [
        one
        for one in seen
        if one.node == lost.node
        and one.kind == "scheduler"
        and (one.time_ns or 0) >= lost_ns
        and _STEP_DAEMON.search(one.text)
    ]
    return min(later, key=lambda one: one.time_ns or 0, default=None)


# srun says which node failed; of a step's daemon that lives it hears how its tasks ended.
_NODE_FAILURE = re.compile(r"\bsrun: error: Node failure on ([A-Za-z][\w.-]*\d)")
_TASK_END = re.compile(
    r"\bsrun: (?:error: )?([A-Za-z][\w.-]*\d): tasks? [\d,-]+: "
    r"(?:Terminated|Killed|Exited|Aborted|Segmentation|Completed|Done)"
)
_LEAST_STEPS = 3
"""Fewer lines of steps may be what was under way when the scheduler spoke."""


def signs_of_output(lines: Sequence[str], name: str, first_row: int = 1) -> Signs:
    """Return what the order of a log's lines tells of nodes that srun names as failed.

    ``name`` and ``first_row`` say where the lines are. Steps that are numbered anew are a job that
    was started again without the node, and tell nothing.
    """
    lost: dict[str, int] = {}
    ended: dict[str, str] = {}
    went_on: dict[str, str] = {}
    step, anew = -1, False
    for row, line in enumerate(lines, first_row):
        if match := _NODE_FAILURE.search(line):
            lost.setdefault(match[1], 0)
        elif match := _TASK_END.search(line):
            if match[1] in lost:
                ended.setdefault(match[1], f"{name}:{row}")
        elif (number := progress_of(line)) is not None:
            anew |= bool(lost) and number < step
            for node in lost if number > step and not anew else ():
                lost[node] += 1
                if lost[node] == _LEAST_STEPS:
                    went_on[node] = f"{name}:{row}"
            step = number
    return Signs(ended_tasks=ended, went_on=went_on)


_PATIENCE_NS = 300 * _SECOND
"""Slurm gives a node up after five minutes by default (SlurmdTimeout)."""
_UP_NS = 3600 * _SECOND
"""A node that booted so long before it was given up did not boot because of it."""
_GAP_NS = 90 * _SECOND
"""No server boots so fast that its numbers pause for less."""


def _began_anew(start: DaemonStart | None, lost_ns: int) -> bool | None:
    """Say whether the daemon alone began anew after the loss; None where that is not known.

    A node that is still down has the record of its last registration.
    """
    if start is None or start.began_ns < lost_ns:
        return None
    return start.booted_ns < lost_ns - _UP_NS


def _sampled_through(times_ns: Sequence[int], lost_ns: int) -> bool:
    """Say whether numbers came without a pause while the scheduler waited, and after it."""
    after = [t for t in times_ns if t >= lost_ns]
    before = [t for t in times_ns if t < lost_ns]
    start = max((t for t in before if t <= lost_ns - _PATIENCE_NS), default=None)
    if start is None or not after:
        return False
    whole = [start, *(t for t in before if t > start), after[0]]
    return all(late - early <= _GAP_NS for early, late in pairwise(whole))


def _why_alive(
    seen: Sequence[Observation], lost: Observation, context: Context
) -> tuple[str, str] | None:
    """Return how a node that was given up showed that it lives, and where that is read."""
    signs, node, progress_ns = context.signs, lost.node or "", context.progress.latest_ns
    if lost.time_ns is None:
        return None
    if progress_ns is not None and progress_ns >= lost.time_ns - _SLACK_NS:
        apart = abs(progress_ns - lost.time_ns) / _SECOND
        side = "after" if progress_ns >= lost.time_ns else "before"
        return f"the job went on: its last progress is {apart:.0f} s {side} that", lost.source
    wrote = _step_daemon_wrote(seen, lost, lost.time_ns)
    if wrote is not None and wrote.time_ns is not None:
        apart = (wrote.time_ns - lost.time_ns) / _SECOND
        return (
            f"the node lives: the job's step daemon wrote there {apart:.0f} s later",
            wrote.source,
        )
    start = signs.daemons.get(node)
    if start is not None and _began_anew(start, lost.time_ns):
        apart = (start.began_ns - lost.time_ns) / _SECOND
        why = f"the node lives: its daemon began anew {apart:.0f} s later, the node did not boot"
        return why, start.source
    if node in signs.ended_tasks:
        why = "the node lives: the launcher still heard how its tasks there ended"
        return why, signs.ended_tasks[node]
    if _sampled_through(signs.samples.get(node, ()), lost.time_ns):
        return "the node lives: its numbers came on all that time", "metrics"
    return None


def silent_daemons(seen: Sequence[Observation], context: Context) -> list[Observation]:
    """Return the nodes of the job that did not answer the scheduler and yet lived.

    Ranks train in step, so progress of any rank shows that every node of the job lives; without
    dated steps, what the job's own step daemons wrote does, a daemon that began anew on a node that
    did not boot, or numbers that came on.
    """
    lost = [o for o in seen if o.rule == "node-lost" and o.node]
    ours = {o.node for o in lost if _OF_A_JOB.search(o.text)} | context.job_nodes
    found = []
    for one in lost:
        silent = one.kind == "scheduler" and one.component.endswith("not responding")
        alive = _why_alive(seen, one, context) if silent and one.node in ours else None
        if alive is None:
            continue
        why, source = alive
        found.append(
            Observation(
                rule="daemon.silent",
                text=f"{one.node} did not answer the scheduler, and {why}",
                source=source,
                kind="scheduler",
                domain=Domain.SCHEDULER,
                component="node daemon",
                role="root",
                strength=0.75,
                meaning="the node was well; its slurmd, or the way to it, was not",
                action="start slurmd again after a look at its journal; the node needs no repair",
                time_ns=one.time_ns,
                last_ns=one.last_ns,
                node=one.node,
            )
        )
    return found


def _died(one: Observation, lost: Observation) -> bool:
    """Say whether an observation tells, beside the scheduler, that the node that it lost died."""
    apart_ns = (lost.time_ns or 0) - (one.time_ns or lost.time_ns or 0)
    if one.rule == "node-lost" or one.rule in TOLD_OF_LOSS or one.healed_ns is not None:
        return False
    if apart_ns > _UP_NS:
        return False
    if one.node == lost.node and one.role in {"root", "either"}:
        return one.domain in {Domain.HOST, Domain.GPU_HARDWARE} or one.component == "node daemon"
    return one.target == lost.node and apart_ns > _SLACK_NS  # a peer missed it before


def undecided(seen: Sequence[Observation], lost: Observation, context: Context) -> bool:
    """Say whether nothing tells a dead node from a silent daemon, where a scheduler lost a node.

    Dated steps that ended before that tell, and so does all that speaks of the node's own trouble
    or of peers that missed it earlier.
    """
    if lost.rule != "node-lost" or context.progress.latest_ns is not None:
        return False
    start = context.signs.daemons.get(lost.node or "")
    if lost.time_ns is not None and _began_anew(start, lost.time_ns) is False:
        return False
    return not any(_died(one, lost) for one in seen)


_FIRST_SHARE, _SECOND_SHARE = 0.9, 0.5
"""Of the confidence that a lost node would have, for either way that it may be."""
_NOT_TOLD = "nothing that was read tells a dead node from one whose daemon alone is silent"
_LOOK_FIRST = (
    "look whether the node answers and since when it is up: if it never stopped, start its slurmd "
    "again; the node needs no repair"
)


def with_alternative(
    found: Sequence[Hypothesis], lost: Observation, context: Context
) -> list[Hypothesis]:
    """Return the hypotheses with the first, a lost node, divided into dead node and silent daemon.

    Steps that follow the word of the loss speak for the daemon, not firmly: output that was held
    back comes late.
    """
    first, word = found[0], found[0].evidence_for[0]
    source = context.signs.went_on.get(lost.node or "")
    untold = replace(word, sentence=_NOT_TOLD)
    steps = replace(word, sentence="lines of further steps follow that word", source=source or "",
                    time_ns=None)  # fmt: skip
    dead_share, silent_share = _FIRST_SHARE, _SECOND_SHARE
    if source is not None:
        dead_share, silent_share = silent_share, dead_share
    dead = replace(
        first,
        confidence=round(first.confidence * dead_share, 3),
        evidence_against=(*first.evidence_against, untold if source is None else steps),
    )
    silent = replace(
        first,
        domain=Domain.SCHEDULER,
        component="node daemon",
        confidence=round(first.confidence * silent_share, 3),
        evidence_for=(word,) if source is None else (steps, word),
        evidence_against=(untold,) if source is None else (),
        actions=(Action(sentence=_LOOK_FIRST),),
    )
    lead, other = (dead, silent) if source is None else (silent, dead)
    return [lead, *sorted([other, *found[1:]], key=lambda one: -one.confidence)]

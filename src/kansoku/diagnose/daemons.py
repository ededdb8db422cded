"""A node that the scheduler gave up while its job went on: the daemon alone was silent."""

import re
from collections.abc import Iterable, Sequence

from kansoku.diagnose.observation import Observation
from kansoku.model import Domain

__all__ = ["TOLD_OF_LOSS", "silent_daemons"]

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


def _why_alive(
    seen: Sequence[Observation], lost: Observation, progress_ns: int | None
) -> tuple[str, str] | None:
    """Return how a node that was given up showed that it lives, and where that is read."""
    if lost.time_ns is None:
        return None
    if progress_ns is not None and progress_ns >= lost.time_ns - _SLACK_NS:
        apart = abs(progress_ns - lost.time_ns) / _SECOND
        side = "after" if progress_ns >= lost.time_ns else "before"
        return f"the job went on: its last progress is {apart:.0f} s {side} that", lost.source
    wrote = _step_daemon_wrote(seen, lost, lost.time_ns)
    if wrote is None or wrote.time_ns is None:
        return None
    apart = (wrote.time_ns - lost.time_ns) / _SECOND
    return f"the node lives: the job's step daemon wrote there {apart:.0f} s later", wrote.source


def silent_daemons(
    seen: Sequence[Observation], progress_ns: int | None, job_nodes: Iterable[str] = ()
) -> list[Observation]:
    """Return the nodes of the job that did not answer the scheduler and yet lived.

    Ranks train in step, so progress of any rank shows that every node of the job lives; without
    dated steps, what the job's own step daemons wrote does.
    """
    lost = [o for o in seen if o.rule == "node-lost" and o.node]
    ours = {o.node for o in lost if _OF_A_JOB.search(o.text)} | set(job_nodes)
    found = []
    for one in lost:
        silent = one.kind == "scheduler" and one.component.endswith("not responding")
        alive = _why_alive(seen, one, progress_ns) if silent and one.node in ours else None
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

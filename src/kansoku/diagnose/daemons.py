"""A node that the scheduler gave up while its job went on: the daemon alone was silent."""

import re
from collections.abc import Iterable, Sequence

from kansoku.diagnose.observation import Observation
from kansoku.model import Domain

__all__ = ["TOLD_OF_LOSS", "silent_daemons"]

TOLD_OF_LOSS = frozenset(
    ("sch-nodefail-step", "sch-state-node-fail", "sch-cancel", "sch-requeue", "sch-node-down",
     "sch-node-not-responding")
)  # fmt: skip
"""What a scheduler says and does once it has lost a node."""

_SECOND = 1_000_000_000
_SLACK_NS = 2 * _SECOND
"""Schedulers ask for a third of their patience or longer before they say that a node is silent: a
node that died made no progress for at least some seconds before."""
_OF_A_JOB = re.compile(r"(?i)\bjob|\bsrun\b|\bstep\b")


def silent_daemons(
    seen: Sequence[Observation], progress_ns: int | None, job_nodes: Iterable[str] = ()
) -> list[Observation]:
    """Return the nodes of the job that did not answer the scheduler while the job went on.

    Ranks train in step, so progress of any rank shows that every node of the job lives.
    """
    if progress_ns is None:
        return []
    lost = [o for o in seen if o.rule == "node-lost" and o.node]
    ours = {o.node for o in lost if _OF_A_JOB.search(o.text)} | set(job_nodes)
    return [
        Observation(
            rule="daemon.silent",
            text=f"{one.node} did not answer the scheduler, and the job went on: its last progress "
            f"is {abs(progress_ns - one.time_ns) / _SECOND:.0f} s "
            f"{'after' if progress_ns >= one.time_ns else 'before'} that",
            source=one.source,
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
        for one in lost
        if one.kind == "scheduler"
        and one.component.endswith("not responding")
        and one.node in ours
        and one.time_ns is not None
        and progress_ns >= one.time_ns - _SLACK_NS
    ]

"""A node's life: serviced out, evidence, repaired, validated, returned; and who keeps coming back.

Pure: events of the journal go in, where each node stands and what may follow come out. How often a
node was taken out outweighs a clean check: a lemon passes every check between its failures.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["NodeLife", "Stage", "incidents_within", "lemon", "lives_of", "refusal"]

_DAY_NS = 86_400 * 1_000_000_000


class Stage(StrEnum):
    """What happened to a node. The values are the events of ``nodes.jsonl``."""

    SERVICED_OUT = "serviced_out"
    EVIDENCE = "evidence"
    REPAIRED = "repaired"
    VALIDATED = "validated"
    RETURNED = "returned"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLife:
    """One node's events, oldest first."""

    node: str
    events: tuple[tuple[int, Stage, str], ...]
    """Unix time (ns), what happened, why or who."""

    @property
    def stage(self) -> Stage:
        """Where it stands; evidence that was packed moves it nowhere."""
        moved = [stage for _, stage, _ in self.events if stage is not Stage.EVIDENCE]
        return moved[-1] if moved else Stage.RETURNED

    @property
    def out_ns(self) -> tuple[int, ...]:
        """Return when it was serviced out."""
        return tuple(t for t, stage, _ in self.events if stage is Stage.SERVICED_OUT)

    def last_ns(self, stage: Stage) -> int | None:
        """Return when a stage was last reached."""
        return max((t for t, one, _ in self.events if one is stage), default=None)

    @property
    def out_for_ns(self) -> int:
        """Return how long it has been out of service in all, of the times it was returned."""
        total, since = 0, None
        for time_ns, stage, _ in self.events:
            if stage is Stage.SERVICED_OUT and since is None:
                since = time_ns
            elif stage is Stage.RETURNED and since is not None:
                total, since = total + time_ns - since, None
        return total


def lives_of(records: Iterable[Mapping[str, Any]]) -> dict[str, NodeLife]:
    """Return every node's life from the journal; records of another kind are left out."""
    found: dict[str, list[tuple[int, Stage, str]]] = {}
    for record in records:
        try:
            event = (int(record["time_ns"]), Stage(record["event"]), str(record.get("reason", "")))
            found.setdefault(str(record["node"]), []).append(event)
        except (KeyError, ValueError, TypeError):
            continue
    return {node: NodeLife(node=node, events=tuple(sorted(e))) for node, e in found.items()}


def incidents_within(out_ns: Sequence[int], *, days: float, now_ns: int) -> int:
    """Return how often a node was taken out within the last days."""
    return sum(now_ns - t <= days * _DAY_NS for t in out_ns)


def lemon(node: str, incidents: int, *, limit: int, days: float) -> str | None:
    """Return the sentence that makes a node a lemon, or None."""
    if incidents < limit:
        return None
    return f"{node} was taken out {incidents} times in {days:g} days"


_BEFORE = {
    Stage.EVIDENCE: frozenset(Stage),
    Stage.REPAIRED: frozenset({Stage.SERVICED_OUT, Stage.REPAIRED, Stage.VALIDATED}),
    Stage.VALIDATED: frozenset({Stage.SERVICED_OUT, Stage.REPAIRED, Stage.VALIDATED}),
    Stage.RETURNED: frozenset({Stage.VALIDATED}),
}
_REMEDY = {
    Stage.RETURNED: "validate it first",
    Stage.REPAIRED: "it is in service",
    Stage.VALIDATED: "it is in service",
}


def refusal(life: NodeLife, stage: Stage, *, limit: int, days: float, now_ns: int) -> str | None:
    """Return why a node may not reach a stage now, or None.

    A lemon is returned only after a repair since it was last taken out, however clean its check.
    """
    if life.stage not in _BEFORE[stage]:
        return f"{life.node} is {life.stage.replace('_', ' ')}: {_REMEDY[stage]}"
    if stage is not Stage.RETURNED:
        return None
    count = incidents_within(life.out_ns, days=days, now_ns=now_ns)
    said = lemon(life.node, count, limit=limit, days=days)
    repaired = life.last_ns(Stage.REPAIRED)
    if said and (repaired is None or repaired < max(life.out_ns)):
        return f"{said}: a clean check does not outweigh that, repair it first"
    return None

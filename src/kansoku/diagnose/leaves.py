"""Many NICs that lose their link at once: what they share is the leaf switch that they hang on."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kansoku.diagnose.observation import Observation
from kansoku.diagnose.policy import Policy
from kansoku.model import Domain

__all__ = ["LeafMap", "blame_leaves"]

LeafMap = Mapping[tuple[str, str], tuple[str, str]]
"""``(node, NIC or interface)`` to ``(leaf switch, NIC)``, from the cluster file."""

_FEW = 2
_LOST_RULES = {"net-link-down", "port-down", "net-ib-async"}
_LOST = re.compile(
    r"(?i)\b(?:link|port|carrier|state)\b.*\b(?:down|lost|disabled)\b|\blost carrier\b"
)


def _lost_link(one: Observation) -> bool:
    """Say whether it tells of a NIC without a link."""
    if one.domain is not Domain.NETWORK or one.node is None or one.device is None:
        return False
    if one.role not in {"root", "either", "symptom"}:
        return False
    if one.kind == "metric":
        return one.component == "link"
    return one.rule in _LOST_RULES or bool(_LOST.search(one.text))


def _together(
    lost: Sequence[tuple[tuple[str, str], Observation]], policy: Policy
) -> dict[tuple[str, str], Observation]:
    """Return the NICs of the largest set that lost their link at one time; undated ones count."""
    dated = [(one.time_ns, nic, one) for nic, one in lost if one.time_ns is not None]
    best: dict[tuple[str, str], Observation] = {}
    for begin in sorted({time for time, _, _ in dated}):
        now = {nic: one for time, nic, one in dated if 0 <= time - begin <= policy.leaf_together_ns}
        if len(now) > len(best):
            best = now
    return {nic: one for nic, one in lost if one.time_ns is None} | best


# What a switch says of itself, by (strength of NICs on three nodes or more, of all NICs on two;
# words). NICs see the far end of a cable alone: a cut bundle of cables looks as a dead switch.
_OWN_STATES = {
    "unknown": (
        (0.75, 0.6),
        "what they share is the switch; its own state is unknown: nothing that was read is from it",
    ),
    "answers": (
        (0.6, 0.5),
        "what they share is the switch, which answers: its ports, their cables or their power",
    ),
    "in trouble": (
        (0.95, 0.8),
        "what they share is the switch, which does not answer or tells of trouble itself",
    ),
}


def _own_state(
    leaf: str,
    seen: Sequence[Observation],
    answers: Mapping[str, bool],
    lost_ns: int | None,
    policy: Policy,
) -> str:
    """Return what is known of a switch itself about the time when its NICs lost their link."""
    if answers.get(leaf) is False:
        return "in trouble"
    own = [one for one in seen if one.target == f"switch:{leaf}" or one.node == leaf]
    times = [one.time_ns for one in own]
    if any(t is None or lost_ns is None or abs(t - lost_ns) <= policy.old_ns for t in times):
        return "in trouble"
    return "answers" if leaf in answers else "unknown"


def _accusation(
    leaf: str, down: Mapping[tuple[str, str], Observation], under: int, state: str
) -> Observation:
    """Return the observation that names a leaf by those of its ``under`` NICs without a link."""
    first = min(down.values(), key=lambda o: o.time_ns or 0)
    names = sorted(f"{node}/{nic}" for node, nic in down)
    dated = any(one.time_ns is not None for one in down.values())
    did = "lost their link together" if dated else "are without a link, since when is not known"
    (of_many, of_two), meaning = _OWN_STATES[state]
    return replace(
        first,
        rule="leaf.down",
        text=f"{len(down)} of {under} NICs under {leaf} {did}: "
        f"{', '.join(names[:4])}{', …' if len(names) > 4 else ''}",
        component="leaf switch",
        role="root",
        strength=of_many if len({node for node, _ in down}) > _FEW else of_two,
        meaning=meaning,
        action="look at the switch: power, firmware, its log; then at the cables",
        node=None, device=None, rank=None, repeats=1, target=f"switch:{leaf}", healed_ns=None,
    )  # fmt: skip


def blame_leaves(
    seen: Sequence[Observation],
    leaf_of: LeafMap,
    nodes: frozenset[str],
    policy: Policy | None = None,
    *,
    answers: Mapping[str, bool] | None = None,
) -> list[Observation]:
    """Return the observations with every leaf named whose NICs lost their link together.

    ``nodes`` are those that anything is known of: NICs under the leaf on others may be up or down.
    ``answers`` says of switches whether they answered, where they were asked; of a switch that
    nothing is known of itself, less is sure. The NICs' own complaints become symptoms. A node that
    lost NICs under several leaves speaks of itself, not of a leaf.
    """
    policy = policy or Policy()
    lost: dict[str, list[tuple[tuple[str, str], Observation]]] = defaultdict(list)
    leaves_of_node: dict[str, set[str]] = defaultdict(set)
    for one in seen:
        if _lost_link(one) and (known := leaf_of.get((one.node or "", one.device or ""))):
            leaf, nic = known
            lost[leaf].append(((one.node or "", nic), one))
            leaves_of_node[one.node or ""].add(leaf)
    named: list[Observation] = []
    followers: set[int] = set()
    for leaf, complaints in lost.items():
        found = [(nic, one) for nic, one in complaints if len(leaves_of_node[nic[0]]) == 1]
        down = _together(found, policy)
        under = {
            (node, nic) for (node, _), (name, nic) in leaf_of.items()
            if name == leaf and node in nodes
        } | set(down)  # fmt: skip
        hosts = {node for node, _ in down}
        if len(hosts) < _FEW or len(down) < policy.leaf_share * len(under):
            continue
        if len(hosts) == _FEW and len(down) != len(under):
            continue
        lost_ns = min((o.time_ns for o in down.values() if o.time_ns), default=None)
        state = _own_state(leaf, seen, answers or {}, lost_ns, policy)
        named.append(_accusation(leaf, down, len(under), state))
        followers |= {id(one) for nic, one in found if nic in down}
    return [replace(o, role="symptom") if id(o) in followers else o for o in seen] + named

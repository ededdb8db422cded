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


def blame_leaves(
    seen: Sequence[Observation],
    leaf_of: LeafMap,
    nodes: frozenset[str],
    policy: Policy | None = None,
) -> list[Observation]:
    """Return the observations with every leaf named whose NICs lost their link together.

    ``nodes`` are those that anything is known of: NICs under the leaf on others may be up or down.
    The NICs' own complaints become symptoms. A node that lost NICs under several leaves speaks of
    itself, not of a leaf.
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
    for leaf, found in lost.items():
        found = [(nic, one) for nic, one in found if len(leaves_of_node[nic[0]]) == 1]  # noqa: PLW2901
        down = _together(found, policy)
        under = {
            (node, nic) for (node, _), (name, nic) in leaf_of.items()
            if name == leaf and node in nodes
        } | set(down)  # fmt: skip
        hosts = {node for node, _ in down}
        everything = len(down) == len(under)
        if len(hosts) < _FEW or len(down) < policy.leaf_share * len(under):
            continue
        if len(hosts) == _FEW and not everything:
            continue
        first = min(down.values(), key=lambda o: o.time_ns or 0)
        shown = ", ".join(sorted(f"{node}/{nic}" for node, nic in down)[:4])
        named.append(
            replace(
                first,
                rule="leaf.down",
                text=f"{len(down)} of {len(under)} NICs under {leaf} lost their link together: "
                f"{shown}{', …' if len(down) > 4 else ''}",
                component="leaf switch",
                role="root",
                strength=0.95 if len(hosts) > _FEW else 0.8,
                meaning="what they share is the switch",
                action="look at the switch: power, firmware, its log; then at the cables",
                node=None, device=None, rank=None, repeats=1, target=f"switch:{leaf}",
                healed_ns=None,
            )
        )  # fmt: skip
        followers |= {id(one) for nic, one in found if nic in down}
    return [replace(o, role="symptom") if id(o) in followers else o for o in seen] + named

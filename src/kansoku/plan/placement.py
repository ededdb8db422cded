"""Placement from the inside out: which groups stay on NVLink, which cross leaves and pods."""

from dataclasses import dataclass

import numpy as np

from kansoku.plan.hardware import Hardware
from kansoku.plan.layout import Layout
from kansoku.plan.network import TIERS

__all__ = ["GroupPlace", "Placement", "place"]

ORDER = ("tp", "cp", "ep", "dp", "pp")
"""Fastest axis first; expert groups lie within the context- and data-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Where the process groups of one axis lie."""

    axis: str
    size: int
    stride: int
    """Distance between neighbouring ranks of a group."""
    count: int
    """Groups of this axis in the job."""
    per_node: int
    """Members in one scale-up domain."""
    nodes: int
    """Scale-up domains that a group spans."""
    tier: str
    """Widest path: ``single``, ``nvlink``, ``leaf``, ``spine`` or ``pod_crossing``."""
    crossing: int
    """Groups of this axis that cross pods."""
    example: tuple[int, ...]
    """Ranks of the first group (at most eight)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Rank order and the place of every kind of group."""

    order: tuple[str, ...]
    groups: tuple[GroupPlace, ...]
    nodes: int

    def to_json(self) -> dict[str, object]:
        """Return the placement object of a candidate."""
        return {
            "order": list(self.order),
            "nodes": self.nodes,
            "groups": {
                g.axis: {
                    "size": g.size,
                    "stride": g.stride,
                    "count": g.count,
                    "per_node": g.per_node,
                    "nodes": g.nodes,
                    "tier": g.tier,
                    "pod_crossing_groups": g.crossing,
                    "first_group": list(g.example),
                }
                for g in self.groups
            },
        }


def _crossing(layout: Layout, hardware: Hardware, size: int, stride: int) -> int:
    """Count groups whose ranks lie in more than one pod."""
    if hardware.pod_gpus is None or size == 1:
        return 0
    first = np.arange(layout.gpus)
    # The first rank of a group is the one whose coordinate along the axis is 0.
    first = first[(first // stride) % size == 0]
    last = first + (size - 1) * stride
    return int(np.sum(first // hardware.pod_gpus != last // hardware.pod_gpus))


def place(layout: Layout, hardware: Hardware) -> Placement:
    """Lay ranks out tensor first, pipeline last, nodes filled in order."""
    replicas = layout.dp * layout.cp
    axes = {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "ep": (layout.ep, layout.tp),
        "dp": (layout.dp, layout.tp * layout.cp),
        "pp": (layout.pp, layout.tp * replicas),
    }
    groups = []
    for axis, (size, stride) in axes.items():
        per_node = min(max(hardware.scale_up_domain // stride, 1), size)
        nodes = -(-size // per_node)
        crossing = _crossing(layout, hardware, size, stride)
        if size == 1:
            tier = 0
        elif nodes == 1:
            tier = 1
        else:
            tier = 4 if crossing else 2
        groups.append(
            GroupPlace(
                axis=axis,
                size=size,
                stride=stride,
                count=layout.gpus // size,
                per_node=per_node,
                nodes=nodes,
                tier=TIERS[tier],
                crossing=crossing,
                example=tuple(range(0, size * stride, stride))[:8],
            )
        )
    return Placement(
        order=ORDER, groups=tuple(groups), nodes=-(-layout.gpus // hardware.gpus_per_node)
    )

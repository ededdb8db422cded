"""Collectives and transfers over NVLink, rail, leaf, spine and pod crossing, as α + bytes / β.

Ranks are laid from the inside out: tensor, context, data (experts within it), pipeline. A group
of ``size`` ranks ``stride`` apart fills ``members`` GPUs of a node before it leaves it; its data
then crosses ``nodes`` over as many NICs as it has members there, each on its own rail. Inside
a node the bytes run over NVLink at the same time, so the slower of the two counts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.calibration import Calibration
from kansoku.plan.hardware import Hardware

__all__ = ["TIERS", "Group", "Network"]

Array = NDArray[np.float64]

TIERS = ("single", "nvlink", "leaf", "spine", "pod_crossing")
SWITCH_S = 0.8e-6
"""One switch hop, store to forward, of a 400 GbE or NDR switch (vendors state 0.4-0.9 µs)."""
SWITCHES = (0, 0, 1, 3, 3)
"""Switches on a path of each tier: leaf; leaf-spine-leaf."""
SCALE_UP_CALL_S = 10e-6
"""A small collective of eight GPUs over NVSwitch (nccl-tests, latency end of the sweep)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Where a kind of process group lies, one value a layout."""

    size: NDArray[np.int64]
    members: NDArray[np.int64]
    """Ranks of the group in one scale-up domain."""
    nodes: NDArray[np.int64]
    """Scale-up domains that the group spans."""
    tier: NDArray[np.int64]
    """Index into TIERS of the widest path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Transfer times on one machine."""

    hardware: Hardware
    calibration: Calibration
    nic: float
    """Line rate per GPU and direction, byte/s."""

    def group(self, size: NDArray[np.int64], stride: NDArray[np.int64]) -> Group:
        """Place a group of ``size`` ranks, ``stride`` apart."""
        domain = self.hardware.scale_up_domain
        members = np.clip(domain // stride, 1, size)
        nodes = -(-size // members)
        extent = (size - 1) * stride + 1
        leaf = 2
        tier = np.where(size == 1, 0, np.where(nodes == 1, 1, leaf))
        if self.hardware.pod_gpus is not None:
            tier = np.where((nodes > 1) & (extent > self.hardware.pod_gpus), 4, tier)
        return Group(size=size, members=members, nodes=nodes, tier=tier)

    def _rates(self, group: Group) -> tuple[float, Array]:
        inside = self.hardware.one_way_scale_up * self.calibration.scale_up_efficiency
        outside = np.full(len(group.size), self.nic * self.calibration.scale_out_efficiency)
        thinner = np.where(group.tier >= 3, self.hardware.oversubscription, 1.0)
        return inside, outside / thinner

    def latency(self, group: Group) -> Array:
        """One step of a collective between the group's nodes, seconds."""
        switches = np.array(SWITCHES)[group.tier] * SWITCH_S
        return np.where(group.nodes > 1, self.calibration.hop_latency_s + switches, 0.0)

    def gather(self, group: Group, whole: Array, *, calls: Array | float = 1.0) -> Array:
        """All-gather or reduce-scatter of ``whole`` bytes (the full tensor), seconds."""
        inside, outside = self._rates(group)
        size, nodes = group.size, group.nodes
        out = whole * (nodes - 1) / nodes / group.members / outside
        within = whole * (size - 1) / size / inside * (group.members > 1)
        start = SCALE_UP_CALL_S * (group.members > 1) + (nodes - 1) * self.latency(group)
        return np.asarray(np.maximum(out, within) + calls * start * (size > 1))

    def exchange(self, group: Group, sent: Array) -> Array:
        """All-to-all in which every rank sends ``sent`` bytes in all, seconds."""
        inside, outside = self._rates(group)
        size, members = group.size, group.members
        out = sent * (size - members) / size / outside
        within = sent * (members - 1) / size / inside
        start = SCALE_UP_CALL_S + (group.nodes - 1) * self.latency(group)
        return np.asarray(np.maximum(out, within) + start * (size > 1)) * (size > 1)

    def send(self, group: Group, size: Array) -> Array:
        """Send ``size`` bytes to the next rank of the group, seconds."""
        inside, outside = self._rates(group)
        # The slowest neighbour pair counts: one of them leaves the node unless all are inside.
        rate = np.where(group.nodes > 1, outside, inside)
        start = np.where(group.nodes > 1, self.latency(group), SCALE_UP_CALL_S)
        return np.asarray((size / rate + start) * (group.size > 1))

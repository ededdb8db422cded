"""RNICs, hosts, ToRs and rails of a cluster as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kansoku.catalog.cluster import Cluster, Fabric
from kansoku.errors import ConfigurationError

__all__ = ["Topology", "topology_of"]

Ints = npt.NDArray[np.int32]
_TIERS = ("leaf", "spine")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Who hangs where; an RNIC is an index into ``rnics``."""

    rnics: tuple[str, ...]
    """``NODE/DEV``."""
    hosts: tuple[str, ...]
    tors: tuple[str, ...]
    spines: tuple[str, ...]
    rnic_host: Ints
    """``(rnics,)`` index into hosts."""
    rnic_tor: Ints
    """``(rnics,)`` index into tors."""
    parallel_paths: int
    """Equal paths between two ToRs."""
    rail_optimised: bool
    tor_rail: Ints
    """``(tors,)`` rail of each ToR, -1 where it serves all."""

    @cached_property
    def index(self) -> dict[str, int]:
        """RNIC name to index."""
        return {name: number for number, name in enumerate(self.rnics)}

    @cached_property
    def by_tor(self) -> tuple[Ints, Ints]:
        """RNIC indices sorted by ToR, and the offset of each ToR in them, ``(tors + 1,)``."""
        order = np.argsort(self.rnic_tor, kind="stable").astype(np.int32)
        counts = np.bincount(self.rnic_tor, minlength=len(self.tors))
        return order, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def topology_of(cluster: Cluster) -> Topology:
    """Return the fabric of a cluster file.

    Raises ConfigurationError where it has none, or contradicts itself.
    """
    if cluster.fabric is None or not cluster.fabric.leaves:
        raise ConfigurationError(
            f"cluster {cluster.name} has no fabric with leaf switches",
            remedy="add [fabric] and [[fabric.switch]] to the cluster file",
        )
    _check(cluster, cluster.fabric)
    leaves = {leaf.name: number for number, leaf in enumerate(cluster.fabric.leaves)}
    leaf_by_place = {(leaf.pod, leaf.rail): leaf.name for leaf in cluster.fabric.leaves}
    rnics: list[str] = []
    hosts: list[str] = []
    rnic_host: list[int] = []
    rnic_tor: list[int] = []
    for node in cluster.nodes:
        for nic in node.kind.fabric_nics:
            leaf = leaf_by_place.get((node.pod, nic.rail)) or leaf_by_place.get((node.pod, None))
            if leaf is None:
                leaf = cluster.leaf_of(node.name, nic).name
            if not hosts or hosts[-1] != node.name:
                hosts.append(node.name)
            rnics.append(f"{node.name}/{nic.device}")
            rnic_host.append(len(hosts) - 1)
            rnic_tor.append(leaves[leaf])
    if twice := _twice(rnics):
        raise _wrong(cluster, f"{twice} is listed twice: give each NIC a device of its own")
    if not rnics:
        raise _wrong(cluster, 'no NIC has role = "fabric", so there is nothing to probe')
    return Topology(
        rnics=tuple(rnics),
        hosts=tuple(hosts),
        tors=tuple(leaves),
        spines=tuple(spine.name for spine in cluster.fabric.spines),
        rnic_host=np.array(rnic_host, dtype=np.int32),
        rnic_tor=np.array(rnic_tor, dtype=np.int32),
        parallel_paths=max(len(cluster.fabric.spines), 1),
        rail_optimised=cluster.fabric.rail_optimised,
        tor_rail=np.array(
            [-1 if leaf.rail is None else leaf.rail for leaf in cluster.fabric.leaves],
            dtype=np.int32,
        ),
    )


def _check(cluster: Cluster, fabric: Fabric) -> None:
    """Raise ConfigurationError for switches of which no topology can be made."""
    if twice := _twice([switch.name for switch in fabric.switches]):
        raise _wrong(cluster, f"switch {twice} is listed twice")
    for switch in fabric.switches:
        if switch.tier not in _TIERS:
            raise _wrong(
                cluster, f"switch {switch.name}: tier {switch.tier!r} is not leaf or spine"
            )
    # A cluster that was read from TOML holds whatever stood there.
    if not isinstance(fabric.rail_optimised, bool):
        raise _wrong(cluster, f"rail_optimised = {fabric.rail_optimised!r} is not true or false")
    pods = [("node", node.name, node.pod) for node in cluster.nodes]
    pods += [("switch", leaf.name, leaf.pod) for leaf in fabric.leaves]
    for what, name, pod in pods:
        if pod is not None and not isinstance(pod, str):
            raise _wrong(cluster, f"{what} {name}: pod {pod!r} is no name")
    places = [f"pod {leaf.pod}, rail {leaf.rail}" for leaf in fabric.leaves]
    if twice := _twice(places):
        raise _wrong(cluster, f"two leaves serve {twice}: which of them has its NICs?")


def _twice(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _wrong(cluster: Cluster, what: str) -> ConfigurationError:
    return ConfigurationError(f"cluster {cluster.name}: {what}", remedy="see docs/cluster-file.md")

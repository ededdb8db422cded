"""The cluster file: nodes, GPUs, NICs, rails, leaves, spines, storage, stores.

One TOML file that the planner, the fabric prober, job history, deployment and the views read.
What is unknown is absent, never zero. :doc:`docs/cluster-file.md` describes every key.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from ClusterShell.NodeSet import NodeSet, NodeSetParseError

from kansoku.catalog.accelerators import Accelerator, accelerator
from kansoku.errors import ConfigurationError, InputError

__all__ = [
    "Cluster",
    "Fabric",
    "Nic",
    "Node",
    "NodeKind",
    "Storage",
    "Switch",
    "load_cluster",
    "shipped_clusters",
]

_MOST_HOSTS = 1_000_000
"""Hosts of one host list; a typing error such as ``c[1-999999999]`` would fill the memory."""
_MOST = 1e12
"""Bound of every number in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network port of a node kind."""

    device: str
    """Device name, such as ``mlx5_0``."""
    role: str
    """``fabric`` (GPU to GPU), ``storage`` or ``management``."""
    line_rate_bits_per_s: float | None
    gpu: int | None
    """Index of the GPU under the same PCIe switch."""
    rail: int | None
    interface: str | None = None
    """Network interface name, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """What a node is made of."""

    name: str
    gpu: str | None
    """Accelerator name of the catalogue; None for nodes without GPUs or with unknown ones."""
    gpus: int | None
    cpu: str | None
    cpu_cores: int | None
    memory_bytes: int | None
    nics: tuple[Nic, ...]

    def accelerator(self) -> Accelerator:
        """Return the catalogue's entry of the GPU; raise ConfigurationError where unknown."""
        if self.gpu is None:
            raise ConfigurationError(f"node kind {self.name}: the kind of GPU is unknown")
        return accelerator(self.gpu)

    @property
    def fabric_nics(self) -> tuple[Nic, ...]:
        """The NICs that carry GPU traffic, in rail order."""
        found = [nic for nic in self.nics if nic.role == "fabric"]
        return tuple(sorted(found, key=lambda nic: -1 if nic.rail is None else nic.rail))


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of the cluster."""

    name: str
    kind: NodeKind
    pod: str | None
    reserved: bool
    """Kept free to replace a failed node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One switch of the GPU fabric."""

    name: str
    tier: str
    """``leaf`` (ToR) or ``spine``."""
    pod: str | None
    rail: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The leaf-spine fabric."""

    protocol: str
    """``rocev2``, ``infiniband`` or ``ethernet``."""
    rail_optimised: bool
    """The NIC of rail r in pod p hangs on leaf (p, r); else a node's NICs share one leaf."""
    link_rate_bits_per_s: float | None
    oversubscription: float | None
    """Leaf down-link over up-link capacity; 1 is full bisection."""
    switches: tuple[Switch, ...]

    @property
    def leaves(self) -> tuple[Switch, ...]:
        """The leaf (ToR) switches."""
        return tuple(s for s in self.switches if s.tier == "leaf")

    @property
    def spines(self) -> tuple[Switch, ...]:
        """The spine switches."""
        return tuple(s for s in self.switches if s.tier == "spine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One shared file system."""

    name: str
    kind: str
    """``lustre``, ``nfs`` …"""
    mount: str | None
    capacity_bytes: int | None
    bandwidth_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A whole cluster, as its file describes it."""

    name: str
    title: str
    slurm_cluster: str | None
    nodes: tuple[Node, ...]
    fabric: Fabric | None
    storage: tuple[Storage, ...]
    stores: Mapping[str, str]
    """Back end name (``metrics``, ``logs``, ``traces``, ``profiles``, ``grafana``, ``otlp``,
    ``kansoku``) to address."""
    source: str
    unknown: tuple[str, ...]
    """Sentences: what the file's author could not find out."""

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def node(self, name: str) -> Node:
        """Return a node by name; raise ConfigurationError if there is none."""
        try:
            return self._by_name[name]
        except KeyError:
            raise ConfigurationError(f"cluster {self.name} has no node {name!r}") from None

    def leaf_of(self, node: str, nic: Nic) -> Switch:
        """Return the leaf switch that a fabric NIC of a node hangs on."""
        pod = self.node(node).pod
        for leaf in self.fabric.leaves if self.fabric else ():
            same_rail = leaf.rail == nic.rail or leaf.rail is None
            if leaf.pod == pod and same_rail:
                return leaf
        raise ConfigurationError(f"cluster {self.name}: no leaf for {node}/{nic.device}")


def shipped_clusters() -> dict[str, Path]:
    """Return name and file of every cluster that comes with kansoku."""
    folder = Path(str(resources.files("kansoku.catalog") / "clusters"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_cluster(file_or_name: str | Path) -> Cluster:
    """Read a cluster file, or a shipped one by name.

    Raises ConfigurationError naming file, key and remedy for anything wrong or unknown.
    """
    path = Path(file_or_name)
    shipped = shipped_clusters()
    if not path.exists() and str(file_or_name) in shipped:
        path = shipped[str(file_or_name)]
    elif not path.exists():
        # The short name, "sakuraone", as long as it means one of them only.
        longer = [name for name in shipped if name.startswith(f"{file_or_name}-")]
        path = shipped[longer[0]] if len(longer) == 1 else path
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            "no such cluster file",
            where=str(file_or_name),
            remedy=f"give a TOML file or one of {', '.join(shipped)}",
        ) from None
    except OSError as error:
        raise ConfigurationError(
            error.strerror or str(error),
            where=str(path),
            remedy=f"give a TOML file or one of {', '.join(shipped)}",
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(
            f"not a TOML file: {error}", where=str(path), remedy="see docs/cluster-file.md"
        ) from None
    return _Reader(str(path)).cluster(data)


class _Reader:
    """Turn the parsed TOML into records, naming the key in every complaint."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _fail(self, message: str) -> ConfigurationError:
        return ConfigurationError(message, where=self._where, remedy="see docs/cluster-file.md")

    def _check(self, table: object, name: str, known: set[str], needed: set[str]) -> dict[str, Any]:
        if not isinstance(table, dict):
            raise self._fail(f"{name} must be a table, not {type(table).__name__}")
        if unknown := set(table) - known:
            raise self._fail(
                f"{name}: unknown key {', '.join(sorted(unknown))}; "
                f"known: {', '.join(sorted(known))}"
            )
        if missing := needed - set(table):
            raise self._fail(f"{name}: missing key {', '.join(sorted(missing))}")
        return table

    def _hosts(self, text: object, name: str) -> list[str]:
        if not isinstance(text, str):
            raise self._fail(f"{name} must be a host list such as 'c[001-100]'")
        pairs = re.findall(r"(\d+)-(\d+)", text)
        if any(len(high) > 18 or int(high) - int(low) >= _MOST_HOSTS for low, high in pairs):
            raise self._fail(f"{name}: {text!r} is more than {_MOST_HOSTS:,} hosts")
        try:
            return list(NodeSet(text, resolver=None))
        except NodeSetParseError as error:
            raise self._fail(f"{name}: {error}") from None

    def _number(
        self, table: Mapping[str, Any], key: str, name: str, *, least: float = 0.0
    ) -> float | None:
        """Return a finite number above ``least``, or None where the key is absent."""
        value = table.get(key)
        if value is None:
            return None
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not math.isfinite(value) or not least < value < _MOST:
            raise self._fail(
                f"{name}: {key} must be a number above {least:g}, not {value!r}; leave it out "
                "where it is unknown"
            )
        return float(value)

    def _whole(
        self, table: Mapping[str, Any], key: str, name: str, *, least: int = 1
    ) -> int | None:
        """Return a whole number of at least ``least``, or None where the key is absent."""
        value = table.get(key)
        if value is None:
            return None
        right = isinstance(value, int) and not isinstance(value, bool)
        if not right or not least <= value < _MOST:
            raise self._fail(
                f"{name}: {key} must be a whole number of at least {least}, not {value!r}; leave "
                "it out where it is unknown"
            )
        return int(value)

    def cluster(self, data: dict[str, Any]) -> Cluster:
        top = self._check(
            data,
            "the file",
            {"name", "title", "slurm_cluster", "source", "unknown", "node_kind", "nodes",
             "fabric", "storage", "stores", "reserved"},
            {"name", "nodes", "node_kind", "source"},
        )  # fmt: skip
        kinds = {name: self._kind(name, row) for name, row in top["node_kind"].items()}
        reserved = set(self._hosts(top.get("reserved", ""), "reserved"))
        nodes = self._nodes(top["nodes"], kinds, reserved)
        if strangers := reserved - {node.name for node in nodes}:
            raise self._fail(f"reserved: no such node {', '.join(sorted(strangers))}")
        return Cluster(
            name=top["name"],
            title=top.get("title", top["name"]),
            slurm_cluster=top.get("slurm_cluster"),
            nodes=nodes,
            fabric=self._fabric(top["fabric"]) if "fabric" in top else None,
            storage=tuple(self._storage(row) for row in top.get("storage", [])),
            stores=dict(top.get("stores", {})),
            source=top["source"],
            unknown=tuple(top.get("unknown", ())),
        )

    def _kind(self, name: str, row: object) -> NodeKind:
        known = {"gpu", "gpus", "cpu", "cpu_cores", "memory_gib", "nic"}
        table = self._check(row, f"node_kind.{name}", known, set())
        gpu, where = table.get("gpu"), f"node_kind.{name}"
        if gpu is not None and not isinstance(gpu, str):
            raise self._fail(f"{where}: gpu must be a name of the catalogue, not {gpu!r}")
        try:
            kind = None if gpu is None else accelerator(gpu).name
        except InputError as error:
            raise self._fail(f"{where}: {error}") from None
        memory = self._number(table, "memory_gib", where)
        return NodeKind(
            name=name,
            gpu=kind,
            gpus=self._whole(table, "gpus", where, least=0),
            cpu=table.get("cpu"),
            cpu_cores=self._whole(table, "cpu_cores", where),
            memory_bytes=None if memory is None else int(memory * 2**30),
            nics=tuple(self._nic(name, nic) for nic in table.get("nic", [])),
        )

    def _nic(self, kind: str, row: object) -> Nic:
        name = f"node_kind.{kind}.nic"
        known = {"device", "role", "line_rate_gbps", "gpu", "rail", "interface"}
        table = self._check(row, name, known, {"device", "role"})
        if table["role"] not in {"fabric", "storage", "management"}:
            raise self._fail(f"{name}: role {table['role']!r} is not fabric, storage or management")
        rate = self._number(table, "line_rate_gbps", name)
        return Nic(
            device=table["device"],
            role=table["role"],
            line_rate_bits_per_s=None if rate is None else rate * 1e9,
            gpu=self._whole(table, "gpu", name, least=0),
            rail=self._whole(table, "rail", name, least=0),
            interface=table.get("interface"),
        )

    def _nodes(
        self, rows: object, kinds: dict[str, NodeKind], reserved: set[str]
    ) -> tuple[Node, ...]:
        if not isinstance(rows, list):
            raise self._fail("nodes must be an array of tables: [[nodes]]")
        nodes: dict[str, Node] = {}
        for row in rows:
            table = self._check(row, "nodes", {"names", "kind", "pod"}, {"names", "kind"})
            if table["kind"] not in kinds:
                raise self._fail(f"nodes: kind {table['kind']!r} is not among {', '.join(kinds)}")
            for name in self._hosts(table["names"], "nodes.names"):
                if name in nodes:
                    raise self._fail(f"nodes: {name} is listed twice")
                nodes[name] = Node(
                    name=name,
                    kind=kinds[table["kind"]],
                    pod=table.get("pod"),
                    reserved=name in reserved,
                )
        return tuple(nodes.values())

    def _fabric(self, row: object) -> Fabric:
        known = {"protocol", "rail_optimised", "link_rate_gbps", "oversubscription", "switch"}
        table = self._check(row, "fabric", known, {"protocol", "rail_optimised"})
        switches = []
        for entry in table.get("switch", []):
            line = self._check(
                entry, "fabric.switch", {"names", "tier", "pod", "rails"}, {"names", "tier"}
            )
            names = self._hosts(line["names"], "fabric.switch.names")
            rails = line.get("rails") or [None] * len(names)
            if len(rails) != len(names):
                raise self._fail(f"fabric.switch: {len(names)} names but {len(rails)} rails")
            switches += [
                Switch(name=name, tier=line["tier"], pod=line.get("pod"), rail=rail)
                for name, rail in zip(names, rails, strict=True)
            ]
        rate = self._number(table, "link_rate_gbps", "fabric")
        return Fabric(
            protocol=table["protocol"],
            rail_optimised=table["rail_optimised"],
            link_rate_bits_per_s=None if rate is None else rate * 1e9,
            oversubscription=self._number(table, "oversubscription", "fabric"),
            switches=tuple(switches),
        )

    def _storage(self, row: object) -> Storage:
        known = {"name", "kind", "mount", "capacity_tb", "bandwidth_gb_per_s"}
        table = self._check(row, "storage", known, {"name", "kind"})
        capacity = self._number(table, "capacity_tb", "storage")
        bandwidth = self._number(table, "bandwidth_gb_per_s", "storage")
        return Storage(
            name=table["name"],
            kind=table["kind"],
            mount=table.get("mount"),
            capacity_bytes=None if capacity is None else int(capacity * 1e12),
            bandwidth_bytes_per_s=None if bandwidth is None else bandwidth * 1e9,
        )

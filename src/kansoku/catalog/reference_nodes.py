"""Reference nodes: the maker's own node of each kind of GPU, each with its source."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from kansoku.catalog.accelerators import accelerator
from kansoku.errors import ConfigurationError

__all__ = ["ReferenceNode", "reference_node", "reference_nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceNode:
    """What is published about one node type; None is unknown."""

    gpu: str
    """Accelerator name of the catalogue."""
    title: str
    gpus: int
    scale_up_domain: int
    """GPUs joined by NVLink and the like."""
    nic_bits_per_s_per_gpu: float | None
    usable_memory_bytes: int | None
    """Total memory of one GPU as its driver reports it."""
    gpu_power_watts: float | None
    """Limit of one GPU."""
    power_watts: float | None
    """Stated maximum of the whole node."""
    source: str


@cache
def reference_nodes() -> dict[str, ReferenceNode]:
    """Return every reference node by accelerator name."""
    text = (resources.files("kansoku.catalog") / "data" / "reference_nodes.toml").read_text("utf-8")
    return {
        name: ReferenceNode(
            gpu=accelerator(name).name,
            title=row["title"],
            gpus=row["gpus"],
            scale_up_domain=row["scale_up_domain"],
            nic_bits_per_s_per_gpu=row["nic_gbps_per_gpu"] * 1e9
            if "nic_gbps_per_gpu" in row
            else None,
            usable_memory_bytes=row["usable_mib"] * 2**20 if "usable_mib" in row else None,
            gpu_power_watts=row.get("gpu_power_watts"),
            power_watts=row.get("power_watts"),
            source=row["source"],
        )
        for name, row in tomllib.loads(text).items()
    }


def reference_node(gpu: str) -> ReferenceNode:
    """Return the reference node of a GPU by any of its names; raise where none is published."""
    name = accelerator(gpu).name
    try:
        return reference_nodes()[name]
    except KeyError:
        raise ConfigurationError(
            f"no reference node of {name} is known", remedy="give a cluster file with --cluster"
        ) from None

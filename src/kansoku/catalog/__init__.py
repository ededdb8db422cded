"""Sourced data tables: accelerators, clusters, and what other parts add.

Every number has a source; unknown keys raise, nothing is guessed.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kansoku.catalog.accelerators import Accelerator, accelerator, accelerators

if TYPE_CHECKING:
    from kansoku.catalog.cluster import (
        Cluster,
        Fabric,
        Nic,
        Node,
        NodeKind,
        Storage,
        Switch,
        load_cluster,
        shipped_clusters,
    )

__all__ = [
    "Accelerator",
    "Cluster",
    "Fabric",
    "Nic",
    "Node",
    "NodeKind",
    "Storage",
    "Switch",
    "accelerator",
    "accelerators",
    "load_cluster",
    "shipped_clusters",
]


def __getattr__(name: str) -> Any:
    """Load the cluster file's reader when it is used: readers of traces need none (15 ms)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("kansoku.catalog.cluster"), name)

"""Sourced data tables: accelerators, clusters, and what other parts add.

Every number has a source; unknown keys raise, nothing is guessed.
"""

from kansoku.catalog.accelerators import Accelerator, accelerator, accelerators
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

"""Which leaf every NIC hangs on: by the cluster file that is named, or lies in the folder."""

from pathlib import Path

from kansoku.catalog.cluster import Cluster, load_cluster
from kansoku.diagnose.leaves import LeafMap
from kansoku.errors import ConfigurationError

__all__ = ["cluster_of", "leaf_map"]


def cluster_of(folder: Path | None, named: str | None) -> Cluster | None:
    """Return the cluster that was named, else the one whose file lies in the folder, else None.

    Raise ConfigurationError where the named one cannot be read.
    """
    if named is not None:
        return load_cluster(named)
    if folder is None or not folder.is_dir():
        return None
    for path in sorted(folder.glob("*.toml")):
        try:
            return load_cluster(path)
        except ConfigurationError:
            continue  # some other program's file
    return None


def leaf_map(cluster: Cluster | None) -> LeafMap:
    """Return the leaf of every fabric NIC, by the names of its device and of its interface."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    if cluster is None or cluster.fabric is None:
        return found
    for node in cluster.nodes:
        for nic in node.kind.fabric_nics:
            try:
                leaf = cluster.leaf_of(node.name, nic).name
            except ConfigurationError:
                continue  # a part of the fabric that the file does not know
            for name in {nic.device, nic.interface} - {None}:
                found[node.name, str(name)] = leaf, nic.device
    return found

"""The plug-in point of the node agent: a collector.

A collector is a class in a file of its own, named in the entry-point group
``kansoku.collectors``; the built-in ones stand in :data:`BUILT_IN` and work the same way::

    class Weather(Collector):
        name = "weather"
        title = "Temperature outside"
        metrics = ("hw.temperature",)

        def absent(self, host):
            return None if host.read("/dev/weather") else "no /dev/weather"

        def collect(self, host):
            yield Sample("hw.temperature", labels(("hw.id", "outside")), 21.0)
"""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from kansoku.errors import ConfigurationError
from kansoku.node.host import Host
from kansoku.node.sample import Event, Sample

__all__ = ["BUILT_IN", "Collector", "load_collectors"]

_SIGNATURE = (
    "class X(Collector) with name, title, metrics, absent(self, host) -> str | None and "
    "collect(self, host) -> Iterable[Sample | Event]"
)


class Collector(ABC):
    """Reads one part of the machine."""

    name: ClassVar[str]
    """One word, as ``--only`` takes it."""
    title: ClassVar[str]
    """What it reads, for people."""
    metrics: ClassVar[tuple[str, ...]]
    """Catalogue names of everything it may return."""
    interval_s: ClassVar[float] = 0.0
    """Not oftener than this; 0 is every round."""

    @abstractmethod
    def absent(self, host: Host) -> str | None:
        """Return why this machine has nothing to read, in a few words; None where it has."""

    @abstractmethod
    def collect(self, host: Host) -> Iterable[Sample | Event]:
        """Return what there is now; an exception costs this round of this collector only."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what is held."""


_FOLDER = "kansoku.node.collectors"
BUILT_IN: Mapping[str, str] = {
    "cpu": f"{_FOLDER}.cpu:Cpu",
    "memory": f"{_FOLDER}.memory:Memory",
    "pressure": f"{_FOLDER}.pressure:Pressure",
    "numa": f"{_FOLDER}.numa:Numa",
    "disk": f"{_FOLDER}.disk:Disks",
    "filesystem": f"{_FOLDER}.filesystem:Filesystems",
    "network": f"{_FOLDER}.network:Network",
    "energy": f"{_FOLDER}.energy:CpuEnergy",
    "ethtool": f"{_FOLDER}.ethtool:Ethtool",
    "rdma": f"{_FOLDER}.rdma:Rdma",
    "nvml": f"{_FOLDER}.nvml:Nvml",
    "dcgm": f"{_FOLDER}.dcgm:Dcgm",
    "lustre": f"{_FOLDER}.lustre:Lustre",
    "nfs": f"{_FOLDER}.nfs:Nfs",
    "kernel_log": f"{_FOLDER}.kernel_log:KernelLog",
    "slurm": f"{_FOLDER}.slurm:Slurm",
    "logins": f"{_FOLDER}.logins:Logins",
    "switches": f"{_FOLDER}.switches:Switches",
}


def _load(name: str, target: str, settings: Mapping[str, Any]) -> Collector:
    module, _, attribute = target.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"collector {name} cannot be loaded from {target}: {error}",
            remedy=f"expected {_SIGNATURE}",
        ) from error
    if not (inspect.isclass(kind) and issubclass(kind, Collector)) or inspect.isabstract(kind):
        raise ConfigurationError(
            f"collector {name} ({target}) is not a complete Collector",
            remedy=f"expected {_SIGNATURE}",
        )
    # Here, not above: the node guard imports this package before every job and has no need of it.
    from kansoku.catalog.metrics import metrics as known_metrics

    unknown = sorted(set(kind.metrics) - set(known_metrics()))
    if unknown:
        raise ConfigurationError(
            f"collector {name} ({target}) returns metrics the catalogue does not have: "
            f"{', '.join(unknown)}",
            remedy="declare them in catalog/data/metrics.csv",
        )
    wanted = inspect.signature(kind).parameters
    collector: Collector = kind(**{k: v for k, v in settings.items() if k in wanted})
    return collector


def load_collectors(
    only: Iterable[str] = (), *, settings: Mapping[str, Any] | None = None
) -> list[Collector]:
    """Make the collectors named, or all; ``settings`` go to those whose constructor takes them.

    Raises ConfigurationError naming the plug-in and what was expected of it.
    """
    from importlib.metadata import entry_points

    targets = dict(BUILT_IN)
    targets.update({e.name: e.value for e in entry_points(group="kansoku.collectors")})
    names = list(only) or list(targets)
    unknown = [name for name in names if name not in targets]
    if unknown:
        raise ConfigurationError(
            f"no collector {', '.join(unknown)}", remedy=f"known: {', '.join(targets)}"
        )
    return [_load(name, targets[name], settings or {}) for name in names]

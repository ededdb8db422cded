"""Hardware of a plan: GPU, node, scale-up domain, NICs, pods; unknown figures are refused."""

from collections import Counter
from dataclasses import dataclass, replace

from kansoku.catalog.accelerators import Accelerator, accelerator
from kansoku.catalog.calibration import Calibration, calibrations
from kansoku.catalog.cluster import Cluster
from kansoku.catalog.reference_nodes import reference_node, reference_nodes
from kansoku.errors import ConfigurationError, InputError

__all__ = ["Hardware", "cluster_hardware", "generic_hardware"]


MOST_GPUS = 1_048_576
"""No machine is larger; bounds the work of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine a job would run on; None is unknown."""

    name: str
    accelerator: Accelerator
    calibration: Calibration | None
    gpus: int
    """GPUs there are."""
    gpus_per_node: int
    scale_up_domain: int
    """GPUs joined by NVLink and the like."""
    nic_bytes_per_s: float | None
    """Line rate of the fabric per GPU and direction."""
    memory_bytes: int
    """Usable memory of one GPU."""
    pod_gpus: int | None = None
    """GPUs of a pod; None without pods."""
    oversubscription: float = 1.0
    storage_bytes_per_s: float | None = None
    gpu_power_watts: float | None = None
    node_power_watts: float | None = None
    source: str
    notes: tuple[str, ...] = ()

    @property
    def one_way_scale_up(self) -> float:
        """NVLink rate per GPU in one direction, byte/s."""
        return self.accelerator.scale_up_bytes_per_s / 2

    def with_links(
        self,
        *,
        scale_up: tuple[float, float] | None = None,
        scale_out: tuple[float, float] | None = None,
    ) -> "Hardware":
        """Return the same hardware with measured links: (latency in s, byte/s of one GPU).

        ``scale_up`` is NVLink, whose latency is part of every call; ``scale_out`` the fabric, whose
        latency is that of one hop.
        """
        calibration = self.need_calibration()
        source = calibration.source
        if scale_up is not None:
            calibration = replace(
                calibration, scale_up_efficiency=scale_up[1] / self.one_way_scale_up
            )
            source += "; scale-up rate measured"
        if scale_out is not None:
            rate = self.need_network(self.scale_up_domain + 1)
            calibration = replace(
                calibration,
                scale_out_efficiency=scale_out[1] / rate,
                hop_latency_s=scale_out[0],
            )
            source += "; fabric latency and rate measured"
        for name in ("scale_up_efficiency", "scale_out_efficiency"):
            if not 0 < getattr(calibration, name) <= 1:
                raise InputError(
                    f"a measured link is {getattr(calibration, name):.2f} of the line rate of "
                    f"{self.name}",
                    remedy="measured elsewhere, or not per GPU?",
                )
        return replace(self, calibration=replace(calibration, source=source))

    def need_calibration(self) -> Calibration:
        """Return the calibration; refuse where nothing was measured."""
        if self.calibration is None:
            known = ", ".join(calibrations())
            raise ConfigurationError(
                f"no measured point of {self.accelerator.title} is known, so its step time is not "
                "predicted",
                remedy=f"calibrated: {known}; plan memory and plan flops need none",
            )
        return self.calibration

    def need_network(self, gpus: int) -> float:
        """Return the fabric's rate per GPU, byte/s; refuse where it matters and is unknown."""
        if self.nic_bytes_per_s is None:
            if gpus <= self.scale_up_domain:
                # Never used: the whole job stays inside one scale-up domain.
                return self.one_way_scale_up
            raise ConfigurationError(
                f"{self.name}: the fabric's rate per GPU is unknown, so {gpus} GPUs cannot be "
                "planned",
                remedy="fill in node_kind.*.nic with line_rate_gbps in the cluster file",
            )
        return self.nic_bytes_per_s

    def with_gpus(self, gpus: int) -> "Hardware":
        """Return the same hardware for a job of ``gpus``; refuse more than there are."""
        if gpus > self.gpus:
            raise InputError(
                f"{self.name} has {self.gpus} GPUs, {gpus} are asked for",
                remedy=f"--gpus of at most {self.gpus}",
            )
        return replace(self, gpus=gpus)


def _usable(name: str, fallback: int) -> tuple[int, tuple[str, ...]]:
    node = reference_nodes().get(name)
    if node is not None and node.usable_memory_bytes is not None:
        return node.usable_memory_bytes, ()
    return fallback, (f"usable memory of {name}: the nominal figure of the catalogue",)


def generic_hardware(gpu: str, gpus: int) -> Hardware:
    """Return ``gpus`` GPUs on the maker's own nodes of that kind."""
    if not 1 <= gpus <= MOST_GPUS:
        raise InputError(f"--gpus must be 1 to {MOST_GPUS:,}, not {gpus}")
    kind, node = accelerator(gpu), reference_node(gpu)
    rate = node.nic_bits_per_s_per_gpu
    memory, notes = _usable(kind.name, kind.memory_bytes)
    return Hardware(
        name=f"{node.title} nodes",
        accelerator=kind,
        calibration=calibrations().get(kind.name),
        gpus=gpus,
        gpus_per_node=node.gpus,
        scale_up_domain=node.scale_up_domain,
        nic_bytes_per_s=None if rate is None else rate / 8,
        memory_bytes=memory,
        gpu_power_watts=node.gpu_power_watts,
        node_power_watts=node.power_watts,
        source=f"{kind.source}; {node.source}",
        notes=notes,
    )


def cluster_hardware(cluster: Cluster) -> Hardware:
    """Return the planner's view of a cluster file.

    All nodes with GPUs must be of one kind. Raises ConfigurationError naming what is unknown.
    """
    kinds = {node.kind.name: node.kind for node in cluster.nodes if node.kind.gpu}
    if len(kinds) != 1:
        raise ConfigurationError(
            f"cluster {cluster.name} has {len(kinds)} kinds of GPU nodes; a plan needs one",
            remedy="give a cluster file with the nodes of one kind",
        )
    (kind,) = kinds.values()
    if not kind.gpus:
        raise ConfigurationError(
            f"cluster {cluster.name}: GPUs a node of kind {kind.name} is unknown",
            remedy=f"fill in node_kind.{kind.name}.gpus, or plan with --gpu {kind.gpu} --gpus N",
        )
    gpu = kind.accelerator()
    nodes = [node for node in cluster.nodes if node.kind is kind and not node.reserved]
    rates = [nic.line_rate_bits_per_s for nic in kind.fabric_nics]
    known = [rate for rate in rates if rate is not None]
    nic = sum(known) / 8 / kind.gpus if rates and len(known) == len(rates) else None
    pods = Counter(node.pod for node in nodes if node.pod is not None)
    reference = reference_nodes().get(gpu.name)
    memory, notes = _usable(gpu.name, gpu.memory_bytes)
    storage = [s.bandwidth_bytes_per_s for s in cluster.storage if s.bandwidth_bytes_per_s]
    oversubscription = cluster.fabric.oversubscription if cluster.fabric else None
    if oversubscription is None:
        notes += ("oversubscription is unknown: full bisection is assumed",)
    return Hardware(
        name=cluster.name,
        accelerator=gpu,
        calibration=calibrations().get(gpu.name),
        gpus=len(nodes) * kind.gpus,
        gpus_per_node=kind.gpus,
        scale_up_domain=kind.gpus,
        nic_bytes_per_s=nic,
        memory_bytes=memory,
        pod_gpus=min(pods.values()) * kind.gpus if pods else None,
        oversubscription=oversubscription or 1.0,
        storage_bytes_per_s=max(storage, default=None),
        gpu_power_watts=reference.gpu_power_watts if reference else None,
        # The node's power is a fact of its maker's node; another maker's is unknown.
        node_power_watts=None,
        source=cluster.source,
        notes=notes,
    )

"""Alert rules, in the form that vmalert and Prometheus share.

A rule says what is wrong, in which domain, and what to do; thresholds are the frozen policy.
"""

from dataclasses import dataclass

from kansoku.deploy.promql import promql

__all__ = ["AlertPolicy", "AlertRule", "alert_rules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertPolicy:
    """Thresholds of the shipped rules."""

    pause_ratio: float = 0.05
    """Share of time a port may be paused by PFC."""
    discards_per_s: float = 1.0
    """Packets a NIC may drop a second."""
    fabric_drop_ratio: float = 0.001
    """Probes that may be lost."""
    storage_ms: float = 100.0
    """Milliseconds that a Lustre operation may take in the mean."""
    full_ratio: float = 0.92
    """Fill of a file system."""
    idle_ratio: float = 0.05
    """GPU utilisation below which a held GPU counts as idle."""
    silent_s: float = 180.0
    """Seconds without a success after which a collector counts as silent."""
    memory_available_ratio: float = 0.03
    """Memory of a node that must stay available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """One rule."""

    name: str
    expression: str
    hold: str | None
    """How long it must hold: a Prometheus duration; None fires at once."""
    severity: str
    """``critical`` (work stops or is wrong), ``warning`` (work slows or soon stops), ``info``."""
    domain: str
    summary: str
    """With Go templates of the labels."""
    action: str


_UNCORRECTED = 'hw_type="gpu",error_type=~".*uncorrected.*"'
_GPU = "{{ $labels.host_name }}/{{ $labels.hw_name }}"
_NIC = "{{ $labels.host_name }}/{{ $labels.network_interface_name }}"


def alert_rules(policy: AlertPolicy | None = None) -> dict[str, tuple[AlertRule, ...]]:
    """Return the rules by group."""
    limits = policy or AlertPolicy()
    return {
        "kansoku-gpu": _gpu(limits),
        "kansoku-network": _network(limits),
        "kansoku-storage-and-host": _storage_and_host(limits),
        "kansoku-scheduler": _scheduler(),
        "kansoku-telemetry": _telemetry(limits),
    }


def _rule(
    name: str, expression: str, *, hold: str | None, says: tuple[str, str], text: tuple[str, str]
) -> AlertRule:
    severity, domain = says
    summary, action = text
    return AlertRule(
        name=name,
        expression=promql(expression),
        hold=hold,
        severity=severity,
        domain=domain,
        summary=summary,
        action=action,
    )


def _grown(metric: str, by: str, window: str, match: str = "") -> str:
    """Return growth that does not take a new series to have started at zero, as increase may."""
    one = f"{metric}{{{match}}}" if match else metric
    return f"sum by ({by}) ({one} - min_over_time({one}[{window}]))"


def _gpu(limits: AlertPolicy) -> tuple[AlertRule, ...]:
    gpu = "gpu_hardware"
    return (
        _rule(
            "GpuLost", "max by (host_name, hw_name) (%kansoku.gpu.lost) > 0", hold=None,
            says=("critical", gpu),
            text=(f"{_GPU}: the driver no longer reaches the GPU",
                  "drain the node; reboot or replace the GPU; see its Xid events"),
        ),
        _rule(
            "GpuMemoryErrors",
            _grown("%hw.errors", "host_name, hw_name", "10m", _UNCORRECTED) + " > 0",
            hold=None, says=("critical", gpu),
            text=(f"{_GPU}: uncorrected memory errors",
                  "expect the job to fail; drain after it and reset the GPU"),
        ),
        _rule(
            "GpuRowRemapPending",
            "max by (host_name, hw_name) (%kansoku.gpu.rows.pending) > 0", hold="5m",
            says=("warning", gpu),
            text=(f"{_GPU}: a row remap waits for a reset", "drain when idle and reset the GPU"),
        ),
        _rule(
            "GpuRowRemapFailed",
            "max by (host_name, hw_name) (%kansoku.gpu.rows.failed) > 0", hold=None,
            says=("critical", gpu),
            text=(f"{_GPU}: a memory row could not be replaced", "replace the GPU"),
        ),
        _rule(
            "GpuThrottled",
            'max by (host_name, hw_name, kansoku_gpu_reason) (%kansoku.gpu.throttle.active{kansoku_gpu_reason=~"hw_.*|sw_thermal.*"}) > 0',
            hold="5m", says=("warning", gpu),
            text=(f"{_GPU}: clocks are held down: {{{{ $labels.kansoku_gpu_reason }}}}",
                  "check cooling and power; a job of many nodes runs at this GPU's speed"),
        ),
        _rule(
            "GpuPcieDegraded",
            'max by (host_name, hw_name) (%kansoku.gpu.pcie.width{kansoku_limit="current"}) < max by (host_name, hw_name) (%kansoku.gpu.pcie.width{kansoku_limit="max"})',
            hold="15m", says=("warning", gpu),
            text=(f"{_GPU}: PCIe runs with fewer lanes than it has", "reseat or replace"),
        ),
        _rule(
            "NvlinkDown", "min by (host_name, hw_name) (%kansoku.gpu.nvlink.up) < 1", hold="2m",
            says=("critical", gpu),
            text=(f"{_GPU}: an NVLink is down", "drain the node; reset GPUs and fabric manager"),
        ),
        _rule(
            "GpuHeldButIdle",
            "(max by (host_name, hw_name, slurm_job_id, slurm_user) (%kansoku.slurm.job.gpu) * on (host_name, hw_name) group_left ()"
            f' max by (host_name, hw_name) (%hw.gpu.utilization{{hw_type="gpu",hw_gpu_task="general"}})) < {limits.idle_ratio:g}',
            hold="1h", says=("info", "application"),
            text=(f"{_GPU}: job {{{{ $labels.slurm_job_id }}}} holds it and does not use it",
                  "ask {{ $labels.slurm_user }}; kansoku jobs idle has the whole list"),
        ),
    )  # fmt: skip


def _network(limits: AlertPolicy) -> tuple[AlertRule, ...]:
    return (
        _rule(
            "NicDown", 'max by (host_name, hw_name) (%hw.network.up{hw_type="network"}) < 1',
            hold="1m", says=("critical", "network"),
            text=(f"{_GPU}: the port is down", "check cable and transceiver, then the switch port"),
        ),
        _rule(
            "NicFlapping",
            _grown("%kansoku.nic.link.downs", "host_name, network_interface_name", "15m") + " > 1",
            hold=None, says=("warning", "network"),
            text=(f"{_NIC}: the link went down more than once", "clean or replace the transceiver"),
        ),
        _rule(
            "PfcPaused",
            "max by (host_name, network_interface_name, network_io_direction) (rate(%kansoku.nic.pause.time[5m]))"
            f" > {limits.pause_ratio:g}",
            hold="2m", says=("warning", "network"),
            text=(f"{_NIC}: paused by PFC {{{{ $value | humanizePercentage }}}} of the time",
                  "received: congestion in the fabric; transmitted: this host is slow to receive"),
        ),
        _rule(
            "NicDiscards",
            "sum by (host_name, network_interface_name, kansoku_cause) (rate(%kansoku.nic.discards[5m]))"
            f" > {limits.discards_per_s:g}",
            hold="2m", says=("warning", "network"),
            text=(f"{_NIC}: drops packets: {{{{ $labels.kansoku_cause }}}}",
                  "RoCE must not lose packets: check PFC and DSCP settings on this path"),
        ),
        _rule(
            "FabricLoss", f"max by (kansoku_scope) (%kansoku.fabric.drop) > {limits.fabric_drop_ratio:g}",
            hold="1m", says=("critical", "network"),
            text=("{{ $value | humanizePercentage }} of the fabric's probes are lost",
                  "kansoku fabric status names the link or NIC"),
        ),
        _rule(
            "FabricFault", "max by (kansoku_kind) (%kansoku.fabric.anomalies) > 0", hold="1m",
            says=("warning", "network"),
            text=("the prober found a {{ $labels.kansoku_kind }} at fault",
                  "kansoku fabric status says which and why"),
        ),
        _rule(
            "SwitchUnreachable", "max by (kansoku_switch) (%kansoku.switch.reachable) < 1",
            hold="5m", says=("warning", "network"),
            text=("switch {{ $labels.kansoku_switch }} does not answer", "check its management"),
        ),
    )  # fmt: skip


def _storage_and_host(limits: AlertPolicy) -> tuple[AlertRule, ...]:
    return (
        _rule(
            "LustreTargetLost",
            "min by (host_name, kansoku_filesystem, kansoku_target) (%kansoku.lustre.target.up) < 1",
            hold="1m", says=("critical", "storage"),
            text=("{{ $labels.host_name }}: no connection to {{ $labels.kansoku_target }}",
                  "one node: its storage NIC; many nodes: the server"),
        ),
        _rule(
            "LustreSlow",
            "(sum by (host_name, kansoku_filesystem) (rate(%kansoku.lustre.operation_time[5m]))"
            " / sum by (host_name, kansoku_filesystem) (rate(%kansoku.lustre.operations[5m])))"
            f" > {limits.storage_ms / 1e3:g}",
            hold="5m", says=("warning", "storage"),
            text=("{{ $labels.host_name }}: operations on {{ $labels.kansoku_filesystem }} take {{ $value | humanizeDuration }}",
                  "compare nodes on the storage dashboard"),
        ),
        _rule(
            "FileSystemFull",
            'max by (host_name, system_filesystem_mountpoint) (%system.filesystem.usage{system_filesystem_state="used"}'
            " / on (host_name, system_filesystem_mountpoint) group_left () max by (host_name, system_filesystem_mountpoint)"
            f" (%system.filesystem.limit)) > {limits.full_ratio:g}",
            hold="10m", says=("warning", "storage"),
            text=("{{ $labels.host_name }}: {{ $labels.system_filesystem_mountpoint }} is {{ $value | humanizePercentage }} full",
                  "checkpoints fail when it is full"),
        ),
        _rule(
            "HostMemoryLow",
            "min by (host_name) (%system.linux.memory.available) / max by (host_name) (%system.memory.limit)"
            f" < {limits.memory_available_ratio:g}",
            hold="2m", says=("warning", "host"),
            text=("{{ $labels.host_name }}: {{ $value | humanizePercentage }} of memory is available",
                  "the kernel will soon kill a process"),
        ),
        _rule(
            "OutOfMemoryKill",
            _grown("%kansoku.memory.oom_kills", "host_name", "10m") + " > 0", hold=None,
            says=("warning", "host"),
            text=("{{ $labels.host_name }}: the kernel killed a process for want of memory",
                  "its events name process and job"),
        ),
    )  # fmt: skip


def _scheduler() -> tuple[AlertRule, ...]:
    return (
        _rule(
            "NodeNotInService",
            'max by (slurm_node_name, slurm_state) (%kansoku.slurm.node.state{slurm_state=~"down|drain|fail|not_responding"}) > 0',
            hold="10m", says=("info", "scheduler"),
            text=("{{ $labels.slurm_node_name }} is {{ $labels.slurm_state }} in Slurm",
                  "scontrol show node has the reason; kansoku jobs nodes its history"),
        ),
    )  # fmt: skip


def _telemetry(limits: AlertPolicy) -> tuple[AlertRule, ...]:
    return (
        _rule(
            "AgentSilent",
            "(time() - max by (host_name) (%kansoku.agent.collector.last_success))"
            f" > {limits.silent_s:g}",
            hold="2m", says=("warning", "host"),
            text=("{{ $labels.host_name }}: nothing from its agent",
                  "the node is down, the agent is, or the way to the gateway: rows wait in its spool"),
        ),
        _rule(
            "AgentGone",
            "count by (host_name) (last_over_time(%kansoku.agent.samples[1d]))"
            " unless count by (host_name) (last_over_time(%kansoku.agent.samples[10m]))",
            hold="5m", says=("warning", "host"),
            text=("{{ $labels.host_name }}: its agent was here within a day and is gone",
                  "a node taken out of service on purpose ends this after a day"),
        ),
        _rule(
            "CollectorFails",
            "sum by (host_name, kansoku_collector) (increase(%kansoku.agent.collector.failures[15m])) > 3",
            hold=None, says=("info", "host"),
            text=("{{ $labels.host_name }}: collector {{ $labels.kansoku_collector }} fails",
                  "the agent's journal says why"),
        ),
        _rule(
            "AgentDrops",
            "sum by (host_name, kansoku_cause) (increase(%kansoku.agent.dropped[15m])) > 0", hold=None,
            says=("warning", "host"),
            text=("{{ $labels.host_name }}: samples are lost: {{ $labels.kansoku_cause }}",
                  "too_many_series: a label explodes; sink: spool and disk"),
        ),
        _rule(
            "GatewayQueueFills",
            "max by (exporter) (otelcol_exporter_queue_size / otelcol_exporter_queue_capacity) > 0.5",
            hold="5m", says=("warning", "host"),
            text=("the gateway's queue to {{ $labels.exporter }} is {{ $value | humanizePercentage }} full",
                  "that store is slow or away"),
        ),
        _rule(
            "GatewayLoses",
            'sum by (exporter) (increase({__name__=~"otelcol_exporter_enqueue_failed_.+"}[15m])) > 0',
            hold=None, says=("critical", "host"),
            text=("the gateway refused rows for {{ $labels.exporter }}",
                  "senders hold them in their spools; bring the store back"),
        ),
    )  # fmt: skip

"""One node, GPUs, storage."""

from typing import Any

from kansoku.deploy.dashboards._panels import Metric, board, choice, curves, metric_table, number
from kansoku.deploy.dashboards._parts import GPU, NODE, grown, node_variable

__all__ = ["gpu", "node", "storage"]

_RATE = "[$__rate_interval]"
_UNCORRECTED = f'{GPU},error_type=~".*uncorrected.*"'
_NAME = "{{host_name}}/{{hw_name}}"


def node() -> Any:
    """Return the dashboard of nodes: CPU, memory, pressure, disks, network."""
    return board(
        "kansoku-node",
        "Node",
        [
            number("Up for", Metric(text=f"min(%system.uptime{{{NODE}}})"), "s"),
            number("CPUs", Metric(text=f"sum(%system.cpu.logical.count{{{NODE}}})")),
            number("Memory in all", Metric(text=f"sum(%system.memory.limit{{{NODE}}})"), "bytes"),
            number("Available", Metric(text=f"sum(%system.linux.memory.available{{{NODE}}})"), "bytes"),
            number("Processes killed for memory", Metric(text=f"sum({grown('%kansoku.memory.oom_kills', NODE)})"), bad_above=1),
            number("CPU package power", Metric(text=f'sum(rate(%hw.energy{{{NODE},hw_type="cpu"}}{_RATE}))'), "watt"),
            number("Processes waiting for I/O", Metric(text=f'sum(%system.process.count{{{NODE},process_state="blocked"}})')),
            curves(
                "CPU time",
                Metric(text=f"sum by (cpu_mode) (rate(%system.cpu.time{{{NODE}}}{_RATE}))", legend="{{cpu_mode}}"),
                stack=True, note="In cores",
            ),
            curves("Load", Metric(text=f"%system.cpu.load_average.1m{{{NODE}}}", legend="{{host_name}}")),
            curves(
                "Memory",
                Metric(text=f"sum by (system_memory_state) (%system.memory.usage{{{NODE}}})", legend="{{system_memory_state}}"),
                unit="bytes", stack=True,
            ),
            curves(
                "Tasks that waited (PSI)",
                Metric(text=f"rate(%kansoku.cpu.pressure.time{{{NODE}}}{_RATE})", legend="{{host_name}} CPU {{kansoku_pressure}}"),
                Metric(text=f"rate(%kansoku.memory.pressure.time{{{NODE}}}{_RATE})", legend="{{host_name}} memory {{kansoku_pressure}}"),
                Metric(text=f"rate(%kansoku.io.pressure.time{{{NODE}}}{_RATE})", legend="{{host_name}} I/O {{kansoku_pressure}}"),
                unit="percentunit", note="Share of time in which some or all tasks stood still",
            ),
            curves(
                "Free memory by NUMA node",
                Metric(text=f'%kansoku.numa.memory.usage{{{NODE},system_memory_state="free"}}', legend="{{host_name}} NUMA {{kansoku_numa_node}}"),
                unit="bytes",
            ),
            curves(
                "Allocations that missed their NUMA node",
                Metric(text=f'rate(%kansoku.numa.allocations{{{NODE},kansoku_numa_outcome="miss"}}{_RATE})', legend="{{host_name}} NUMA {{kansoku_numa_node}}"),
                unit="ops",
            ),
            curves(
                "Page faults",
                Metric(text=f"sum by (system_paging_fault_type) (rate(%system.paging.faults{{{NODE}}}{_RATE}))", legend="{{system_paging_fault_type}}"),
                unit="ops",
            ),
            curves(
                "Swap",
                Metric(text=f'%system.paging.usage{{{NODE},system_paging_state="used"}}', legend="{{host_name}}"), unit="bytes",
            ),
            curves(
                "Disks",
                Metric(text=f"rate(%system.disk.io{{{NODE}}}{_RATE})", legend="{{host_name}} {{system_device}} {{disk_io_direction}}"),
                unit="Bps",
            ),
            curves(
                "Disks busy",
                Metric(text=f"rate(%system.disk.io_time{{{NODE}}}{_RATE})", legend="{{host_name}} {{system_device}}"),
                unit="percentunit", top=1,
            ),
            curves(
                "Interfaces",
                Metric(text=f"rate(%system.network.io{{{NODE}}}{_RATE})", legend="{{host_name}} {{network_interface_name}} {{network_io_direction}}"),
                unit="Bps",
            ),
            curves(
                "Interfaces: errors and drops",
                Metric(text=f"rate(%system.network.errors{{{NODE}}}{_RATE})", legend="{{host_name}} {{network_interface_name}} {{network_io_direction}} errors"),
                Metric(text=f"rate(%system.network.packet.dropped{{{NODE}}}{_RATE})", legend="{{host_name}} {{network_interface_name}} {{network_io_direction}} drops"),
                unit="pps",
            ),
        ],
        variables=[node_variable()],
        note="CPU, memory, pressure, disks and interfaces of one node or several",
    )  # fmt: skip


def gpu() -> Any:
    """Return the dashboard of GPUs."""
    return board(
        "kansoku-gpu",
        "GPU",
        [
            number("GPUs", Metric(text=f"count(%kansoku.gpu.info{{{GPU}}})")),
            number("Lost", Metric(text=f"sum(%kansoku.gpu.lost{{{GPU}}})"), bad_above=1),
            number("Uncorrected memory errors", Metric(text=f"sum({grown('%hw.errors', _UNCORRECTED)})"), bad_above=1, width=4),
            number("Row remaps waiting", Metric(text=f"sum(%kansoku.gpu.rows.pending{{{GPU}}})"), bad_above=1, width=4),
            number("Row remaps failed", Metric(text=f"sum(%kansoku.gpu.rows.failed{{{GPU}}})"), bad_above=1, width=4),
            number("NVLinks down", Metric(text=f"count(%kansoku.gpu.nvlink.up{{{GPU}}} < 1) or vector(0)"), bad_above=1),
            number("Power", Metric(text=f"sum(%hw.power{{{GPU}}})"), "watt"),
            curves("Utilisation", Metric(text=f'%hw.gpu.utilization{{{GPU},hw_gpu_task="general"}}', legend=_NAME), unit="percentunit", top=1),
            curves("Activity of the parts", Metric(text=f"avg by (kansoku_gpu_unit) (%kansoku.gpu.activity{{{GPU}}})", legend="{{kansoku_gpu_unit}}"), unit="percentunit", top=1),
            curves("Power by GPU", Metric(text=f"%hw.power{{{GPU}}}", legend=_NAME), Metric(text=f"max(%kansoku.gpu.power.limit{{{GPU}}})", legend="limit"), unit="watt"),
            curves("Power from the energy counter", Metric(text=f"rate(%hw.energy{{{GPU}}}{_RATE})", legend=_NAME), unit="watt", note="Joules over time: does not miss what happens between two samples"),
            curves("Memory", Metric(text=f"%hw.gpu.memory.usage{{{GPU}}}", legend=_NAME), Metric(text=f"min(%hw.gpu.memory.limit{{{GPU}}})", legend="limit"), unit="bytes"),
            curves("Memory interface busy", Metric(text=f"%kansoku.gpu.memory.controller.utilization{{{GPU}}}", legend=_NAME), unit="percentunit", top=1),
            curves(
                "Temperature",
                Metric(text=f"%hw.temperature{{{GPU}}}", legend=_NAME + " {{hw_sensor_location}}"),
                Metric(text=f"min by (kansoku_limit) (%kansoku.gpu.temperature.limit{{{GPU}}})", legend="limit: {{kansoku_limit}}"),
                unit="celsius",
            ),
            curves("Clocks", Metric(text=f"%kansoku.gpu.clock.frequency{{{GPU}}}", legend=_NAME + " {{kansoku_gpu_clock}}"), unit="hertz"),
            curves("Clocks held down, by reason", Metric(text=f"sum by (host_name, hw_name, kansoku_gpu_reason) (rate(%kansoku.gpu.throttle.time{{{GPU}}}{_RATE}))", legend=_NAME + " {{kansoku_gpu_reason}}"), unit="percentunit"),
            curves("Errors", Metric(text=f"sum by (host_name, hw_name, error_type) (increase(%hw.errors{{{GPU}}}{_RATE}))", legend=_NAME + " {{error_type}}")),
            curves("Rows remapped", Metric(text=f"%kansoku.gpu.rows.remapped{{{GPU}}}", legend=_NAME + " {{error_type}}")),
            curves("NVLink", Metric(text=f"rate(%kansoku.gpu.nvlink.io{{{GPU}}}{_RATE})", legend=_NAME + " {{network_io_direction}}"), unit="Bps"),
            curves("NVLink errors", Metric(text=f"sum by (host_name, hw_name, error_type) (increase(%kansoku.gpu.nvlink.errors{{{GPU}}}{_RATE}))", legend=_NAME + " {{error_type}}")),
            curves("PCIe lanes", Metric(text=f'%kansoku.gpu.pcie.width{{{GPU},kansoku_limit="current"}}', legend=_NAME), note="Fewer than the most it has: a bad slot, riser or GPU"),
            curves("Compute processes", Metric(text=f"%kansoku.gpu.process.count{{{GPU}}}", legend=_NAME)),
            metric_table(
                "Which GPU this is",
                Metric(text=f"max by (host_name, hw_name, hw_model, hw_serial_number, hw_driver_version, hw_firmware_version, kansoku_pci_address) (%kansoku.gpu.info{{{GPU}}})", instant=True),
                {"host_name": "node", "hw_name": "GPU", "hw_model": "model", "hw_serial_number": "serial",
                 "hw_driver_version": "driver", "hw_firmware_version": "VBIOS", "kansoku_pci_address": "PCI"},
                width=24,
            ),
        ],
        variables=[
            node_variable("kansoku.gpu.info"),
            choice("gpu", "GPU", 'label_values(%kansoku.gpu.info{host_name=~"$node"}, hw_name)'),
        ],
        note="Utilisation, power, clocks, temperatures, memory, errors and links of GPUs",
    )  # fmt: skip


def storage() -> Any:
    """Return the dashboard of file systems."""
    lustre = 'host_name=~"$node",kansoku_filesystem=~"$filesystem"'
    mean = (
        f"sum by (host_name, kansoku_operation) (rate(%kansoku.lustre.operation_time{{{lustre}}}{_RATE})) / "
        f"(sum by (host_name, kansoku_operation) (rate(%kansoku.lustre.operations{{{lustre}}}{_RATE})) > 0)"
    )
    fill = (
        f'max by (host_name, system_filesystem_mountpoint) (%system.filesystem.usage{{{NODE},system_filesystem_state="used"}})'
        f" / max by (host_name, system_filesystem_mountpoint) (%system.filesystem.limit{{{NODE}}})"
    )
    return board(
        "kansoku-storage",
        "Storage",
        [
            number("Read from Lustre", Metric(text=f'sum(rate(%kansoku.lustre.io{{{lustre},disk_io_direction="read"}}{_RATE}))'), "Bps", width=4),
            number("Written to Lustre", Metric(text=f'sum(rate(%kansoku.lustre.io{{{lustre},disk_io_direction="write"}}{_RATE}))'), "Bps", width=4),
            number("Targets not connected", Metric(text=f"count(%kansoku.lustre.target.up{{{lustre}}} < 1) or vector(0)"), bad_above=1, width=4),
            number("NFS calls sent again", Metric(text=f"sum({grown('%nfs.client.rpc.retransmits', NODE)})"), bad_above=1, width=4),
            number("Fullest file system", Metric(text=f"max({fill})"), "percentunit", bad_above=0.92, width=4),
            curves("Lustre by node", Metric(text=f"sum by (host_name, disk_io_direction) (rate(%kansoku.lustre.io{{{lustre}}}{_RATE}))", legend="{{host_name}} {{disk_io_direction}}"), unit="Bps"),
            curves("Lustre operations", Metric(text=f"sum by (kansoku_operation) (rate(%kansoku.lustre.operations{{{lustre}}}{_RATE}))", legend="{{kansoku_operation}}"), unit="ops"),
            curves("Lustre: mean time of an operation", Metric(text=mean, legend="{{host_name}} {{kansoku_operation}}"), unit="s", note="Only operations that Lustre times"),
            curves("Lustre targets connected", Metric(text=f"count by (kansoku_target) (%kansoku.lustre.target.up{{{lustre}}} > 0)", legend="{{kansoku_target}}"), note="Nodes whose import is FULL or IDLE"),
            curves("NFS", Metric(text=f"sum by (host_name, system_filesystem_mountpoint, disk_io_direction) (rate(%kansoku.nfs.io{{{NODE}}}{_RATE}))", legend="{{host_name}} {{system_filesystem_mountpoint}} {{disk_io_direction}}"), unit="Bps"),
            curves(
                "NFS calls",
                Metric(text=f"sum by (system_filesystem_mountpoint) (rate(%nfs.client.rpc.count{{{NODE}}}{_RATE}))", legend="{{system_filesystem_mountpoint}}"),
                Metric(text=f"sum by (system_filesystem_mountpoint) (rate(%nfs.client.rpc.retransmits{{{NODE}}}{_RATE}))", legend="{{system_filesystem_mountpoint}} sent again"),
                unit="ops",
            ),
            curves("NFS: time in calls", Metric(text=f"sum by (system_filesystem_mountpoint, kansoku_operation) (rate(%kansoku.nfs.operation_time{{{NODE}}}{_RATE}))", legend="{{system_filesystem_mountpoint}} {{kansoku_operation}}"), unit="s"),
            curves("Local disks: mean time of an operation", Metric(text=f"sum by (host_name, system_device) (rate(%system.disk.operation_time{{{NODE}}}{_RATE})) / (sum by (host_name, system_device) (rate(%system.disk.operations{{{NODE}}}{_RATE})) > 0)", legend="{{host_name}} {{system_device}}"), unit="s"),
            curves("Fill of file systems", Metric(text=fill, legend="{{host_name}} {{system_filesystem_mountpoint}}"), unit="percentunit", top=1, width=24),
        ],
        variables=[
            node_variable(),
            choice("filesystem", "Lustre", "label_values(%kansoku.lustre.target.up, kansoku_filesystem)"),
        ],
        note="Lustre, NFS, local disks and fill, as the clients see them",
    )  # fmt: skip

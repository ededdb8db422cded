"""NICs and RoCE, the fabric, microbursts."""

from typing import Any

from kansoku.deploy.dashboards._panels import (
    Logs,
    Metric,
    board,
    choice,
    curves,
    heat,
    log_table,
    number,
)
from kansoku.deploy.dashboards._parts import NODE, grown, node_variable

__all__ = ["bursts", "fabric", "nic"]

_RATE = "[$__rate_interval]"
_PORT = f'{NODE},hw_type="network"'
_INTERFACE = f'{NODE},network_interface_name=~"$interface"'


def _rdma(*counters: str) -> str:
    names = "|".join(counters)
    return (
        "sum by (host_name, kansoku_rdma_device, kansoku_rdma_counter) "
        f'(rate(%kansoku.rdma.events{{{NODE},kansoku_rdma_counter=~"{names}"}}{_RATE}))'
    )


_RDMA = "{{host_name}} {{kansoku_rdma_device}} {{kansoku_rdma_counter}}"
_ETH = "{{host_name}} {{network_interface_name}}"


def nic() -> Any:
    """Return the dashboard of NICs and RoCE."""
    share = (
        f"sum by (host_name, hw_name, network_io_direction) (rate(%hw.network.io{{{_PORT}}}{_RATE}))"
        " / on (host_name, hw_name) group_left () max by (host_name, hw_name)"
        f" (%hw.network.bandwidth.limit{{{_PORT}}})"
    )
    return board(
        "kansoku-nic",
        "NIC and RoCE",
        [
            number("Ports up", Metric(text=f"sum(%hw.network.up{{{_PORT}}})")),
            number("Ports down", Metric(text=f"count(%hw.network.up{{{_PORT}}} < 1) or vector(0)"), bad_above=1),
            number("Sent", Metric(text=f'sum(rate(%hw.network.io{{{_PORT},network_io_direction="transmit"}}{_RATE}))'), "Bps"),
            number("Received", Metric(text=f'sum(rate(%hw.network.io{{{_PORT},network_io_direction="receive"}}{_RATE}))'), "Bps"),
            number("Longest paused by PFC", Metric(text=f"max(rate(%kansoku.nic.pause.time{{{_INTERFACE}}}{_RATE}))"), "percentunit", bad_above=0.05),
            number("Discarded", Metric(text=f"sum(rate(%kansoku.nic.discards{{{_INTERFACE}}}{_RATE}))"), "pps", bad_above=1),
            number("Link downs", Metric(text=f"sum({grown('%kansoku.nic.link.downs', _INTERFACE)})"), bad_above=1),
            number("Pause storms", Metric(text=f"sum({grown('%kansoku.nic.pause.storms', _INTERFACE)})"), bad_above=1),
            heat("Share of line rate", Metric(text=share, legend="{{host_name}}/{{hw_name}} {{network_io_direction}}"), unit="percentunit", top=1, height=12),
            curves("Throughput", Metric(text=f"rate(%hw.network.io{{{_PORT}}}{_RATE})", legend="{{host_name}}/{{hw_name}} {{network_io_direction}}"), unit="Bps"),
            curves("Packets", Metric(text=f"rate(%hw.network.packets{{{_PORT}}}{_RATE})", legend="{{host_name}}/{{hw_name}} {{network_io_direction}}"), unit="pps"),
            curves("PFC pause frames by priority", Metric(text=f"sum by (host_name, network_interface_name, network_io_direction, kansoku_priority) (rate(%kansoku.nic.pause.frames{{{_INTERFACE}}}{_RATE}))", legend=_ETH + " {{network_io_direction}} {{kansoku_priority}}"), unit="pps", note="Received: the switch asks this NIC to stop. Transmitted: this host asks."),
            curves("Paused by PFC", Metric(text=f"sum by (host_name, network_interface_name, network_io_direction, kansoku_priority) (rate(%kansoku.nic.pause.time{{{_INTERFACE}}}{_RATE}))", legend=_ETH + " {{network_io_direction}} {{kansoku_priority}}"), unit="percentunit", note="Share of time"),
            curves("Bytes by priority", Metric(text=f"sum by (kansoku_priority, network_io_direction) (rate(%kansoku.nic.priority.io{{{_INTERFACE}}}{_RATE}))", legend="{{kansoku_priority}} {{network_io_direction}}"), unit="Bps", note="RoCE traffic on another priority than PFC's is a wrong DSCP setting"),
            curves("Discards and why", Metric(text=f"sum by (host_name, network_interface_name, kansoku_cause) (rate(%kansoku.nic.discards{{{_INTERFACE}}}{_RATE}))", legend=_ETH + " {{kansoku_cause}}"), unit="pps"),
            curves("Congestion: ECN marks and notifications", Metric(text=_rdma("np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled", "rp_cnp_ignored"), legend=_RDMA), unit="pps"),
            curves("Loss and order", Metric(text=_rdma("out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "duplicate_request", "local_ack_timeout_err"), legend=_RDMA), unit="ops", note="out_of_sequence: the receiver saw it; packet_seq_err, timeouts: the sender"),
            curves("Receiver not ready", Metric(text=_rdma("out_of_buffer", "rnr_nak_retry_err"), legend=_RDMA), unit="ops"),
            curves("RoCE's own recovery", Metric(text=_rdma("roce_adp_retrans", "roce_adp_retrans_to", "roce_slow_restart"), legend=_RDMA), unit="ops"),
            curves("FEC", Metric(text=f"sum by (host_name, network_interface_name, kansoku_fec) (rate(%kansoku.nic.fec.blocks{{{_INTERFACE}}}{_RATE}))", legend=_ETH + " {{kansoku_fec}}"), unit="ops"),
            curves("Errors of ports", Metric(text=f"sum by (host_name, hw_name, error_type) (increase(%hw.errors{{{_PORT}}}{_RATE}))", legend="{{host_name}}/{{hw_name}} {{error_type}}")),
        ],
        variables=[
            node_variable("hw.network.up"),
            choice("interface", "interface", 'label_values(%kansoku.nic.link.downs{host_name=~"$node"}, network_interface_name)'),
        ],
        note="Throughput, PFC, ECN, discards, RDMA counters and links of every NIC",
    )  # fmt: skip


def fabric() -> Any:
    """Return the dashboard of the fabric: probes between NICs, and switches."""
    cut = 'kansoku_scope=~"$scope"'
    port = 'kansoku_switch=~"$switch"'
    name = "{{kansoku_switch}} {{network_interface_name}}"
    return board(
        "kansoku-fabric",
        "Fabric mesh",
        [
            number("Probes in a window", Metric(text=f"sum(%kansoku.fabric.probes{{{cut}}})"), width=4),
            number("Lost", Metric(text=f"max(%kansoku.fabric.drop{{{cut}}})"), "percentunit", bad_above=0.001, width=4),
            number("Round trip, p99", Metric(text=f'max(%kansoku.fabric.rtt{{{cut},kansoku_quantile="p99"}})'), "s", width=4),
            number("Faults found", Metric(text="sum(%kansoku.fabric.anomalies)"), bad_above=1, width=4),
            number("Switches silent", Metric(text=f"count(%kansoku.switch.reachable{{{port}}} < 1) or vector(0)"), bad_above=1, width=4),
            curves("Network round trip", Metric(text=f"%kansoku.fabric.rtt{{{cut}}}", legend="{{kansoku_scope}} {{kansoku_quantile}}"), unit="s"),
            curves("Loss", Metric(text=f"%kansoku.fabric.drop{{{cut}}}", legend="{{kansoku_scope}}"), unit="percentunit"),
            curves(
                "Time added by hosts",
                Metric(text=f"%kansoku.fabric.responder.delay{{{cut}}}", legend="{{kansoku_scope}} responder {{kansoku_quantile}}"),
                Metric(text=f"%kansoku.fabric.prober.delay{{{cut}}}", legend="{{kansoku_scope}} prober {{kansoku_quantile}}"),
                unit="s", note="Not the network: scheduling on the hosts that probe and answer",
            ),
            curves("Faults by kind", Metric(text="%kansoku.fabric.anomalies", legend="{{kansoku_kind}}")),
            log_table(
                "Worst paths",
                Logs(
                    text='"event.name":="kansoku.probes" | stats by ("kansoku.source", "kansoku.target", "kansoku.kind") '
                    'sum("kansoku.probes") probes, sum("kansoku.lost") lost, max("kansoku.rtt_p99_ns") rtt_p99_ns '
                    "| sort by (lost desc, rtt_p99_ns desc) | limit 100",
                    kind="stats",
                ),
            ),
            curves("Switch ports", Metric(text=f"sum by (kansoku_switch, network_interface_name, network_io_direction) (rate(%kansoku.switch.port.io{{{port}}}{_RATE}))", legend=name + " {{network_io_direction}}"), unit="Bps"),
            curves("Switch ports: dropped and in error", Metric(text=f"sum by (kansoku_switch, network_interface_name) (rate(%kansoku.switch.port.discards{{{port}}}{_RATE}))", legend=name + " dropped"), Metric(text=f"sum by (kansoku_switch, network_interface_name) (rate(%kansoku.switch.port.errors{{{port}}}{_RATE}))", legend=name + " errors"), unit="pps"),
            curves("PFC of switch ports", Metric(text=f"sum by (kansoku_switch, network_interface_name, network_io_direction, kansoku_priority) (rate(%kansoku.switch.port.pause.frames{{{port}}}{_RATE}))", legend=name + " {{network_io_direction}} {{kansoku_priority}}"), unit="pps"),
            curves("Queues: ECN marks", Metric(text=f"sum by (kansoku_switch, network_interface_name, kansoku_queue) (rate(%kansoku.switch.queue.ecn.marked{{{port}}}{_RATE}))", legend=name + " {{kansoku_queue}}"), unit="pps"),
            curves("Queues: highest fill", Metric(text=f"max by (kansoku_switch, network_interface_name, kansoku_queue) (%kansoku.switch.queue.watermark{{{port}}})", legend=name + " {{kansoku_queue}}"), unit="bytes", note="Only for switches that give watermarks (gNMI)"),
            curves("Queues: dropped", Metric(text=f"sum by (kansoku_switch, network_interface_name, kansoku_queue) (rate(%kansoku.switch.queue.discards{{{port}}}{_RATE}))", legend=name + " {{kansoku_queue}}"), unit="pps"),
        ],
        variables=[
            choice("scope", "scope", "label_values(%kansoku.fabric.probes, kansoku_scope)"),
            choice("switch", "switch", "label_values(%kansoku.switch.reachable, kansoku_switch)"),
        ],
        note="Active probes between NICs, and the counters of switches",
    )  # fmt: skip


def bursts() -> Any:
    """Return the dashboard of microbursts."""
    these = '"event.name":="kansoku.bursts" "kansoku.node":~"$node"'
    return board(
        "kansoku-bursts",
        "Microbursts",
        [
            log_table(
                "Ports with the most bursts",
                Logs(
                    text=f'{these} | stats by ("kansoku.node", "kansoku.port", "kansoku.direction") count() bursts, '
                    'max("kansoku.peak_ratio") peak_ratio, avg("kansoku.duration_ns") mean_duration_ns, '
                    'max("kansoku.duration_ns") longest_ns, sum("kansoku.bytes") bytes | sort by (bursts desc) | limit 100',
                    kind="stats",
                ),
                note="A burst: more than half of line rate in samples of a millisecond or less",
            ),
            curves("Bursts over time", Logs(text=f'{these} | stats by ("kansoku.node") count() bursts', kind="statsRange", legend="{{kansoku.node}}")),
            curves("Highest peak, share of line rate", Logs(text=f'{these} | stats by ("kansoku.node") max("kansoku.peak_ratio") peak', kind="statsRange", legend="{{kansoku.node}}"), unit="percentunit"),
            curves(
                "Beside them: paused by PFC",
                Metric(text=f"sum by (host_name, network_interface_name) (rate(%kansoku.nic.pause.time{{{NODE}}}{_RATE}))", legend=_ETH), unit="percentunit",
            ),
            curves(
                "Beside them: ECN-marked packets received",
                Metric(text=f'sum by (host_name, kansoku_rdma_device) (rate(%kansoku.rdma.events{{{NODE},kansoku_rdma_counter="np_ecn_marked_roce_packets"}}{_RATE}))', legend="{{host_name}} {{kansoku_rdma_device}}"), unit="pps",
            ),
            log_table(
                "Bursts one by one",
                Logs(text=f'{these} | fields _time, "kansoku.node", "kansoku.port", "kansoku.direction", "kansoku.duration_ns", "kansoku.peak_ratio", "kansoku.bytes" | sort by (_time desc) | limit 500'),
            ),
        ],
        variables=[node_variable()],
        note="Short bursts that counters of 10 s or a minute do not show",
    )  # fmt: skip

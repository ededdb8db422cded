"""Network interfaces: bytes, packets, errors, drops, link state and line rate."""

from collections.abc import Iterable

from kansoku.formats.procfs import parse_net_dev, whole_number
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Sample, labels

__all__ = ["Network"]

_BITS_PER_MEGABIT = 1_000_000


class Network(Collector):
    """/proc/net/dev and /sys/class/net; loopback and container ends are left out."""

    name = "network"
    title = "network interfaces"
    metrics = (
        "system.network.io",
        "system.network.packet.count",
        "system.network.packet.dropped",
        "system.network.errors",
        "hw.network.up",
        "hw.network.bandwidth.limit",
    )

    def absent(self, host: Host) -> str | None:
        """Every Linux has it."""
        return None if host.read("/proc/net/dev") else "no /proc/net/dev"

    def collect(self, host: Host) -> Iterable[Sample]:
        """Counters of the kernel's own view; RDMA traffic passes by it, see ``rdma``."""
        for name, port in parse_net_dev(host.read("/proc/net/dev") or "").value.items():
            if name == "lo" or name.startswith(("cali", "docker", "cni", "flannel", "ifb")):
                continue
            who = ("network.interface.name", name)
            for way, io, packets, dropped, errors in (
                ("receive", port.receive_bytes, port.receive_packets, port.receive_dropped,
                 port.receive_errors),
                ("transmit", port.transmit_bytes, port.transmit_packets, port.transmit_dropped,
                 port.transmit_errors),
            ):  # fmt: skip
                series = labels(who, ("network.io.direction", way))
                yield Sample("system.network.io", series, float(io))
                yield Sample("system.network.packet.count", series, float(packets))
                yield Sample("system.network.packet.dropped", series, float(dropped))
                yield Sample("system.network.errors", series, float(errors))
            yield from _port(host, name)


def _port(host: Host, name: str) -> Iterable[Sample]:
    folder = f"/sys/class/net/{name}"
    series = labels(("hw.id", name), ("hw.name", name), ("hw.type", "network"))
    state = (host.read(f"{folder}/operstate") or "").strip()
    if state in {"up", "down", "lowerlayerdown", "dormant"}:
        yield Sample("hw.network.up", series, 1.0 if state == "up" else 0.0)
    # speed reads -1, or not at all, while the link is down or where a virtual port has none
    speed = whole_number((host.read(f"{folder}/speed") or "").strip())
    if speed is not None and 0 < speed < 10_000_000:
        rate = speed * _BITS_PER_MEGABIT / 8
        yield Sample("hw.network.bandwidth.limit", series, rate)

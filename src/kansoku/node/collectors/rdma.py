"""RDMA ports: traffic, link state, errors, and the hw_counters of either side."""

import re
from collections.abc import Iterable

from kansoku.catalog.nic_counters import RdmaCounter, rdma_counter
from kansoku.formats.procfs import whole_number
from kansoku.node.collector import Collector
from kansoku.node.counters import Counters
from kansoku.node.host import Host
from kansoku.node.sample import Labels, Sample, labels

__all__ = ["RDMA_CACHE_NS", "Rdma"]

RDMA_CACHE_NS = 10_000_000
"""The kernel keeps hw_counters for 10 ms (file ``lifespan``): reading faster gives old values."""

_FOLDER = "/sys/class/infiniband"
# 4: ACTIVE
_STATE = re.compile(r"\s*\d+:\s*([A-Z_]+)\s*")


class Rdma(Collector):
    """/sys/class/infiniband/*/ports/*/{counters,hw_counters,state,rate}."""

    name = "rdma"
    title = "RDMA ports"
    metrics = (
        "hw.network.io",
        "hw.network.packets",
        "hw.network.up",
        "hw.network.bandwidth.limit",
        "hw.errors",
        "kansoku.rdma.events",
        "kansoku.rdma.link",
    )

    def __init__(self) -> None:
        self._counters = Counters()
        self._series: dict[tuple[str, str, str, str], tuple[RdmaCounter, str, Labels] | None] = {}

    def absent(self, host: Host) -> str | None:
        """Nodes without an RDMA device."""
        return None if host.names(_FOLDER) else "no RDMA device (/sys/class/infiniband is empty)"

    def collect(self, host: Host) -> Iterable[Sample]:
        """Words of 4 bytes become bytes; wraps and resets become growth."""
        for device in host.names(_FOLDER):
            for port in host.names(f"{_FOLDER}/{device}/ports"):
                folder = f"{_FOLDER}/{device}/ports/{port}"
                yield from self._port(host, device, port, folder)
                for kind in ("counters", "hw_counters"):
                    for name in host.names(f"{folder}/{kind}"):
                        found = self._known((device, port, kind, name))
                        if found is None:
                            continue
                        text = host.read(f"{folder}/{kind}/{name}")
                        raw = whole_number((text or "").strip())
                        if raw is None:  # "N/A (no PMA)" of virtual functions, EINVAL
                            continue
                        counter, metric, series = found
                        if not counter.saturates:
                            key = (device, port, kind, name)
                            raw = self._counters.grow(key, raw, bits=counter.bits)
                        yield Sample(metric, series, float(raw * counter.factor))

    def _known(self, key: tuple[str, str, str, str]) -> tuple[RdmaCounter, str, Labels] | None:
        """Return meaning and series of a counter file; made once, read every round."""
        if key not in self._series:
            device, port, kind, name = key
            counter = rdma_counter(kind, name)
            self._series[key] = None if counter is None else _series(counter, device, port)
        return self._series[key]

    def _port(self, host: Host, device: str, port: str, folder: str) -> Iterable[Sample]:
        state = _STATE.fullmatch(host.read(f"{folder}/state") or "")
        if state is not None:
            series = labels(
                ("kansoku.rdma.device", device),
                ("kansoku.rdma.port", port),
                ("kansoku.rdma.state", state[1].lower()),
            )
            yield Sample("kansoku.rdma.link", series, 1.0)
            up = 1.0 if state[1] == "ACTIVE" else 0.0
            yield Sample("hw.network.up", _hardware(device, port), up)
        # 400 Gb/sec (4X NDR)
        words = (host.read(f"{folder}/rate") or "").split()
        if len(words) >= 2 and words[1] == "Gb/sec" and words[0].replace(".", "", 1).isdigit():
            rate = float(words[0]) * 1e9 / 8
            yield Sample("hw.network.bandwidth.limit", _hardware(device, port), rate)


def _hardware(device: str, port: str, *more: tuple[str, str]) -> Labels:
    return labels(("hw.id", f"{device}/{port}"), ("hw.name", device), ("hw.type", "network"), *more)


def _series(counter: RdmaCounter, device: str, port: str) -> tuple[RdmaCounter, str, Labels]:
    if counter.metric.startswith("hw.network."):
        metric, _, direction = counter.metric.rpartition(".")
        return counter, metric, _hardware(device, port, ("network.io.direction", direction))
    if counter.metric:
        return counter, counter.metric, _hardware(device, port, ("error.type", counter.error_type))
    series = labels(
        ("kansoku.rdma.device", device),
        ("kansoku.rdma.port", port),
        ("kansoku.rdma.counter", counter.name),
        ("kansoku.rdma.side", counter.side),
    )
    return counter, "kansoku.rdma.events", series

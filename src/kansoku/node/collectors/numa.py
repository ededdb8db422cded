"""Memory and page allocations of each NUMA node."""

import re
from collections.abc import Iterable

from kansoku.formats.procfs import parse_key_values, parse_meminfo
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Sample, labels

__all__ = ["Numa"]

_FOLDER = "/sys/devices/system/node"
_NODE = re.compile(r"node(\d{1,4})")
_OUTCOMES = {
    "numa_hit": "hit",
    "numa_miss": "miss",
    "numa_foreign": "foreign",
    "other_node": "other",
}


class Numa(Collector):
    """/sys/devices/system/node."""

    name = "numa"
    title = "NUMA memory and allocations"
    metrics = ("kansoku.numa.memory.usage", "kansoku.numa.allocations")

    def absent(self, host: Host) -> str | None:
        """Kernels without CONFIG_NUMA lack it."""
        return None if any(map(_NODE.fullmatch, host.names(_FOLDER))) else f"no {_FOLDER}"

    def collect(self, host: Host) -> Iterable[Sample]:
        """Misses and foreign allocations show a rank whose memory is on the wrong socket."""
        for name in host.names(_FOLDER):
            match = _NODE.fullmatch(name)
            if match is None:
                continue
            node = ("kansoku.numa.node", match[1])
            info = parse_meminfo(host.read(f"{_FOLDER}/{name}/meminfo") or "").value
            for state, key in (("free", "MemFree"), ("used", "MemUsed")):
                if key in info:
                    series = labels(node, ("system.memory.state", state))
                    yield Sample("kansoku.numa.memory.usage", series, float(info[key]))
            counts = parse_key_values(host.read(f"{_FOLDER}/{name}/numastat") or "").value
            for key, outcome in _OUTCOMES.items():
                if key in counts:
                    series = labels(node, ("kansoku.numa.outcome", outcome))
                    yield Sample("kansoku.numa.allocations", series, float(counts[key]))

"""Memory and swap by state, page faults, OOM kills."""

from collections.abc import Iterable

from kansoku.formats.procfs import parse_key_values, parse_meminfo
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Sample, labels

__all__ = ["Memory"]


class Memory(Collector):
    """/proc/meminfo and /proc/vmstat."""

    name = "memory"
    title = "memory, swap, page faults"
    metrics = (
        "system.memory.usage",
        "system.memory.limit",
        "system.linux.memory.available",
        "system.paging.usage",
        "system.paging.faults",
        "kansoku.memory.oom_kills",
    )

    def absent(self, host: Host) -> str | None:
        """Every Linux has it."""
        return None if host.read("/proc/meminfo") else "no /proc/meminfo"

    def collect(self, host: Host) -> Iterable[Sample]:
        """States sum to the total: used is what is neither free nor a cache."""
        info = parse_meminfo(host.read("/proc/meminfo") or "").value
        total, free = info.get("MemTotal"), info.get("MemFree")
        if total is not None and free is not None:
            buffers = info.get("Buffers", 0)
            # Shmem sits in Cached though it cannot be dropped; MemAvailable knows, and is sent too
            cached = info.get("Cached", 0) + info.get("SReclaimable", 0)
            states = {
                "free": free,
                "buffers": buffers,
                "cached": cached,
                "used": max(total - free - buffers - cached, 0),
            }
            for state, value in states.items():
                series = labels(("system.memory.state", state))
                yield Sample("system.memory.usage", series, float(value))
            yield Sample("system.memory.limit", (), float(total))
        if "MemAvailable" in info:
            yield Sample("system.linux.memory.available", (), float(info["MemAvailable"]))
        if "SwapTotal" in info and "SwapFree" in info:
            free_swap = info["SwapFree"]
            for state, value in (("free", free_swap), ("used", info["SwapTotal"] - free_swap)):
                series = labels(("system.paging.state", state))
                yield Sample("system.paging.usage", series, float(value))
        counts = parse_key_values(host.read("/proc/vmstat") or "").value
        if "pgfault" in counts and "pgmajfault" in counts:
            major = counts["pgmajfault"]
            for kind, value in (("major", major), ("minor", counts["pgfault"] - major)):
                series = labels(("system.paging.fault.type", kind))
                yield Sample("system.paging.faults", series, float(value))
        if "oom_kill" in counts:
            yield Sample("kansoku.memory.oom_kills", (), float(counts["oom_kill"]))

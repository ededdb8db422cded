"""CPU time by mode, load, processes, uptime."""

import re
from collections.abc import Iterable

from kansoku.formats.procfs import CPU_MODES, parse_stat
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Sample, labels

__all__ = ["Cpu"]

_TICKS_PER_S = 100.0  # USER_HZ, fixed in the kernel's interface whatever HZ the kernel runs at
_CORE = re.compile(r"cpu\d+")
_DECIMAL = re.compile(r"\d{1,12}(?:\.\d{1,9})?")


class Cpu(Collector):
    """/proc/stat, /proc/loadavg, /proc/uptime."""

    name = "cpu"
    title = "CPU time, load, processes"
    metrics = (
        "system.cpu.time",
        "system.cpu.logical.count",
        "system.cpu.load_average.1m",
        "system.processes.created",
        "system.process.count",
        "system.uptime",
    )

    def absent(self, host: Host) -> str | None:
        """Every Linux has it."""
        return None if host.read("/proc/stat") else "no /proc/stat"

    def collect(self, host: Host) -> Iterable[Sample]:
        """Sum over all cores; a node's cores one by one would be 2,000 series."""
        stat = parse_stat(host.read("/proc/stat") or "").value
        total = stat.get("cpu", [])
        # guest and guest_nice are counted in user and nice too: left out, so modes sum to time
        for mode, ticks in zip(CPU_MODES, total, strict=False):
            yield Sample("system.cpu.time", labels(("cpu.mode", mode)), ticks / _TICKS_PER_S)
        cores = sum(1 for word in stat if _CORE.fullmatch(word))
        yield Sample("system.cpu.logical.count", (), float(cores))
        if "processes" in stat:
            yield Sample("system.processes.created", (), float(stat["processes"][0]))
        for state, word in (("running", "procs_running"), ("blocked", "procs_blocked")):
            if word in stat:
                value = float(stat[word][0])
                yield Sample("system.process.count", labels(("process.state", state)), value)
        for metric, path in (
            ("system.cpu.load_average.1m", "/proc/loadavg"),
            ("system.uptime", "/proc/uptime"),
        ):
            words = (host.read(path) or "").split()
            if words and _DECIMAL.fullmatch(words[0]):
                yield Sample(metric, (), float(words[0]))

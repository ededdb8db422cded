"""Block devices: bytes, operations, times."""

import re
from collections.abc import Iterable

from kansoku.formats.procfs import parse_diskstats
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Sample, labels

__all__ = ["Disks"]

_PARTITION = re.compile(r"(?:(?:s|v|xv|h)d[a-z]+\d+|(?:nvme\d+n\d+|mmcblk\d+|md\d+)p\d+)")


class Disks(Collector):
    """/proc/diskstats; whole disks only, partitions would count twice."""

    name = "disk"
    title = "local disks"
    metrics = (
        "system.disk.io",
        "system.disk.operations",
        "system.disk.operation_time",
        "system.disk.io_time",
    )

    def absent(self, host: Host) -> str | None:
        """Diskless nodes have none."""
        return None if parse_diskstats(host.read("/proc/diskstats") or "").value else "no disks"

    def collect(self, host: Host) -> Iterable[Sample]:
        """One set of counters a disk."""
        for device, disk in parse_diskstats(host.read("/proc/diskstats") or "").value.items():
            if _PARTITION.fullmatch(device):
                continue
            who = ("system.device", device)
            for way, io, operations, time_ms in (
                ("read", disk.read_bytes, disk.reads, disk.read_ms),
                ("write", disk.written_bytes, disk.writes, disk.write_ms),
            ):
                series = labels(who, ("disk.io.direction", way))
                yield Sample("system.disk.io", series, float(io))
                yield Sample("system.disk.operations", series, float(operations))
                yield Sample("system.disk.operation_time", series, time_ms / 1e3)
            yield Sample("system.disk.io_time", labels(who), disk.busy_ms / 1e3)

"""NFS mounts: bytes, calls, retransmissions, time by operation."""

from collections.abc import Iterable

from kansoku.formats.mountstats import parse_mountstats
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Sample, labels

__all__ = ["Nfs"]

_OPERATIONS = ("READ", "WRITE", "OPEN", "CLOSE", "COMMIT", "GETATTR", "LOOKUP", "ACCESS", "CREATE")
"""Of some fifty; the others are in the totals."""


class Nfs(Collector):
    """/proc/self/mountstats."""

    name = "nfs"
    title = "NFS mounts"
    metrics = (
        "kansoku.nfs.io",
        "kansoku.nfs.operation_time",
        "nfs.client.rpc.count",
        "nfs.client.rpc.retransmits",
    )

    def absent(self, host: Host) -> str | None:
        """Nodes without an NFS mount."""
        found = parse_mountstats(host.read("/proc/self/mountstats") or "")[0]
        return None if found else "no NFS mount"

    def collect(self, host: Host) -> Iterable[Sample]:
        """Counters since mount."""
        for mount in parse_mountstats(host.read("/proc/self/mountstats") or "")[0]:
            who = ("system.filesystem.mountpoint", mount.mountpoint)
            for way, value in (("read", mount.read_bytes), ("write", mount.written_bytes)):
                if value is not None:
                    series = labels(who, ("disk.io.direction", way))
                    yield Sample("kansoku.nfs.io", series, float(value))
            calls = sum(op.operations for op in mount.operations.values())
            sent = sum(op.transmissions for op in mount.operations.values())
            yield Sample("nfs.client.rpc.count", labels(who), float(calls))
            yield Sample("nfs.client.rpc.retransmits", labels(who), float(max(sent - calls, 0)))
            for name in _OPERATIONS:
                if name in mount.operations:
                    series = labels(who, ("kansoku.operation", name.lower()))
                    seconds = mount.operations[name].total_ms / 1e3
                    yield Sample("kansoku.nfs.operation_time", series, seconds)

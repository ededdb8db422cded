"""Space of local file systems and of Lustre clients."""

from collections.abc import Iterable

from kansoku.formats.lustre import filesystem_of
from kansoku.formats.procfs import Mount, parse_mounts, whole_number
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Sample, labels

__all__ = ["Filesystems"]

# statvfs of a network file system whose server is gone hangs for ever, and us with it: only
# local ones are asked so; Lustre tells its sizes in files that its client keeps.
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "zfs", "f2fs", "overlay"})
_BORING = ("/proc", "/sys", "/run/user", "/dev/pts", "/var/lib/docker", "/var/lib/containers")
_LLITE = "/proc/fs/lustre/llite"
_LLITE_SYS = "/sys/fs/lustre/llite"


class Filesystems(Collector):
    """/proc/mounts with statvfs, and llite's kbytes files."""

    name = "filesystem"
    title = "space of file systems"
    metrics = ("system.filesystem.usage", "system.filesystem.limit")
    interval_s = 60.0

    def absent(self, host: Host) -> str | None:
        """Every node has a root."""
        return None if host.read("/proc/mounts") else "no /proc/mounts"

    def collect(self, host: Host) -> Iterable[Sample]:
        """Each device once, under its shortest mount point."""
        seen: set[str] = set()
        mounts = parse_mounts(host.read("/proc/mounts") or "").value
        for mount in sorted(mounts, key=lambda m: len(m.mountpoint)):
            # tmpfs and overlay mounts share their device name without sharing space
            key = mount.device if mount.device.startswith("/") else mount.mountpoint
            if mount.kind not in _LOCAL or mount.mountpoint.startswith(_BORING) or key in seen:
                continue
            seen.add(key)
            space = host.space(mount.mountpoint)
            if space is not None and space.total_bytes > 0:
                yield from _space(mount, space.total_bytes, space.free_bytes, space.available_bytes)
        for folder in (_LLITE, _LLITE_SYS):
            for client in host.names(folder):
                numbers = [
                    whole_number((host.read(f"{folder}/{client}/{name}") or "").strip())
                    for name in ("kbytestotal", "kbytesfree", "kbytesavail")
                ]
                known = [n * 1024 for n in numbers if n is not None]
                if len(known) == 3:
                    name = filesystem_of(client)
                    mount = Mount(device=name, mountpoint=name, kind="lustre")
                    yield from _space(mount, *known)


def _space(mount: Mount, total: int, free: int, available: int) -> Iterable[Sample]:
    who = (
        ("system.device", mount.device),
        ("system.filesystem.mountpoint", mount.mountpoint),
        ("system.filesystem.type", mount.kind),
    )
    yield Sample("system.filesystem.limit", labels(*who), float(total))
    for state, value in (
        ("used", total - free),
        ("free", available),
        ("reserved", free - available),
    ):
        series = labels(*who, ("system.filesystem.state", state))
        yield Sample("system.filesystem.usage", series, float(value))

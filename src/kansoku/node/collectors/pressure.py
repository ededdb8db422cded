"""Pressure stall information: time tasks waited for CPU, memory, I/O."""

from collections.abc import Iterable

from kansoku.formats.procfs import parse_pressure
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Sample, labels

__all__ = ["Pressure"]


class Pressure(Collector):
    """/proc/pressure/*; the averages are left out, rates of the totals say more."""

    name = "pressure"
    title = "pressure stalls (PSI)"
    metrics = (
        "kansoku.cpu.pressure.time",
        "kansoku.memory.pressure.time",
        "kansoku.io.pressure.time",
    )

    def absent(self, host: Host) -> str | None:
        """Kernels built or booted without PSI lack it."""
        if host.read("/proc/pressure/cpu") is None:
            return "this kernel has no /proc/pressure (boot with psi=1)"
        return None

    def collect(self, host: Host) -> Iterable[Sample]:
        """Microseconds to seconds."""
        for resource in ("cpu", "memory", "io"):
            text = host.read(f"/proc/pressure/{resource}") or ""
            for kind, total_us in parse_pressure(text).value.items():
                series = labels(("kansoku.pressure", kind))
                yield Sample(f"kansoku.{resource}.pressure.time", series, total_us / 1e6)

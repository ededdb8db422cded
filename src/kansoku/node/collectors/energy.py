"""Energy of CPU packages and memory (RAPL)."""

import re
from collections.abc import Iterable

from kansoku.formats.procfs import whole_number
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Sample, labels

__all__ = ["CpuEnergy"]

_FOLDER = "/sys/class/powercap"
_ZONE = re.compile(r"intel-rapl:\d+(?::\d+)?")


class CpuEnergy(Collector):
    """/sys/class/powercap/intel-rapl:* (AMD processors use the same names)."""

    name = "energy"
    title = "CPU energy (RAPL)"
    metrics = ("hw.energy",)

    def __init__(self) -> None:
        self._state: dict[str, tuple[int, int]] = {}

    def absent(self, host: Host) -> str | None:
        """Virtual machines mostly lack it; the files are root's."""
        zones = [name for name in host.names(_FOLDER) if _ZONE.fullmatch(name)]
        if not zones:
            return "no RAPL energy counters (virtual machine, or module intel_rapl_msr not loaded)"
        if host.read(f"{_FOLDER}/{zones[0]}/energy_uj") is None:
            return "RAPL energy counters are readable by root only"
        return None

    def collect(self, host: Host) -> Iterable[Sample]:
        """Unwrap: the counter wraps at its own range, after minutes on a loaded server."""
        for zone in host.names(_FOLDER):
            if not _ZONE.fullmatch(zone):
                continue
            raw = whole_number((host.read(f"{_FOLDER}/{zone}/energy_uj") or "").strip())
            if raw is None:
                continue
            span = whole_number((host.read(f"{_FOLDER}/{zone}/max_energy_range_uj") or "").strip())
            last, total = self._state.get(zone, (raw, raw))
            step = raw - last
            if step < 0:
                step = step + span if span else raw
            total += max(step, 0)
            self._state[zone] = (raw, total)
            name = (host.read(f"{_FOLDER}/{zone}/name") or zone).strip()
            series = labels(("hw.id", zone), ("hw.name", name), ("hw.type", "cpu"))
            yield Sample("hw.energy", series, total / 1e6)

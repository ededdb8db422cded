"""NIC statistics of the driver: PFC per priority, discards, link downs, FEC, pause storms."""

from collections.abc import Callable, Iterable, Mapping

from kansoku.catalog.nic_counters import EthtoolMatch, match_ethtool
from kansoku.node.collector import Collector
from kansoku.node.counters import Counters
from kansoku.node.host import Host
from kansoku.node.sample import Labels, Sample, labels

__all__ = ["Ethtool"]

_FOLDER = "/sys/class/net"
Statistics = Callable[[str], Mapping[str, int] | None]


class Ethtool(Collector):
    """``ethtool -S`` of each interface whose driver's counters the catalogue knows."""

    name = "ethtool"
    title = "NIC statistics (ethtool)"
    metrics = (
        "kansoku.nic.pause.frames",
        "kansoku.nic.pause.time",
        "kansoku.nic.priority.io",
        "kansoku.nic.discards",
        "kansoku.nic.ecn.marked",
        "kansoku.nic.link.downs",
        "kansoku.nic.fec.blocks",
        "kansoku.nic.pause.storms",
        "hw.errors",
    )

    def __init__(self, *, ethtool_statistics: Statistics | None = None) -> None:
        """``ethtool_statistics`` gives the counters of an interface, None where it has none."""
        if ethtool_statistics is None:
            from kansoku.node.edge.ethtool import EthtoolSocket

            ethtool_statistics = EthtoolSocket().statistics
        self._statistics = ethtool_statistics
        self._counters = Counters()
        self._known: dict[tuple[str, str], tuple[EthtoolMatch, Labels] | None] = {}

    def absent(self, host: Host) -> str | None:
        """Only NICs with a driver and counters that mean something here."""
        drivers = {name: _driver(host, name) for name in host.names(_FOLDER)}
        found = {name: driver for name, driver in drivers.items() if driver}
        if not found:
            return "no interface with a hardware driver"
        if any(driver.startswith(("mlx5", "bnxt", "ice")) for driver in found.values()):
            return None
        kinds = ", ".join(sorted(set(found.values())))
        return f"no NIC whose statistics the catalogue explains (drivers here: {kinds})"

    def collect(self, host: Host) -> Iterable[Sample]:
        """Counters that fall into one series (discards of all priorities) are added."""
        for name in host.names(_FOLDER):
            driver = _driver(host, name)
            statistics = self._statistics(name) if driver else None
            totals: dict[tuple[str, Labels], float] = {}
            for counter, raw in (statistics or {}).items():
                found = self._meaning(driver or "", name, counter)
                if found is None:
                    continue
                match, series = found
                grown = self._counters.grow((name, counter), raw)
                key = (match.metric, series)
                totals[key] = totals.get(key, 0.0) + grown * match.factor
            for (metric, series), value in totals.items():
                yield Sample(metric, series, value)

    def _meaning(self, driver: str, name: str, counter: str) -> tuple[EthtoolMatch, Labels] | None:
        key = (name, counter)
        if key not in self._known:
            match = match_ethtool(driver, counter)
            self._known[key] = None if match is None else (match, _series(match, name))
        return self._known[key]


def _series(match: EthtoolMatch, name: str) -> Labels:
    if match.metric == "hw.errors":
        return labels(("hw.id", name), ("hw.name", name), ("hw.type", "network"), *match.labels)
    return labels(("network.interface.name", name), *match.labels)


def _driver(host: Host, name: str) -> str | None:
    target = host.link(f"{_FOLDER}/{name}/device/driver")
    return target.rpartition("/")[2] if target else None

"""Switches: port counters, PFC, ECN, watermarks, by gNMI (SONiC) or SNMP."""

from collections.abc import Iterable, Sequence

from kansoku.node.collector import Collector
from kansoku.node.counters import Counters
from kansoku.node.host import Host
from kansoku.node.sample import Event, Sample, labels
from kansoku.node.switch import SwitchClient, SwitchTarget, from_sai, from_snmp

__all__ = ["Switches"]


class Switches(Collector):
    """The switches of ``--switches FILE``; on one agent only, or they are asked many times."""

    name = "switches"
    title = "switches (gNMI, SNMP)"
    metrics = (
        "kansoku.switch.port.io", "kansoku.switch.port.packets", "kansoku.switch.port.discards",
        "kansoku.switch.port.errors", "kansoku.switch.port.up", "kansoku.switch.port.speed",
        "kansoku.switch.port.pause.frames", "kansoku.switch.queue.ecn.marked",
        "kansoku.switch.queue.discards", "kansoku.switch.queue.watermark",
        "kansoku.switch.priority_group.watermark", "kansoku.switch.reachable",
    )  # fmt: skip
    interval_s = 15.0

    def __init__(
        self, *, switches: Sequence[SwitchTarget] = (), switch_client: SwitchClient | None = None
    ) -> None:
        """Ask ``switches`` through ``switch_client`` (default: real SNMP and gNMI)."""
        self._targets = switches
        self._client = switch_client
        self._counters = Counters()
        self._reachable: dict[str, bool] = {}

    def absent(self, host: Host) -> str | None:  # noqa: ARG002 - the plug-in's signature
        """Only where a file names some."""
        return None if self._targets else "no switches configured (--switches FILE)"

    def collect(self, host: Host) -> Iterable[Sample | Event]:
        """Ask each; one that does not answer costs only itself, and an event when that changes."""
        if self._client is None:
            from kansoku.node.edge.switch_client import NetworkSwitchClient

            self._client = NetworkSwitchClient()
        for target in self._targets:
            try:
                if target.protocol == "snmp":
                    columns = self._client.snmp(target)
                    found = list(from_snmp(target.name, columns, self._counters))
                else:
                    found = list(from_sai(target.name, self._client.gnmi(target), self._counters))
                trouble = None if found else "it answered with no port counters"
            except OSError as error:
                found, trouble = [], str(error)[:300]
            yield from found
            answered = trouble is None
            series = labels(("kansoku.switch", target.name))
            yield Sample("kansoku.switch.reachable", series, float(answered))
            if answered != self._reachable.get(target.name, True):
                yield Event(
                    time_ns=host.now_ns(),
                    source=target.protocol,
                    subject=f"switch:{target.name}",
                    severity="info" if answered else "warning",
                    kind="switch_reachable" if answered else "switch_unreachable",
                    body=f"{target.name} answers" if answered else f"{target.name}: {trouble}",
                )
            self._reachable[target.name] = answered

"""Switches the agent asks: their file, and what their answers mean. No sockets here.

The file (``kansoku agent --switches FILE``)::

    [[switch]]
    name = "leaf1-0"
    snmp = "10.0.0.11"           # host or host:port, SNMP v2c
    community = "public"         # or community_file

    [[switch]]
    name = "spine0"
    gnmi = "10.0.0.21:8080"      # SONiC's telemetry service
    user = "admin"
    password_file = "/etc/kansoku/spine0.password"
    ca_file = "/etc/kansoku/ca.pem"   # without it the connection is not encrypted
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kansoku.errors import ConfigurationError
from kansoku.formats.procfs import whole_number
from kansoku.node.counters import Counters
from kansoku.node.sample import Sample, labels

__all__ = [
    "SAI_GROUP",
    "SAI_PORT",
    "SAI_QUEUE",
    "SNMP_COLUMNS",
    "SwitchClient",
    "SwitchTarget",
    "from_sai",
    "from_snmp",
    "read_switches",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTarget:
    """One switch and how to ask it."""

    name: str
    protocol: str
    """``snmp`` or ``gnmi``."""
    host: str
    port: int
    community: str | None = None
    user: str | None = None
    password_file: str | None = None
    ca_file: str | None = None


class SwitchClient(Protocol):
    """Asks one switch."""

    def snmp(self, target: SwitchTarget) -> dict[str, dict[str, int | str]]:
        """Return column name → index (``7`` or ``7.3``) → value; raise OSError."""
        ...

    def gnmi(self, target: SwitchTarget) -> dict[str, Any]:
        """Return ``ports``, ``queues``, ``watermarks``, ``group_watermarks``; raise OSError.

        Each is name → SAI name → value; a queue's or group's name is ``PORT:NUMBER``.
        """
        ...


_PORTS = {"snmp": 161, "gnmi": 8080}
_KEYS = {
    "name", "snmp", "gnmi", "community", "community_file", "user", "password_file", "ca_file",
}  # fmt: skip


def read_switches(text: str, *, where: str) -> list[SwitchTarget]:
    """Read the switches file; raise ConfigurationError naming the switch and the key."""
    try:
        rows = tomllib.loads(text).get("switch", [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(str(error), where=where) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigurationError("expected [[switch]] tables", where=where)
    found = []
    for number, row in enumerate(rows):
        place = f"{where}: switch {row.get('name', number)}"
        if unknown := set(row) - _KEYS:
            raise ConfigurationError(
                f"unknown key {', '.join(sorted(unknown))}; known: {', '.join(sorted(_KEYS))}",
                where=place,
            )
        protocols = [p for p in _PORTS if p in row]
        if len(protocols) != 1 or "name" not in row:
            raise ConfigurationError("needs name and either snmp or gnmi", where=place)
        protocol = protocols[0]
        host, _, port = str(row[protocol]).partition(":")
        number_of_port = whole_number(port) if port else _PORTS[protocol]
        if not host or number_of_port is None:
            raise ConfigurationError(
                f"{protocol} = {row[protocol]!r} is not HOST or HOST:PORT", where=place
            )
        found.append(
            SwitchTarget(
                name=str(row["name"]),
                protocol=protocol,
                host=host,
                port=number_of_port,
                community=row.get("community", "public") if protocol == "snmp" else None,
                user=row.get("user"),
                password_file=row.get("password_file"),
                ca_file=row.get("ca_file"),
            )
        )
    return found


SNMP_COLUMNS: Mapping[str, str] = {
    # IF-MIB, RFC 2863
    "ifName": "1.3.6.1.2.1.31.1.1.1.1",
    "ifHCInOctets": "1.3.6.1.2.1.31.1.1.1.6",
    "ifHCInUcastPkts": "1.3.6.1.2.1.31.1.1.1.7",
    "ifHCOutOctets": "1.3.6.1.2.1.31.1.1.1.10",
    "ifHCOutUcastPkts": "1.3.6.1.2.1.31.1.1.1.11",
    "ifHighSpeed": "1.3.6.1.2.1.31.1.1.1.15",
    "ifOperStatus": "1.3.6.1.2.1.2.2.1.8",
    "ifInDiscards": "1.3.6.1.2.1.2.2.1.13",
    "ifInErrors": "1.3.6.1.2.1.2.2.1.14",
    "ifOutDiscards": "1.3.6.1.2.1.2.2.1.19",
    "ifOutErrors": "1.3.6.1.2.1.2.2.1.20",
    # CISCO-PFC-EXT-MIB as SONiC's SNMP agent serves it: index is ifIndex.(priority + 1), requests
    # are pause frames received, indications those sent (sonic-snmpagent, ciscoPfcExtMIB.py)
    "cpfcIfPriorityRequests": "1.3.6.1.4.1.9.9.813.1.2.1.2",
    "cpfcIfPriorityIndications": "1.3.6.1.4.1.9.9.813.1.2.1.3",
}
# column: metric, direction, width in bits
_SNMP_METRICS = {
    "ifHCInOctets": ("kansoku.switch.port.io", "receive", 64),
    "ifHCOutOctets": ("kansoku.switch.port.io", "transmit", 64),
    "ifHCInUcastPkts": ("kansoku.switch.port.packets", "receive", 64),
    "ifHCOutUcastPkts": ("kansoku.switch.port.packets", "transmit", 64),
    "ifInDiscards": ("kansoku.switch.port.discards", "receive", 32),
    "ifOutDiscards": ("kansoku.switch.port.discards", "transmit", 32),
    "ifInErrors": ("kansoku.switch.port.errors", "receive", 32),
    "ifOutErrors": ("kansoku.switch.port.errors", "transmit", 32),
}
_PFC = {"cpfcIfPriorityRequests": "receive", "cpfcIfPriorityIndications": "transmit"}
_PRIORITIES = frozenset("12345678")
_IF_UP = 1


def from_snmp(
    switch: str, columns: Mapping[str, Mapping[str, int | str]], counters: Counters
) -> Iterable[Sample]:
    """Turn walked columns into samples; counters of 32 bits are unwrapped."""
    names = {index: str(name) for index, name in columns.get("ifName", {}).items()}
    for column, (metric, direction, bits) in _SNMP_METRICS.items():
        for index, value in columns.get(column, {}).items():
            if index not in names or not isinstance(value, int):
                continue
            series = labels(*_port(switch, names[index]), ("network.io.direction", direction))
            grown = counters.grow((switch, column, index), value, bits=bits)
            yield Sample(metric, series, float(grown))
    for column, direction in _PFC.items():
        for index, value in columns.get(column, {}).items():
            port, _, priority = index.partition(".")
            if port in names and isinstance(value, int) and priority in _PRIORITIES:
                series = labels(
                    *_port(switch, names[port]),
                    ("network.io.direction", direction),
                    ("kansoku.priority", str(int(priority) - 1)),
                )
                yield Sample("kansoku.switch.port.pause.frames", series, float(value))
    for index, value in columns.get("ifOperStatus", {}).items():
        if index in names:
            up = float(value == _IF_UP)
            yield Sample("kansoku.switch.port.up", labels(*_port(switch, names[index])), up)
    for index, value in columns.get("ifHighSpeed", {}).items():
        if index in names and isinstance(value, int) and value > 0:
            rate = value * 1e6 / 8
            yield Sample("kansoku.switch.port.speed", labels(*_port(switch, names[index])), rate)


def _port(switch: str, name: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("kansoku.switch", switch), ("network.interface.name", name)


SAI_PORT: Mapping[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "SAI_PORT_STAT_IF_IN_OCTETS": (
        "kansoku.switch.port.io", (("network.io.direction", "receive"),)),
    "SAI_PORT_STAT_IF_OUT_OCTETS": (
        "kansoku.switch.port.io", (("network.io.direction", "transmit"),)),
    "SAI_PORT_STAT_IF_IN_UCAST_PKTS": (
        "kansoku.switch.port.packets", (("network.io.direction", "receive"),)),
    "SAI_PORT_STAT_IF_OUT_UCAST_PKTS": (
        "kansoku.switch.port.packets", (("network.io.direction", "transmit"),)),
    "SAI_PORT_STAT_IF_IN_DISCARDS": (
        "kansoku.switch.port.discards", (("network.io.direction", "receive"),)),
    "SAI_PORT_STAT_IF_OUT_DISCARDS": (
        "kansoku.switch.port.discards", (("network.io.direction", "transmit"),)),
    "SAI_PORT_STAT_IF_IN_ERRORS": (
        "kansoku.switch.port.errors", (("network.io.direction", "receive"),)),
    "SAI_PORT_STAT_IF_OUT_ERRORS": (
        "kansoku.switch.port.errors", (("network.io.direction", "transmit"),)),
    **{
        f"SAI_PORT_STAT_PFC_{priority}_{way}_PKTS": (
            "kansoku.switch.port.pause.frames",
            (("kansoku.priority", str(priority)), ("network.io.direction", direction)),
        )
        for priority in range(8)
        for way, direction in (("RX", "receive"), ("TX", "transmit"))
    },
}  # fmt: skip
SAI_QUEUE: Mapping[str, str] = {
    "SAI_QUEUE_STAT_WRED_ECN_MARKED_PACKETS": "kansoku.switch.queue.ecn.marked",
    "SAI_QUEUE_STAT_DROPPED_PACKETS": "kansoku.switch.queue.discards",
    "SAI_QUEUE_STAT_SHARED_WATERMARK_BYTES": "kansoku.switch.queue.watermark",
}
SAI_GROUP: Mapping[str, tuple[str, str]] = {
    "SAI_INGRESS_PRIORITY_GROUP_STAT_SHARED_WATERMARK_BYTES": (
        "kansoku.switch.priority_group.watermark", "shared"),
    "SAI_INGRESS_PRIORITY_GROUP_STAT_XOFF_ROOM_WATERMARK_BYTES": (
        "kansoku.switch.priority_group.watermark", "headroom"),
}  # fmt: skip
"""SAI name: metric and the part of the buffer; headroom takes what arrives after a pause."""


def from_sai(switch: str, answer: Mapping[str, Any], counters: Counters) -> Iterable[Sample]:
    """Turn SONiC's COUNTERS_DB tables (ports, queues, priority groups) into samples.

    Values are numbers in strings; "N/A" is what an ASIC without the counter says.
    """
    for port, table in _tables(answer.get("ports")):
        for name, (metric, more) in SAI_PORT.items():
            value = whole_number(str(table.get(name, "")))
            if value is not None:
                grown = counters.grow((switch, port, name), value)
                yield Sample(metric, labels(*_port(switch, port), *more), float(grown))
    for kind in ("queues", "watermarks"):
        for key, table in _tables(answer.get(kind)):
            port, _, queue = key.partition(":")
            for name, metric in SAI_QUEUE.items():
                value = whole_number(str(table.get(name, "")))
                if value is None:
                    continue
                series = labels(*_port(switch, port), ("kansoku.queue", queue))
                if metric.endswith("watermark"):
                    yield Sample(metric, series, float(value))
                else:
                    grown = counters.grow((switch, key, name), value)
                    yield Sample(metric, series, float(grown))
    for key, table in _tables(answer.get("group_watermarks")):
        port, _, group = key.partition(":")
        for name, (metric, part) in SAI_GROUP.items():
            value = whole_number(str(table.get(name, "")))
            if value is not None:
                more = (("kansoku.priority_group", group), ("kansoku.buffer", part))
                yield Sample(metric, labels(*_port(switch, port), *more), float(value))


def _tables(value: object) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        for key, table in value.items():
            if isinstance(table, Mapping):
                yield str(key), table

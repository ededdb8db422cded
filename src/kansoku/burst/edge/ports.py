"""The ports of this machine: which counters to read, and their line rate."""

import fnmatch
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kansoku.errors import InputError, PlatformError

__all__ = ["Port", "find_ports"]

_GIGA = 1e9
# What tells of congestion, by folder; the rest of the counters is the collectors' business.
_BESIDE = {
    "counters": ("port_xmit_discards", "port_xmit_wait", "excessive_buffer_overrun_errors"),
    "hw_counters": (
        "np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "out_of_sequence",
        "out_of_buffer", "packet_seq_err", "local_ack_timeout_err", "rx_icrc_encapsulated",
        "roce_slow_restart", "out_of_seq_request", "completer_retry_err",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port whose bytes are counted."""

    name: str
    """Interface, or RDMA device (``mlx5_0``; ``mlx5_0/2`` for a second port)."""
    line_rate_bits_per_s: float
    rate_source: str
    """``given``, ``sysfs``, or ``cluster file``."""
    index: int | None = None
    """Interface index: its counters come by netlink."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Direction to its file of 4-byte words: an RDMA port."""
    beside: Mapping[str, Path] = field(default_factory=dict)
    """Counters of congestion: name to file."""


def find_ports(
    wanted: Sequence[str] = (),
    *,
    line_rates_bits_per_s: Mapping[str, float] | None = None,
    root: Path = Path("/"),
) -> list[Port]:
    """Return the ports to watch, RDMA ports first.

    Without ``wanted`` (names or patterns such as ``mlx5_*``) all physical ports that are up; RoCE
    passes by the interface's counters, so an interface under an RDMA device is left to it. Raises
    InputError for a name that is not there or whose line rate is unknown, PlatformError when no
    port is found.
    """
    rates = dict(line_rates_bits_per_s or {})
    rdma = _rdma_ports(root, rates)
    interfaces = _interfaces(root, rates)
    if wanted:
        known = {**{name: (port, why) for name, port, why in interfaces}, **rdma}
        return _select(wanted, known)
    under = {
        interface.name
        for name in rdma
        for interface in (root / f"sys/class/infiniband/{name.split('/')[0]}/device/net").glob("*")
    }
    found = [port for port, _ in rdma.values() if port is not None]
    for name, port, _ in interfaces:
        physical = (root / f"sys/class/net/{name}/device").exists()
        if port is not None and physical and name not in under:
            found.append(port)
    if not found:
        raise PlatformError(
            "no physical network port with a known line rate is up",
            remedy="name one and its rate: --port NAME --line-rate NAME=GBPS",
        )
    return found


def _select(wanted: Sequence[str], known: Mapping[str, tuple[Port | None, str]]) -> list[Port]:
    found: dict[str, Port] = {}
    for pattern in wanted:
        names = fnmatch.filter(known, pattern)
        if not names:
            raise InputError(f"no port {pattern!r}; there are {', '.join(sorted(known))}")
        for name in names:
            port, why = known[name]
            if port is None:
                if name == pattern:
                    raise InputError(why, where=name, remedy=f"--line-rate {name}=GBPS")
                continue
            found[name] = port
    return list(found.values())


def _rdma_ports(root: Path, rates: Mapping[str, float]) -> dict[str, tuple[Port | None, str]]:
    found: dict[str, tuple[Port | None, str]] = {}
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = folder.parent.parent.name
        name = device if folder.name == "1" else f"{device}/{folder.name}"
        files = {
            "receive": folder / "counters" / "port_rcv_data",
            "transmit": folder / "counters" / "port_xmit_data",
        }
        if not all(path.exists() for path in files.values()):
            found[name] = (None, "its driver counts no bytes; watch the interface under it")
            continue
        beside = {
            counter: folder / kind / counter
            for kind, counters in _BESIDE.items()
            for counter in counters
            if (folder / kind / counter).exists()
        }
        match = re.match(r"([0-9.]+) Gb/sec", _text(folder / "rate"))
        rate = rates.get(name) or (float(match[1]) * _GIGA if match else None)
        if rate is None:
            found[name] = (None, "its line rate is unknown")
            continue
        port = Port(
            name=name,
            line_rate_bits_per_s=rate,
            rate_source="given" if name in rates else "sysfs",
            files=files,
            beside=beside,
        )
        found[name] = (port, "")
    return found


def _interfaces(root: Path, rates: Mapping[str, float]) -> list[tuple[str, Port | None, str]]:
    found: list[tuple[str, Port | None, str]] = []
    indices = {name: index for index, name in socket.if_nameindex()}
    for folder in sorted((root / "sys/class/net").glob("*")):
        name = folder.name
        index = indices.get(name)
        if name == "lo" or index is None:
            continue
        speed = _text(folder / "speed")
        sysfs = float(speed) * 1e6 if speed.isdecimal() and int(speed) > 0 else None
        rate = rates.get(name) or sysfs
        if rate is None:
            found.append((name, None, "its line rate is unknown to the kernel"))
            continue
        port = Port(
            name=name,
            line_rate_bits_per_s=rate,
            rate_source="given" if name in rates else "sysfs",
            index=index,
        )
        found.append((name, port, ""))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""

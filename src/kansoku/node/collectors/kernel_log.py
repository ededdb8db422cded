"""Kernel log: Xid, SXid, AER, OOM, Lustre and link lines, with the catalogue's meaning."""

from collections.abc import Callable, Iterable

from kansoku.catalog.xid import Code, sxid, xid
from kansoku.formats.kernel_log import KernelMessage, KernelRecord, classify, parse_kmsg
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Event

__all__ = ["KernelLog", "to_event"]

Records = Callable[[], tuple[list[str], int]]
"""New records of /dev/kmsg, and how many the kernel overwrote before they were read."""


class KernelLog(Collector):
    """/dev/kmsg, from the agent's start on (``from_boot``: everything the kernel still has)."""

    name = "kernel_log"
    title = "kernel log"
    metrics = ()

    def __init__(self, *, kmsg: Records | None = None, from_boot: bool = False) -> None:
        """``kmsg`` gives new records; without it /dev/kmsg is followed."""
        self._kmsg = kmsg
        self._from_boot = from_boot
        self._close: Callable[[], None] | None = None
        self._boot_ns: int | None = None

    def absent(self, host: Host) -> str | None:  # noqa: ARG002 - the plug-in's signature
        """Needs root, or CAP_SYSLOG."""
        if self._kmsg is None:
            from kansoku.node.edge.kmsg import Kmsg

            try:
                reader = Kmsg(from_boot=self._from_boot)
            except OSError as error:
                return f"/dev/kmsg: {error.strerror} (needs root or CAP_SYSLOG)"
            self._kmsg, self._close = reader.read, reader.close
        return None

    def collect(self, host: Host) -> Iterable[Event]:
        """One event for each line that means something."""
        lines, lost = self._kmsg() if self._kmsg else ([], 0)
        if lost:
            yield Event(
                time_ns=host.now_ns(),
                source="kernel",
                subject=f"node:{host.name}",
                severity="warning",
                kind="kernel_log_overrun",
                body=f"the kernel overwrote {lost} records before they were read",
            )
        if not lines:
            return
        gpus = _gpus_by_pci(host)
        boot_ns = _boot_time_ns(host)
        for line in lines:
            record = parse_kmsg(line)
            message = None if record is None else classify(record)
            if record is not None and message is not None:
                yield to_event(message, record, host=host, gpus=gpus, boot_ns=boot_ns)

    def close(self) -> None:
        """Close /dev/kmsg."""
        if self._close is not None:
            self._close()


def to_event(
    message: KernelMessage,
    record: KernelRecord,
    *,
    host: Host,
    gpus: dict[str, int],
    boot_ns: int | None,
) -> Event:
    """Say which device it is about and what the catalogue knows of the code."""
    attributes = dict(message.attributes)
    severity = message.severity
    body = message.body
    if message.pci:
        attributes["pci.address"] = message.pci
    if message.code is not None:
        attributes["code"] = str(message.code)
        code = xid(message.code) if message.kind == "xid" else sxid(message.code)
        if code is None:
            attributes["meaning"] = "unknown: no source names this code"
        else:
            severity = code.severity if message.kind == "xid" else severity
            attributes.update(_meaning(code))
            body = f"{body} — {code.meaning}"
    stamped = boot_ns is not None and record.boot_us is not None
    return Event(
        time_ns=boot_ns + record.boot_us * 1000  # type: ignore[operator]
        if stamped
        else host.now_ns(),
        source="kernel",
        subject=_subject(message, host.name, gpus),
        severity=severity,
        kind=message.kind,
        body=body,
        attributes=attributes,
    )


def _meaning(code: Code) -> dict[str, str]:
    found = {
        "mnemonic": code.mnemonic,
        "meaning": code.meaning,
        "responsibility": code.responsibility,
        "fatal_to_job": code.fatal_to_job,
        "action": code.action,
        "source": code.source,
    }
    if code.domain is not None:
        found["domain"] = code.domain.value
    return {key: value for key, value in found.items() if value}


def _subject(message: KernelMessage, node: str, gpus: dict[str, int]) -> str:
    index = gpus.get(_pci_key(message.pci)) if message.pci else None
    if index is not None:
        return f"gpu:{node}/{index}"
    if message.kind in {"link_down", "link_up"} and message.device:
        return f"nic:{node}/{message.device}"
    if message.kind == "lustre" and message.device:
        return f"storage:{message.device.partition('-')[0]}"
    if message.kind == "nfs" and message.device:
        return f"storage:{message.device}"
    return f"node:{node}"


def _pci_key(address: str) -> str:
    """Domain in four digits, no function: 00000000:3B:00.0 and 0000:3b:00 are the same GPU."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def _gpus_by_pci(host: Host) -> dict[str, int]:
    """Return the GPUs numbered as NVML does: by PCI address."""
    addresses = host.names("/proc/driver/nvidia/gpus")
    return {_pci_key(address): index for index, address in enumerate(addresses)}


def _boot_time_ns(host: Host) -> int | None:
    """Unix time of boot. The kernel log's clock stops in suspend; nodes do not suspend."""
    words = (host.read("/proc/uptime") or "").split()
    try:
        return host.now_ns() - round(float(words[0]) * 1e9)
    except (IndexError, ValueError):
        return None

"""Kernel log records to what they mean: Xid, SXid, AER, OOM, Lustre, link events.

Reads the records of ``/dev/kmsg`` (``priority,sequence,µs,flags;text``) and the lines that
``dmesg`` and syslog write. A line that nobody asked for is left out.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["KernelMessage", "KernelRecord", "classify", "parse_kmsg", "split_dmesg"]

_SEVERITIES = ("critical", "critical", "critical", "error", "warning", "info", "info", "debug")
_BODY_LIMIT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """One line of the kernel."""

    sequence: int | None
    boot_us: int | None
    """Microseconds on the kernel's monotonic clock; None where the line carries no stamp."""
    severity: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMessage:
    """A line whose meaning is known."""

    kind: str
    """``xid``, ``sxid``, ``aer``, ``oom_kill``, ``lustre``, ``link_down``, ``link_up``,
    ``mce``, ``hung_task``, ``nfs``, ``disk_error``, ``gpu_lost``."""
    severity: str
    body: str
    pci: str | None = None
    device: str | None = None
    """NIC, disk, file system target or process name."""
    code: int | None = None
    attributes: dict[str, str] = field(default_factory=dict)


def parse_kmsg(record: str) -> KernelRecord | None:
    """Read one record of /dev/kmsg; None for one that is malformed or a continuation."""
    head, semicolon, text = record.partition(";")
    words = head.split(",")
    if not semicolon or len(words) < 3 or not all(w.isascii() and w.isdigit() for w in words[:3]):
        return None
    if max(map(len, words[:3])) > 20:
        return None
    line = text.split("\n", 1)[0]  # dictionary lines of the record follow, each after a space
    return KernelRecord(
        sequence=int(words[1]),
        boot_us=int(words[2]),
        severity=_SEVERITIES[int(words[0]) & 7],
        text=line[:_BODY_LIMIT],
    )


_DMESG = re.compile(r"(?:<(\d{1,3})>)?\[\s*(\d{1,10})\.(\d{6})\]\s?(.*)")


def split_dmesg(line: str) -> KernelRecord:
    """Read a line of ``dmesg`` (``[ 12.345678] text``) or bare text."""
    match = _DMESG.match(line.rstrip("\n"))
    if match is None:
        return KernelRecord(sequence=None, boot_us=None, severity="info", text=line[:_BODY_LIMIT])
    level = int(match[1]) & 7 if match[1] else 6
    return KernelRecord(
        sequence=None,
        boot_us=int(match[2]) * 1_000_000 + int(match[3]),
        severity=_SEVERITIES[level],
        text=match[4][:_BODY_LIMIT],
    )


_PCI = r"(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_XID = re.compile(rf"NVRM: (?:GPU at )?Xid \(PCI:{_PCI}\): (?P<code>\d{{1,5}})(?:, (?P<rest>.*))?")
_SXID = re.compile(
    rf"nvidia-nvswitch(?P<switch>\d+): SXid \(PCI:{_PCI}\): (?P<code>\d{{1,6}}),? ?(?P<rest>.*)"
)
_GPU_LOST = re.compile(rf"NVRM: .*GPU (?:at PCI:|){_PCI}:? .*(?:fallen off the bus|lost)")
_PID = re.compile(r"pid='?(\d{1,9})'?")
_NAME = re.compile(r"name=([^,<\s]{1,64})")
_AER = re.compile(
    rf"(?:pcieport|nvidia|mlx5_core|nvme)?\s*{_PCI}: (?:AER: |PCIe Bus Error: )(?P<rest>.*)"
)
_AER_SEVERITY = re.compile(r"severity=(Corrected|Uncorrect\w*)(?:[^,]*\((Fatal|Non-Fatal)\))?")
_OOM = re.compile(
    r"(?P<scope>Memory cgroup out of memory|Out of memory)(?:: Killed|: Kill) process "
    r"(?P<pid>\d{1,9}) \((?P<name>.{1,64}?)\)"
)
_LUSTRE = re.compile(r"(?P<level>Lustre|LustreError|LNet|LNetError): (?P<rest>.*)")
_LUSTRE_TARGET = re.compile(r"\b([A-Za-z0-9_]{1,32}-(?:OST|MDT|MGS)[0-9a-fA-F]{0,4})")
_LUSTRE_STATES = (
    ("was lost", "connection_lost"),
    ("evicted", "evicted"),
    ("Connection restored", "connection_restored"),
    ("timed out", "timeout"),
    ("Request sent has failed", "timeout"),
)
_LINK = re.compile(
    r"(?P<driver>mlx5_core|bnxt_en|ice|i40e|ixgbe|e1000e|igb|virtio_net|tg3):? +"
    r"(?P<pci>[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])?:? *[^\n]{0,40}?"
    r"(?P<nic>[\w.-]{1,32})?:? (?:NIC )?[Ll]ink (?:is )?(?P<state>[Uu]p|[Dd]own|UP|DOWN)"
)
_CARRIER = re.compile(r"(?P<nic>[\w.-]{1,32}): (?:link becomes ready|Link is (?P<state>Up|Down)|"
                      r"(?P<lost>carrier lost|link is not ready))")  # fmt: skip
_MCE = re.compile(r"(?:mce: )?\[Hardware Error\]: (?P<rest>.*)")
_HUNG = re.compile(r"INFO: task (?P<name>[^\s]{1,64}):(?P<pid>\d{1,9}) blocked for more than")
_NFS = re.compile(r"nfs: server (?P<server>\S{1,253}) (?P<state>not responding|OK)")
_DISK = re.compile(
    r"(?:I/O error, dev (?P<disk>[\w-]{1,32})|EXT4-fs error \(device (?P<ext>[\w-]{1,32})\)|"
    r"XFS \((?P<xfs>[\w-]{1,32})\): .*(?:corruption|shut down)|"
    r"nvme (?P<nvme>nvme\d{1,4}): (?:controller is down|I/O .* timeout))"
)
_UNKNOWN_SEVERITY = "error"


def _extra(rest: str) -> dict[str, str]:
    found = {}
    if pid := _PID.search(rest):
        found["process.pid"] = pid[1]
    if name := _NAME.search(rest):
        found["process.executable.name"] = name[1]
    return found


def _xid(match: re.Match[str], record: KernelRecord) -> KernelMessage:
    return KernelMessage(
        kind="xid",
        severity=_UNKNOWN_SEVERITY,  # the catalogue knows better, code by code
        body=record.text,
        pci=match["pci"].lower(),
        code=int(match["code"]),
        attributes=_extra(match["rest"] or ""),
    )


def _sxid(match: re.Match[str], record: KernelRecord) -> KernelMessage:
    rest = match["rest"]
    severity = "error" if rest.startswith("Fatal") else "warning"
    return KernelMessage(
        kind="sxid",
        severity=severity,
        body=record.text,
        pci=match["pci"].lower(),
        code=int(match["code"]),
        device=f"nvswitch{match['switch']}",
    )


def _gpu_lost(match: re.Match[str], record: KernelRecord) -> KernelMessage:
    return KernelMessage(
        kind="gpu_lost", severity="error", body=record.text, pci=match["pci"].lower()
    )


def _aer(match: re.Match[str], record: KernelRecord) -> KernelMessage:
    found = _AER_SEVERITY.search(match["rest"])
    corrected = "Corrected" in match["rest"] and not (found and found[1].startswith("Uncorr"))
    severity = "warning" if corrected else "error"
    return KernelMessage(
        kind="aer",
        severity=severity,
        body=record.text,
        pci=match["pci"].lower(),
        attributes={"aer.severity": "corrected" if corrected else "uncorrected"},
    )


def _oom(match: re.Match[str], record: KernelRecord) -> KernelMessage:
    scope = "cgroup" if match["scope"].startswith("Memory") else "node"
    return KernelMessage(
        kind="oom_kill",
        severity="error",
        body=record.text,
        device=match["name"],
        attributes={
            "process.pid": match["pid"],
            "process.executable.name": match["name"],
            "oom.scope": scope,
        },
    )


def _lustre(match: re.Match[str], record: KernelRecord) -> KernelMessage:
    rest = match["rest"]
    target = _LUSTRE_TARGET.search(rest)
    state = next((name for text, name in _LUSTRE_STATES if text in rest), "other")
    healthy = state == "connection_restored"
    severity = "info" if healthy or state == "other" else "warning"
    if match["level"].endswith("Error") or state == "evicted":
        severity = "error"
    return KernelMessage(
        kind="lustre",
        severity=severity,
        body=record.text,
        device=target[1] if target else None,
        attributes={"lustre.state": state},
    )


def _link(match: re.Match[str], record: KernelRecord) -> KernelMessage:
    groups = match.groupdict()
    state = groups.get("state")
    down = state.lower() == "down" if state else bool(groups.get("lost"))
    return KernelMessage(
        kind="link_down" if down else "link_up",
        severity="warning" if down else "info",
        body=record.text,
        device=groups.get("nic"),
        pci=(groups.get("pci") or "").lower() or None,
    )


def _simple(kind: str, severity: str) -> Callable[[re.Match[str], KernelRecord], KernelMessage]:
    def build(match: re.Match[str], record: KernelRecord) -> KernelMessage:
        groups = {k: v for k, v in match.groupdict().items() if v}
        device = next((groups[k] for k in ("disk", "ext", "xfs", "nvme", "server", "name")
                       if k in groups), None)  # fmt: skip
        level = "info" if groups.get("state") == "OK" else severity
        return KernelMessage(
            kind=kind,
            severity=level,
            body=record.text,
            device=device,
            attributes={"process.pid": groups["pid"]} if "pid" in groups else {},
        )

    return build


# A cheap word that must be present, the pattern, and what to make of it; the first match counts.
_RULES: tuple[
    tuple[str, re.Pattern[str], Callable[[re.Match[str], KernelRecord], KernelMessage]], ...
] = (
    ("SXid", _SXID, _sxid),
    ("Xid", _XID, _xid),
    ("NVRM", _GPU_LOST, _gpu_lost),
    ("AER", _AER, _aer),
    ("PCIe Bus Error", _AER, _aer),
    ("ut of memory", _OOM, _oom),
    ("Lustre", _LUSTRE, _lustre),
    ("LNet", _LUSTRE, _lustre),
    ("ink", _LINK, _link),
    ("ink", _CARRIER, _link),
    ("carrier lost", _CARRIER, _link),
    ("Hardware Error", _MCE, _simple("mce", "error")),
    ("blocked for more than", _HUNG, _simple("hung_task", "warning")),
    ("nfs: server", _NFS, _simple("nfs", "warning")),
    ("rror", _DISK, _simple("disk_error", "error")),
    ("nvme", _DISK, _simple("disk_error", "error")),
    ("XFS", _DISK, _simple("disk_error", "error")),
)


def classify(record: KernelRecord) -> KernelMessage | None:
    """Return what a line means, or None for a line of no interest."""
    for word, pattern, build in _RULES:
        if word in record.text and (match := pattern.search(record.text)):
            return build(match, record)
    return None

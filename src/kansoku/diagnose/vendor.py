"""What a hardware vendor is given of a node, and what stays here: the tenants' data.

Pure. Only lines of the kernel that speak of hardware are taken; what they say of programs, people
and addresses is removed. Metrics are those of the machine, their labels those of its devices.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kansoku.catalog.xid import codes
from kansoku.formats.kernel_log import KernelMessage, classify, split_dmesg

__all__ = ["HARDWARE_METRICS", "device_labels", "hardware_line", "redact", "redact_incident",
           "redacted_events", "xid_row"]  # fmt: skip

_HARDWARE = {"xid", "sxid", "aer", "mce", "gpu_lost", "link_down", "link_up", "disk_error"}
HARDWARE_METRICS = ("hw.", "kansoku.gpu.", "kansoku.nic.", "kansoku.rdma.", "kansoku.pcie.")
"""Beginnings of the metrics that tell of the machine alone."""
_LABELS = ("hw.", "host.name", "error.type", "network.", "kansoku.pci", "kansoku.gpu.unit")

_REMOVED = "<removed>"
# Each names the thing and keeps its word, so that the line can still be read.
_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), _REMOVED),
    (
        re.compile(
            r"(?i)\b((?:pid|tgid|name|comm|task|cmd(?:line)?|user(?:name)?|uid|gid|job(?:[ _-]?id)?"
            r"|account|process|container|token|password|passwd|secret|api[_-]?key|authorization)"
            r"\s*[=:]\s*)(?:'[^']*'|\"[^\"]*\"|[^\s,;)]+)"
        ),
        rf"\1{_REMOVED}",
    ),
    (re.compile(r"(?i)\b(job|user|process|pid)\s+[\w.\[\]-]*\d[\w.\[\]-]*"), rf"\1 {_REMOVED}"),
    # PCI paths and devices are the machine's; every other path may tell of a tenant.
    (re.compile(r"(?<![\w/.:])/(?!sys/|dev/)[\w.@%+-]+(?:/[\w.@%+=-]*)+"), "<path>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), "<address>"),
    (re.compile(r"(?i)\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}\b"), "<address>"),
)


def redact(text: str) -> str:
    """Return a text without programs, people, paths and addresses."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def hardware_line(line: str) -> tuple[KernelMessage, str] | None:
    """Return what a kernel line says of hardware and the line to hand on; None for any other."""
    message = classify(split_dmesg(line)) or classify(split_dmesg(_body(line)))
    if message is None or message.kind not in _HARDWARE:
        return None
    return message, redact(line.rstrip("\n")[:2000])


_KERNEL = re.compile(r"\bkernel:\s*")


def _body(line: str) -> str:
    """Return a syslog line without its head."""
    found = _KERNEL.search(line[:200])
    return line[found.end() :] if found else line


def xid_row(message: KernelMessage, line: str, source: str) -> dict[str, Any] | None:
    """Return a driver code as a row with its meaning; None for other lines."""
    if message.kind not in {"xid", "sxid"} or message.code is None:
        return None
    known = codes().get((message.kind, message.code))
    return {
        "kind": message.kind,
        "code": message.code,
        "pci": message.pci,
        "meaning": known.meaning if known else None,
        "line": line,
        "source": source,
    }


def device_labels(labels: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels that name devices of the machine."""
    return {k: str(v) for k, v in labels.items() if k.startswith(_LABELS)}


def redact_incident(incident: Mapping[str, Any], node: str) -> tuple[dict[str, Any], int]:
    """Return an incident of ``diagnose --json`` without tenants' data, and the evidence left out.

    Of its evidence only hardware lines of the kernel are kept: logs of jobs are the tenant's.
    """
    kept, dropped = [], 0
    for one in incident.get("hypotheses", []):
        if node not in str(one.get("subject") or ""):
            dropped += len(one.get("evidence_for", []))
            continue
        lines = [(e, hardware_line(str(e["sentence"]))) for e in one.get("evidence_for", [])]
        dropped += sum(found is None for _, found in lines)
        kept.append(
            {
                "domain": one.get("domain"),
                "component": one.get("component"),
                "subject": one.get("subject"),
                "confidence": one.get("confidence"),
                "evidence_for": [
                    {"sentence": found[1], "time_ns": e.get("time_ns")}
                    for e, found in lines
                    if found
                ],
            }
        )
    answer = {key: incident.get(key) for key in ("onset_ns", "kind", "verdict")}
    return answer | {"hypotheses": kept}, dropped  # its id names the run


def redacted_events(events: Iterable[tuple[int, str, str]]) -> list[dict[str, Any]]:
    """Return a node's life for the vendor."""
    return [{"time_ns": t, "event": stage, "reason": redact(why)} for t, stage, why in events]

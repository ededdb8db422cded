"""Read a node's logs for the vendor and write the bundle: a tar that one can check and read."""

import csv
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kansoku.diagnose.device_text import facts_of_text
from kansoku.diagnose.vendor import hardware_line, xid_row
from kansoku.errors import PlatformError
from kansoku.formats.job_log import Clock, host_in_path, parse_line

__all__ = ["NodeLogs", "read_node_logs", "table_text", "write_bundle"]

_KERNEL_LINE = re.compile(
    r"\bkernel:|NVRM:|^\s*(?:<\d+>)?\[\s*(?:\d+\.\d{6}|\w{3} \w{3} +\d+ [\d:]{8} \d{4})\]"
)
_IDENTITY = re.compile(
    r"serial|uuid|guid|part number|vbios|firmware|fw_ver|board id|product (?:name|brand)|"
    r"driver version|model|ecc errors|remap|retired|link width|link gen|inforom|image version",
    re.IGNORECASE,
)
_PROCESS = re.compile(r"process", re.IGNORECASE)
_MOST_FILES = 2000
_MOST_LINES = 20_000
_LARGEST_BYTES = 1 << 30


@dataclass(slots=True, kw_only=True)
class NodeLogs:
    """What a node's logs say of its hardware, redacted."""

    kernel: list[str] = field(default_factory=list)
    codes: list[dict[str, Any]] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0
    """Lines that are no hardware's, or another node's."""


def _another(host: str | None, node: str) -> bool:
    """Say whether a name is that of another node: alike but for its digits."""
    if host is None or host == node:
        return False
    return re.sub(r"\d+", "#", host) == re.sub(r"\d+", "#", node)


def _files(folder: Path) -> Iterator[Path]:
    count = 0
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(root) / name
            if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
                continue
            count += 1
            if count > _MOST_FILES:
                return
            yield path


def read_node_logs(folder: Path, node: str) -> NodeLogs:
    """Return the hardware's lines and identities of one node below a folder."""
    found = NodeLogs()
    for path in _files(folder):
        name = str(path.relative_to(folder))
        if _another(host_in_path(name), node):
            continue
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if b"\0" in text[:4096]:
            continue
        _read(text.decode("utf-8", "replace").splitlines(), name, node, found)
    return found


def _read(lines: Sequence[str], name: str, node: str, found: NodeLogs) -> None:
    clock = Clock(reference_ns=0)
    for number, line in enumerate(lines, start=1):
        if not _KERNEL_LINE.search(line[:200]):
            continue
        told = hardware_line(line)
        if told is None or _another(parse_line(line, clock).host, node):
            found.left_out += 1
            continue
        message, text = told
        if len(found.kernel) < _MOST_LINES:
            found.kernel.append(text)
            row = xid_row(message, text, f"{name}:{number}")
            found.codes += [row] if row else []
    for fact in facts_of_text(lines, node=node, name=name):
        if fact.device and _IDENTITY.search(fact.key) and not _PROCESS.search(fact.key):
            found.devices.append({"device": fact.device, "key": fact.key, "value": fact.value})


def table_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV; empty without any."""
    known = list(rows)
    if not known:
        return ""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(known[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(known)
    return stream.getvalue()


def write_bundle(
    target: Path, node: str, parts: Mapping[str, str], manifest: dict[str, Any], *, time_ns: int
) -> None:
    """Write ``NODE/…`` as a gzipped tar; the manifest names each part with its SHA-256.

    Raises PlatformError where it cannot be written; nothing half written is left behind.
    """
    parts = {name: text for name, text in parts.items() if text}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in parts.items()}
    whole = {"manifest.json": json.dumps(manifest | {"files": digests}, indent=1) + "\n", **parts}
    draft = target.with_name(f"{target.name}.tmp")
    try:
        with tarfile.open(draft, "w:gz") as archive:
            for name, text in whole.items():
                data = text.encode()
                info = tarfile.TarInfo(f"{node}/{name}")
                info.size, info.mtime = len(data), time_ns // 1_000_000_000
                archive.addfile(info, io.BytesIO(data))
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise PlatformError(error.strerror or str(error), where=str(target)) from None

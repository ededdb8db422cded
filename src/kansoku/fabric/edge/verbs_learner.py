"""Learn the queue pairs of running jobs: kprobe events on modify_qp and destroy_qp.

No compiler and no package: the events are asked of tracefs, the offsets of the kernel's
structures come from its own BTF. Needs root. Queue pairs connected before the start are not seen.
"""

import contextlib
import ipaddress
import os
import re
import struct
from pathlib import Path

from kansoku.errors import PlatformError
from kansoku.fabric.edge.verbs import rxe_source_port
from kansoku.fabric.service import QueuePair

__all__ = ["KprobeLearner", "parse_line", "structure_offsets"]

_DEST_QPN = 1 << 20  # IB_QP_DEST_QPN of the attribute mask
_BTF_HEADER = struct.Struct("=HBBIIIII")
_WANTED = {
    "ib_qp": ("device", "qp_num"),
    "ib_device": ("name",),
    "ib_qp_attr": ("ah_attr", "dest_qp_num"),
    "rdma_ah_attr": ("grh",),
    "ib_global_route": ("dgid", "flow_label", "traffic_class"),
}
# Bytes after the head of a type, by kind: fixed, or per member.
_EXTRA = {1: 4, 3: 12, 14: 4, 17: 4}
_PER_MEMBER = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_LINE = re.compile(r"^\s*.*-(?P<pid>\d+)\s+\[\d+\].*?: (?P<event>\w+): \([^)]*\) (?P<fields>.*)$")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def structure_offsets(btf: bytes, base_strings: int = 0) -> dict[str, dict[str, int]]:
    """Return byte offsets of the members wanted, by structure.

    ``base_strings`` is the length of the base's strings for a module's BTF (its names follow).
    Raises PlatformError for what is no BTF.
    """
    if len(btf) < _BTF_HEADER.size or btf[:2] != b"\x9f\xeb":
        raise PlatformError("the kernel's type information (BTF) cannot be read")
    _, _, _, size, types_at, types_length, strings_at, _ = _BTF_HEADER.unpack_from(btf)
    at, end = size + types_at, size + types_at + types_length
    strings = size + strings_at - base_strings

    def name(offset: int) -> str:
        if offset < base_strings:
            return ""
        begin = strings + offset
        return btf[begin : btf.index(b"\0", begin)].decode("ascii", "replace")

    found: dict[str, dict[str, int]] = {}
    head = struct.Struct("=III")
    while at < end:
        named, info, _ = head.unpack_from(btf, at)
        at += 12
        kind, count = info >> 24 & 31, info & 0xFFFF
        if kind == 4:
            wanted = _WANTED.get(name(named))
            if wanted is not None:
                members = found.setdefault(name(named), {})
                for n in range(count):
                    member, _, bits = head.unpack_from(btf, at + 12 * n)
                    text = name(member)
                    if text in wanted:
                        members[text] = (bits & 0xFFFFFF if info >> 31 else bits) // 8
        at += _EXTRA.get(kind, 0) + _PER_MEMBER.get(kind, 0) * count
    return found


def _offsets() -> dict[str, dict[str, int]]:
    folder = Path("/sys/kernel/btf")
    try:
        base = (folder / "vmlinux").read_bytes()
    except OSError as error:
        raise PlatformError(f"no kernel type information: {error}") from None
    found: dict[str, dict[str, int]] = {}
    length = struct.unpack_from("=I", base, 20)[0]
    with contextlib.suppress(OSError):
        found = structure_offsets((folder / "ib_core").read_bytes(), length)
    if any(len(found.get(name, {})) < len(members) for name, members in _WANTED.items()):
        # ib_core built in, or some of its structures known to the kernel proper; names shared
        # with it stand there.
        for name, offsets in structure_offsets(base).items():
            found[name] = offsets | found.get(name, {})
    for name, members in _WANTED.items():
        missing = set(members) - set(found.get(name, {}))
        if missing:
            raise PlatformError(
                f"the kernel's struct {name} has no {', '.join(sorted(missing))}",
                remedy="is RDMA's ib_core loaded? Without it: kansoku fabric follow RUN",
            )
    return found


class KprobeLearner:
    """A :class:`kansoku.fabric.service.Learner` over tracefs."""

    source = "kprobes on ib_modify_qp_with_udata and ib_destroy_qp_user"

    def __init__(self, node: str, *, tracefs: Path = Path("/sys/kernel/tracing")) -> None:
        """Attach; raise PlatformError where the kernel has no kprobes, no RDMA, or forbids it."""
        self._node = node
        self._tracefs = tracefs
        self._group = f"kansoku{os.getpid()}"
        self._instance = tracefs / "instances" / self._group
        self._rest = b""
        o = _offsets()
        attr = o["ib_qp_attr"]["ah_attr"] + o["rdma_ah_attr"]["grh"]
        route = {key: attr + offset for key, offset in o["ib_global_route"].items()}
        qp = (
            f"qpn=+{o['ib_qp']['qp_num']}(%di):u32 "
            f"device=+{o['ib_device']['name']}(+{o['ib_qp']['device']}(%di)):string"
        )
        modify = (
            f"p:{self._group}/modify_qp ib_modify_qp_with_udata mask=%dx:x32 {qp} "
            f"peer=+{o['ib_qp_attr']['dest_qp_num']}(%si):u32 "
            f"gid0=+{route['dgid']}(%si):x64 gid1=+{route['dgid'] + 8}(%si):x64 "
            f"label=+{route['flow_label']}(%si):u32 tclass=+{route['traffic_class']}(%si):u8"
        )
        events = (modify, f"p:{self._group}/destroy_qp ib_destroy_qp_user {qp}")
        try:
            self._instance.mkdir()
            for event in events:
                self._control(event)
            enable = self._instance / "events" / self._group / "enable"
            enable.write_text("1", "ascii")
            self._pipe = os.open(
                self._instance / "trace_pipe", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            self.close()
            raise PlatformError(
                f"cannot watch queue pairs: {error}",
                remedy="run as root on a kernel with kprobes, with ib_core loaded",
            ) from None

    def _control(self, text: str) -> None:
        descriptor = os.open(self._tracefs / "kprobe_events", os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, text.encode() + b"\n")
        finally:
            os.close(descriptor)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when something was seen."""
        return self._pipe

    def poll(self) -> list[QueuePair]:
        """Return what was connected or destroyed since the last call; never block."""
        found: list[QueuePair] = []
        while True:
            try:
                data = os.read(self._pipe, 65536)
            except BlockingIOError:
                break
            if not data:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                pair = parse_line(line.decode("utf-8", "replace"), self._node)
                if pair is not None:
                    found.append(pair)
        return found

    def close(self) -> None:
        """Detach."""
        pipe = getattr(self, "_pipe", None)
        if pipe is not None:
            os.close(pipe)
            self._pipe = -1
        with contextlib.suppress(OSError):
            (self._instance / "events" / self._group / "enable").write_text("0", "ascii")
        for name in ("modify_qp", "destroy_qp"):
            with contextlib.suppress(OSError):
                self._control(f"-:{self._group}/{name}")
        with contextlib.suppress(OSError):
            self._instance.rmdir()


def parse_line(line: str, node: str) -> QueuePair | None:
    """Return the queue pair of one line of trace_pipe; None for anything else."""
    match = _LINE.match(line)
    if match is None:
        return None
    fields = {key: value.strip('"') for key, value in _FIELD.findall(match["fields"])}
    try:
        qpn, device = int(fields["qpn"]), fields["device"]
        gone = match["event"] == "destroy_qp"
        if gone:
            return QueuePair(
                node=node, device=device, qpn=qpn, peer_qpn=0, peer_gid="", flow_label=None,
                traffic_class=None, pid=int(match["pid"]), gone=True,
            )  # fmt: skip
        if match["event"] != "modify_qp" or not int(fields["mask"], 16) & _DEST_QPN:
            return None
        gid = b"".join(int(fields[key], 16).to_bytes(8, "little") for key in ("gid0", "gid1"))
        soft = device.startswith("rxe")
        return QueuePair(
            node=node,
            device=device,
            qpn=qpn,
            peer_qpn=int(fields["peer"]),
            peer_gid=_gid_text(gid),
            flow_label=int(fields["label"]),
            traffic_class=int(fields["tclass"]),
            pid=int(match["pid"]),
            source_port=rxe_source_port(qpn) if soft else None,
        )
    except (KeyError, ValueError):
        return None


def _gid_text(gid: bytes) -> str:
    address = ipaddress.IPv6Address(gid)
    mapped = address.ipv4_mapped
    return f"::ffff:{mapped}" if mapped is not None else str(address)

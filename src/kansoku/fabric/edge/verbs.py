"""RDMA transport: UD queue pairs through pyverbs, path by flow label or by a pool of queue pairs.

A NIC derives the UDP source port of RoCE v2 from the flow label, so any port can be chosen.
Soft-RoCE ignores the label and derives it from the queue pair number: there a pool of queue pairs
gives as many ports, discovered by looking at what leaves, and every port asked for stands for
one of them.

Stamps: of the NIC where it stamps completions (extended completion queue), else none, and the
application's clock is all there is; results are labelled so.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import ipaddress
import os
import select
import socket
import struct
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from kansoku.errors import DependencyError, InputError, PlatformError
from kansoku.fabric.ecmp import FIRST_PORT, label_of_port
from kansoku.fabric.edge.transport import HopAnswer, Peer, Received, Stamped
from kansoku.fabric.edge.verbs_trace import Tracer
from kansoku.fabric.probe import SIZE, StampSource, decode

__all__ = ["VerbsTransport", "gateway_toward", "rxe_source_port"]

_QKEY = 0x6B52504D  # both ends must agree on one; it is no secret
_HOP_LIMIT = 64
_GRH = 40
_SLOT = 128
_RECEIVES = 256
_SENDS = 256  # send slots over all queue pairs
_DEPTH = 64  # of one queue pair's send queue
_REPORT_EACH = 16  # sends of a queue pair of which one reports that it is done
_IS_SEND = 1 << 62  # marks work requests that send; the others are numbers of receive slots
_HANDLES = 4096
_ROCE_PORT = 4791
_SYSTEM = Path("/usr/lib/python3/dist-packages")
_BASE = Path("/sys/class/infiniband")
_OWN = Path("/proc/self/fd")


def rxe_source_port(qpn: int) -> int:
    """Return the UDP source port of a soft-RoCE queue pair (Linux 6.1: ``hash_32(qpn, 14)``)."""
    return FIRST_PORT + ((qpn * 0x61C88647 & 0xFFFFFFFF) >> 18)


def gateway_toward(device: str) -> str | None:
    """Return the IPv4 gateway of the interface under a soft-RoCE device; None where there is none.

    Packets may be sent that way to see their source ports.
    """
    try:
        interface = (_BASE / device / "parent").read_text("ascii").strip()
        lines = Path("/proc/net/route").read_text("ascii").splitlines()[1:]
    except OSError:
        return None
    for line in lines:
        name, _, gateway, *_ = line.split()
        if name == interface and int(gateway, 16):
            return socket.inet_ntoa(struct.pack("@I", int(gateway, 16)))
    return None


def _find_pyverbs() -> None:
    """Make Debian's pyverbs importable from a virtual environment of the same Python version.

    It is on no package index. Only this package is taken, not the folder it lies in.
    """
    if importlib.util.find_spec("pyverbs") is not None:
        return
    init = _SYSTEM / "pyverbs" / "__init__.py"
    if init.exists():
        folder = [str(init.parent)]
        spec = importlib.util.spec_from_file_location(
            "pyverbs", init, submodule_search_locations=folder
        )
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            sys.modules["pyverbs"] = module
            spec.loader.exec_module(module)


def _verbs() -> Any:
    """Return pyverbs' modules in one namespace; raise DependencyError without them."""
    try:
        _find_pyverbs()
        names = ("device", "pd", "mr", "cq", "qp", "addr", "wr", "enums", "pyverbs_error")
        parts = {name: importlib.import_module(f"pyverbs.{name}") for name in names}
    except ImportError as error:
        raise DependencyError(
            f"probing over verbs needs the package pyverbs ({error})",
            remedy="install python3-pyverbs of rdma-core, for this version of Python",
        ) from None
    return type("Verbs", (), parts)


class VerbsTransport:
    """Probes over UD queue pairs of one RDMA device."""

    def __init__(
        self,
        device: str,
        address: str,
        *,
        port: int = 1,
        pool: int = 16,
        toward: str | None = None,
        hardware_stamps: bool = True,
        extended: bool = False,
    ) -> None:
        """Open ``device``; raise PlatformError where it or its RoCE v2 GID of ``address`` is not.

        ``pool`` is the number of queue pairs where they choose the path. ``toward`` is an address
        whose direction packets may be sent to discover their ports, such as the gateway; without
        it, or without the right to look at packets, the kernel's formula is trusted. ``extended``
        uses the extended completion queue even without NIC stamps.
        """
        self._v = _verbs()
        self.address = address
        self.device = device
        self._port = port
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._sgid_index, self._interface = _gid_index(device, port, address)
        self.soft = (_BASE / device / "parent").exists()
        """A soft-RoCE device: no flow labels, no NIC stamps."""
        try:
            self._open(pool if self.soft else 1, stamped=hardware_stamps, extended=extended)
        except self._v.pyverbs_error.PyverbsError as error:
            raise PlatformError(f"{device}: {error}", remedy="is the device up?") from None
        self.qpn = int(self._pairs[0].qp_num)
        self._handles: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._sent = 0
        self._outstanding = [0] * len(self._pairs)
        self._unsignalled = [0] * len(self._pairs)
        self._signalled: dict[int, tuple[int, int, int | None]] = {}
        self._early: list[Received | Stamped | HopAnswer] = []
        self.failed_completions = 0
        self.ports_source = "flow label"
        """How the source ports are known: ``flow label``, ``observed`` or ``formula``."""
        self.ports = self._learn_ports(toward) if self.soft else []
        """UDP source port of each queue pair of the pool; empty where labels choose."""
        self._tracer = Tracer(address, _ROCE_PORT, device=self._interface)
        self._lengths: dict[str, int] = {}
        self._epoll.register(self._tracer.fileno(), select.EPOLLIN)

    # -- opening ----------------------------------------------------------------------------

    def _open(self, pairs: int, *, stamped: bool, extended: bool) -> None:
        v = self._v
        self._epoll = select.epoll()
        self._context = v.device.Context(name=self.device)
        self._domain = v.pd.PD(self._context)
        self._memory = v.mr.MR(
            self._domain, _SLOT * (_RECEIVES + _SENDS), v.enums.IBV_ACCESS_LOCAL_WRITE
        )
        self._tick_ns = 1.0
        self._wall = False
        self._cq_ex: Any = self._stamping_queue() if stamped else None
        self.stamps = StampSource.HARDWARE if self._cq_ex else StampSource.APPLICATION
        if self._cq_ex is None and extended:
            self._cq_ex = self._extended_queue(0)
        self._timer = -1
        self._channel: Any = None
        if self._cq_ex is None:
            # pyverbs does not tell the channel's descriptor: it is the one that is new.
            before = _event_descriptors()
            self._channel = v.cq.CompChannel(self._context)
            new = _event_descriptors() - before
            if len(new) != 1:
                raise PlatformError("the completion channel has no descriptor to wait for")
            self._channel_fd = new.pop()
            self._cq = v.cq.CQ(self._context, _RECEIVES + _SENDS, None, self._channel, 0)
            self._cq.req_notify()
            self._epoll.register(self._channel_fd, select.EPOLLIN)
        else:
            # pyverbs cannot arm an extended queue: look at it on time; stamps are the NIC's.
            self._cq = self._cq_ex
            self._timer = _timer_descriptor(500_000)
            self._epoll.register(self._timer, select.EPOLLIN)
        self._pairs = [self._pair(first=n == 0) for n in range(pairs)]
        for slot in range(_RECEIVES):
            self._post_receive(slot)

    def _extended_queue(self, flags: int) -> Any:
        v = self._v
        wanted = v.enums.IBV_WC_EX_WITH_BYTE_LEN | v.enums.IBV_WC_EX_WITH_SRC_QP
        init = v.cq.CqInitAttrEx(cqe=_RECEIVES + _SENDS, wc_flags=wanted | flags)
        return v.cq.CQEX(self._context, init)

    def _stamping_queue(self) -> Any:
        """Return a queue whose completions the NIC stamps; None where it does not."""
        e = self._v.enums
        wall = getattr(e, "IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK", 0)
        for flag in (wall, e.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP):
            if not flag:
                continue
            with contextlib.suppress(self._v.pyverbs_error.PyverbsError):
                queue = self._extended_queue(flag)
                self._wall = flag == wall
                if not self._wall:
                    clock = self._context.query_device_ex().hca_core_clock  # kHz
                    if not clock:
                        queue.close()
                        continue
                    self._tick_ns = 1e6 / clock
                return queue
        return None

    def _pair(self, *, first: bool) -> Any:
        v = self._v
        cap = v.qp.QPCap(
            max_send_wr=_DEPTH, max_recv_wr=_RECEIVES if first else 1, max_send_sge=1,
            max_recv_sge=1, max_inline_data=64,
        )  # fmt: skip
        init = v.qp.QPInitAttr(
            qp_type=v.enums.IBV_QPT_UD, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0
        )
        attributes = v.qp.QPAttr(port_num=self._port)
        attributes.qkey = _QKEY
        attributes.pkey_index = 0
        return v.qp.QP(self._domain, init, attributes)

    def _post_receive(self, slot: int) -> None:
        v = self._v
        where = self._memory.buf + slot * _SLOT
        request = v.wr.RecvWR(slot, 1, [v.wr.SGE(where, _GRH + SIZE + 1, self._memory.lkey)])
        self._pairs[0].post_recv(request)

    # -- ports ------------------------------------------------------------------------------

    def _learn_ports(self, toward: str | None) -> list[int]:
        numbers = [int(pair.qp_num) for pair in self._pairs]
        seen: dict[int, int] = {}
        if toward is not None and self._interface is not None and self._family == socket.AF_INET:
            with contextlib.suppress(OSError):
                seen = self._observe(toward, self._interface)
        whole = set(numbers) <= set(seen)
        self.ports_source = "observed" if whole else "formula"
        return [seen[n] if whole else rxe_source_port(n) for n in numbers]

    def _observe(self, toward: str, interface: str) -> dict[int, int]:
        """Send a packet from each queue pair and read its source port off the wire."""
        found: dict[int, int] = {}
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)) as sniffer:
            sniffer.bind((interface, 3))
            sniffer.settimeout(0.3)
            for index in range(len(self._pairs)):
                self._post(bytes(SIZE), Peer(toward, 1), index, FIRST_PORT, None)
            deadline = time.monotonic() + 1.0
            while len(found) < len(self._pairs) and time.monotonic() < deadline:
                packet = sniffer.recv(256)
                pair = _source_of_packet(packet)
                if pair is not None:
                    found[pair[0]] = pair[1]
        return found

    def real_port(self, source_port: int) -> int:
        """Return the port that packets asked to leave from ``source_port`` do leave from."""
        return self.ports[self._index(source_port)] if self.ports else source_port

    def _index(self, source_port: int) -> int:
        return (source_port - FIRST_PORT) % len(self._pairs)

    # -- sending ----------------------------------------------------------------------------

    def send(
        self, data: bytes, peer: Peer, source_port: int, *, token: int | None = None, hops: int = 0
    ) -> Stamped | None:
        """Send along the path of a source port; see :class:`Transport`.

        A trace leaves as plain UDP to RoCE's port with the hop limit, so that switches hash it
        like the probes. The receiver's NIC consumes such a packet silently; so the one that would
        arrive goes through the queue pair, once the length of the path is known from packets
        received.
        """
        if hops:
            length = self._lengths.get(peer.address)
            if length is None or hops <= length:
                self._tracer.send(data, peer.address, self.real_port(source_port), hops)
                return None
            if hops > length + 1:
                return None
        self._post(data, peer, self._index(source_port), source_port, token)
        return None

    def _post(
        self, data: bytes, peer: Peer, index: int, source_port: int, token: int | None
    ) -> None:
        v = self._v
        offset = (_RECEIVES + self._sent % _SENDS) * _SLOT
        self._memory.write(data, len(data), offset)
        stamped = token is not None and self.stamps is StampSource.HARDWARE
        if self._outstanding[index] >= _DEPTH - 1:
            self._early += self._drain()
            if self._outstanding[index] >= _DEPTH - 1:
                raise BlockingIOError("the send queue is full")
        # An unsignalled send's place is free only when a later one is reported done.
        signalled = stamped or self._unsignalled[index] == _REPORT_EACH - 1
        flags = v.enums.IBV_SEND_INLINE | (v.enums.IBV_SEND_SIGNALED if signalled else 0)
        self._sent += 1
        number = _IS_SEND | self._sent
        sge = v.wr.SGE(self._memory.buf + offset, len(data), self._memory.lkey)
        request = v.wr.SendWR(
            wr_id=number, num_sge=1, sg=[sge], opcode=v.enums.IBV_WR_SEND, send_flags=flags
        )
        try:
            request.set_wr_ud(self._handle(peer.address, source_port), peer.qpn, _QKEY)
            self._pairs[index].post_send(request)
        except v.pyverbs_error.PyverbsError as error:
            raise OSError(f"{self.device}: {error}") from None
        self._outstanding[index] += 1
        self._unsignalled[index] += 1
        if signalled:
            done, self._unsignalled[index] = self._unsignalled[index], 0
            self._signalled[number] = (index, done, token if stamped else None)

    def _handle(self, address: str, source_port: int) -> Any:
        """Return the address handle of a peer, with the flow label of the port."""
        label = 0 if self.soft else label_of_port(source_port)
        key = (address, label)
        handle = self._handles.get(key)
        if handle is None:
            v = self._v
            if (":" in address) != (self._family == socket.AF_INET6):
                raise InputError(f"{address} and {self.address} are of different families")
            route = v.addr.GlobalRoute(
                dgid=v.addr.GID(_gid(address).exploded), sgid_index=self._sgid_index,
                flow_label=label, hop_limit=_HOP_LIMIT,
            )  # fmt: skip
            attributes = v.addr.AHAttr(gr=route, is_global=1, port_num=self._port)
            handle = v.addr.AH(self._domain, attr=attributes)
            if len(self._handles) >= _HANDLES:
                self._handles.popitem(last=False)[1].close()
            self._handles[key] = handle
        else:
            self._handles.move_to_end(key)
        return handle

    # -- receiving --------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the epoll descriptor, itself pollable."""
        return self._epoll.fileno()

    def poll(self) -> list[Received | Stamped | HopAnswer]:
        """Return what came in, stamps before packets."""
        found, self._early = self._early, []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._tracer.fileno():
                found += self._tracer.poll()
            elif self._channel is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._timer, 8)
            else:
                # It is readable, so this does not wait (holding the interpreter if it did).
                self._channel.get_cq_event(self._cq)
                self._cq.ack_events(1)
                self._cq.req_notify()
        found += self._drain()
        return found

    def _drain(self) -> list[Received | Stamped | HopAnswer]:
        found: list[Received | Stamped | HopAnswer] = []
        complete = self._drain_plain if self._cq_ex is None else self._drain_extended
        complete(found)
        found.sort(key=lambda event: isinstance(event, Received))
        return found

    def _drain_plain(self, found: list[Received | Stamped | HopAnswer]) -> None:
        while True:
            count, completions = self._cq.poll(32)
            for one in completions:
                self._completion(found, one.wr_id, one.status, one.byte_len, None)
            if count < 32:
                return

    def _drain_extended(self, found: list[Received | Stamped | HopAnswer]) -> None:
        queue = self._cq_ex
        attributes = self._v.cq.PollCqAttr()
        # One at a time: soft-RoCE's library (rdma-core 44) steps too far at the end of a batch.
        while queue.start_poll(attributes) == 0:
            number, status = queue.wr_id, queue.status
            length = 0 if number & _IS_SEND else queue.read_byte_len()
            stamp = self._stamp(queue)
            queue.end_poll()
            self._completion(found, number, status, length, stamp)

    def _stamp(self, queue: Any) -> int | None:
        if self.stamps is not StampSource.HARDWARE:
            return None
        if self._wall:
            return int(queue.read_completion_wallclock_ns())
        return round(int(queue.read_timestamp()) * self._tick_ns)

    def _completion(
        self,
        found: list[Received | Stamped | HopAnswer],
        number: int,
        status: int,
        length: int,
        stamp_ns: int | None,
    ) -> None:
        """Turn one completion into an event, and give its receive slot back."""
        if number & _IS_SEND:
            index, done, token = self._signalled.pop(number, (0, 0, None))
            self._outstanding[index] -= done
            if token is not None and stamp_ns is not None and status == 0:
                found.append(Stamped(token, stamp_ns, StampSource.HARDWARE))
            self.failed_completions += status != 0
            return
        if status == 0 and length >= _GRH:
            raw = self._memory.read(length, number * _SLOT)
            address = self._sender(raw[:_GRH])
            source = StampSource.APPLICATION if stamp_ns is None else StampSource.HARDWARE
            packet = decode(raw[_GRH:])
            if packet is not None:
                found.append(Received(packet, address, stamp_ns, time.time_ns(), source))
        else:
            self.failed_completions += status != 0
        self._post_receive(number)

    def _sender(self, route: bytes) -> str:
        """Read the sender and the length of its path from the network header before the data."""
        if self._family == socket.AF_INET:
            address, left = socket.inet_ntop(socket.AF_INET, route[32:36]), route[28]
        else:
            address, left = socket.inet_ntop(socket.AF_INET6, route[8:24]), route[7]
        begun = next(limit for limit in (64, 128, 255) if left <= limit)
        self._lengths[address] = begun - left
        return address

    def close(self) -> None:
        """Give everything back."""
        self._tracer.close()
        self._epoll.close()
        for handle in self._handles.values():
            handle.close()
        for pair in self._pairs:
            pair.close()
        self._cq.close()
        if self._channel is not None:
            self._channel.close()
        if self._timer >= 0:
            os.close(self._timer)
        self._memory.close()
        self._domain.close()
        self._context.close()


def _gid(address: str) -> ipaddress.IPv6Address:
    return ipaddress.IPv6Address(address if ":" in address else f"::ffff:{address}")


def _gid_index(device: str, port: int, address: str) -> tuple[int, str | None]:
    """Return the index of the RoCE v2 GID of an address, and the interface under it."""
    folder = _BASE / device / "ports" / str(port)
    wanted = _gid(address)
    if not folder.is_dir():
        have = ", ".join(sorted(p.name for p in _BASE.glob("*"))) or "none"
        raise PlatformError(f"no RDMA device {device} port {port}; there are: {have}")
    for file in sorted((folder / "gids").iterdir(), key=lambda path: int(path.name)):
        try:
            kind = (folder / "gid_attrs" / "types" / file.name).read_text("ascii").strip()
            value = ipaddress.IPv6Address(file.read_text("ascii").strip())
        except (OSError, ValueError):
            continue  # an empty place of the table
        if value == wanted and kind == "RoCE v2":
            interface: str | None = None
            with contextlib.suppress(OSError):
                name = folder / "gid_attrs" / "ndevs" / file.name
                interface = name.read_text("ascii").strip()
            return int(file.name), interface
    raise PlatformError(f"{device} has no RoCE v2 GID of {address}")


def _event_descriptors() -> set[int]:
    found = set()
    for path in list(_OWN.iterdir()):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            if "infinibandevent" in str(path.readlink()):
                found.add(int(path.name))
    return found


def _timer_descriptor(period_ns: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.timerfd_create(1, os.O_NONBLOCK | os.O_CLOEXEC))  # CLOCK_MONOTONIC
    if descriptor < 0:
        raise PlatformError(f"no timer: {os.strerror(ctypes.get_errno())}")
    when = struct.pack("@qqqq", 0, period_ns, 0, period_ns)
    libc.timerfd_settime(descriptor, 0, when, None)
    return descriptor


def _source_of_packet(packet: bytes) -> tuple[int, int] | None:
    """Return source queue pair and UDP source port of a RoCE v2 UD packet over IPv4."""
    head = (packet[0] & 15) * 4 if packet else 0
    if len(packet) < head + 28 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_UDP:
        return None
    source, target = struct.unpack_from("!HH", packet, head)
    if target != _ROCE_PORT or packet[head + 8] != 0x64:  # opcode UD SEND ONLY
        return None
    return int.from_bytes(packet[head + 25 : head + 28], "big"), source

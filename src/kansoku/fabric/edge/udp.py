"""UDP transport: unconnected sockets, kernel (or NIC) stamps, one socket per source port.

Everything is received on one socket at the well-known port. Each source port has a socket that
only sends; its error queue returns send stamps and the ICMP answers of traces. Sockets stay
unconnected: with connected ones loss was seen on the wrong ports.
"""

import contextlib
import errno
import select
import socket
import struct
import time
from collections import OrderedDict

from kansoku.errors import PlatformError
from kansoku.fabric.edge.datagrams import batch_of
from kansoku.fabric.edge.transport import HopAnswer, Peer, Received, Stamped
from kansoku.fabric.probe import SIZE, StampSource, decode

__all__ = ["UdpTransport"]

_SO_TIMESTAMPING = 37
_TX_HARDWARE, _TX_SOFTWARE, _RX_HARDWARE, _RX_SOFTWARE = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_SOFTWARE, _RAW_HARDWARE, _OPT_ID, _OPT_TSONLY = 1 << 4, 1 << 6, 1 << 7, 1 << 11
_IP_RECVERR, _IPV6_RECVERR, _IPV6_HOPLIMIT = 11, 25, 52
_ORIGIN_ICMP, _ORIGIN_ICMP6, _ORIGIN_STAMP = 2, 3, 4
_STAMPS = struct.Struct("@qqqqqq")  # struct scm_timestamping: software, (unused), hardware
_EXTENDED = struct.Struct("@IBBBBII")  # struct sock_extended_err
_NO_STAMP = [(socket.SOL_SOCKET, _SO_TIMESTAMPING, struct.pack("@I", 0))]
_PASSING = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNREFUSED, errno.EPROTO}
_ERRORS = int(socket.MSG_ERRQUEUE)
_SOCKETS = 1024  # senders kept open; the least used is closed beyond it
_BATCH = 1024  # packets taken per poll, so that sending gets its turn under a flood


class _Sender:
    __slots__ = ("give", "next_id", "socket", "take", "tokens")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.give, self.take = sock.sendto, sock.recvmsg  # looked up once, called for every probe
        self.next_id = 0
        self.tokens: dict[int, int] = {}


class UdpTransport:
    """Probes over UDP."""

    def __init__(
        self,
        address: str,
        port: int,
        qpn: int,
        *,
        device: str | None = None,
        stamps: StampSource = StampSource.KERNEL,
    ) -> None:
        """Bind ``address``; raise PlatformError when address or port cannot be had.

        ``device`` binds the sockets to one interface (hosts with several NICs in one subnet).
        HARDWARE asks for NIC stamps, and falls back to the kernel's where the NIC gives none.
        """
        self.address = address
        self.qpn = qpn
        self._port = port
        self._device = device
        self.stamps = stamps
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._epoll = select.epoll()
        self._senders: OrderedDict[int, _Sender] = OrderedDict()
        self._by_fd: dict[int, _Sender] = {}
        self._early: list[Received | Stamped | HopAnswer] = []
        self.refused = 0
        """ICMP "port unreachable" answers: a host without an agent."""
        self._stamped = stamps is not StampSource.APPLICATION
        self._receiver = self._open(port, receive=True)
        self._batch = batch_of(self._receiver)
        self._epoll.register(self._receiver, select.EPOLLIN)

    def _open(self, port: int, *, receive: bool = False) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            if self._device:
                sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self._device.encode() + b"\0"
                )
            sock.bind((self.address, port))
            if receive:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            self._ask_stamps(sock, receive=receive)
            if not receive and self._family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
            elif not receive:
                sock.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        except OSError as error:
            sock.close()
            if not receive:
                raise
            raise PlatformError(
                f"cannot receive on {self.address} port {port}: {error.strerror}",
                remedy="is the address up, and no other fabric agent running on it?",
            ) from None
        return sock

    def _ask_stamps(self, sock: socket.socket, *, receive: bool) -> None:
        if not self._stamped:
            return
        flags = _SOFTWARE | (_RX_SOFTWARE if receive else _TX_SOFTWARE)
        if self.stamps is StampSource.HARDWARE:
            flags |= _RAW_HARDWARE | (_RX_HARDWARE if receive else _TX_HARDWARE)
        if not receive:
            flags |= _OPT_ID | _OPT_TSONLY
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, flags)

    def _sender(self, port: int) -> _Sender:
        sender = self._senders.get(port)
        if sender is None:
            if len(self._senders) >= _SOCKETS:
                self._drop(next(iter(self._senders)))
            try:
                sender = _Sender(self._open(port))
            except OSError as error:
                if error.errno != errno.EMFILE or not self._senders:
                    raise
                self._drop(next(iter(self._senders)))  # fewer descriptors than ports
                sender = _Sender(self._open(port))
            self._senders[port] = sender
            self._by_fd[sender.socket.fileno()] = sender
            self._epoll.register(sender.socket, 0)  # errors only: stamps and ICMP
        return sender

    def _drop(self, port: int) -> None:
        sender = self._senders.pop(port)
        self._epoll.unregister(sender.socket)
        del self._by_fd[sender.socket.fileno()]
        sender.socket.close()

    def send(
        self, data: bytes, peer: Peer, source_port: int, *, token: int | None = None, hops: int = 0
    ) -> Stamped | None:
        """Send along the path of a source port; see :class:`Transport`."""
        sender = self._senders.get(source_port) or self._sender(source_port)
        where = (peer.address, self._port)
        wanted = token is not None and self._stamped
        control: list[tuple[int, int, bytes]] | None = None
        if hops:
            control = [*_NO_STAMP, self._hop_limit(hops)]
        elif self._stamped and not wanted:
            control = _NO_STAMP
        try:
            self._send(sender, data, where, control)
        except OSError as error:
            self._send_again(error, source_port, data, where, control)
        if not wanted or token is None:
            return None
        number = sender.next_id
        sender.next_id = (number + 1) & 0xFFFFFFFF
        # The kernel's stamp is usually there already: one call less than waiting for epoll.
        try:
            quoted, ancillary, _, _ = sender.take(SIZE, 256, _ERRORS)
        except BlockingIOError:
            sender.tokens[number] = token
            return None
        if len(ancillary) == 2 and ancillary[0][1] == _SO_TIMESTAMPING:
            extended = _EXTENDED.unpack_from(ancillary[1][2])
            if extended[1] == _ORIGIN_STAMP and extended[6] == number:
                return Stamped(token, *_stamp_of(ancillary[0][2]))
        sender.tokens[number] = token
        self._early += self._events(sender, quoted, ancillary)
        return None

    @staticmethod
    def _send(
        sender: _Sender,
        data: bytes,
        where: tuple[str, int],
        control: list[tuple[int, int, bytes]] | None,
    ) -> None:
        if control is None:
            sender.give(data, where)
        else:
            sender.socket.sendmsg([data], control, 0, where)

    def _send_again(
        self,
        error: OSError,
        source_port: int,
        data: bytes,
        where: tuple[str, int],
        control: list[tuple[int, int, bytes]] | None,
    ) -> None:
        """Send once more where an ICMP answer to an earlier packet was reported, else raise."""
        try:
            if error.errno not in _PASSING:
                raise error
            self._send(self._senders[source_port], data, where, control)
        except OSError:
            # Whether the kernel counted this packet's stamp is unknown: start over.
            self._drop(source_port)
            raise

    def _hop_limit(self, hops: int) -> tuple[int, int, bytes]:
        if self._family == socket.AF_INET6:
            return (socket.IPPROTO_IPV6, _IPV6_HOPLIMIT, struct.pack("@i", hops))
        return (socket.IPPROTO_IP, socket.IP_TTL, struct.pack("@i", hops))

    def _errors(self, sender: _Sender, limit: int) -> list[Stamped | HopAnswer]:
        """Read a sender's error queue: send stamps and ICMP."""
        found: list[Stamped | HopAnswer] = []
        for _ in range(limit):
            try:
                data, ancillary, _, _ = sender.socket.recvmsg(SIZE, 256, socket.MSG_ERRQUEUE)
            except OSError:
                break
            found += self._events(sender, data, ancillary)
        return found

    def _events(
        self, sender: _Sender, data: bytes, ancillary: list[tuple[int, int, bytes]]
    ) -> list[Stamped | HopAnswer]:
        found: list[Stamped | HopAnswer] = []
        stamp: tuple[int, StampSource] | None = None
        for level, kind, value in ancillary:
            if kind == _SO_TIMESTAMPING and level == socket.SOL_SOCKET:
                stamp = _stamp_of(value)
            elif kind in (_IP_RECVERR, _IPV6_RECVERR) and len(value) >= _EXTENDED.size:
                _, origin, icmp_type, _, _, _, number = _EXTENDED.unpack_from(value)
                if origin == _ORIGIN_STAMP and stamp is not None:
                    token = sender.tokens.pop(number, None)
                    if token is not None:
                        found.append(Stamped(token, *stamp))
                elif origin in (_ORIGIN_ICMP, _ORIGIN_ICMP6):
                    answer = self._hop(data, value, icmp_type, origin)
                    if answer is not None:
                        found.append(answer)
        return found

    def _hop(self, data: bytes, value: bytes, icmp_type: int, origin: int) -> HopAnswer | None:
        exceeded = 11 if origin == _ORIGIN_ICMP else 3
        if icmp_type != exceeded:
            self.refused += 1
            return None
        where = value[_EXTENDED.size :]
        with contextlib.suppress(ValueError):
            if origin == _ORIGIN_ICMP:
                return HopAnswer(data, socket.inet_ntop(socket.AF_INET, where[4:8]))
            return HopAnswer(data, socket.inet_ntop(socket.AF_INET6, where[8:24]))
        return None

    def fileno(self) -> int:
        """Return the epoll descriptor, itself pollable."""
        return self._epoll.fileno()

    def poll(self) -> list[Received | Stamped | HopAnswer]:
        """Return what came in."""
        found = self._early
        self._early = []
        receive = False
        for fd, _ in self._epoll.poll(0):
            sender = self._by_fd.get(fd)
            if sender is None:
                receive = True
            else:
                found += self._errors(sender, _BATCH)
        if receive:
            self._receive(found)
        return found

    def _receive(self, found: list[Received | Stamped | HopAnswer]) -> None:
        if self._batch is None:
            self._receive_singly(found)
            return
        packets: list[Received] = []
        taken = 0
        while taken < _BATCH:
            got = self._batch.take(packets, stamped=self._stamped)
            taken += got
            if got < self._batch.size:
                break
        found += packets

    def _receive_singly(self, found: list[Received | Stamped | HopAnswer]) -> None:
        receiver, clock = self._receiver, time.time_ns
        for _ in range(_BATCH):
            try:
                data, ancillary, _, where = receiver.recvmsg(SIZE + 1, 128)
            except BlockingIOError:
                return
            except OSError:
                continue
            now = clock()
            nic: int | None = None
            source = StampSource.APPLICATION
            for level, kind, value in ancillary:
                if kind == _SO_TIMESTAMPING and level == socket.SOL_SOCKET:
                    nic, source = _stamp_of(value)
            packet = decode(data)
            if packet is not None:
                found.append(Received(packet, where[0], nic, now, source))

    def close(self) -> None:
        """Close every socket."""
        for port in list(self._senders):
            self._drop(port)
        self._receiver.close()
        self._epoll.close()


def _stamp_of(value: bytes) -> tuple[int, StampSource]:
    seconds, nanos, _, _, hard_s, hard_ns = _STAMPS.unpack(value)
    if hard_s or hard_ns:
        return hard_s * 1_000_000_000 + hard_ns, StampSource.HARDWARE
    return seconds * 1_000_000_000 + nanos, StampSource.KERNEL

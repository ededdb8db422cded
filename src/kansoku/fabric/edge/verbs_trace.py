"""Path traces of RoCE traffic: plain UDP with its ports and a hop limit, answers by ICMP."""

import select
import socket
import struct
from collections import OrderedDict

from kansoku.fabric.edge.transport import HopAnswer

__all__ = ["Tracer"]

_RECVERR, _RECVERR6, _HOPLIMIT6 = 11, 25, 52
_EXTENDED = struct.Struct("@IBBBBII")  # struct sock_extended_err
_ORIGIN_ICMP, _ORIGIN_ICMP6 = 2, 3
_SOCKETS = 256


class Tracer:
    """Sends packets whose hop limit runs out on the path of a source port."""

    def __init__(self, address: str, port: int, *, device: str | None) -> None:
        """``port`` is the destination port; ``device`` the interface to leave by."""
        self._address = address
        self._port = port
        self._device = device
        self._six = ":" in address
        self._epoll = select.epoll()
        self._sockets: OrderedDict[int, socket.socket] = OrderedDict()
        self._by_fd: dict[int, socket.socket] = {}

    def send(self, data: bytes, address: str, source_port: int, hops: int) -> None:
        """Send; raise OSError when it could not leave."""
        sock = self._sockets.get(source_port) or self._open(source_port)
        if self._six:
            limit = (socket.IPPROTO_IPV6, _HOPLIMIT6, struct.pack("@i", hops))
        else:
            limit = (socket.IPPROTO_IP, socket.IP_TTL, struct.pack("@i", hops))
        for attempt in (0, 1):
            try:
                sock.sendmsg([data], [limit], 0, (address, self._port))
                return
            except OSError:
                if attempt:  # the first may report ICMP of an earlier packet
                    raise

    def _open(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if self._six else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            if self._device:
                name = self._device.encode() + b"\0"
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
            sock.bind((self._address, port))
            if self._six:
                sock.setsockopt(socket.IPPROTO_IPV6, _RECVERR6, 1)
            else:
                sock.setsockopt(socket.IPPROTO_IP, _RECVERR, 1)
        except OSError:
            sock.close()
            raise
        if len(self._sockets) >= _SOCKETS:
            self._drop(next(iter(self._sockets)))
        self._sockets[port] = sock
        self._by_fd[sock.fileno()] = sock
        self._epoll.register(sock, 0)  # errors only
        return sock

    def _drop(self, port: int) -> None:
        sock = self._sockets.pop(port)
        self._epoll.unregister(sock)
        del self._by_fd[sock.fileno()]
        sock.close()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when switches answered."""
        return self._epoll.fileno()

    def poll(self) -> list[HopAnswer]:
        """Return the answers that came in."""
        found: list[HopAnswer] = []
        for descriptor, _ in self._epoll.poll(0):
            sock = self._by_fd[descriptor]
            for _ in range(64):
                try:
                    data, ancillary, _, _ = sock.recvmsg(256, 256, socket.MSG_ERRQUEUE)
                except OSError:
                    break
                for _, kind, value in ancillary:
                    if kind in (_RECVERR, _RECVERR6) and len(value) >= _EXTENDED.size + 8:
                        answer = _answer(data, value)
                        if answer is not None:
                            found.append(answer)
        return found

    def close(self) -> None:
        """Close every socket."""
        for port in list(self._sockets):
            self._drop(port)
        self._epoll.close()


def _answer(data: bytes, value: bytes) -> HopAnswer | None:
    _, origin, kind, _, _, _, _ = _EXTENDED.unpack_from(value)
    where = value[_EXTENDED.size :]
    if origin == _ORIGIN_ICMP and kind == 11:
        return HopAnswer(data, socket.inet_ntop(socket.AF_INET, where[4:8]))
    if origin == _ORIGIN_ICMP6 and kind == 3 and len(where) >= 24:
        return HopAnswer(data, socket.inet_ntop(socket.AF_INET6, where[8:24]))
    return None

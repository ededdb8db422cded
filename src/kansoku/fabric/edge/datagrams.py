"""Many datagrams by one system call (recvmmsg), each with its receive stamp.

Python's ``recvmsg`` costs a system call, four objects and a list per packet, which was a third of
what a busy agent spent. Here the kernel fills memory that was laid out once. Where the C library
has no recvmmsg, :func:`batch_of` returns None and the caller reads one by one.
"""

import ctypes
import socket
import struct
import time

from kansoku.fabric.edge.transport import Received
from kansoku.fabric.probe import SIZE, StampSource, slot_decoder

__all__ = ["Batch", "batch_of"]

_COUNT = 64
_DONTWAIT = 0x40
_SO_TIMESTAMPING = 37
_MESSAGE = struct.Struct("@PIPNPNi0PI0P")  # struct mmsghdr
_VECTOR = struct.Struct("@PN")  # struct iovec
# One slot: the sender's address, the packet and one byte more (a longer one is not ours), the
# control message with the stamps.
_NAME, _NAME_BYTES = 0, 32
_DATA = _NAME + _NAME_BYTES
_CONTROL, _CONTROL_BYTES = 96, 96
_SLOT = _CONTROL + _CONTROL_BYTES
# Of a struct cmsghdr with a struct scm_timestamping: its type, software and hardware stamps.
_STAMPS = struct.Struct(f"@{_CONTROL + 12}xiqq16xqq{_SLOT - _CONTROL - 64}x")
_LEAST_CONTROL = 64  # bytes that a control message with stamps has
_IPV4 = struct.Struct(f"@4x4s{_SLOT - 8}x")
_IPV6 = struct.Struct(f"@8x16s{_SLOT - 24}x")
_ADDRESSES = 65536  # texts kept


class Batch:
    """Reads one UDP socket."""

    size = _COUNT
    """Datagrams of one call at most."""

    def __init__(self, sock: socket.socket, call: "ctypes._NamedFuncPointer") -> None:
        """``call`` is recvmmsg."""
        self._fd = sock.fileno()
        self._call = call
        self._family = sock.family
        self._memory = bytearray(_COUNT * _SLOT)
        self._view = memoryview(self._memory)
        self._messages = bytearray(_COUNT * _MESSAGE.size)
        vectors = bytearray(_COUNT * _VECTOR.size)
        base, where, iov = map(_address, (self._memory, self._messages, vectors))
        for n in range(_COUNT):
            slot = base + n * _SLOT
            _VECTOR.pack_into(vectors, n * _VECTOR.size, slot + _DATA, SIZE + 1)
            _MESSAGE.pack_into(
                self._messages, n * _MESSAGE.size, slot + _NAME, _NAME_BYTES,
                iov + n * _VECTOR.size, 1, slot + _CONTROL, _CONTROL_BYTES, 0, 0,
            )  # fmt: skip
        self._vectors = vectors
        self._fresh = bytes(self._messages)  # the kernel overwrites lengths by those it used
        self._where = where
        self._packets = slot_decoder(before=_DATA, after=_SLOT - _DATA - SIZE)
        self._addresses = _IPV6 if sock.family == socket.AF_INET6 else _IPV4
        self._texts: dict[bytes, str] = {}

    def take(self, found: list[Received], *, stamped: bool) -> int:
        """Append what is waiting, at most a batch; return how many datagrams were taken.

        ``stamped`` says whether receive stamps were asked for.
        """
        self._messages[:] = self._fresh
        got: int = self._call(self._fd, self._where, _COUNT, _DONTWAIT, None)
        if got <= 0:
            return 0
        now = time.time_ns()
        memory = self._view[: got * _SLOT]
        headers = _MESSAGE.iter_unpack(memoryview(self._messages)[: got * _MESSAGE.size])
        slots = zip(
            headers,
            self._packets(memory),
            self._addresses.iter_unpack(memory),
            _STAMPS.iter_unpack(memory),
            strict=True,
        )
        hardware, kernel = StampSource.HARDWARE, StampSource.KERNEL
        for header, packet, (raw,), (kind, seconds, nanos, hard_s, hard_ns) in slots:
            if packet is None or header[7] != SIZE:
                continue
            address = self._texts.get(raw) or self._text(raw)
            if not stamped or header[5] < _LEAST_CONTROL or kind != _SO_TIMESTAMPING:
                found.append(Received(packet, address, None, now, StampSource.APPLICATION))
            elif hard_s or hard_ns:
                nic = hard_s * 1_000_000_000 + hard_ns
                found.append(Received(packet, address, nic, now, hardware))
            else:
                nic = seconds * 1_000_000_000 + nanos
                found.append(Received(packet, address, nic, now, kernel))
        return got

    def _text(self, raw: bytes) -> str:
        if len(self._texts) >= _ADDRESSES:
            self._texts.clear()
        text = self._texts[raw] = socket.inet_ntop(self._family, raw)
        return text


def _address(memory: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))


def batch_of(sock: socket.socket) -> Batch | None:
    """Return a reader of many datagrams at once; None where this system has none."""
    if _MESSAGE.size != 64 or _VECTOR.size != 16:
        return None
    try:
        call = ctypes.CDLL(None).recvmmsg
    except (OSError, AttributeError):
        return None
    call.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    return Batch(sock, call)

"""The process that reads counters on time; run by path, standard library only.

Nothing else runs in it: no other thread holds the interpreter when a reading is due. It fills a
ring in shared memory, row by row; whoever started it reads there. A row is the monotonic time
before and after the reading, the head of an RTM_GETSTATS answer per interface, and 24 bytes of
text per counter file. Arguments: a JSON object, see ``_main``.
"""

import contextlib
import ctypes
import gc
import json
import mmap
import os
import socket
import struct
import sys
import time
from typing import Any

ANSWER = 96  # bytes kept of an answer: up to and with the dropped packets
TEXT = 24
HEADER = 64
_GETSTATS, _REQUEST, _LINK_64 = 94, 1, 1
_WAITFORONE = 0x10000


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Head(ctypes.Structure):  # struct msghdr, its padding at the end included
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


class _Message(ctypes.Structure):  # struct mmsghdr
    _fields_ = [("head", _Head), ("length", ctypes.c_uint)]


class _Netlink:
    """All counters of all interfaces by one send and one receive."""

    def __init__(self, indices: list[int], scratch: bytearray, offset: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        self._socket.bind((0, 0))
        self._count = len(indices)
        self._request = b"".join(
            struct.pack("=IHHIIBBHII", 28, _GETSTATS, _REQUEST, n, 0, 0, 0, 0, index, _LINK_64)
            for n, index in enumerate(indices)
        )
        base = ctypes.addressof((ctypes.c_char * len(scratch)).from_buffer(scratch))
        self._iovecs = (_Iovec * self._count)()
        self._messages = (_Message * self._count)()
        for n in range(self._count):
            self._iovecs[n] = _Iovec(base + offset + n * ANSWER, ANSWER)
            self._messages[n].head.iov = ctypes.addressof(self._iovecs[n])
            self._messages[n].head.iov_count = 1
        self._receive = ctypes.CDLL(None, use_errno=True).recvmmsg
        self._receive.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip
        self._where = ctypes.addressof(self._messages)

    def read(self) -> None:
        # The kernel answers each request within the send: the receive never waits.
        self._socket.send(self._request)
        self._receive(self._socket.fileno(), self._where, self._count, 0, None)


def _real_time(priority: int) -> None:
    """Be woken on time on a busy machine; without the right the machine's rules apply."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
        return
    with contextlib.suppress(OSError):
        os.nice(-10)


def _main(words: dict[str, Any]) -> None:
    interval, rows, real_time = words["interval_ns"], words["rows"], words["real_time"]
    indices, files, slow = words["interfaces"], words["files"], words["slow_files"]
    row = 16 + ANSWER * len(indices) + TEXT * (len(files) + len(slow))
    # Populated: a page fault in every third row would else cost more than the reading.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    memory = mmap.mmap(words["fd"], HEADER + rows * row, flags=flags)
    scratch = bytearray(row)
    view = memoryview(scratch)
    netlink = _Netlink(indices, scratch, 16) if indices else None
    at = 16 + ANSWER * len(indices)
    slots = []
    for path in files + slow:
        slots.append((os.open(path, os.O_RDONLY | os.O_CLOEXEC), [view[at : at + TEXT]]))
        at += TEXT
    fast, rest = slots[: len(files)], slots[len(files) :]
    for descriptor, buffers in slots:
        os.preadv(descriptor, buffers, 0)
    if real_time:
        _real_time(1)
    gc.disable()
    parent = os.getppid()
    clock, sleep, preadv = time.monotonic_ns, time.sleep, os.preadv
    stamps = struct.Struct("=qq").pack_into
    count_into = struct.Struct("=q").pack_into
    written, turn, slot = 0, 0, None
    due = clock()
    while True:
        due += interval
        now = clock()
        if due > now:
            sleep((due - now) * 1e-9)
        elif now - due > interval:
            due += (now - due) // interval * interval  # late: readings are lost, not bunched
        before = clock()
        try:
            if netlink is not None:
                netlink.read()
            for slot in fast:
                preadv(slot[0], slot[1], 0)
            if rest:  # one of the others in turn, so that every reading costs the same
                turn = turn + 1 if turn + 1 < len(rest) else 0
                slot = rest[turn]
                preadv(slot[0], slot[1], 0)
        except OSError:
            # A device went away: its last value stays, the others are read on.
            fast = [one for one in fast if one is not slot]
            rest = [one for one in rest if one is not slot]
            turn = 0
            continue
        stamps(scratch, 0, before, clock())
        offset = HEADER + written % rows * row
        memory[offset : offset + row] = scratch
        written += 1
        count_into(memory, 0, written)
        if written & 255 == 0 and os.getppid() != parent:
            return


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _main(json.loads(sys.argv[1]))

"""Programs in the kernel that note a call and its arguments, and the ring they write into.

The standard library alone: the bpf() system call by ctypes, programs assembled here, the kernel's
ring buffer mapped. One program a shape of argument; a probe is told apart by its cookie. Programs
only read: registers, the return address, and the sizes of the tensors that the arguments name.
Everything belongs to file descriptors of this process: however it ends, the kernel takes the probes
out.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["EVENT", "SHAPES", "Bpf", "BpfError", "Event", "unpack_event"]

_NR_BPF = 321
_MAP_CREATE, _PROG_LOAD, _LINK_CREATE = 0, 5, 28
_RINGBUF, _ARRAY = 27, 2
_KPROBE, _UPROBE_MULTI = 2, 48
_KTIME, _PID_TGID, _RESERVE, _SUBMIT, _COOKIE = 5, 14, 131, 132, 174
_READ_USER, _READ_USER_TEXT = 112, 114
_NO_WAKEUP = 1
_CLOSERS = 64
# Where struct pt_regs keeps the argument registers and the stack pointer (x86-64).
_ARGUMENTS = (112, 104, 96, 88, 72, 64)  # rdi rsi rdx rcx r8 r9
_RSP = 152

_HEAD_BYTES = 88
_TEXT_BYTES = 96
_TENSOR_BYTES = 56
MAX_TENSORS = 256
NUMEL_OFFSET = 152
"""Of c10::TensorImpl: the element count stands here, its type after it; in older layouts 8 later.
24 bytes are taken and told apart by the reader."""

SHAPES = ("plain", "text", "tensor", "tensors", "lists")
"""What the noted argument is: nothing, std::string&, at::Tensor&, std::vector<at::Tensor>&,
std::vector<std::vector<at::Tensor>>&."""


class BpfError(OSError):
    """The kernel refused; the message says what and why."""


class Event(NamedTuple):
    """One call, as the kernel saw it."""

    time_ns: int
    """CLOCK_MONOTONIC."""
    process: int
    thread: int
    """Both in the kernel's first namespace."""
    cookie: int
    arguments: tuple[int, ...]
    """Six argument registers."""
    stack: int
    """Stack pointer at the entry."""
    caller: int
    """Address it returns to."""
    payload: bytes


EVENT = struct.Struct("<QIIQ6QQQ")


def unpack_event(raw: bytes) -> Event:
    """Return the event in a ring record."""
    v = EVENT.unpack_from(raw)
    return Event(v[0], v[2], v[1], v[3], v[4:10], v[10], v[11], raw[_HEAD_BYTES:])


class _Assembler:
    """Instructions of the eBPF machine, with labels."""

    def __init__(self) -> None:
        self._code: list[tuple[int, int, int, int, int]] = []
        self._labels: dict[str, int] = {}
        self._jumps: list[tuple[int, str]] = []

    def _add(self, op: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0) -> None:
        self._code.append((op, dst, src, off, imm))

    def move(self, dst: int, src: int) -> None:
        self._add(0xBF, dst, src)

    def set(self, dst: int, imm: int) -> None:
        self._add(0xB7, dst, 0, 0, imm)

    def add(self, dst: int, imm: int) -> None:
        self._add(0x07, dst, 0, 0, imm)

    def add_register(self, dst: int, src: int) -> None:
        self._add(0x0F, dst, src)

    def subtract(self, dst: int, src: int) -> None:
        self._add(0x1F, dst, src)

    def divide(self, dst: int, imm: int) -> None:
        self._add(0x37, dst, 0, 0, imm)

    def load(self, dst: int, src: int, off: int) -> None:
        self._add(0x79, dst, src, off)

    def store(self, dst: int, off: int, src: int) -> None:
        self._add(0x7B, dst, src, off)

    def store_zero(self, dst: int, off: int) -> None:
        self._add(0x7A, dst, 0, off, 0)

    def load_map(self, dst: int, descriptor: int) -> None:
        self._add(0x18, dst, 1, 0, descriptor)
        self._add(0)

    def call(self, helper: int) -> None:
        self._add(0x85, 0, 0, 0, helper)

    def jump(self, op: int, label: str, dst: int = 0, src: int = 0, imm: int = 0) -> None:
        self._jumps.append((len(self._code), label))
        self._add(op, dst, src, 0, imm)

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def read_user(self, frame_offset: int, size: int) -> None:
        """Read ``size`` bytes at the address in r3 to the stack frame."""
        self.move(1, 10)
        self.add(1, frame_offset)
        self.set(2, size)
        self.call(_READ_USER)

    def finish(self) -> bytes:
        for at, name in self._jumps:
            op, dst, src, _, imm = self._code[at]
            self._code[at] = (op, dst, src, self._labels[name] - at - 1, imm)
        return b"".join(
            struct.pack("<BBhi", op, src << 4 | dst, off, imm)
            for op, dst, src, off, imm in self._code
        )


_ALWAYS, _EQUAL, _NOT_EQUAL, _AT_LEAST, _AT_LEAST_REGISTER = 0x05, 0x15, 0x55, 0x35, 0x3D


def _program(shape: str, argument: int, ring: int, drops: int) -> bytes:
    """Assemble the program that notes one shape of argument."""
    a = _Assembler()
    size = _HEAD_BYTES + {"plain": 0, "text": _TEXT_BYTES}.get(shape, _TENSOR_BYTES)
    a.move(6, 1)
    a.call(_COOKIE)
    a.move(7, 0)
    a.load_map(1, ring)
    a.set(2, size)
    a.set(3, 0)
    a.call(_RESERVE)
    a.jump(_EQUAL, "drop", 0)
    a.move(8, 0)
    a.call(_KTIME)
    a.store(8, 0, 0)
    a.call(_PID_TGID)
    a.store(8, 8, 0)
    a.store(8, 16, 7)
    for number, register in enumerate(_ARGUMENTS):
        a.load(1, 6, register)
        a.store(8, 24 + 8 * number, 1)
    a.load(3, 6, _RSP)
    a.store(8, 72, 3)
    a.store_zero(8, 80)
    a.read_user(-8, 8)
    a.load(1, 10, -8)
    a.store(8, 80, 1)
    a.load(9, 6, _ARGUMENTS[argument])
    if shape == "text":
        _note_text(a)
    elif shape != "plain":
        _note_tensors(a, shape)
    a.move(1, 8)
    a.set(2, _NO_WAKEUP)
    a.call(_SUBMIT)
    a.set(0, 0)
    a._add(0x95)  # noqa: SLF001 - exit
    a.label("drop")
    a.store_zero(10, -8)
    a.load_map(1, drops)
    a.move(2, 10)
    a.add(2, -8)
    a.call(1)  # bpf_map_lookup_elem
    a.jump(_EQUAL, "end", 0)
    a.set(1, 1)
    a._add(0xDB, 0, 1)  # noqa: SLF001 - lock *(u64 *)r0 += r1
    a.label("end")
    a.set(0, 0)
    a._add(0x95)  # noqa: SLF001 - exit
    return a.finish()


def _note_text(a: _Assembler) -> None:
    """Copy the beginning of the std::string at r9: its length, then up to 88 bytes."""
    for off in range(0, _TEXT_BYTES, 8):
        a.store_zero(8, _HEAD_BYTES + off)
    a.move(3, 9)
    a.read_user(-24, 16)
    a.jump(_NOT_EQUAL, "noted", 0)
    a.load(1, 10, -16)
    a.store(8, _HEAD_BYTES, 1)
    a.move(1, 8)
    a.add(1, _HEAD_BYTES + 8)
    a.set(2, _TEXT_BYTES - 8)
    a.load(3, 10, -24)
    a.call(_READ_USER_TEXT)
    a.label("noted")


def _note_tensors(a: _Assembler, shape: str) -> None:
    """Sum the elements of the tensors at r9; keep the first one's own words."""
    at = _HEAD_BYTES  # sums in both layouts, tensors, lists, 24 bytes of the first
    for off in range(0, _TENSOR_BYTES, 8):
        a.store_zero(8, at + off)
    a.set(1, 1)
    a.store(8, at + 24, 1)
    if shape == "lists":  # the first list stands for all: they are alike
        a.move(3, 9)
        a.read_user(-24, 16)
        a.jump(_NOT_EQUAL, "noted", 0)
        a.load(9, 10, -24)
        a.load(1, 10, -16)
        a.subtract(1, 9)
        a.divide(1, 24)
        a.store(8, at + 24, 1)
    if shape == "tensor":
        a.set(7, 1)
    else:
        a.move(3, 9)
        a.read_user(-24, 16)
        a.jump(_NOT_EQUAL, "noted", 0)
        a.load(9, 10, -24)
        a.load(7, 10, -16)
        a.subtract(7, 9)
        a.divide(7, 8)
    a.store(8, at + 16, 7)
    a.set(6, 0)
    a.label("next")
    a.jump(_AT_LEAST_REGISTER, "noted", 6, 7)
    a.jump(_AT_LEAST, "noted", 6, 0, MAX_TENSORS)
    a.move(3, 9)
    a.read_user(-8, 8)
    a.jump(_NOT_EQUAL, "noted", 0)
    a.load(3, 10, -8)
    a.add(3, NUMEL_OFFSET)
    a.read_user(-48, 24)
    a.jump(_NOT_EQUAL, "noted", 0)
    for word in (0, 8):
        a.load(1, 8, at + word)
        a.load(2, 10, -48 + word)
        a.add_register(1, 2)
        a.store(8, at + word, 1)
    a.jump(_NOT_EQUAL, "following", 6)
    for word in (0, 8, 16):
        a.load(1, 10, -48 + word)
        a.store(8, at + 32 + word, 1)
    a.label("following")
    a.add(9, 8)
    a.add(6, 1)
    a.jump(_ALWAYS, "next")
    a.label("noted")


_libc = ctypes.CDLL(None, use_errno=True)


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes.ljust(144, b"\0"), 144)
    result = int(_libc.syscall(_NR_BPF, command, buffer, len(buffer)))
    if result < 0:
        code = ctypes.get_errno()
        raise BpfError(code, os.strerror(code))
    return result


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Bpf:
    """The kernel's side: programs by shape, their ring, and what could not be noted."""

    def __init__(self, *, ring_bytes: int = 8 << 20):
        self._descriptors: list[int] = []
        self._programs: dict[tuple[str, int], int] = {}
        self._page = mmap.PAGESIZE
        self._mask = ring_bytes - 1
        try:
            self._ring = self._keep(
                _bpf(_MAP_CREATE, struct.pack("<IIII", _RINGBUF, 0, 0, ring_bytes))
            )
            self._drops = self._keep(
                _bpf(_MAP_CREATE, struct.pack("<IIIII", _ARRAY, 4, 8, 1, 1 << 10))
            )
            self._consumer = mmap.mmap(self._ring, self._page)
            self._data = mmap.mmap(
                self._ring,
                self._page + 2 * ring_bytes,
                prot=mmap.PROT_READ,
                offset=self._page,
            )
            self._dropped = mmap.mmap(self._drops, self._page, prot=mmap.PROT_READ)
        except OSError:
            self.close()
            raise

    def _keep(self, descriptor: int) -> int:
        self._descriptors.append(descriptor)
        return descriptor

    def program(self, shape: str, argument: int) -> int:
        """Return the loaded program that notes this argument."""
        key = (shape, argument)
        if key not in self._programs:
            code = _program(shape, argument, self._ring, self._drops)
            self._programs[key] = self._keep(self._load(code))
        return self._programs[key]

    @staticmethod
    def _load(code: bytes) -> int:
        instructions = ctypes.create_string_buffer(code, len(code))
        licence = ctypes.create_string_buffer(b"GPL")  # what the helpers that read memory ask for

        def attributes(log: ctypes.Array[ctypes.c_char] | None) -> bytes:
            return struct.pack(
                "<IIQQIIQII16sII",
                _KPROBE,
                len(code) // 8,
                ctypes.addressof(instructions),
                ctypes.addressof(licence),
                1 if log is not None else 0,
                len(log) if log is not None else 0,
                ctypes.addressof(log) if log is not None else 0,
                0,
                0,
                b"kansoku",
                0,
                _UPROBE_MULTI,
            )

        try:
            return _bpf(_PROG_LOAD, attributes(None))
        except BpfError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS):
                raise
            log = ctypes.create_string_buffer(1 << 20)
            try:
                return _bpf(_PROG_LOAD, attributes(log))
            except BpfError:
                said = log.value.decode("utf-8", "replace").strip().splitlines()
                raise BpfError(error.errno, f"{error.strerror}: {' / '.join(said[-3:])}") from error

    def attach(
        self, program: int, path: str, offsets: Sequence[int], cookies: Sequence[int], pid: int
    ) -> int:
        """Set probes at places of a file, for one process alone; return the link."""
        count = len(offsets)
        where = ctypes.create_string_buffer(os.fsencode(path))
        places = (ctypes.c_uint64 * count)(*offsets)
        marks = (ctypes.c_uint64 * count)(*cookies)
        return self._keep(
            _bpf(
                _LINK_CREATE,
                struct.pack(
                    "<IIIIQQQQIII",
                    program,
                    0,
                    _UPROBE_MULTI,
                    0,
                    ctypes.addressof(where),
                    ctypes.addressof(places),
                    0,
                    ctypes.addressof(marks),
                    count,
                    0,
                    pid,
                ),
            )
        )

    def detach(self, *links: int) -> None:
        """Take the probes of links out.

        The kernel waits some 35 ms for each until no core can still be in its program: four ranks
        have eighty, so they wait at the same time.
        """
        held = [link for link in dict.fromkeys(links) if link in self._descriptors]
        for link in held:
            self._descriptors.remove(link)
        parts = [held[first::_CLOSERS] for first in range(min(_CLOSERS, len(held)))]
        closers = [threading.Thread(target=_close_all, args=(part,)) for part in parts]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()

    @property
    def dropped(self) -> int:
        """Return how many calls could not be noted because the ring was full."""
        return int.from_bytes(self._dropped[:8], "little")

    def poll(self) -> list[Event]:
        """Return what was noted since the last call, in the order of noting."""
        events = []
        at = int.from_bytes(self._consumer[:8], "little")
        end = int.from_bytes(self._data[:8], "little")
        while at < end:
            place = self._page + (at & self._mask)
            (head,) = struct.unpack_from("<I", self._data, place)
            if head & 1 << 31:  # still being written
                break
            length = head & ~(3 << 30)
            if not head & 1 << 30 and length >= EVENT.size:
                events.append(unpack_event(self._data[place + 8 : place + 8 + length]))
            at += (length + 8 + 7) & ~7
        self._consumer[:8] = at.to_bytes(8, "little")
        return events

    def close(self) -> None:
        """Take every probe out and free the rest."""
        while self._descriptors:  # links were made last: they go first
            os.close(self._descriptors.pop())

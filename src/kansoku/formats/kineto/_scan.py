"""Cut a stream of bytes into chunks that begin and end at event objects.

A Kineto trace is one JSON object whose ``traceEvents`` array may hold gigabytes, or that bare
array. Nothing here decodes an event: chunks are cut where one object ends and the next begins
with a key that only events begin with, so that each chunk can be decoded by itself, on any core.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kansoku.errors import InputError
from kansoku.formats.kineto._spare import Spare

__all__ = [
    "CHUNK_BYTES",
    "EVENT_START",
    "POOL_CHUNK_BYTES",
    "Piece",
    "last_seam",
    "middle_seam",
    "split",
]

CHUNK_BYTES = 512 << 10
"""Decoded, a chunk takes several times its size; smaller ones cost time, larger ones memory."""
POOL_CHUNK_BYTES = 2 << 20
"""For another process: fewer, larger messages."""
_HEADER_LIMIT_BYTES = 64 << 20
_PIECE_LIMIT_BYTES = 64 << 20
_KEYS = rb"ph|name|cat|args|pid|ts|tid|dur|id|bp|s"
# The comma may be lost in a damaged file.
_SEAM = re.compile(rb"\}\s*,?\s*(?=\{\s*\"(?:" + _KEYS + rb")\"\s*:)")
# Not the value of a key, such as "args": {"name": ….
EVENT_START = re.compile(rb"(?<!:)(?<!: )\{\s*\"(?:" + _KEYS + rb")\"\s*:")
_BEFORE_ARRAY = b"\xef\xbb\xbf \t\r\n"
_EVENTS_KEY = re.compile(rb"\"traceEvents\"\s*:\s*\[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of the file."""

    kind: str
    """``header`` (before the events), ``events`` or ``headless`` (events whose head is lost)."""
    data: bytes | memoryview
    offset: int
    """Position of the first byte in the (inflated) file."""
    last: bool = False
    """Nothing follows: the data may hold the end of the array and what comes after it."""


def last_seam(data: bytes | memoryview, start: int = 0) -> int | None:
    """Return the position after the last object that another event follows; None without one."""
    window = 1 << 14
    while True:
        low = max(start, len(data) - window)
        found = None
        for match in _SEAM.finditer(data, low):
            found = match.start() + 1
        if found is not None or low == start:
            return found
        window *= 16


def middle_seam(data: bytes) -> int | None:
    """Return a seam near the middle, where a damaged chunk is cut to isolate the damage."""
    match = _SEAM.search(data, len(data) // 2)
    if match is None:
        found = last_seam(data)
        return None if found == len(data) else found
    return match.start() + 1


_WINDOW_BYTES = CHUNK_BYTES + (512 << 10)


def _memory(size: int) -> memoryview:
    """Return memory that is not written to yet: a page costs what it takes to read one."""
    return np.empty(size, np.uint8).data


class _Window:
    """What was read and not yet given away; its memory serves all chunks."""

    def __init__(self) -> None:
        self._memory = _memory(_WINDOW_BYTES)
        self.size = 0

    @property
    def data(self) -> memoryview:
        """What is held."""
        return self._memory[: self.size]

    def add(self, block: bytes | memoryview) -> None:
        need = self.size + len(block)
        if need > len(self._memory):
            grown = _memory(2 * need)
            grown[: self.size] = self.data
            self._memory = grown
        self._memory[self.size : need] = block
        self.size = need

    def shrink(self) -> None:
        """Give memory back that only an unusual file needed."""
        if len(self._memory) > 8 * _WINDOW_BYTES:
            self._memory = _memory(_WINDOW_BYTES)

    def drop(self, size: int) -> None:
        """Give up the first bytes; views of them hold something else from now on."""
        self._memory[: self.size - size] = self._memory[size : self.size]
        self.size -= size


_windows = Spare(_Window)


def split(
    blocks: Iterable[bytes | memoryview], *, chunk_bytes: int = CHUNK_BYTES, lend: bool = False
) -> Iterator[Piece]:
    """Yield the header, then chunks of whole events; memory stays within a few chunks.

    With ``lend`` the data of a chunk is a view that holds it until the next one is asked for.
    Raises InputError where nothing looks like a trace.
    """
    with _windows.lent() as window:
        window.size = 0
        yield from _pieces(iter(blocks), window, chunk_bytes, lend=lend)
        window.shrink()


def _pieces(
    stream: Iterator[bytes | memoryview], window: _Window, chunk_bytes: int, *, lend: bool
) -> Iterator[Piece]:
    buffer, offset = _header(stream)
    headless = offset == 0 and not bytes(buffer).lstrip(_BEFORE_ARRAY).startswith(b"[")
    kind = "headless" if headless else "events"
    window.add(memoryview(buffer)[offset:])
    yield Piece(kind="header", data=bytes(buffer[:offset]), offset=0)
    wanted = chunk_bytes
    for block in stream:
        window.add(block)
        if window.size < wanted:
            continue
        cut = last_seam(window.data)
        if cut is None and window.size < _PIECE_LIMIT_BYTES:
            wanted = 2 * window.size  # a search over every block more would be quadratic
            continue
        wanted = chunk_bytes
        if cut is None:
            cut = window.size
        data = window.data[:cut]
        yield Piece(kind=kind, data=data if lend else bytes(data), offset=offset)
        kind = "events"
        window.drop(cut)
        offset += cut
    data = window.data
    yield Piece(kind=kind, data=data if lend else bytes(data), offset=offset, last=True)


def _header(stream: Iterator[bytes | memoryview]) -> tuple[bytes | memoryview, int]:
    """Return the bytes read so far and where the first event (or ``]``) may begin."""
    first = next(stream, b"")
    if (place := _events_begin(first)) is not None:
        return first, place
    data = bytes(first)
    for block in stream:
        seen = max(len(data) - 64, 0)
        data += block
        if (place := _events_begin(data, seen)) is not None:
            return data, place
        if len(data) > _HEADER_LIMIT_BYTES:
            break
    if (place := _events_begin(data)) is not None:
        return data, place
    match = EVENT_START.search(data)
    if match is None or b'"ph"' not in data:
        raise InputError(
            "no trace events: neither a traceEvents array nor an array of events",
            remedy="expected a Kineto (PyTorch profiler) trace in Chrome JSON",
        )
    return data, 0


def _events_begin(data: bytes | memoryview, start: int = 0) -> int | None:
    head = bytes(data[:64])
    if head.lstrip(_BEFORE_ARRAY).startswith(b"["):
        return head.index(b"[") + 1
    match = _EVENTS_KEY.search(data, start)
    return None if match is None else match.end()

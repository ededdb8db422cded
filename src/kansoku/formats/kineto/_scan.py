"""Cut a stream of bytes into chunks that begin and end at event objects.

A Kineto trace is one JSON object whose ``traceEvents`` array may hold gigabytes, or that bare
array. Nothing here decodes an event: chunks are cut where one object ends and the next begins
with a key that only events begin with, so that each chunk can be decoded by itself, on any core.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kansoku.errors import InputError

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
_EVENTS_KEY = re.compile(rb"\"traceEvents\"\s*:\s*\[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of the file."""

    kind: str
    """``header`` (before the events), ``events`` or ``headless`` (events whose head is lost)."""
    data: bytes
    offset: int
    """Position of the first byte in the (inflated) file."""
    last: bool = False
    """Nothing follows: the data may hold the end of the array and what comes after it."""


def last_seam(data: bytes, start: int = 0) -> int | None:
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


def split(blocks: Iterable[bytes], *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Piece]:
    """Yield the header, then chunks of whole events; memory stays within a few chunks.

    Raises InputError where nothing looks like a trace.
    """
    stream = iter(blocks)
    buffer, offset = _header(stream)
    yield Piece(kind="header", data=buffer[:offset], offset=0)
    headless = offset == 0 and not buffer.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    kind = "headless" if headless else "events"
    rest = [buffer[offset:]]
    size = len(rest[0])
    wanted = chunk_bytes
    for block in stream:
        rest.append(block)
        size += len(block)
        if size < wanted:
            continue
        if (place := last_seam(block)) is not None:  # as a rule: what is kept is copied once
            rest[-1] = block[:place]
            data = b"".join(rest)
            yield Piece(kind=kind, data=data, offset=offset)
            kind = "events"
            rest = [block[place:]]
            offset += len(data)
            size -= len(data)
            wanted = chunk_bytes
            continue
        data = b"".join(rest)
        cut = last_seam(data)
        if cut is None and size < _PIECE_LIMIT_BYTES:
            rest = [data]
            wanted = 2 * size  # a search over every block more would be quadratic
            continue
        wanted = chunk_bytes
        if cut is None:
            cut = size
        yield Piece(kind=kind, data=data[:cut], offset=offset)
        kind = "events"
        rest = [data[cut:]]
        offset += cut
        size -= cut
    yield Piece(kind=kind, data=b"".join(rest), offset=offset, last=True)


def _header(stream: Iterator[bytes]) -> tuple[bytes, int]:
    """Return the bytes read so far and where the first event (or ``]``) may begin."""
    data = b""
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


def _events_begin(data: bytes, start: int = 0) -> int | None:
    text = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"["):
        return data.index(b"[") + 1
    match = _EVENTS_KEY.search(data, start)
    return None if match is None else match.end()

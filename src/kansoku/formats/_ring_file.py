"""Open ring files that may be anything: what is no ring, or lies, is refused with a sentence."""

import io
import mmap
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kansoku.model import ring

__all__ = ["MOST_RANKS", "open_ring", "plausible"]

MOST_RANKS = 1 << 22
_MOST_MONOTONIC_NS = 1 << 60
"""36 years without a restart of the machine."""
_MOST_UNIX_NS = 1 << 62
"""The year 2116."""
_MOST_AWAY_NS = 1 << 58
"""Nine years between a span and the moment its process noted both clocks."""
_MOST_STEPS = 1 << 30
_MOST_FILE = 1 << 42
_READ_BYTES = 1 << 26


def open_ring(file: Path) -> tuple[mmap.mmap, ring.Header]:
    """Map a ring or a drained copy; raise RingError or OSError saying what is wrong with it."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ring.RingError("not a regular file")
    # A file that became a pipe in between must not be waited for.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        status = os.fstat(descriptor)
        if status.st_size == 0:
            raise ring.RingError("it is empty, as where the disk was full")
        if _has_holes(status):
            buffer = _read(stream, status.st_size)
        else:
            buffer = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    header = ring.read_header(buffer)
    lie = _lie(header)
    if lie is not None:
        raise ring.RingError(f"the header is damaged: {lie}")
    return buffer, header


def _has_holes(status: os.stat_result) -> bool:
    """Say whether a look at a map of the file could end us.

    Where a full disk cut what was written, a file has holes; in tmpfs a look at one takes a page,
    and where there is none the process gets SIGBUS. Reading costs a fifth more than mapping.
    """
    return status.st_blocks * 512 < status.st_size


def _read(stream: io.FileIO, size: int) -> mmap.mmap:
    """Return the bytes of a file in memory of our own; zeros where it ends before."""
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with memoryview(buffer) as view:
        at = 0
        while at < size and (count := stream.readinto(view[at : at + _READ_BYTES])):
            at += count
    return buffer


def _lie(header: ring.Header) -> str | None:
    """Return what cannot be true in a header; None where all of it can."""
    for monotonic, unix in (header.first_anchor, header.anchor):
        if not (0 <= monotonic < _MOST_MONOTONIC_NS and 0 < unix < _MOST_UNIX_NS):
            return f"clocks of {monotonic} ns since boot and {unix} ns of Unix time"
    if header.rank is not None and header.rank >= (header.world_size or MOST_RANKS):
        return f"rank {header.rank} of {header.world_size or MOST_RANKS}"
    if header.world_size is not None and header.world_size > MOST_RANKS:
        return f"{header.world_size} ranks"
    areas = [
        ("facts", header.facts_offset, header.facts_bytes),
        ("strings", header.strings_offset, header.strings_bytes),
        *(
            (f"lane {number}", lane.offset, lane.capacity * ring.RECORD_BYTES)
            for number, lane in enumerate(header.lanes)
        ),
    ]
    if header.strings_used > header.strings_bytes:
        return f"{header.strings_used} bytes of strings in room for {header.strings_bytes}"
    reached = header.header_bytes
    for name, offset, size in sorted(areas, key=lambda area: area[1]):
        if offset < reached or offset + size > _MOST_FILE or not size:
            return f"{name} at {offset} with {size} bytes"
        reached = offset + size
    return None


def plausible(
    header: ring.Header,
    start_ns: npt.NDArray[np.int64],
    duration_ns: npt.NDArray[np.int64],
    step: npt.NDArray[np.int32],
    sequence: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Mark records whose times and numbers can be; a flipped high bit makes others of them."""
    near = header.anchor[0]
    found = (start_ns >= max(near - _MOST_AWAY_NS, 0)) & (start_ns <= near + _MOST_AWAY_NS)
    found &= (duration_ns < _MOST_AWAY_NS) & (step < _MOST_STEPS) & (sequence < _MOST_MONOTONIC_NS)
    return found

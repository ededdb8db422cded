"""Write spans as a Perfetto trace: protobuf track events, one track a thread or stream.

Format: perfetto's ``trace_packet.proto`` and ``track_event.proto``. Slices of one track must nest;
one that overlaps its predecessor in part goes to an extra track beside it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import polars as pl

__all__ = ["write_perfetto"]

_SEQUENCE = 1
_INCREMENTAL_STATE_CLEARED, _NEEDS_INCREMENTAL_STATE = 1, 2
_BEGIN, _END = 1, 2
_REALTIME_CLOCK, _BOOT_CLOCK = 1, 6
_VARINT, _BYTES = 0, 2


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3 | _VARINT) + _varint(value & (1 << 64) - 1)


def _data(tag: int, value: bytes) -> bytes:
    return _varint(tag << 3 | _BYTES) + _varint(len(value)) + value


def _text(tag: int, value: str) -> bytes:
    return _data(tag, value.encode("utf-8", "replace"))


def _packet(body: bytes) -> bytes:
    return _data(1, body + _number(10, _SEQUENCE))


@dataclass(slots=True)
class _Lane:
    """Slices of one thread or stream, as columns."""

    process: tuple[str, int]
    name: str
    start: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = field(default_factory=list)
    end: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = field(default_factory=list)
    label: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = field(default_factory=list)


def write_perfetto(file: IO[bytes], frames: Iterable[pl.DataFrame]) -> int:
    """Write ``spans`` rows of any number of ranks; return the number of slices.

    Open spans (no duration) are left out. Rows need no order; they are held as three integers
    each until all are seen, because Perfetto wants each track in time order.
    """
    lanes: dict[tuple[int | None, str, int | None], _Lane] = {}
    labels: dict[tuple[str, str], int] = {}
    for frame in frames:
        _collect(frame, lanes, labels)
    file.write(_head(labels))
    count = 0
    uuid = 1
    for process in sorted({lane.process for lane in lanes.values()}):
        parent = uuid
        uuid += 1
        described = _number(1, process[1]) + _text(6, process[0])
        file.write(_packet(_data(60, _number(1, parent) + _data(3, described))))
        for lane in _of(lanes.values(), process):
            for extra, (start, end, label) in enumerate(_tracks(lane)):
                name = lane.name if extra == 0 else f"{lane.name} (overlap {extra})"
                file.write(
                    _packet(_data(60, _number(1, uuid) + _number(5, parent) + _text(2, name)))
                )
                file.writelines(_slices(uuid, start, end, label))
                count += len(start)
                uuid += 1
    return count


def _of(lanes: Iterable[_Lane], process: tuple[str, int]) -> list[_Lane]:
    return sorted((lane for lane in lanes if lane.process == process), key=lambda lane: lane.name)


def _head(labels: dict[tuple[str, str], int]) -> bytes:
    """Return the first packets: the clock of all stamps, names and categories by number.

    Perfetto's own time is that since boot: without a snapshot that ties Unix time to it, it drops
    every slice. The two are called equal, so that its pages show Unix time.
    """
    clocks = b"".join(
        _data(1, _number(1, clock) + _number(2, 1)) for clock in (_REALTIME_CLOCK, _BOOT_CLOCK)
    )
    snapshot = _packet(_data(6, clocks + _number(2, _REALTIME_CLOCK)))
    categories: dict[str, int] = {}
    interned = b""
    for (category, name), number in labels.items():
        interned += _data(2, _number(1, number) + _text(2, name))
        categories.setdefault(category, len(categories) + 1)
    for category, number in categories.items():
        interned += _data(1, _number(1, number) + _text(2, category))
    defaults = _number(58, _REALTIME_CLOCK)
    return snapshot + _packet(
        _number(13, _INCREMENTAL_STATE_CLEARED) + _data(59, defaults) + _data(12, interned)
    )


def _collect(
    frame: pl.DataFrame,
    lanes: dict[tuple[int | None, str, int | None], _Lane],
    labels: dict[tuple[str, str], int],
) -> None:
    closed = frame.filter(pl.col("duration_ns").is_not_null() & pl.col("start_ns").is_not_null())
    for (rank, device, thread), part in closed.group_by("rank", "device", "thread"):
        key = (rank, device or "cpu", thread)
        lane = lanes.get(key)
        if lane is None:
            word = "stream" if str(device or "cpu").startswith("gpu") else "thread"
            title = f"{device or 'cpu'} {word} {'?' if thread is None else thread}"
            owner = "rank unknown" if rank is None else f"rank {rank}"
            pid = 1_000_000 if rank is None else int(str(rank)) + 1
            lane = lanes[key] = _Lane(process=(owner, pid), name=title)
        start = part["start_ns"].to_numpy()
        lane.start.append(start)
        lane.end.append(start + part["duration_ns"].to_numpy())
        pairs = zip(part["kind"].to_list(), part["name"].to_list(), strict=True)
        codes = [labels.setdefault((k or "", n or ""), len(labels) + 1) for k, n in pairs]
        lane.label.append(np.array(codes, np.int64))


_Columns = tuple[list[int], list[int], list[int]]


def _tracks(lane: _Lane) -> list[_Columns]:
    """Split a lane into tracks whose slices nest, keeping as many as possible on the first."""
    start, end, label = (np.concatenate(part) for part in (lane.start, lane.end, lane.label))
    order = np.lexsort((label, -end, start))
    tracks: list[_Columns] = []
    stacks: list[list[int]] = []
    for begin, stop, code in zip(
        start[order].tolist(), end[order].tolist(), label[order].tolist(), strict=True
    ):
        place = _first_fit(stacks, begin, stop)
        if place == len(stacks):
            stacks.append([])
            tracks.append(([], [], []))
        stacks[place].append(stop)
        for column, value in zip(tracks[place], (begin, stop, code), strict=True):
            column.append(value)
    return tracks


def _first_fit(stacks: list[list[int]], begin: int, stop: int) -> int:
    """Return the first track on which the slice follows or nests; a new one if there is none."""
    for place, stack in enumerate(stacks):
        while stack and stack[-1] <= begin:
            stack.pop()
        if not stack or stop <= stack[-1]:
            return place
    return len(stacks)


def _slices(uuid: int, start: list[int], end: list[int], label: list[int]) -> Iterator[bytes]:
    """Yield begin and end packets in time order; inner slices end before outer ones."""
    track = _number(11, uuid)
    flags = _number(13, _NEEDS_INCREMENTAL_STATE)
    finish = _data(11, _number(9, _END) + track)
    open_ends: list[int] = []

    def closing(until: int | None) -> Iterator[bytes]:
        while open_ends and (until is None or open_ends[-1] <= until):
            yield _packet(_number(8, open_ends.pop()) + finish + flags)

    for begin, stop, code in zip(start, end, label, strict=True):
        yield from closing(begin)
        event = _data(11, _number(9, _BEGIN) + track + _number(10, code))
        yield _packet(_number(8, begin) + event + flags)
        open_ends.append(stop)
    yield from closing(None)

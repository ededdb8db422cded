"""The ring file: what one process was doing, readable at any moment from outside.

One memory-mapped file per process: header, facts, string table, and lanes of fixed-size records.
A lane has one writing side (lane 0: Python; lane 1: native code). A record is written whole when
its span opens and completed in place when it closes, so the file of a killed or hanging process
still says what was running, since when. Readers take no lock; a record is valid when its first and
last word agree. The byte layout is in ``docs/formats/ring.md``; the constants here are the same.

Standard library and Python 3.9 syntax only: this module is copied into the folder that runs inside
users' jobs. It opens no file and reads no clock: buffers and stamps are passed in.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = [
    "CLOSED", "DEFAULT_RING_BYTES", "FLAG_ASYNC", "FLAG_EVALUATES", "FLAG_FAILED",
    "FLAG_INCOMPLETE", "FLAG_LATE", "FLAG_NO_TIMES", "FLAG_RECOMPUTE", "HEADER_BYTES", "KINDS",
    "KIND_CODES", "LANE_SHIFT", "MAGIC", "MAX_LANES", "OFF", "OPEN", "RECORDING", "RECORD_BYTES",
    "RECORD_FIELDS", "VERSION", "Header", "Lane", "RingError", "RingWriter", "format_ring",
    "pack_template", "read_facts", "read_header", "read_strings",
]  # fmt: skip

MAGIC = b"KANSOKU\n"
VERSION = 1
BYTE_ORDER_MARK = 0x01020304
HEADER_BYTES = 4096
RECORD_BYTES = 128
MAX_LANES = 4
LANE_SHIFT = 56
"""A record's id is ``lane << 56 | n`` with n = 1, 2, 3 … in the order of opening."""
DEFAULT_RING_BYTES = 8 << 20
MAX_STRINGS = 65_535
MAX_FACTS_BYTES = 64 << 20
OPEN = -1
"""Duration of a span that has not closed."""

RING, LOG = 0, 1
"""File kinds: a wrapping ring, or the drained copy, whose records only grow."""
OFF, RECORDING, CLOSED = 0, 1, 2
"""States of the writer: switched off, recording, ended in order."""

KINDS = (
    "",
    "step",
    "data_wait",
    "forward",
    "backward",
    "optimizer",
    "collective",
    "checkpoint",
    "evaluation",
    "gc",
    "compile",
    "collective_wait",  # the thread was blocked until collectives completed
    "device_launch",
    "device_copy",
    "device_sync",
    "note",
)
KIND_CODES = {name: code for code, name in enumerate(KINDS) if name}

FLAG_INCOMPLETE = 1  # a step that ended without its optimizer update
FLAG_RECOMPUTE = 2  # a forward repeated inside a backward
FLAG_LATE = 4  # completes the record named by origin, whose slot was overwritten
FLAG_FAILED = 8  # the span ended by an exception
FLAG_ASYNC = 16  # issued without blocking the caller
FLAG_NO_TIMES = 32  # counted, but its end was not seen
FLAG_EVALUATES = 64  # a data wait or other span of an evaluation

# (field, offset, struct format); little-endian.
RECORD_FIELDS = (
    ("id", 0, "Q"),
    ("start_ns", 8, "q"),
    ("cpu_ns", 16, "q"),
    ("duration_ns", 24, "q"),
    ("parent", 32, "Q"),
    ("step", 40, "i"),
    ("kind", 44, "H"),
    ("flags", 46, "H"),
    ("name", 48, "H"),
    ("group", 50, "H"),
    ("dtype", 52, "H"),
    ("device", 54, "H"),
    ("attributes", 56, "H"),
    ("peer", 58, "H"),
    ("thread", 60, "I"),
    ("sequence", 64, "q"),
    ("bytes", 72, "q"),
    ("peak_rss_bytes", 80, "q"),
    ("device_ns", 88, "q"),
    ("value_a", 96, "d"),
    ("value_b", 104, "d"),
    ("origin", 112, "Q"),
    ("id_again", 120, "Q"),
)
_TEMPLATE = struct.Struct("=HHHHHHHHIqqqqddQ")
_TEMPLATE_OFFSET = 44
_OPEN = struct.Struct("@QqqqQi76sQ")
_CLOSE = struct.Struct("@qq")
_CLOSE_OFFSET = 16
_RSS_OFFSET, _VALUES_OFFSET = 80, 96
assert _TEMPLATE.size == 76 and _OPEN.size == RECORD_BYTES  # noqa: S101, PT018 - our own layout
_HEAD = struct.Struct("=8sIIIIIIQQQQQ")
"""magic, version, header and record bytes, lanes, byte order mark, file kind; facts offset and
capacity; strings offset, capacity, used."""
_USED = 64
_PROCESS = struct.Struct("=QQiiiI")
_PROCESS_OFFSET = 80
"""pid, start of the process in clock ticks since boot, rank, local rank, world size, state."""
_RANKS_OFFSET = 96
_STATE_OFFSET = 108
_ANCHORS = struct.Struct("=qqqq")
_ANCHORS_OFFSET = 112
"""First and newest pair of (monotonic, Unix) nanoseconds read together."""
_NOW = struct.Struct("=qQqq")
_NOW_OFFSET = 144
"""Current step, id of the main thread's innermost open phase, native thread id of the main
thread, last sign of life (monotonic)."""
_LOSSES = struct.Struct("=QQQQ")
_LOSSES_OFFSET = 176
"""Records not written, errors swallowed, strings that did not fit, records lost before draining."""
_LANE = struct.Struct("=QQQQ")
_LANE_OFFSET = 256
"""Per lane: offset, capacity in records, newest n (now and then), n drained so far (in logs)."""
_COUNTERS = struct.Struct("=QQ")
_COUNTERS_OFFSET = 384
"""Per kind: spans closed and their bytes since the start, whatever was overwritten."""
_FACTS = struct.Struct("=II")
"""At the facts offset: change number (odd while being written) and length, then JSON."""


class RingError(Exception):
    """The bytes are not a ring file this version can read."""


class Lane(NamedTuple):
    """Where the records of one writing side are."""

    offset: int
    capacity: int
    head: int
    """Newest n the writer has noted; the records themselves say more."""
    drained: int


class Header(NamedTuple):
    """The header of a ring file or of a drained copy."""

    version: int
    file_kind: int
    record_bytes: int
    header_bytes: int
    facts_offset: int
    facts_bytes: int
    strings_offset: int
    strings_bytes: int
    strings_used: int
    pid: int
    process_start: int
    rank: int | None
    local_rank: int | None
    world_size: int | None
    state: int
    first_anchor: tuple[int, int]
    anchor: tuple[int, int]
    step: int | None
    open_phase: int
    main_thread: int
    alive_ns: int
    not_written: int
    errors: int
    strings_dropped: int
    lost: int
    lanes: tuple[Lane, ...]
    counts: dict[str, tuple[int, int]]

    @property
    def records_offset(self) -> int:
        """Return where the records of a drained copy begin."""
        return self.lanes[0].offset


def _known(value: int) -> int | None:
    return None if value < 0 else value


def read_header(buffer: Any) -> Header:
    """Return the header; raise RingError saying what is wrong with the bytes."""
    if len(buffer) < HEADER_BYTES:
        raise RingError(f"{len(buffer)} bytes are fewer than a header of {HEADER_BYTES}")
    head = _HEAD.unpack_from(buffer, 0)
    magic, version, header_bytes, record_bytes, lanes, mark, file_kind = head[:7]
    if magic != MAGIC:
        raise RingError("not a ring file: the first eight bytes are not 'KANSOKU\\n'")
    if version > VERSION:
        raise RingError(f"written in ring format {version}; this reader knows up to {VERSION}")
    if mark != BYTE_ORDER_MARK:
        raise RingError("written on a machine of the other byte order")
    if (
        header_bytes != HEADER_BYTES
        or record_bytes != RECORD_BYTES
        or not 1 <= lanes <= MAX_LANES
        or file_kind not in (RING, LOG)
    ):
        raise RingError("the header contradicts its own format version: damaged")
    process = _PROCESS.unpack_from(buffer, _PROCESS_OFFSET)
    anchors = _ANCHORS.unpack_from(buffer, _ANCHORS_OFFSET)
    now = _NOW.unpack_from(buffer, _NOW_OFFSET)
    losses = _LOSSES.unpack_from(buffer, _LOSSES_OFFSET)
    counts = {}
    for code, name in enumerate(KINDS):
        count = _COUNTERS.unpack_from(buffer, _COUNTERS_OFFSET + code * _COUNTERS.size)
        if name and count[0]:
            counts[name] = count
    places = [_LANE.unpack_from(buffer, _LANE_OFFSET + i * _LANE.size) for i in range(lanes)]
    return Header(
        version, file_kind, record_bytes, header_bytes, head[7], head[8], head[9], head[10],
        head[11], process[0], process[1], _known(process[2]), _known(process[3]),
        _known(process[4]), process[5], (anchors[0], anchors[1]), (anchors[2], anchors[3]),
        _known(now[0]), now[1], now[2], now[3], losses[0], losses[1], losses[2], losses[3],
        tuple(Lane(*place) for place in places), counts,
    )  # fmt: skip


def read_strings(buffer: Any, header: Header) -> list[str]:
    """Return the string table; index 0 is the empty string. A cut table gives what is whole."""
    end = min(header.strings_used, header.strings_bytes)
    raw = bytes(buffer[header.strings_offset : header.strings_offset + end])
    strings, at = [""], 0
    while at + 2 <= len(raw) and len(strings) <= MAX_STRINGS:
        length = raw[at] | raw[at + 1] << 8
        text = raw[at + 2 : at + 2 + length]
        if len(text) < length:
            break
        strings.append(text.decode("utf-8", "replace"))
        at += 2 + length
    return strings


def read_facts(buffer: Any, header: Header) -> dict[str, Any]:
    """Return what the process said of itself; empty where nothing whole is there."""
    if header.facts_offset + _FACTS.size > len(buffer):
        return {}
    for _ in range(8):  # the writer may be at it: take a copy between two equal even numbers
        change, length = _FACTS.unpack_from(buffer, header.facts_offset)
        if length > min(header.facts_bytes, MAX_FACTS_BYTES):
            return {}
        start = header.facts_offset + _FACTS.size
        raw = bytes(buffer[start : start + length])
        if not change & 1 and _FACTS.unpack_from(buffer, header.facts_offset)[0] == change:
            break
    try:
        facts = json.loads(raw.decode("utf-8", "replace")) if raw else {}
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def pack_template(  # noqa: PLR0913 - one argument a field of the record
    kind: int,
    *,
    flags: int = 0,
    name: int = 0,
    group: int = 0,
    dtype: int = 0,
    device: int = 0,
    attributes: int = 0,
    peer: int = 0,
    thread: int = 0,
    sequence: int = -1,
    bytes_: int = -1,
    peak_rss_bytes: int = -1,
    device_ns: int = -1,
    value_a: float = 0.0,
    value_b: float = 0.0,
    origin: int = 0,
) -> bytes:
    """Return the 76 bytes of a record that are known before the span opens."""
    return _TEMPLATE.pack(
        kind, flags, name, group, dtype, device, attributes, peer, thread, sequence, bytes_,
        peak_rss_bytes, device_ns, value_a, value_b, origin,
    )  # fmt: skip


def format_ring(
    buffer: Any,
    *,
    pid: int,
    process_start: int,
    anchor: tuple[int, int],
    lane_shares: tuple[int, ...] = (1, 1),
    facts_bytes: int = 65_536,
    strings_bytes: int = 65_536,
) -> None:
    """Lay out an empty ring in a zeroed buffer; the magic is written last.

    ``lane_shares`` divides the space for records between the lanes. Raise RingError where the
    buffer is too small for 16 records a lane.
    """
    size = len(buffer)
    if size < 1 << 20:  # small rings keep most of their room for records
        facts_bytes, strings_bytes = min(facts_bytes, size // 16), min(strings_bytes, size // 16)
    facts_offset = HEADER_BYTES
    strings_offset = facts_offset + facts_bytes
    records_offset = -(-(strings_offset + strings_bytes) // RECORD_BYTES) * RECORD_BYTES
    room = (size - records_offset) // RECORD_BYTES
    at = records_offset
    for number, share in enumerate(lane_shares):
        capacity = room * share // sum(lane_shares)
        if capacity < 16:
            raise RingError(f"{size} bytes are too few for a ring")
        _LANE.pack_into(buffer, _LANE_OFFSET + number * _LANE.size, at, capacity, 0, 0)
        at += capacity * RECORD_BYTES
    _PROCESS.pack_into(buffer, _PROCESS_OFFSET, pid, process_start, -1, -1, -1, RECORDING)
    _ANCHORS.pack_into(buffer, _ANCHORS_OFFSET, *anchor, *anchor)
    _NOW.pack_into(buffer, _NOW_OFFSET, -1, 0, 0, anchor[0])
    _HEAD.pack_into(
        buffer, 0, bytes(8), VERSION, HEADER_BYTES, RECORD_BYTES, len(lane_shares),
        BYTE_ORDER_MARK, RING, facts_offset, facts_bytes, strings_offset, strings_bytes, 0,
    )  # fmt: skip
    buffer[0:8] = MAGIC


class RingWriter:
    """Writes one lane, the strings and the facts of a formatted ring.

    ``open`` and ``close`` are plain closures over the buffer: they run in a user's training loop
    and cost about half a microsecond together. Threads may call them under the interpreter lock.
    """

    open: Callable[[bytes, int, int, int], int]
    """(template, start_ns, step, parent) -> id. The step is -1 outside any step."""
    close: Callable[[int, int, int, int], None]
    """(id, start_ns, end_ns, cpu_ns). The CPU time is -1 where unknown."""
    _slot: Callable[[int], int]
    _newest: Callable[[], int]
    begin: Callable[[bytes, int, int, int], int]
    """As ``open``, and the span is the main thread's innermost phase from now on. Lane 0 only."""
    end: Callable[[int, int, int, int, int, int, float, float, int], bool]
    """(id, kind, start_ns, end_ns, cpu_ns, peak_rss_bytes, value_a, value_b, phase): complete and
    count (kind 0: not) a span, note the innermost phase; False where the slot was overwritten."""
    turn: Callable[[int, int, int], None]
    """(step, phase, alive_ns): note where the main thread is, and the newest id. Lane 0 only."""

    def __init__(self, buffer: Any, *, lane: int = 0):
        self.buffer = buffer
        self._header = read_header(buffer)
        self._strings: dict[str, int] = {"": 0}
        self._strings_used = 0
        self._facts_change, self._lane = 0, lane
        self._late: dict[int, tuple[bytes, int, int]] = {}
        if lane:
            self.open, self.close = self._make_in_lane()
        else:
            self.open, self.close, self.begin, self.end, self.turn = self._make()

    def _make(self) -> Any:
        buffer = self.buffer
        offset, capacity = self._header.lanes[0][:2]
        following = itertools.count(1).__next__
        pack_open, pack_close = _OPEN.pack_into, _CLOSE.pack_into
        whole = memoryview(buffer)[: len(buffer) // 8 * 8].cast("B")
        words, floats = whole.cast("q"), whole.cast("d")
        first, phase_at, counters = offset // 8, _NOW_OFFSET // 8 + 1, _COUNTERS_OFFSET // 8
        step_at, alive_at, head_at = phase_at - 1, phase_at + 2, _LANE_OFFSET // 8 + 2
        newest = 0
        self._slot, self._newest = lambda span: offset + (span - 1) % capacity * 128, lambda: newest

        # This runs in training loops: names bound as defaults are locals, and the id of lane 0 is
        # the bare number, which halves the cost (0.56 against 1.05 µs for both with two clocks).
        def open_(
            template: bytes,
            start_ns: int,
            step: int,
            parent: int,
            pack: Callable[..., None] = pack_open,
            buffer: Any = buffer,
        ) -> int:
            nonlocal newest
            newest = n = following()
            at = offset + (n - 1) % capacity * 128
            pack(buffer, at, n, start_ns, -1, -1, parent, step, template, n)
            return n

        def close(
            span: int,
            start_ns: int,
            end_ns: int,
            cpu_ns: int,
            pack: Callable[..., None] = pack_close,
            buffer: Any = buffer,
        ) -> None:
            if newest - span >= capacity:
                self._close_late(span, start_ns, end_ns, cpu_ns)
                return
            # CPU time first, duration last: a reader that sees the duration sees everything.
            pack(buffer, offset + (span - 1) % capacity * 128 + 16, cpu_ns, end_ns - start_ns)

        # Between the kernels of a step, which have emptied the caches, every call and every object
        # touched costs a microsecond or more: these three call nothing, and set words, not fields.
        def begin(template: bytes, start_ns: int, step: int, parent: int) -> int:
            nonlocal newest
            newest = n = following()
            at = offset + (n - 1) % capacity * 128
            pack_open(buffer, at, n, start_ns, -1, -1, parent, step, template, n)
            words[phase_at] = n
            return n

        def end(  # noqa: PLR0913, PLR0917 - one argument a field; keywords cost
            span: int,
            kind: int,
            start_ns: int,
            end_ns: int,
            cpu_ns: int,
            peak_rss_bytes: int,
            value_a: float,
            value_b: float,
            phase: int,
        ) -> bool:
            words[phase_at] = phase
            if kind:
                words[counters + 2 * kind] += 1
            if newest - span >= capacity:
                return False
            at = first + (span - 1) % capacity * 16
            words[at + 10] = peak_rss_bytes
            floats[at + 12] = value_a
            floats[at + 13] = value_b
            words[at + 2] = cpu_ns
            words[at + 3] = end_ns - start_ns
            return True

        def turn(step: int, phase: int, alive_ns: int) -> None:
            words[head_at], words[alive_at] = newest, alive_ns
            words[step_at], words[phase_at] = step, phase

        return open_, close, begin, end, turn

    def _make_in_lane(self) -> Any:
        buffer, bits = self.buffer, self._lane << LANE_SHIFT
        offset, capacity = self._header.lanes[self._lane][:2]
        following = itertools.count(1).__next__
        newest = 0
        mask = (1 << LANE_SHIFT) - 1

        def slot(span: int) -> int:
            return offset + ((span & mask) - 1) % capacity * RECORD_BYTES

        self._slot, self._newest = slot, lambda: newest

        def open_(template: bytes, start_ns: int, step: int, parent: int) -> int:
            nonlocal newest
            newest = n = following()
            span = bits | n
            _OPEN.pack_into(buffer, slot(n), span, start_ns, -1, -1, parent, step, template, span)
            return span

        def close(span: int, start_ns: int, end_ns: int, cpu_ns: int) -> None:
            if newest - (span & mask) >= capacity:
                self._close_late(span, start_ns, end_ns, cpu_ns)
                return
            _CLOSE.pack_into(buffer, slot(span) + _CLOSE_OFFSET, cpu_ns, end_ns - start_ns)

        return open_, close

    def delegate(self, core: Any) -> None:
        """Let a compiled core write lane 0 from now on; nothing was written before."""
        self.open, self.close = core.record, core.complete
        self._slot, self._newest = core.slot, core.newest

    def remember(self, span: int, template: bytes, step: int, parent: int) -> None:
        """Keep what a long span needs to be completed after its slot was overwritten."""
        self._late[span] = (template, step, parent)

    def forget(self, span: int) -> None:
        """Drop what ``remember`` kept."""
        self._late.pop(span, None)

    def _close_late(self, span: int, start_ns: int, end_ns: int, cpu_ns: int) -> None:
        kept = self._late.pop(span, None)
        if kept is None:
            self.add_losses(not_written=1)
            return
        template, step, parent = kept
        fields = list(_TEMPLATE.unpack(template))
        fields[1] |= FLAG_LATE
        fields[-1] = span
        again = self.open(_TEMPLATE.pack(*fields), start_ns, step, parent)
        _CLOSE.pack_into(self.buffer, self._slot(again) + _CLOSE_OFFSET, cpu_ns, end_ns - start_ns)

    def holds(self, span: int) -> bool:
        """Say whether the record's slot has not been overwritten yet."""
        return bool(struct.unpack_from("=Q", self.buffer, self._slot(span))[0] == span)

    def set_values(
        self, span: int, *, peak_rss_bytes: int = -1, value_a: float = 0.0, value_b: float = 0.0
    ) -> None:
        """Complete an open record before it closes."""
        if self.holds(span):
            at = self._slot(span)
            struct.pack_into("=q", self.buffer, at + _RSS_OFFSET, peak_rss_bytes)
            struct.pack_into("=dd", self.buffer, at + _VALUES_OFFSET, value_a, value_b)
        elif span in self._late:
            template, step, parent = self._late[span]
            fields = list(_TEMPLATE.unpack(template))
            fields[11:15] = [peak_rss_bytes, fields[12], value_a, value_b]
            self._late[span] = (_TEMPLATE.pack(*fields), step, parent)

    def set_device_ns(self, span: int, device_ns: int) -> None:
        """Write the time the device took, known some time after the span closed."""
        if self.holds(span):
            struct.pack_into("=q", self.buffer, self._slot(span) + 88, device_ns)

    def set_kind(self, span: int, kind: int, flags: int) -> None:
        """Correct the kind and the flags of a record that is still in the ring."""
        if self.holds(span):
            struct.pack_into("=HH", self.buffer, self._slot(span) + _TEMPLATE_OFFSET, kind, flags)

    def set_step(self, span: int, step: int, parent: int) -> None:
        """Move a record that is still in the ring to another step."""
        if self.holds(span):
            struct.pack_into("=Qi", self.buffer, self._slot(span) + 32, parent, step)

    def intern(self, text: str) -> int:
        """Return the index of a string, adding it; 0 where the table is full (counted)."""
        index = self._strings.get(text)
        if index is not None:
            return index
        raw = text.encode("utf-8", "replace")[:1024]
        header = self._header
        used = self._strings_used
        if used + 2 + len(raw) > header.strings_bytes or len(self._strings) >= MAX_STRINGS:
            self._strings[text] = 0
            self.add_losses(strings_dropped=1)
            return 0
        at = header.strings_offset + used
        self.buffer[at : at + 2] = bytes((len(raw) & 255, len(raw) >> 8))
        self.buffer[at + 2 : at + 2 + len(raw)] = raw
        self._strings_used = used + 2 + len(raw)
        struct.pack_into("=Q", self.buffer, _USED, self._strings_used)
        index = self._strings[text] = len(self._strings)
        return index

    def set_facts(self, facts: dict[str, Any]) -> bool:
        """Replace the facts; False where they do not fit (the old ones stay)."""
        raw = json.dumps(facts, separators=(",", ":")).encode("utf-8")
        at = self._header.facts_offset
        if len(raw) + _FACTS.size > self._header.facts_bytes:
            return False
        self._facts_change += 1
        _FACTS.pack_into(self.buffer, at, self._facts_change, 0)
        self.buffer[at + _FACTS.size : at + _FACTS.size + len(raw)] = raw
        self._facts_change += 1
        _FACTS.pack_into(self.buffer, at, self._facts_change, len(raw))
        return True

    def set_ranks(self, rank: int, local_rank: int, world_size: int) -> None:
        """Write the ranks; -1 is unknown."""
        struct.pack_into("=iii", self.buffer, _RANKS_OFFSET, rank, local_rank, world_size)

    def set_state(self, state: int) -> None:
        """Write OFF, RECORDING or CLOSED."""
        struct.pack_into("=I", self.buffer, _STATE_OFFSET, state)

    def set_anchor(self, monotonic_ns: int, unix_ns: int) -> None:
        """Refresh the newest pair of clocks."""
        struct.pack_into("=qq", self.buffer, _ANCHORS_OFFSET + 16, monotonic_ns, unix_ns)

    def set_now(self, *, step: int, phase: int, main_thread: int, alive_ns: int) -> None:
        """Write the current step and phase, which native code copies into its records."""
        _NOW.pack_into(self.buffer, _NOW_OFFSET, step, phase, main_thread, alive_ns)

    def count(self, kind: int, bytes_: int) -> None:
        """Count a closed span and its bytes."""
        at = _COUNTERS_OFFSET + kind * _COUNTERS.size
        count, total = _COUNTERS.unpack_from(self.buffer, at)
        _COUNTERS.pack_into(self.buffer, at, count + 1, total + bytes_)

    def set_count(self, kind: int, count: int, bytes_: int) -> None:
        """Write how many spans of a kind have closed, and their bytes."""
        _COUNTERS.pack_into(self.buffer, _COUNTERS_OFFSET + kind * _COUNTERS.size, count, bytes_)

    def set_head(self) -> None:
        """Note the newest n of the lane."""
        at = _LANE_OFFSET + self._lane * _LANE.size + 16
        struct.pack_into("=Q", self.buffer, at, self._newest())

    def add_losses(
        self, *, not_written: int = 0, errors: int = 0, strings_dropped: int = 0, lost: int = 0
    ) -> None:
        """Count what failed."""
        old = _LOSSES.unpack_from(self.buffer, _LOSSES_OFFSET)
        more = (not_written, errors, strings_dropped, lost)
        _LOSSES.pack_into(self.buffer, _LOSSES_OFFSET, *(a + b for a, b in zip(old, more)))  # noqa: B905 - 3.9

"""A bounded queue of numbered batches on disk: survives kill -9, knows what was delivered.

One folder: ``identity`` (a random name made with the folder, the sender's name at the server),
``delivered`` (the last sequence delivered) and segments ``FIRST_SEQUENCE.seg``. A segment is a
row of records: magic, sequence, rows, length, CRC-32 of the payload, payload. A record cut off by
a crash was never acknowledged to its producer and is cut away at the next start. A record whose
payload is damaged is passed over; where a header is, the rest of its segment is lost. When full,
the oldest segment goes, and its rows are counted.
"""

import contextlib
import fcntl
import os
import re
import secrets
import struct
import threading
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from kansoku.errors import PlatformError

__all__ = ["Record", "Spool"]

_HEADER = struct.Struct("<IQIII")
_MAGIC = 0x4B53504C
_SEGMENT = re.compile(r"\d{20}\.seg")
_IDENTITY = re.compile(r"[0-9a-f]{24}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One batch."""

    sequence: int
    rows: int
    payload: bytes


@dataclass(slots=True, kw_only=True)
class _Segment:
    path: Path
    size: int
    records: deque[tuple[int, int, int, int]]
    """(sequence, rows, offset of the payload, length) of what is not delivered yet."""


class Spool:
    """The queue; one process owns the folder, several threads may use it."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = 2 << 30,
        segment_bytes: int = 16 << 20,
        sync: bool = True,
    ) -> None:
        """Open or create.

        With ``sync`` every batch is forced to the disk before :meth:`put` returns, so that a
        power cut loses nothing either. Raises PlatformError where another process owns the
        folder or it cannot be written.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max(max_bytes // 4, 4096))
        self._sync = sync
        self._lock = threading.RLock()
        self.dropped_rows = 0
        self.dropped_batches = 0
        self.dropped_segments = 0
        """Segments that went because the spool was full."""
        self.damaged_segments = 0
        """Segments of which something acknowledged could not be read any more."""
        self.torn_records = 0
        """Records that could not be read: damaged, or cut off by a crash."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._owner = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.identity = self._identify()
            delivered = self._read_delivered()
            self._delivered = delivered or 0
            self._segments: deque[_Segment] = deque()
            self._scan()
            if delivered is None and not self._last:
                # Numbers begin again: under the old name the receiver would take them for repeats.
                self.identity = self._identify(anew=True)
        except BlockingIOError:
            os.close(self._owner)
            raise PlatformError("another process uses this spool", where=str(folder)) from None
        except OSError as error:
            raise PlatformError(f"the spool cannot be used: {error}", where=str(folder)) from None
        self._writer: int | None = None

    def _identify(self, *, anew: bool = False) -> str:
        path = self._folder / "identity"
        if path.exists() and not anew:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            if _IDENTITY.fullmatch(text):
                return text
        identity = secrets.token_hex(12)
        self._write_whole(path, identity)
        return identity

    def _write_whole(self, path: Path, text: str) -> None:
        temporary = path.with_suffix(".new")
        with temporary.open("w", encoding="ascii") as handle:
            handle.write(text)
            handle.flush()
            if self._sync:
                os.fsync(handle.fileno())
        temporary.replace(path)

    def _read_delivered(self) -> int | None:
        try:
            number = int((self._folder / "delivered").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None
        return number if 0 <= number < 1 << 63 else None

    def _scan(self) -> None:
        last = self._delivered
        for path in sorted(self._folder.glob("*.seg")):
            if not _SEGMENT.fullmatch(path.name):
                continue
            segment, last = self._scan_segment(path, last)
            if segment.records:
                self._segments.append(segment)
            else:
                path.unlink()
        self._last = last

    def _scan_segment(self, path: Path, last: int) -> tuple[_Segment, int]:
        records: deque[tuple[int, int, int, int]] = deque()
        at, size, damaged = 0, path.stat().st_size, False
        with path.open("r+b") as handle:
            while at + _HEADER.size <= size:
                handle.seek(at)
                magic, sequence, rows, length, crc = _HEADER.unpack(handle.read(_HEADER.size))
                end = at + _HEADER.size + length
                if magic != _MAGIC or end > size:
                    break
                if zlib.crc32(handle.read(length)) != crc:
                    damaged = True
                    self.torn_records += 1
                else:
                    last = max(last, sequence)
                    if sequence > self._delivered:
                        records.append((sequence, rows, at + _HEADER.size, length))
                at = end
            if at != size:
                handle.seek(at)
                damaged = damaged or not _cut_off(handle.read())
                self.torn_records += 1
                handle.truncate(at)
        self.damaged_segments += damaged
        return _Segment(path=path, size=at, records=records), last

    @property
    def pending_rows(self) -> int:
        """Rows kept and not delivered."""
        with self._lock:
            return sum(rows for segment in self._segments for _, rows, _, _ in segment.records)

    @property
    def pending_batches(self) -> int:
        """Batches kept and not delivered."""
        with self._lock:
            return sum(len(segment.records) for segment in self._segments)

    @property
    def size_bytes(self) -> int:
        """Size of all segments."""
        with self._lock:
            return sum(segment.size for segment in self._segments)

    def next_sequence(self) -> int:
        """Return a sequence for a batch that the disk refused and memory keeps."""
        with self._lock:
            self._last += 1
            return self._last

    def put(self, payload: bytes, *, rows: int) -> int:
        """Keep a batch and return its sequence; raise OSError when the disk refuses it."""
        with self._lock:
            sequence = self._last + 1
            record = _HEADER.pack(_MAGIC, sequence, rows, len(payload), zlib.crc32(payload))
            segment = self._open_segment(sequence)
            assert self._writer is not None
            try:
                _write_all(self._writer, record + payload)
                if self._sync:
                    os.fdatasync(self._writer)
            except OSError:
                os.ftruncate(self._writer, segment.size)
                raise
            place = segment.size + len(record)
            segment.records.append((sequence, rows, place, len(payload)))
            segment.size = place + len(payload)
            self._last = sequence
            self._drop_excess()
            return sequence

    def _open_segment(self, sequence: int) -> _Segment:
        if self._writer is not None and self._segments:
            if self._segments[-1].size < self._segment_bytes:
                return self._segments[-1]
            os.close(self._writer)
            self._writer = None
        if self._writer is not None:
            os.close(self._writer)
        path = self._folder / f"{sequence:020d}.seg"
        self._writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._segments.append(_Segment(path=path, size=0, records=deque()))
        return self._segments[-1]

    def _drop_excess(self) -> None:
        while self.size_bytes > self._max_bytes and len(self._segments) > 1:
            oldest = self._segments.popleft()
            self.dropped_segments += 1
            self.dropped_batches += len(oldest.records)
            self.dropped_rows += sum(rows for _, rows, _, _ in oldest.records)
            oldest.path.unlink(missing_ok=True)

    def first(self) -> Record | None:
        """Return the oldest batch not delivered, or None."""
        with self._lock:
            for segment in self._segments:
                if segment.records:
                    sequence, rows, offset, length = segment.records[0]
                    with segment.path.open("rb") as handle:
                        handle.seek(offset)
                        payload = handle.read(length)
                    return Record(sequence=sequence, rows=rows, payload=payload)
            return None

    def delivered(self, sequence: int) -> bool:
        """Forget a batch: it arrived, or never will. False where it was dropped meanwhile."""
        found = False
        with self._lock:
            for segment in self._segments:
                while segment.records and segment.records[0][0] <= sequence:
                    found |= segment.records.popleft()[0] == sequence
            self._delivered = max(self._delivered, sequence)
            # On a full disk it is not written: after a crash the server knows the batch's number.
            with contextlib.suppress(OSError):
                self._write_whole(self._folder / "delivered", str(self._delivered))
            while len(self._segments) > 1 and not self._segments[0].records:
                self._segments.popleft().path.unlink(missing_ok=True)
            return found

    def close(self) -> None:
        """Let go of the folder; what is pending stays there."""
        with self._lock:
            if self._writer is not None:
                os.close(self._writer)
                self._writer = None
            os.close(self._owner)


def _cut_off(rest: bytes) -> bool:
    """Say whether the end of a segment is one record that a crash cut off: no other follows."""
    magic = struct.pack("<I", _MAGIC)
    return magic.startswith(rest[:4]) and magic not in rest[4:]


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]

"""What DuckDB's write-ahead log holds and its replay will not reach.

The log is a short head, then entries: length (8 bytes, little end first), checksum (8), payload.
DuckDB refuses a log in which a checksum is wrong. But an entry that reaches over the end of the
file, as a crash while writing leaves one, ends the replay without a word; a damaged length looks
the same, and so does a damaged head. The difference: a crash leaves no whole commit behind that
place, damage does. Commits are found by their entry, which is always the same.

A log of an older checkpoint is passed over too, as it must be: damage of that one number cannot be
told from it.
"""

import re
import shutil
import struct
from pathlib import Path
from typing import BinaryIO

__all__ = ["commits_out_of_reach", "keep_damaged"]

_ENTRY = struct.Struct("<QQ")
_HEAD_BYTES = 64
# Field 100: the kind of entry, 101: the log's version, 102: the database's identifier, 103: the
# checkpoint that it follows; each number has seven bits a byte.
_NUMBER = rb"[\x80-\xff]*[\x00-\x7f]"
_HEAD = re.compile(
    rb"d\x00b" + rb"e\x00" + _NUMBER + rb"(?:f\x00\x10(?:" + _NUMBER + rb"){16}"
    rb"g\x00" + _NUMBER + rb")?\xff\xff"
)  # fmt: skip
# A commit's entry without its length, which may be what is damaged: checksum and payload.
_COMMIT = bytes.fromhex("e7fe7d722fed3d5e640064ffff")
_CHUNK_BYTES = 4 << 20


def _replayed_to(file: BinaryIO, start: int, size: int) -> int:
    """Return where the replay that begins at ``start`` ends."""
    at = start
    while at + _ENTRY.size <= size:
        file.seek(at)
        length, _ = _ENTRY.unpack(file.read(_ENTRY.size))
        if length == 0 or at + _ENTRY.size + length > size:
            break
        at += _ENTRY.size + length
    return at


def _commits_from(file: BinaryIO, at: int) -> int:
    file.seek(at)
    count, kept = 0, b""
    while chunk := file.read(_CHUNK_BYTES):
        window = kept + chunk
        count += window.count(_COMMIT)
        # Too short for a whole commit: one that the chunks divide is counted once.
        kept = window[1 - len(_COMMIT) :]
    return count


def commits_out_of_reach(path: Path) -> int:
    """Return the number of whole commits in the log that a replay will pass over in silence.

    0 without a log, or where only an unfinished write is cut off. Damage that DuckDB's own
    checksums find is left to it. Raises OSError where the log cannot be read.
    """
    if not path.exists():
        return 0
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = _HEAD.match(file.read(_HEAD_BYTES))
        reached = 0 if head is None else _replayed_to(file, head.end(), size)
        return _commits_from(file, reached) if reached < size else 0


def keep_damaged(path: Path) -> Path:
    """Copy the log aside, since the engine writes over it; return the copy's place."""
    copy = path.with_name(f"{path.name}.damaged")
    shutil.copyfile(path, copy)
    return copy

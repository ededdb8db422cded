"""Byte strings that lie in one buffer, read by columns: equal ones found, whole numbers decoded.

A column is ``starts`` and ``lengths`` into ``data``. Eight bytes are loaded at a time, so that a
text of sixteen bytes costs two steps however many rows there are.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Ints", "Spots", "Words", "distinct", "varints", "words_of"]

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
_LONGEST = 256
_U8 = np.uint64(8)
# Mask of the first n bytes of a little-endian word, n = 0 to 8.
_FIRST = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)
# Where a varint of n bytes has its "more follows" bits, n = 0 to 8.
_MORE = np.array([int.from_bytes(b"\x80" * max(n - 1, 0), "little") for n in range(9)], np.uint64)
_EIGHTHS = np.uint64(0x8080808080808080)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def words_of(data: npt.NDArray[np.uint8]) -> Words:
    """Return the eight bytes that begin at every position; the last seven positions have none."""
    if len(data) < 8:
        return np.zeros(0, np.uint64)
    return np.ndarray((len(data) - 7,), "<u8", buffer=data.data, strides=(1,))


@dataclass(slots=True)
class Spots:
    """Byte strings in one buffer, and the row of each."""

    data: npt.NDArray[np.uint8]
    words: Words
    rows: Ints
    starts: Ints
    lengths: Ints

    def raw(self, at: int) -> bytes:
        """Return one string."""
        start = int(self.starts[at])
        return self.data[start : start + int(self.lengths[at])].tobytes()

    def inner(self, skip: int) -> "Spots":
        """Return the strings without their first bytes."""
        return Spots(self.data, self.words, self.rows, self.starts + skip, self.lengths - skip)


def _load(spots: Spots, offset: int) -> Words:
    """Return bytes ``offset`` to ``offset + 8`` of every string, zero beyond its end."""
    at = spots.starts + offset
    left = spots.lengths - offset
    last = len(spots.words) - 1
    if last < 0:
        padded = np.concatenate([spots.data, np.zeros(16, np.uint8)])
        found = words_of(padded)[np.minimum(at, len(spots.data))]
    elif not len(at) or int(at.max()) <= last:
        found = spots.words[at]
    else:
        # The last seven bytes begin no word: take the last word and shift.
        found = spots.words[np.minimum(at, last)]
        beyond = np.clip(at - last, 0, 8).astype(np.uint64) * np.uint64(8)
        # Shifting by 64 is undefined, by 32 twice is not.
        half = beyond >> np.uint64(1)
        found = (found >> half >> (beyond - half)).astype(np.uint64, copy=False)
    mask: Words = _FIRST.take(left, mode="clip")
    return found & mask


def distinct(spots: Spots) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Return the number of each string, and where each distinct one stands first."""
    count = len(spots.lengths)
    if not count:
        return np.zeros(0, np.int32), []
    longest = int(spots.lengths.max())
    if longest > _LONGEST:
        return _distinct_by_one(spots)
    parts = [_load(spots, offset) for offset in range(0, longest, 8)]
    mixed = spots.lengths.astype(np.uint64)
    for part in parts:
        mixed = (mixed ^ part) * _ODD  # wraps around
        mixed ^= mixed >> np.uint64(29)
    import pyarrow as pa

    encoded = pa.array(mixed).dictionary_encode()
    codes: npt.NDArray[np.int32] = encoded.indices.to_numpy()
    firsts = np.zeros(len(encoded.dictionary), np.int64)
    firsts[codes[::-1]] = np.arange(count)[::-1]
    # Two strings of one mixed number are possible, on purpose even: compare them in full.
    if len(firsts) < count:
        for part in (spots.lengths.astype(np.uint64), *parts):
            if not bool((part[firsts].take(codes) == part).all()):
                return _distinct_by_one(spots)
    return codes, firsts.tolist()


def _distinct_by_one(spots: Spots) -> tuple[npt.NDArray[np.int32], list[int]]:
    known: dict[bytes, int] = {}
    firsts: list[int] = []
    codes = np.empty(len(spots.lengths), np.int32)
    view = spots.data.tobytes()
    ends = spots.starts + spots.lengths
    for at, (start, end) in enumerate(zip(spots.starts.tolist(), ends.tolist(), strict=True)):
        text = view[start:end]
        code = known.get(text)
        if code is None:
            code = known[text] = len(firsts)
            firsts.append(at)
        codes[at] = code
    return codes, firsts


def varints(spots: Spots) -> Ints | None:
    """Return the whole number that each string is, or None where one is no single varint."""
    lengths = spots.lengths
    if not len(lengths):
        return np.zeros(0, np.int64)
    if int(lengths.min()) < 1 or int(lengths.max()) > 10:
        return None
    words = _load(spots, 0)
    if not bool((words & _EIGHTHS == _MORE.take(lengths, mode="clip")).all()):
        # Longer than eight bytes (large or negative), or not a single varint.
        return _long_varints(spots)
    if int(lengths.max()) > 8:
        return _long_varints(spots)
    total = words & np.uint64(0x7F7F7F7F7F7F7F7F)
    # Seven bits of every byte move together: pairs, then fours, then all eight.
    total = (total & np.uint64(0x007F007F007F007F)) | (
        (total & np.uint64(0x7F007F007F007F00)) >> np.uint64(1)
    )
    total = (total & np.uint64(0x00003FFF00003FFF)) | (
        (total & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    )
    total = (total & np.uint64(0x000000000FFFFFFF)) | (
        (total & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4)
    )
    return total.view(np.int64)


def _long_varints(spots: Spots) -> Ints | None:
    data, starts, lengths = spots.data, spots.starts, spots.lengths
    if bool((data[starts + lengths - 1] & 0x80).any()):
        return None
    total = (data[starts] & 0x7F).astype(np.uint64)
    active = np.nonzero(lengths > 1)[0]
    for byte in range(1, 10):
        if not len(active):
            break
        if bool((data[starts[active] + byte - 1] & 0x80 == 0).any()):
            return None
        part = (data[starts[active] + byte] & 0x7F).astype(np.uint64)
        total[active] |= part << np.uint64(7 * byte)
        active = active[lengths[active] > byte + 1]
    return total.view(np.int64)

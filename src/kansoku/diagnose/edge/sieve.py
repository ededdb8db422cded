"""Find the lines of large logs that may matter, without looking at each.

Logs repeat themselves: lines that differ in digits alone say the same. Blocks of bytes have their
digits made equal, equal lines are met once, and only lines of a new shape are judged. A file of
steps costs a translation and a set; a line of a suspicious shape is decoded.
"""

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import BinaryIO

import polars as pl

__all__ = ["COLOUR", "Sieve", "plain"]

COLOUR = r"\x1b\[[\d;]*m"
"""What switches a terminal's colour; its last letter would join the word after it."""
_COLOUR = re.compile(COLOUR)

_SAME_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_BLOCK_BYTES = 4 << 20
_LONGEST_LINE = 16 << 20
# Shapes are kept from file to file, as ranks say the same; so many, then anew.
_MOST_SHAPES = 200_000
_MANY, _THINNED = 2000, 100
_LOOK_BACK = 64
_SHOWN_BYTES = 8192


class Sieve:
    """Sorts lines by shape into harmless ones and those that may matter."""

    def __init__(self, words: Sequence[str], pattern: str, matters: Callable[[str], bool]) -> None:
        """``words`` (any case) or ``pattern`` must be in a line; ``matters`` is asked then."""
        self._words = list(words)
        self._pattern = pattern
        self._matters = matters
        self._harmless: set[bytes] = set()
        self._suspicious: set[bytes] = set()
        self._shown: dict[bytes, int] = {}

    def rows(self, file: BinaryIO) -> Iterator[tuple[int, str, Sequence[bytes]]]:
        """Yield ``(row, line, lines before)`` of lines that may matter; rows count from 1.

        The lines before are those since the last one that was yielded, 64 at most: a stamp may
        stand in them.
        """
        row, rest = 1, b""
        self._shown.clear()
        while block := file.read(_BLOCK_BYTES):
            chunk = rest + block
            cut = chunk.rfind(b"\n") + 1
            if not cut and len(chunk) < _LONGEST_LINE:
                rest = chunk
                continue
            rest = chunk[cut:] if cut else b""
            whole = chunk[: cut - 1] if cut else chunk
            row = yield from self._of_chunk(whole, row)
        if rest:
            yield from self._of_chunk(rest, row)

    def _of_chunk(
        self, chunk: bytes, row: int
    ) -> Generator[tuple[int, str, Sequence[bytes]], None, int]:
        """Yield the lines of one chunk; return the row after it."""
        if len(self._harmless) + len(self._suspicious) > _MOST_SHAPES:
            self._harmless.clear()
            self._suspicious.clear()
        shapes = chunk.translate(_SAME_DIGITS).split(b"\n")
        unique = set(shapes)
        new = unique - self._harmless - self._suspicious
        lines: list[bytes] | None = None
        if new:
            lines = chunk.split(b"\n")
            self._judge(new, shapes, lines)
        bad = unique & self._suspicious
        if not bad:
            return row + len(shapes)
        lines = lines or chunk.split(b"\n")
        last = -1
        for index, shape in enumerate(shapes):
            if shape in bad and self._wants(shape):
                yield (
                    row + index,
                    _text(lines[index]),
                    lines[max(last + 1, index - _LOOK_BACK) : index],
                )
                last = index
        return row + len(shapes)

    def _wants(self, shape: bytes) -> bool:
        """Count a shape's lines in this file: of very many, every hundredth is enough.

        But for driver codes: one of them may be another.
        """
        count = self._shown.get(shape, 0) + 1
        self._shown[shape] = count
        return count <= _MANY or count % _THINNED == 0 or b"Xid" in shape

    def _judge(self, new: set[bytes], shapes: Sequence[bytes], lines: Sequence[bytes]) -> None:
        """Sort new shapes by the first line of each."""
        left, firsts = set(new), []
        for shape, line in zip(shapes, lines, strict=True):
            if shape in left:
                left.discard(shape)
                firsts.append((shape, _text(line)))
        texts = pl.Series([text for _, text in firsts], dtype=pl.String)
        worded = texts.str.contains_any(self._words, ascii_case_insensitive=True)
        named = texts.str.contains(self._pattern)
        for (shape, text), wanted in zip(firsts, worded | named, strict=True):
            chosen = self._suspicious if wanted and self._matters(text) else self._harmless
            chosen.add(shape)


def plain(text: str) -> str:
    """Return a text without a terminal's colours."""
    return _COLOUR.sub("", text) if "\x1b[" in text else text


def _text(line: bytes) -> str:
    return plain(line[:_SHOWN_BYTES].rstrip(b"\r").decode("utf-8", "replace"))

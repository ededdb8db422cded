"""Put rows together again that newlines and delimiters inside names tore apart.

``sacct --parsable2`` escapes nothing. A broken row is a run of lines whose pieces must be dealt
out to the columns again: each typed column takes exactly one piece that it can hold, free texts
take one or more. Where every way to deal agrees on all columns but the free texts, the row is
certain; where they disagree, it is not, and stays out.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kansoku.formats.slurm._columns import FREE_TEXT, checker

__all__ = ["Repairer"]

_MAX_LINES = 12
_MAX_EXTRA = 60
_MAX_WAYS = 200


class Repairer:
    """Deals pieces out to a fixed list of columns."""

    def __init__(self, columns: Sequence[str], delimiter: str) -> None:
        """Take the header's columns and the delimiter between them."""
        self._columns = list(columns)
        self._delimiter = delimiter
        self._free = [name in FREE_TEXT for name in columns]
        self._checks: list[Callable[[str], object]] = [checker(name) for name in columns]
        # The submit line repeats the name and more: it comes first when pieces are left over.
        self._order = sorted(
            (i for i, free in enumerate(self._free) if free),
            key=lambda i: self._columns[i] != "SubmitLine",
        )

    def rows(self, lines: Sequence[str]) -> Iterator[tuple[int, list[str] | str]]:
        """Yield (index of the first line, the row's cells) or (index, reason) for each row."""
        at = 0
        while at < len(lines):
            reason = ""
            for end in range(at + 1, min(at + _MAX_LINES, len(lines)) + 1):
                answer = self._deal("\n".join(lines[at:end]).split(self._delimiter))
                if isinstance(answer, list):
                    yield at, answer
                    at = end
                    break
                reason = reason or answer
                if answer.startswith("several"):
                    reason = answer
            else:
                yield at, reason
                at += 1

    def _deal(self, pieces: list[str]) -> list[str] | str:
        width = len(self._columns)
        extra = len(pieces) - width
        if extra < 0:
            return f"{len(pieces)} cells, expected {width}"
        if extra > _MAX_EXTRA:
            return f"{len(pieces)} cells, expected {width}: too many to put together"
        ways = list(islice(self._ways(pieces, 0, 0, extra, set()), _MAX_WAYS))
        if not ways:
            return f"{len(pieces)} cells, expected {width}, and no way to deal them fits the types"
        certain = {
            tuple(cell for cell, free in zip(way, self._free, strict=True) if not free)
            for way in ways
        }
        if len(certain) > 1:
            return f"several ways to deal {len(pieces)} cells to {width} columns"
        return max(ways, key=self._preference)

    def _preference(self, way: list[str]) -> list[int]:
        return [way[i].count(self._delimiter) for i in self._order]

    def _ways(
        self, pieces: list[str], column: int, at: int, extra: int, dead: set[tuple[int, int]]
    ) -> Iterator[list[str]]:
        """Yield every assignment of pieces[at:] to the columns from ``column`` on."""
        if column == len(self._columns):
            yield []
            return
        if (column, at) in dead:
            return
        found = False
        longest = extra if self._free[column] else 0
        for more in range(longest + 1):
            cell = self._delimiter.join(pieces[at : at + 1 + more])
            if not self._free[column] and not self._holds(column, cell):
                break
            for rest in self._ways(pieces, column + 1, at + 1 + more, extra - more, dead):
                found = True
                yield [cell, *rest]
        if not found:
            dead.add((column, at))

    def _holds(self, column: int, cell: str) -> bool:
        if "\n" in cell:
            return False
        try:
            self._checks[column](cell)
        except ValueError:
            return False
        return True

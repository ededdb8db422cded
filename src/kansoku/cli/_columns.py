"""How wide the columns of a table are drawn, so that a narrow terminal costs lines, never words."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from kansoku.view import Column

__all__ = ["Fitted", "fit_columns"]

_PADDING = 2
"""A space on each side."""
_LONGEST_WORD = 14
"""Longer words of a text column (paths, kernels) may be broken; a number or a heading may not."""
_LONGEST_NUMBER = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A column that is drawn: its place in the table, and its width in cells."""

    place: int
    width: int


def fit_columns(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, room: int
) -> list[list[Fitted]]:
    """Return the columns of each band, one below the other; one band where ``room`` cells do.

    Headings and texts wrap between words first. Where that is too little, the columns left over go
    to a further band, which repeats the leading columns that tell the rows apart.
    """
    cells = [[row[place] for row in rows] for place in range(len(columns))]
    most = max(room - _PADDING, 1)
    natural, least = [], []
    for column, texts in zip(columns, cells, strict=True):
        widest = max((cell_len(line) for text in texts for line in text.split("\n")), default=0)
        if column.numeric:
            smallest = min(widest, _LONGEST_NUMBER)
        else:
            smallest = min(max(map(_longest_word, texts), default=0), _LONGEST_WORD)
        natural.append(min(max(cell_len(column.title), widest, 1), most))
        least.append(min(max(_longest_word(column.title), smallest, 1), most))
    keys = _keys(rows, least, room=room)
    return [
        [
            Fitted(place=place, width=width)
            for place, width in zip(band, _shrunk(band, natural, least, room=room), strict=True)
        ]
        for band in _bands(least, keys, room=room)
    ]


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _keys(rows: Sequence[Sequence[str]], least: Sequence[int], *, room: int) -> int:
    """Return how many leading columns tell the rows apart, in at most half of the room."""
    for count in range(1, len(least)):
        if sum(least[: count + 1]) + (count + 1) * _PADDING > room / 2:
            return count
        if len({tuple(row[:count]) for row in rows}) == len(rows):
            return count
    return 1


def _bands(least: Sequence[int], keys: int, *, room: int) -> list[list[int]]:
    bands = [list(range(min(keys, len(least))))]
    used = sum(least[place] + _PADDING for place in bands[0])
    start = used
    for place in range(len(bands[0]), len(least)):
        need = least[place] + _PADDING
        if used + need > room and len(bands[-1]) > keys:
            bands.append(list(bands[0][:keys]))
            used = start
        bands[-1].append(place)
        used += need
    return bands


def _shrunk(
    band: Sequence[int], natural: Sequence[int], least: Sequence[int], *, room: int
) -> list[int]:
    """Return widths that fit, the widest column giving first; below ``least`` only as a last."""
    widths = [natural[place] for place in band]
    spare = room - len(band) * _PADDING
    for floors in ([least[place] for place in band], [1] * len(band)):
        while sum(widths) > spare:
            giving = [at for at, width in enumerate(widths) if width > floors[at]]
            if not giving:
                break
            widths[max(giving, key=widths.__getitem__)] -= 1
    return widths

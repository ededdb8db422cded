"""A table that is filled again every second: only rows that changed are drawn again."""

from collections.abc import Sequence
from typing import Any, Self

from rich.text import Text
from textual.coordinate import Coordinate
from textual.geometry import Region
from textual.widgets import DataTable

from kansoku.view.plain import plain_line

__all__ = ["SteadyTable"]

Cells = tuple[Text | str, ...]


class SteadyTable(DataTable[Text]):
    """Rows with keys; texts are shown as they are, never read as mark-up."""

    _filled: tuple[tuple[str, Cells], ...] = ()
    _held = False

    def refresh(self, *regions: Region, **more: Any) -> Self:
        """Draw again, unless a fill knows better which rows changed."""
        return self if self._held else super().refresh(*regions, **more)

    def clear(self, columns: bool = False) -> Self:  # noqa: FBT001, FBT002 - Textual's signature
        """Take out all rows."""
        self._filled = ()
        return super().clear(columns)

    def fill(self, rows: Sequence[tuple[str, Cells]]) -> None:
        """Show these rows: a key and a cell a column each."""
        before, after = self._filled, tuple(rows)
        if [key for key, _ in before] != [key for key, _ in after] or not after:
            if before or after:
                self.clear()
                for key, cells in after:
                    self.add_row(*map(_text, cells), key=key)
        elif before != after:
            self._change(before, after)
        self._filled = after

    def _change(
        self, before: Sequence[tuple[str, Cells]], after: Sequence[tuple[str, Cells]]
    ) -> None:
        changed = [n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        self._held = True
        try:
            for row in changed:
                old, new = before[row][1], after[row][1]
                for column, cell in enumerate(new):
                    if cell != old[column]:
                        text = _text(cell)
                        wider = text.cell_len > _text(old[column]).cell_len
                        self.update_cell_at(Coordinate(row, column), text, update_width=wider)
        finally:
            self._held = False
        for row in changed:
            self.refresh_row(row)


def _text(cell: Text | str) -> Text:
    return cell if isinstance(cell, Text) else Text(plain_line(cell))

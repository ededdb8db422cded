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
_MOST_DRAWN = 4096


class SteadyTable(DataTable[Text]):
    """Rows with keys; texts are shown as they are, never read as mark-up."""

    _filled: tuple[tuple[str, Cells], ...] = ()
    _held = False

    def __init__(self, *columns: Any, **more: Any) -> None:
        """Take what a table of Textual takes."""
        self._drawn: dict[Any, Any] = {}
        super().__init__(*columns, **more)

    def refresh(self, *regions: Region, **more: Any) -> Self:
        """Draw again, unless a fill knows better which rows changed."""
        return self if self._held else super().refresh(*regions, **more)

    def _render_cell(self, row_index: int, column_index: int, *more: Any, **named: Any) -> Any:
        # Textual forgets every drawn cell when one has changed. Most say the same as a second ago:
        # kept by what they say, they are half of the cost of a picture.
        if row_index < 0 or column_index < 0:
            return super()._render_cell(row_index, column_index, *more, **named)
        cell = self.get_cell_at(Coordinate(row_index, column_index))
        key = (
            row_index, column_index, cell.plain, cell.style, tuple(cell.spans), more,
            tuple(sorted(named.items())), self._show_hover_cursor, self._pseudo_class_state,
        )  # fmt: skip
        lines = self._drawn.get(key)
        if lines is None:
            if len(self._drawn) >= _MOST_DRAWN:
                self._drawn.clear()
            lines = self._drawn[key] = super()._render_cell(row_index, column_index, *more, **named)
        return lines

    def _clear_caches(self) -> None:
        self._drawn.clear()
        super()._clear_caches()

    def notify_style_update(self) -> None:
        """Draw every cell anew: colours have changed."""
        self._drawn.clear()
        super().notify_style_update()

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

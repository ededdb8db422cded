"""A table that is filled again every second: only rows that changed are drawn again."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual._segment_tools import line_crop
from textual.coordinate import Coordinate
from textual.geometry import Region
from textual.strip import Strip
from textual.widgets import DataTable

from kansoku.view.plain import plain_line

__all__ = ["SteadyTable"]

Cells = tuple[Text | str, ...]
_MOST_KEPT = 4096


class _Picture(NamedTuple):
    """What holds for all lines of one picture."""

    base: Style
    stripes: tuple[Style, Style]
    width: int
    scroll: tuple[int, int]
    widths: tuple[int, ...]
    cursor: Coordinate | None
    hover: Coordinate | None
    kind: str
    """Of the cursor: it marks a row, a column or a cell."""
    state: Any

    def of_row(self, row: int) -> "_Picture":
        """Return what of it holds for a row: others neither have its cursor nor scroll with it."""
        cursor, hover = self.cursor, self.hover
        if self.kind != "column":
            cursor = cursor if cursor is not None and cursor.row == row else None
            hover = hover if hover is not None and hover.row == row else None
        return self._replace(cursor=cursor, hover=hover, scroll=(self.scroll[0], 0))


class _Look(NamedTuple):
    """How a row is drawn, whatever it says."""

    cells: tuple[Style, ...]
    rest: Style
    """Of the space to the right of the last column."""
    marked: bool
    """The cursor is on it, which lays its colours over those of a text."""


class SteadyTable(DataTable[Text]):
    """Rows with keys, a line each; texts are shown as they are, never read as mark-up."""

    _filled: tuple[tuple[str, Cells], ...] = ()
    _held = False
    _picture: _Picture | None = None

    def __init__(self, *columns: Any, **more: Any) -> None:
        """Take what a table of Textual takes."""
        self._texts: list[tuple[Text, ...]] = []
        self._looks: dict[Any, _Look] = {}
        self._lines: dict[int, tuple[Any, tuple[Text, ...], Strip]] = {}
        super().__init__(*columns, **more)

    def key_at(self, row: int) -> str | None:
        """Return the key of a row; None where there is none."""
        return self._filled[row][0] if 0 <= row < len(self._filled) else None

    # What it says

    def clear(self, columns: bool = False) -> Self:  # noqa: FBT001, FBT002 - Textual's signature
        """Take out all rows."""
        self._filled, self._texts = (), []
        return super().clear(columns)

    def fill(self, rows: Sequence[tuple[str, Cells]]) -> None:
        """Show these rows: a key and a cell a column each."""
        before, after = self._filled, tuple(rows)
        if len(before) != len(after):
            self.clear()
            self._texts = [tuple(map(_text, cells)) for _, cells in after]
            for texts in self._texts:
                self.add_row(*texts)
        elif before != after:
            # Rows that come in another order are texts that changed.
            self._change(before, after)
        self._filled = after

    def _change(
        self, before: Sequence[tuple[str, Cells]], after: Sequence[tuple[str, Cells]]
    ) -> None:
        columns = self.ordered_columns
        changed = [n for n in range(len(after)) if before[n][1] != after[n][1]]
        self._held = True
        try:
            for row in changed:
                old, new, texts = before[row][1], after[row][1], list(self._texts[row])
                data = self._data[self._row_locations.get_key(row)]  # type: ignore[index]
                for n, column in enumerate(columns):
                    if new[n] == old[n]:
                        continue
                    texts[n] = text = _text(new[n])
                    if text.cell_len > column.content_width:
                        self.update_cell_at(Coordinate(row, n), text, update_width=True)
                    else:
                        data[column.key] = text
                self._texts[row] = tuple(texts)
        finally:
            self._held = False
        self._update_count += 1
        self._refresh_rows(changed)

    # How it is drawn. Textual forgets every drawn cell when one has changed, and draws a cell in
    # half a millisecond: nine of ten parts of a picture. Here a row's style is taken from Textual
    # once, and what it says is written in that style.

    def refresh(self, *regions: Region, **more: Any) -> Self:
        """Draw again, unless a fill knows better which rows changed."""
        return self if self._held else super().refresh(*regions, **more)

    def _refresh_rows(self, rows: Sequence[int]) -> None:
        """Draw those of the rows, in ascending order, that are on the screen."""
        top, height = self.scroll_offset.y, self.size.height - self.header_height
        shown = [row for row in rows if top <= row < top + height]
        for first, last in _stretches(shown):
            y = self.header_height + first - top
            self.refresh(Region(0, y, self.size.width, last - first + 1))

    def render_lines(self, crop: Region) -> list[Strip]:
        """Draw the lines of a region."""
        self._pseudo_class_state = self.get_pseudo_class_state()
        self._picture = self._new_picture()
        try:
            return super().render_lines(crop)
        finally:
            self._picture = None

    def _new_picture(self) -> _Picture:
        """Look up once what Textual looks up for every line."""
        even, odd = (
            self.get_component_styles(f"datatable--{name}-row").rich_style if self.zebra_stripes
            else self.rich_style for name in ("even", "odd")
        )  # fmt: skip
        return _Picture(
            base=self.rich_style,
            stripes=(even, odd),
            width=self.size.width,
            scroll=(int(self.scroll_offset.x), int(self.scroll_offset.y)),
            widths=tuple(column.get_render_width(self) for column in self.ordered_columns),
            cursor=self.cursor_coordinate if self.show_cursor else None,
            hover=self.hover_coordinate if self._show_hover_cursor else None,
            kind=self.cursor_type,
            state=self._pseudo_class_state,
        )

    def render_line(self, y: int) -> Strip:
        """Draw a line."""
        picture = self._picture
        if picture is None or y < self.header_height or self.fixed_rows or self.fixed_columns:
            return super().render_line(y)
        row = y - self.header_height + picture.scroll[1]
        if row >= len(self._texts) or self._labelled_row_exists:
            return super().render_line(y)
        about = picture.of_row(row)
        texts = self._texts[row]
        kept = self._lines.get(row)
        if kept is not None and kept[1] is texts and kept[0] == about:
            return kept[2]
        strip = self._drawn(row, texts, about)
        self._lines[row] = (about, texts, strip)
        return strip

    def _drawn(self, row: int, texts: tuple[Text, ...], picture: _Picture) -> Strip:
        look = self._look(row, picture)
        segments: list[Segment] = []
        for n, (text, width) in enumerate(zip(texts, picture.widths, strict=True)):
            cell = _simple(text, look.cells[n], width, self.cell_padding, look)
            if cell is None:
                cell = self._render_cell(
                    row, n, picture.stripes[row % 2], width,
                    cursor=self._is_at(picture.cursor, row, n),
                    hover=self._is_at(picture.hover, row, n),
                )[0]  # fmt: skip
            segments += cell
        total = sum(picture.widths)
        if total < picture.width:
            segments.append(Segment(" " * (picture.width - total), look.rest))
        x = picture.scroll[0]
        if x or total > picture.width:
            segments = line_crop(segments, x, x + picture.width, max(total, picture.width))
            return Strip(segments).adjust_cell_length(picture.width, picture.base)
        return Strip(segments, picture.width)

    def _is_at(self, mark: Coordinate | None, row: int, column: int) -> bool:
        return mark is not None and self._should_highlight(
            mark, Coordinate(row, column), self.cursor_type
        )

    def _look(self, row: int, picture: _Picture) -> _Look:
        key = (row, picture)
        look = self._looks.get(key)
        if look is None:
            if len(self._looks) >= _MOST_KEPT:
                self._looks.clear()
            _, cells = self._render_line_in_row(
                self._row_locations.get_key(row), 0, picture.base,  # type: ignore[arg-type]
                self.cursor_coordinate, self.hover_coordinate,
            )  # fmt: skip
            # Each cell begins with the space that is its padding, and ends as it begins.
            *styles, rest = (segments[0].style or Style.null() for segments in cells)
            look = self._looks[key] = _Look(
                tuple(styles), rest, picture.cursor is not None or picture.hover is not None
            )
        return look

    def _clear_caches(self) -> None:
        self._looks.clear()
        self._lines.clear()
        super()._clear_caches()

    def notify_style_update(self) -> None:
        """Draw every cell anew: colours have changed."""
        self._looks.clear()
        self._lines.clear()
        super().notify_style_update()


def _stretches(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return first and last of each stretch of rows without a gap."""
    if not rows:
        return
    first = rows[0]
    for row, following in pairwise((*rows, rows[-1] + 2)):
        if following != row + 1:
            yield first, row
            first = following


def _simple(
    text: Text, style: Style, width: int, padding: int, look: _Look
) -> list[Segment] | None:
    """Return a cell's text in its row's style; None for one that Textual has to lay out."""
    plain = text.plain
    room = width - 2 * padding - cell_len(plain)
    if text.style or text.justify or room < 0 or not plain.isprintable() or not padding:
        return None
    before, after = " " * padding, " " * (padding + room)
    if not text.spans:
        return [Segment(before + plain + after, style)]
    if look.marked:
        return None
    segments, at = [Segment(before, style)], 0
    for start, end, own in text.spans:
        if start != at:
            return None
        segments.append(Segment(plain[start:end], style + Style.parse(str(own))))
        at = end
    if at != len(plain):
        return None
    segments.append(Segment(after, style))
    return segments


def _text(cell: Text | str) -> Text:
    return cell if isinstance(cell, Text) else Text(plain_line(cell))

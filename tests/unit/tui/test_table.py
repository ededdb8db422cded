"""A table that is filled again: what changed is drawn, what did not is left alone."""

import asyncio

import pytest
from rich.text import Text
from textual.app import App
from textual.geometry import Region
from textual.widgets import DataTable

from kansoku.tui._table import SteadyTable


class Screen(App):
    def compose(self):
        yield SteadyTable()

    def on_mount(self):
        self.table = self.query_one(SteadyTable)
        self.table.add_columns("a", "b")


def drive(script):
    async def scene():
        app = Screen()
        async with app.run_test() as pilot:
            await script(app.table, pilot)

    asyncio.run(scene())


def texts(table):
    return [[str(cell) for cell in table.get_row_at(n)] for n in range(table.row_count)]


def test_only_rows_that_changed_are_drawn_again(monkeypatch):
    async def script(table, pilot):
        table.fill([("x", ("1", "2")), ("y", ("3", "4"))])
        await pilot.pause()
        drawn, whole = [], []
        monkeypatch.setattr(table, "_refresh_rows", drawn.extend)
        monkeypatch.setattr(table, "clear", lambda: whole.append(1))
        table.fill([("x", ("1", "2")), ("y", ("3", "4"))])
        assert (drawn, whole) == ([], [])
        table.fill([("x", ("1", "2")), ("y", ("3", "longer"))])
        assert (drawn, whole) == ([1], [])
        await pilot.pause()
        assert texts(table) == [["1", "2"], ["3", "longer"]]
        assert table.ordered_columns[1].content_width == len("longer")

    drive(script)


CELLS = [
    ("1", "a", Text.assemble(("ff", "black on green"), ("b", "white on blue"))),
    ("2 ◀", "名前", Text("late", "bold white on red")),
    ("3", "too long by far", Text.assemble("half ", ("marked", "red"))),
    ("", "[b]no mark-up[/b]", Text.assemble(("all", "dim"), justify="right")),
    ("5", "–", Text("")),
    *((str(n), "x", Text("y")) for n in range(6, 12)),
]


class Both(App):
    CSS = "DataTable { width: 30; height: 8; }"

    def compose(self):
        for kind in (SteadyTable, DataTable):
            yield kind(cursor_type="row", zebra_stripes=True, id=kind.__name__)


def drawn(table):
    """Return every character with its style, mouse marks included."""
    lines = table.render_lines(Region(0, 0, 30, 8))
    return [[(c, segment.style) for segment in line for c in segment.text] for line in lines]


@pytest.mark.parametrize("kind", ["row", "cell", "column", "none"])
def test_it_draws_what_textuals_own_table_draws(kind):
    async def scene():
        app = Both()
        async with app.run_test(size=(80, 24)) as pilot:
            ours, textuals = app.query_one(SteadyTable), app.query_one(f"#{DataTable.__name__}")

            async def same():
                pictures = []
                for table in (ours, textuals):
                    table.focus()  # a cursor has other colours where the keys go
                    await pilot.pause()
                    pictures.append(drawn(table))
                assert pictures[0] == pictures[1]

            for table in (ours, textuals):
                table.cursor_type = kind
                table.add_column("n")
                table.add_column("name", width=8)
                table.add_column("strip")
            # What was there before leaves nothing behind: other texts, then another order.
            ours.fill([(str(n), ("0", "before", Text("before"))) for n in range(len(CELLS))])
            await pilot.pause()
            drawn(ours)
            ours.fill([(str(n), cells) for n, cells in enumerate(CELLS)])
            for cells in CELLS:
                textuals.add_row(*(Text(c) if isinstance(c, str) else c for c in cells))
            await same()
            for table in (ours, textuals):
                table.move_cursor(row=1, column=2)
            await same()
            for table in (ours, textuals):
                table.hover_coordinate, table._show_hover_cursor = table.cursor_coordinate, True
            await same()
            for table in (ours, textuals):
                table.scroll_to(2, 4, animate=False)
            await same()

    asyncio.run(scene())


def test_a_row_is_known_by_its_key_in_any_order():
    async def script(table, _pilot):
        table.fill([("x", ("1", "2")), ("y", ("3", "4"))])
        table.fill([("y", ("3", "4")), ("x", ("1", "2"))])
        assert [table.key_at(n) for n in range(-1, 3)] == [None, "y", "x", None]

    drive(script)


def test_other_rows_or_another_order_fill_it_anew():
    async def script(table, _pilot):
        table.fill([("x", ("1", "2")), ("y", ("3", "4"))])
        table.fill([("y", ("3", "4")), ("x", ("1", "2"))])
        assert texts(table) == [["3", "4"], ["1", "2"]]
        table.fill([("z", ("[/b]", "6"))])
        assert texts(table) == [["[/b]", "6"]]
        table.fill([])
        assert texts(table) == []
        table.clear(columns=True)
        table.add_columns("a")
        table.fill([("x", ("1",))])
        assert texts(table) == [["1"]]

    drive(script)


def test_a_cell_that_says_the_same_is_not_drawn_twice(monkeypatch):
    asked = []
    whole = DataTable._render_cell

    def render_cell(table, row, column, *more, **named):
        asked.append((row, column))
        return whole(table, row, column, *more, **named)

    monkeypatch.setattr(DataTable, "_render_cell", render_cell)

    async def script(table, pilot):
        table.fill([("x", ("same", "1")), ("y", ("same", "2"))])
        await pilot.pause()
        del asked[:]
        table.fill([("x", ("same", "3")), ("y", ("same", "4"))])
        await pilot.pause()
        # Not even one that says something else: how its row looks is known.
        assert {cell for cell in asked if min(cell) >= 0} == set()
        lines = [table.render_line(row).text.split() for row in (1, 2)]
        assert lines == [["same", "3"], ["same", "4"]]
        table.notify_style_update()
        del asked[:]
        table.refresh()
        await pilot.pause()
        assert {cell for cell in asked if min(cell) >= 0} == {(0, 0), (0, 1), (1, 0), (1, 1)}

    drive(script)

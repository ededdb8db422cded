"""A table that is filled again: what changed is drawn, what did not is left alone."""

import asyncio

from textual.app import App
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
        monkeypatch.setattr(table, "refresh_row", drawn.append)
        monkeypatch.setattr(table, "clear", lambda: whole.append(1))
        table.fill([("x", ("1", "2")), ("y", ("3", "4"))])
        assert (drawn, whole) == ([], [])
        table.fill([("x", ("1", "2")), ("y", ("3", "longer"))])
        assert (drawn, whole) == ([1], [])
        await pilot.pause()
        assert texts(table) == [["1", "2"], ["3", "longer"]]
        assert table.ordered_columns[1].content_width == len("longer")

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
        assert {cell for cell in asked if min(cell) >= 0} == {(0, 1), (1, 1)}
        lines = [table.render_line(row).text.split() for row in (1, 2)]
        assert lines == [["same", "3"], ["same", "4"]]
        table.notify_style_update()
        del asked[:]
        table.refresh()
        await pilot.pause()
        assert {cell for cell in asked if min(cell) >= 0} == {(0, 0), (0, 1), (1, 0), (1, 1)}

    drive(script)

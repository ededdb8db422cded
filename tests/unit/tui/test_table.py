"""A table that is filled again: what changed is drawn, what did not is left alone."""

import asyncio

from textual.app import App

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

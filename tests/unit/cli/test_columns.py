"""Tables on narrow terminals: every heading, number and word is there in full."""

import io

import pytest
from rich.console import Console

from kansoku.cli._columns import fit_columns
from kansoku.cli._draw import draw
from kansoku.trace.kineto.critical_path import CRITICAL_KINDS
from kansoku.view import Column, Table, View

KINDS = [kind.replace("_", " ") for kind in CRITICAL_KINDS]
CRITICAL_PATH = Table(
    title="Time on the critical path, ms",
    columns=[Column(title=title, numeric=True) for title in ("rank", "step", "span", *KINDS)],
    rows=[
        [str(rank), str(step), "1,234.567", *(f"{100 + place}.5" for place in range(len(KINDS)))]
        for rank in range(2)
        for step in (7, 8)
    ],
)
WHAT_IF = Table(
    title="Causes",
    columns=[
        Column(title="cause"),
        Column(title="slowdown alone", numeric=True),
        Column(title="share of the loss", numeric=True),
        Column(title="evidence"),
    ],
    rows=[["sequence length", "1.435", "68%", "forward and backward times rise together " * 3]],
)


def drawn(table, width):
    console = Console(width=width, record=True, file=io.StringIO())
    draw(View(title="t", blocks=[table]), console)
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("width", [80, 60, 40])
@pytest.mark.parametrize("table", [CRITICAL_PATH, WHAT_IF], ids=lambda table: table.title)
def test_no_heading_and_no_number_is_cut(table, width):
    lines = drawn(table, width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert not any("…" in word for word in words)
    for column in table.columns:
        for word in column.title.split():
            assert word in words
    for place, column in enumerate(table.columns):
        if column.numeric:
            assert all(row[place] in words for row in table.rows)


def test_what_has_no_room_goes_below_with_what_tells_the_rows_apart():
    lines = drawn(CRITICAL_PATH, 80)
    heads = [line.split() for line in lines if line.split()[:2] == ["rank", "step"]]
    assert len(heads) == 2  # rank and step lead both; rank alone would not tell the rows apart
    # 4 + 4 + 9 + 7 + 13 + 7 + 10 + 7 cells and two spaces each are 77; synchronisation has 15.
    assert heads[1] == ["rank", "step", "synchronisation", "host"]
    assert lines.count(CRITICAL_PATH.title) == 1


def test_headings_wrap_before_a_column_moves():
    # Two columns of 14 and 17 cells with two spaces each: 35; in 24 their words stand in two lines.
    columns = [
        Column(title="slowdown alone", numeric=True),
        Column(title="share of the loss", numeric=True),
    ]
    rows = [["1.4", "68%"]]
    assert [[one.width for one in band] for band in fit_columns(columns, rows, room=35)] == [
        [14, 17]
    ]
    (band,) = fit_columns(columns, rows, room=24)
    assert sum(one.width + 2 for one in band) <= 24
    assert min(one.width for one in band) >= len("slowdown")


def test_a_path_is_broken_not_cut():
    path = "/a/folder/with/a/long/name/and/nothing/to/break/at.json"
    table = Table(title="t", columns=[Column(title="file")], rows=[[path]])
    assert "".join(line.strip() for line in drawn(table, 24)).endswith(path)


def test_a_heading_is_never_markup():
    table = Table(title="t", columns=[Column(title="[bold]x[/bold]")], rows=[["y"]])
    assert "[bold]x[/bold]" in " ".join(drawn(table, 80))

"""Names from foreign files as the terminal gets them."""

import pytest

from kansoku.view import Column, Facts, Sentence, Table, Tone, View
from kansoku.view.plain import plain_line, plain_text, plain_view


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("over\rwritten", r"over\rwritten"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
        ("half\udcff", r"half\udcff"),
        ("end\u2028of line", r"end\u2028of line"),
        ("two\nlines, 日本語", "two\nlines, 日本語"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text, plain):
    assert plain_text(text) == plain


def test_a_line_stays_one_line():
    assert plain_line("a\tb\nc\x1b[2J 日本語") == r"a\tb\nc\x1b[2J 日本語"


def test_every_text_of_a_view():
    evil = "k\x1b[2J"
    view = View(
        title=evil,
        blocks=[
            Sentence(text=evil, detail=evil, tone=Tone.BAD),
            Facts(items=[(evil, evil)]),
            Table(title=evil, columns=[Column(title=evil)], rows=[(evil,), (1.5,)], note=evil),
        ],
    )
    shown = plain_view(view)
    sentence, facts, table = shown.blocks
    assert (shown.title, sentence.text, sentence.detail) == (r"k\x1b[2J",) * 3
    assert sentence.tone is Tone.BAD
    assert [tuple(item) for item in facts.items] == [(r"k\x1b[2J",) * 2]
    assert [tuple(row) for row in table.rows] == [(r"k\x1b[2J",), (1.5,)]
    assert (table.columns[0].title, table.note) == (r"k\x1b[2J",) * 2

"""Views in the terminal, drawn by hand where a cell can be counted."""

import io

from rich.console import Console

from kansoku.cli._draw import draw
from kansoku.view import Facts, Heatmap, Line, Sentence, Series, Span, Timeline, Tone, View


def drawn(*blocks, width=60):
    console = Console(width=width, record=True, file=io.StringIO())
    draw(View(title="title", blocks=blocks), console)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_curves_that_belong_together_share_one_scale():
    x = [0.0, 1.0]
    lines = drawn(
        Series(title="s", x_title="x", y_title="ms", style="stacked",
               lines=[Line(name="big", x=x, y=[7.0, 7.0]), Line(name="small", x=x, y=[1.0, 0.0])])
    )  # fmt: skip
    assert "big    ██  7 – 7" in lines
    assert "small  ▂▁  0 – 1" in lines


def test_a_gap_stays_a_gap():
    lines = drawn(
        Series(title="s", x_title="x", y_title="u", lines=[Line(name="a", x=[0, 1, 2], y=[1.0, None, 2.0])])
    )  # fmt: skip
    assert "a  ▁ █  1 – 2" in lines


def test_named_bars_are_as_long_as_their_values():
    lines = drawn(
        Series(title="s", x_title="x", y_title="u", style="bar", x_labels=["one", "two", "none"],
               lines=[Line(name="a", x=[0, 1, 2], y=[10.0, 5.0, None])])
    )  # fmt: skip
    one, two, none = lines[-3:]
    assert one.count("█") == 2 * two.count("█") > 0
    assert none.endswith("–")


def test_a_timeline_shows_the_innermost_span():
    spans = [
        Span(lane=0, start_ns=0, duration_ns=100_000_000, name="step", kind="step"),
        Span(lane=0, start_ns=0, duration_ns=50_000_000, name="f", kind="forward", depth=1),
        Span(lane=1, start_ns=50_000_000, duration_ns=50_000_000, name="b", kind="backward"),
    ]
    lines = drawn(Timeline(title="t", lanes=["r0", "r1"], spans=spans), width=24)
    assert "r0  " + "█" * 20 in lines
    assert "r1  " + " " * 10 + "█" * 10 in lines
    assert "100 ms" in " ".join(lines)


def test_text_is_never_markup():
    text = "[bold]x[/bold] [link=http://a]y"
    lines = drawn(Facts(items=[(text, "v")]), Sentence(text=text, tone=Tone.BAD), width=80)
    assert sum(text in line for line in lines) == 2
    assert f"✗ {text}" in lines


def test_no_data_is_said():
    lines = drawn(
        Heatmap(title="h", row_labels=["a"], column_labels=["b"], values=[[None]], unit="u"),
        Timeline(title="t", lanes=[], spans=[]),
    )
    assert "no data" in lines
    assert "no spans" in lines

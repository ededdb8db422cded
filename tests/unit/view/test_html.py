"""The HTML page stands alone and cannot be broken out of."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from kansoku.view import (
    Column,
    Facts,
    Heading,
    Heatmap,
    HeatmapBox,
    Line,
    Sentence,
    Series,
    Span,
    Table,
    Timeline,
    Tone,
    View,
)
from kansoku.view.html import render

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'&{{x}}"


def everything(text):
    return View(
        title=text,
        blocks=[
            Heading(text=text),
            Facts(items=[(text, text)]),
            Sentence(text=text, tone=Tone.BAD, detail=text),
            Table(title=text, columns=[Column(title=text)], rows=[[text]], note=text),
            *(
                Series(title=text, x_title=text, y_title=text, style=style,
                       x_labels=[text, text] if style == "bar" else None,
                       lines=[Line(name=text, x=[0, 1], y=[1.0, None]), Line(name="b", x=[0, 1], y=[2, 3])])
                for style in ("line", "stacked", "bar", "scatter")
            ),
            Series(title=text, x_title=text, y_title=text, x_is_time_ns=True, log_y=True,
                   lines=[Line(name=text, x=[1.7e18, 1.7001e18], y=[1.0, 2.0])]),
            Heatmap(title=text, row_labels=[text], column_labels=[text, text], values=[[1.0, None]],
                    unit=text, boxes=[HeatmapBox(label=text, row_from=0, row_to=0, column_from=0, column_to=1)]),
            Timeline(title=text, lanes=[text], spans=[Span(lane=0, start_ns=5, duration_ns=7, name=text, kind=text, mark=text)]),
        ],
    )  # fmt: skip


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.urls, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.urls += [
            v
            for k, v in attrs
            if k in {"src", "href", "action", "data"} or (k or "").startswith("on")
        ]

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def page():
    return render(everything(HOSTILE))


def test_hostile_text_stays_text(page):
    parsed = _Page()
    parsed.feed(page)
    assert "img" not in parsed.tags
    assert parsed.urls == []
    assert HOSTILE in parsed.text
    # One script element a plot, ours, and BokehJS: none more from the text.
    assert parsed.tags.count("script") == 7 + 2


def test_nothing_is_asked_of_the_network(page):
    assert "default-src 'none'" in page
    assert not re.search(r"<(link|iframe|object|embed|base)\b", page)
    assert not re.search(r"<script[^>]+src=", page)


def items(page):
    return [json.loads(text) for text in re.findall(r'class="data">(.*?)</script>', page)]


def test_values_arrive_as_they_are():
    values = np.array([[1.5, np.nan, 3.0], [4.0, 5.0, 6.25]])
    view = View(
        title="t",
        blocks=[
            Heatmap(title="h", row_labels=["a", "b"], column_labels=["x", "y", "z"], values=values, unit="ms"),
            Timeline(title="t", lanes=["0"], spans=[
                Span(lane=0, start_ns=2_000_000_000_000_000_123, duration_ns=77, name="n", kind="forward")]),
        ],
    )  # fmt: skip
    heat, line = (item["item"] for item in items(render(view)))
    cells = np.frombuffer(base64.b64decode(heat["cells"]), "<f4").reshape(2, 3)
    np.testing.assert_array_equal(cells, values.astype(np.float32))
    assert (heat["low"], heat["high"]) == (1.5, 6.25)
    assert np.frombuffer(base64.b64decode(line["start"]), "<f8").tolist() == [0.0]
    assert np.frombuffer(base64.b64decode(line["duration"]), "<f8").tolist() == [77.0]


def test_a_page_without_plots_has_no_script():
    page = render(View(title="t", blocks=[Sentence(text="nothing found", tone=Tone.GOOD)]))
    assert "<script" not in page
    assert 'data-ready="true"' in page
    assert len(page) < 6000


def test_empty_blocks_are_drawn():
    view = View(
        title="t",
        blocks=[
            Table(title="t", columns=[Column(title="a")], rows=[]),
            Series(title="s", x_title="x", y_title="y", lines=[]),
            Series(title="s", x_title="x", y_title="y", lines=[], style="stacked"),
            Series(title="s", x_title="x", y_title="y", lines=[], style="bar"),
            Heatmap(title="h", row_labels=[], column_labels=[], values=np.empty((0, 0)), unit="u"),
            Heatmap(title="h", row_labels=["a"], column_labels=["b"], values=[[None]], unit="u"),
            Timeline(title="t", lanes=[], spans=[]),
        ],
    )
    assert len(items(render(view))) == 6

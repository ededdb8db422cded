"""The page in a real browser: drawn, alone, deaf to hostile text."""

import pytest
from tests.unit.view.test_html import HOSTILE, everything

from kansoku.view.html import render

pytestmark = pytest.mark.real


@pytest.mark.parametrize("dark", [False, True])
def test_hostile_page_is_drawn_without_network_or_damage(show, tmp_path, dark):
    file = tmp_path / "page.html"
    file.write_text(render(everything(HOSTILE)), encoding="utf-8")
    seen = show(file.as_uri(), dark=dark)
    page = seen.page
    assert page.evaluate("document.documentElement.dataset.ready") == "true"
    assert page.evaluate("window.hacked") is None
    assert seen.errors == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    # Each plot has a canvas with something on it, ours at least (Bokeh's sit in shadow roots).
    for kind in ("heatmap", "timeline"):
        drawn = page.evaluate(
            """kind => { const c = document.querySelector(`.${kind} canvas`);
            const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
            return d.some(v => v) }""",
            kind,
        )
        assert drawn, kind
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 26)" if dark else "rgb(253, 253, 252)")


def test_a_tip_names_the_span_under_the_pointer(show, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(render(everything("plain words")), encoding="utf-8")
    page = show(file.as_uri()).page
    page.locator(".timeline canvas").scroll_into_view_if_needed()
    box = page.locator(".timeline canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5)
    assert "plain words" in page.locator(".timeline .tip").inner_text()
    page.locator(".heatmap canvas").scroll_into_view_if_needed()
    box = page.locator(".heatmap canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 5)
    assert "1 plain words" in page.locator(".heatmap .tip").inner_text()

"""Render a View as one HTML file.

The page holds everything: style, data, BokehJS for curves and bars, and a small script of our own
for heat maps and timelines, which Bokeh draws too slowly at a million cells. A content security
policy in the page forbids any request. Text is escaped where it is written; data travels as JSON
in script elements in which ``<`` cannot occur.
"""

import json
from functools import cache
from html import escape
from importlib import resources

from kansoku.view.blocks import (
    Block,
    Facts,
    Heading,
    Heatmap,
    Sentence,
    Series,
    Table,
    Timeline,
    Tone,
    View,
)
from kansoku.view.html._canvas import heatmap_data, timeline_data
from kansoku.view.html._plots import series_item

__all__ = ["render"]

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; connect-src 'none'; form-action 'none'; base-uri 'none'"
)
_MARKS = {Tone.GOOD: "✓", Tone.NOTICE: "!", Tone.BAD: "✗"}


def render(view: View) -> str:
    """Return the page as text; it needs no network and no other file."""
    data: list[dict[str, object]] = []
    body = [_block(block, data) for block in view.blocks]
    curves = any(item["type"] == "bokeh" for item in data)
    scripts = [_script("page.js")] if data else []
    if curves:
        scripts.insert(0, _bokeh())
    ready = "" if data else ' data-ready="true"'
    return "".join(
        [
            f'<!doctype html><html lang="en"{ready}><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(view.title)}</title><style>{_text('page.css')}</style></head><body>",
            f"<main><h1>{escape(view.title)}</h1>",
            *body,
            "</main>",
            *(
                f'<script type="application/json" class="data">{_json(item)}</script>'
                for item in data
            ),
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _json(value: object) -> str:
    """Return JSON that cannot leave its script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return (resources.files("kansoku.view.html") / name).read_text("utf-8")


def _script(name: str) -> str:
    return _text(name).replace("</", "<\\/")


@cache
def _bokeh() -> str:
    """Return BokehJS from the installed package; nothing is fetched."""
    from bokeh.resources import Resources

    bundle = Resources(mode="inline", components=["bokeh"])
    return "\n".join(bundle.js_raw).replace("</script", "<\\/script")


def _block(block: Block, data: list[dict[str, object]]) -> str:
    match block:
        case Heading():
            return f"<h2>{escape(block.text)}</h2>"
        case Sentence():
            return _sentence(block)
        case Facts():
            rows = "".join(
                f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in block.items
            )
            return f'<dl class="facts">{rows}</dl>'
        case Table():
            return _table(block)
        case Series():
            return _figure(block.title, block.y_title, "bokeh", series_item(block), data)
        case Heatmap():
            return _figure(block.title, block.unit, "heatmap", heatmap_data(block), data)
        case Timeline():
            hint = "wheel: zoom, drag: move, double click: all"
            return _figure(block.title, hint, "timeline", timeline_data(block), data)


def _sentence(block: Sentence) -> str:
    mark = _MARKS.get(block.tone)
    head = f'<span class="mark" aria-hidden="true">{mark}</span> ' if mark else ""
    detail = f"<small>{escape(block.detail)}</small>" if block.detail else ""
    return f'<p class="sentence {block.tone.value}">{head}{escape(block.text)}{detail}</p>'


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def _table(block: Table) -> str:
    numeric = [' class="n"' if column.numeric else "" for column in block.columns]
    head = "".join(
        f'<th scope="col"{n}>{escape(column.title)}</th>'
        for column, n in zip(block.columns, numeric, strict=True)
    )
    rows = []
    for number, row in enumerate(block.rows):
        tone = f' class="{block.tones[number].value}"' if block.tones else ""
        cells = "".join(f"<td{n}>{_cell(v)}</td>" for v, n in zip(row, numeric, strict=True))
        rows.append(f"<tr{tone}>{cells}</tr>")
    note = f'<p class="note">{escape(block.note)}</p>' if block.note else ""
    caption = f"<caption>{escape(block.title)}</caption>" if block.title else ""
    return (
        f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _figure(
    title: str, unit: str, kind: str, item: dict[str, object], data: list[dict[str, object]]
) -> str:
    name = f"plot-{len(data)}"
    data.append({"type": kind, "target": name, "title": title, "item": item})
    unit = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    return (
        f"<figure><figcaption>{escape(title)}{unit}</figcaption>"
        f'<div class="plot {kind}" id="{name}"></div></figure>'
    )

"""Print a result: JSON, a drawn View, an HTML page."""

import sys
from collections.abc import Mapping
from pathlib import Path

import orjson
from rich.console import Console

from kansoku.cli._draw import draw
from kansoku.view import View

__all__ = ["emit"]


def emit(
    answer: Mapping[str, object], view: View, *, as_json: bool = False, html: Path | None = None
) -> None:
    """Write the HTML page if asked, then JSON or the drawn View on stdout."""
    if html is not None:
        from kansoku.view.html import render

        html.write_text(render(view), encoding="utf-8")
        print(f"wrote {html}", file=sys.stderr)
    if as_json:
        sys.stdout.buffer.write(
            orjson.dumps(answer, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        )
        sys.stdout.buffer.flush()
    else:
        draw(view, Console(highlight=False))

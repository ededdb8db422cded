"""Print a result: JSON, a drawn View, an HTML page."""

import sys
from collections.abc import Mapping
from pathlib import Path

import orjson

from kansoku.errors import InputError
from kansoku.view import View
from kansoku.view.plain import plain_view

__all__ = ["emit"]


def emit(
    answer: Mapping[str, object], view: View, *, as_json: bool = False, html: Path | None = None
) -> None:
    """Write JSON or the drawn View on stdout, then the HTML page if asked.

    In this order: a page that cannot be written must not cost an answer that took hours.
    """
    _answer(answer, view, as_json=as_json)
    if html is not None:
        from kansoku.view.html import render

        page = render(plain_view(view))
        try:
            html.write_text(page, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise InputError(
                f"the page cannot be written: {error.strerror}",
                where=str(html),
                remedy="choose another --html",
            ) from None
        print(f"wrote {html}", file=sys.stderr)


def _answer(answer: Mapping[str, object], view: View, *, as_json: bool) -> None:
    if as_json:
        options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        try:
            text = orjson.dumps(answer, option=options)
        except TypeError:
            text = orjson.dumps(_as_utf8(answer), option=options)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        # Here, not above: JSON needs neither (25 ms).
        from rich.console import Console

        from kansoku.cli._draw import draw

        draw(view, Console(highlight=False))


def _as_utf8(value: object) -> object:
    """Escape what is no UTF-8, such as bytes of file names; JSON knows nothing else."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_as_utf8(key): _as_utf8(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_utf8(item) for item in value]
    return value

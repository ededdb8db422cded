"""Screens to HTML: one template for every page, one macro for every kind of block."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from kansoku import __version__
from kansoku.app.serve.access import Principal
from kansoku.app.web_memory import Memory
from kansoku.app.web_page import Columns, Page, Screen
from kansoku.errors import KansokuError
from kansoku.view import Series
from kansoku.view.html import series_item
from kansoku.web._language import translate
from kansoku.web._perfetto import PERFETTO_PATH, perfetto_folder
from kansoku.web._settings import Settings, security_headers
from kansoku.web._static import bokeh_address, static_version

__all__ = ["Drawer", "in_language"]

# What scripts of the pages say themselves; sent with each page in the reader's language.
SCRIPT_TEXTS = (
    "no data", "loading…", "could not be loaded", "try again", "{} rows by {} columns",
    "each cell holds {} rows and {} columns: minimum and maximum kept",
    "{} spans on {} lanes over {}", "the same as a table", "what it shows", "more", "fewer",
    "live", "not connected", "updated {}", "show {} rows", "{} of {} rows", "filter rows",
    "arrows move, + and - zoom, 0 shows all, Enter opens", "job {}", "at {}", "for {}",
    "show minimum", "show maximum", "zoom in", "zoom out", "show all", "late", "nothing matches",
    "{} after the first arrival",
)  # fmt: skip
_STAMP = re.compile(r"\b(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z)")
_SUBJECT = re.compile(
    r"(?<![\w/])(job|node|gpu|nic|switch|link):([A-Za-z0-9_.+\-]+(?:/[A-Za-z0-9_.\-]+)?)"
)
_SUBJECT_PAGES = {
    "job": "/jobs/{}",
    "node": "/nodes/{}",
    "gpu": "/nodes/{}",
    "nic": "/nodes/{}",
    "switch": "/fabric?switch={}",
    "link": "/fabric?link={}",
}


def _linked(kind: str, name: str) -> str:
    target = name.split("/", maxsplit=1)[0] if kind in {"gpu", "nic"} else name
    return _SUBJECT_PAGES[kind].format(quote(target, safe=""))


def rich(text: object, language: str) -> Markup:
    """Return a text translated and escaped, UTC stamps as times and subjects as links."""
    parts: list[str] = []
    shown = str(escape(translate(str(text), language)))
    if ":" not in shown:  # neither a stamp nor a subject: most cells of most tables
        return Markup(shown)  # noqa: S704 - escaped above

    def stamped(match: re.Match[str]) -> str:
        return f'<time datetime="{match[1]}">{match[1]}</time>'

    def subject(match: re.Match[str]) -> str:
        return f'<a href="{escape(_linked(match[1], match[2]))}">{match[0]}</a>'

    at = 0
    for match in _SUBJECT.finditer(shown):
        parts += [_STAMP.sub(stamped, shown[at : match.start()]), subject(match)]
        at = match.end()
    parts.append(_STAMP.sub(stamped, shown[at:]))
    return Markup("".join(parts))  # noqa: S704 - escaped above, the rest is our own


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


class Drawer:
    """Draws screens; one for the life of the server."""

    def __init__(self, pages: Sequence[Page]) -> None:
        """Load templates; ``pages`` make the menu."""
        self._curves = Memory(most_bytes=4 << 20)
        self._menu = sorted(
            (p for p in pages if p.navigation is not None), key=lambda p: p.navigation or 0
        )
        self._environment = Environment(
            loader=PackageLoader("kansoku.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters["cell"] = _cell
        self._environment.globals["names"] = frozenset(
            {"name", "user", "account", "partition", "table"}
        )
        self._environment.filters["kind"] = lambda block: type(block).__name__
        self._environment.filters["address"] = lambda text: quote(str(text), safe="")

    def _common(
        self, settings: Settings, principal: Principal | None, path: str | None
    ) -> dict[str, Any]:
        language = settings.language
        sees_all = principal is not None and principal.role in {"local", "operator"}
        texts = {text: translate(text, language) for text in SCRIPT_TEXTS} if path else {}
        return {
            "settings": settings,
            "language": language,
            "principal": principal,
            "version": __version__,
            "static": f"/static/{static_version()}",
            "menu": [p for p in self._menu if sees_all or not p.operators_only],
            "path": path,
            "t": lambda text, *values: _translated(text, values, language),
            "rich": lambda text: rich(text, language),
            "choose": lambda **choice: "/settings?" + urlencode({**choice, "next": settings.here}),
            "texts": _script_json(texts),
        }

    def page(
        self,
        page: Page,
        screen: Screen,
        values: Mapping[str, str],
        settings: Settings,
        principal: Principal,
    ) -> tuple[str, dict[str, str]]:
        """Return a page and its headers."""
        names = {one.name for one in page.parameters if one.in_path}
        path = re.sub(r"\{(\w+)(?::path)?\}", lambda m: quote(values[m[1]], safe="/:+,"), page.path)
        query = {
            one.name: values[one.name]
            for one in page.parameters
            if one.name in values and one.name not in names and values[one.name] != one.default
        }
        suffix = f"?{urlencode(query)}" if query else ""
        figures = [block for block in screen.blocks if isinstance(block, Series)]
        language = settings.language
        curves = {id(block): self._curve(block, language) for block in figures}
        template = self._environment.get_template(screen.template)
        text = template.render(
            **self._common(settings, principal, page.path),
            page=page,
            screen=screen,
            values=values,
            twin=f"/api/v1/pages{path}{suffix}",
            columns=lambda name: f"/api/v1/pages{path}/columns/{name}{suffix}",
            file=lambda name: f"/api/v1/pages{path}/files/{name}{suffix}",
            perfetto=PERFETTO_PATH if perfetto_folder() is not None else None,
            curves=curves,
            has_curves=bool(curves),
            bokeh=bokeh_address(),
            number_of=id,
            rows_of_series=_series_rows,
        )
        return text, security_headers(curves=bool(curves))

    def _curve(self, block: Series, language: str) -> Markup:
        """Return a figure's JSON, kept: Bokeh takes a tenth of a second to build one."""
        key = (language, hashlib.sha256(orjson.dumps(block, default=str)).digest())

        def make(_: Markup | None) -> tuple[Markup, int]:
            made = _script_json(series_item(block, say=lambda t: translate(t, language)))
            return made, len(made)

        return self._curves.get(key, math.inf, make)

    def error(
        self, status: int, error: KansokuError, settings: Settings, principal: Principal | None
    ) -> str:
        """Return a page that says what is wrong and what to do."""
        return self._environment.get_template("error.html").render(
            **self._common(settings, principal, None), status=status, error=error
        )

    def sign_in(self, action: str, settings: Settings, *, wrong: bool) -> str:
        """Return the form that asks for a token."""
        return self._environment.get_template("sign_in.html").render(
            **self._common(settings, None, None), action=action, wrong=wrong
        )


def in_language(columns: Columns, language: str) -> Columns:
    """Return columns whose texts for people are in the reader's language; names stay."""
    if language == "en":
        return columns
    header = dict(columns.header)
    for key in ("title", "unit", "row_title", "column_title"):
        # A ratio is drawn as percent: the unit is a key there, not a word.
        if isinstance(header.get(key), str) and header[key] != "ratio":
            header[key] = translate(str(header[key]), language)
    kinds = header.get("kinds")
    if isinstance(kinds, list):
        header["kind_titles"] = [translate(kind.replace("_", " "), language) for kind in kinds]
    summary = header.get("summary")
    if isinstance(summary, list):
        header["summary"] = [translate(str(text), language) for text in summary]
    table = header.get("alternative")
    if isinstance(table, dict):
        header["alternative"] = {
            **table,
            "title": translate(table["title"], language),
            "columns": [
                {**column, "title": translate(column["title"], language)}
                for column in table["columns"]
            ],
        }
    return Columns(kind=columns.kind, header=header, arrays=columns.arrays)


_MOST_SERIES_ROWS = 400


def _series_rows(block: Series) -> list[list[object]]:
    """Return x and every line's y, as many as a table may hold (evenly chosen beyond)."""
    by_x: dict[float, dict[int, float | None]] = {}
    for number, line in enumerate(block.lines):
        for x, y in zip(line.x, line.y, strict=False):
            by_x.setdefault(float(x), {})[number] = y
    ordered = list(by_x.items()) if block.x_labels else sorted(by_x.items())
    every = max(-(-len(ordered) // _MOST_SERIES_ROWS), 1)
    rows: list[list[object]] = []
    for place, (x, values) in enumerate(ordered):
        if place % every:
            continue
        if block.x_labels and place < len(block.x_labels):
            label: object = block.x_labels[place]
        elif block.x_is_time_ns:
            label = datetime.fromtimestamp(x / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        else:
            label = f"{x:g}"
        rows.append([label, *(values.get(n) for n in range(len(block.lines)))])
    return rows


def _translated(text: str, values: Sequence[object], language: str) -> str:
    shown = translate(text, language)
    return shown.format(*values) if values else shown


def _script_json(value: object) -> Markup:
    """Return JSON that cannot leave its script element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - no mark-up can occur in it

"""What a web page is: an address, its parameters, and a function that answers.

A page's function returns a :class:`Screen`: blocks to draw, the same answer as JSON, and which
tables' fresh rows make it out of date. Big matrices and timelines do not travel in the page: a
:class:`Remote` block names columns (:class:`Columns`) that the browser fetches as raw arrays.
The server draws (:mod:`kansoku.web`); every figure is computed here, below it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kansoku.app.web_reading import Reading
from kansoku.errors import InputError
from kansoku.view import Block, Table, Tone

__all__ = [
    "Answer",
    "Card",
    "Cards",
    "Choice",
    "Choices",
    "Columns",
    "File",
    "Grid",
    "GridCell",
    "Missing",
    "MissingError",
    "Page",
    "Parameter",
    "Remote",
    "Screen",
    "ScreenBlock",
    "Trace",
    "domain_words",
    "parse_query",
    "table_json",
]

Answer = Mapping[str, object]


class MissingError(InputError):
    """There is no such job, run, node or incident: answered with 404."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Arrays for a canvas behind a JSON header; NaN is no data."""

    kind: str
    """``heatmap`` or ``timeline``, or a name that a module of the page knows."""
    header: Answer
    """Labels, units, links; JSON values only."""
    arrays: Mapping[str, npt.NDArray[np.generic]]
    """Name to array; sent little-endian."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A canvas whose columns the browser fetches: ``<page>/columns/<name>``."""

    title: str
    name: str
    """Of the page's columns."""
    kind: str = "heatmap"
    unit: str = ""
    note: str | None = None
    """How to read it."""
    height: int = 0
    """Pixels; 0 leaves it to the canvas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """Bytes to keep or to hand to another program: ``<page>/files/<name>``."""

    name: str
    """As a reader would keep it."""
    kind: str
    """Media type."""
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A Perfetto trace that the page offers: to open in Perfetto's own pages, or to keep."""

    name: str
    """Of the page's files."""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One parameter that the reader may choose, as a form field."""

    name: str
    label: str
    options: Sequence[tuple[str, str]] = ()
    """Value and text; none makes a text field."""
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A form that asks for the same page with other parameters."""

    choices: Sequence[Choice]
    hidden: Sequence[tuple[str, str]] = ()
    """Parameters kept as they are."""
    action: str = ""
    """Path; empty is this page."""
    submit: str = "Show"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One key figure."""

    label: str
    value: str
    note: str | None = None
    tone: Tone = Tone.PLAIN
    link: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """Key figures in a row."""

    cards: Sequence[Card]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """One node (or port, or agent) of a grid."""

    label: str
    text: str
    """What a reader hears and sees on pointing at it."""
    tone: Tone = Tone.PLAIN
    link: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Many things with one state each."""

    title: str
    cells: Sequence[GridCell]
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """An empty state: what is not there, and the command that brings it."""

    text: str
    remedy: str
    """What to do, as a sentence."""
    command: str | None = None


ScreenBlock = Block | Remote | Choices | Cards | Grid | Missing | Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """One page, ready to draw."""

    title: str
    blocks: Sequence[ScreenBlock]
    answer: Answer
    """The JSON twin; has ``schema``."""
    trail: Sequence[tuple[str, str]] = ()
    """Text and address of the pages above: cluster, job."""
    live: Sequence[str] = ()
    """Tables whose fresh rows make this page fetch itself again; none for what is over."""
    template: str = "page.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a page, in its path or its query."""

    name: str
    meaning: str
    default: str | None = None
    choices: Sequence[str] = ()
    """The values allowed; any text without them."""
    pattern: str | None = None
    """Regular expression that the whole value must match."""
    in_path: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of the site."""

    path: str
    """Such as ``/jobs/{job}``."""
    title: str
    build: Callable[[Reading, Mapping[str, str]], Screen]
    """Called with the reader's rights and every parameter's value, defaults filled in."""
    columns: Mapping[str, Callable[[Reading, Mapping[str, str]], Columns]] = field(
        default_factory=dict
    )
    files: Mapping[str, Callable[[Reading, Mapping[str, str]], File]] = field(default_factory=dict)
    parameters: Sequence[Parameter] = ()
    navigation: int | None = None
    """Place in the menu; None for pages that others lead to."""
    operators_only: bool = False


def parse_query(page: Page, given: Mapping[str, str]) -> dict[str, str]:
    """Return each parameter's value; raise InputError naming what is unknown or malformed."""
    known = {one.name: one for one in page.parameters}
    if unknown := set(given) - set(known):
        raise InputError(
            f"no parameter {', '.join(sorted(unknown))}",
            remedy=f"known: {', '.join(known) or 'none'}",
        )
    values = {}
    for name, one in known.items():
        value = given.get(name)
        if value is None or (value == "" and not one.in_path):
            if one.default is not None:
                values[name] = one.default
            continue
        if "\0" in value or len(value) > 4096:
            raise InputError(f"parameter {name} holds a NUL character or is too long")
        if one.choices and value not in one.choices:
            raise InputError(
                f"{name}={value[:40]!r} is not known", remedy=f"one of {', '.join(one.choices)}"
            )
        if one.pattern is not None and re.fullmatch(one.pattern, value) is None:
            raise InputError(f"{name}={value[:40]!r} is not {one.meaning}")
        values[name] = value
    return values


def table_json(table: Table) -> dict[str, object]:
    """Return a table for the JSON twin: column titles and rows."""
    return {
        "title": table.title,
        "columns": [column.title for column in table.columns],
        "rows": [list(row) for row in table.rows],
    }


def domain_words(domain: object) -> str:
    """Return a domain of causes as people write it.

    >>> domain_words("gpu_hardware"), domain_words(None)
    ('GPU hardware', 'unknown')
    """
    return str(domain or "unknown").replace("gpu_", "GPU ").replace("_", " ")

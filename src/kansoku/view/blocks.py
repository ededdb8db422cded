"""The blocks of a View."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kansoku.errors import InputError

__all__ = [
    "Block",
    "Column",
    "Facts",
    "Heading",
    "Heatmap",
    "HeatmapBox",
    "Line",
    "Sentence",
    "Series",
    "Span",
    "Table",
    "Timeline",
    "Tone",
    "View",
]

Cell = str | int | float | None


class Tone(StrEnum):
    """How a sentence or cell should strike the reader."""

    PLAIN = "plain"
    GOOD = "good"
    NOTICE = "notice"
    BAD = "bad"
    MUTED = "muted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A section title."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One plain sentence: a finding, a remark, what is missing."""

    text: str
    tone: Tone = Tone.PLAIN
    detail: str | None = None
    """Evidence or a command, drawn below and smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Label and text pairs, such as the head of a report."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    title: str
    numeric: bool = False
    """Numbers align right."""
    link: str | None = None
    """Web page of a cell, ``{}`` standing for its text: ``/jobs/{}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text and numbers already formatted or plain; None is drawn as a dash."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    tones: Sequence[Tone] | None = None
    """One per row."""
    note: str | None = None

    def __post_init__(self) -> None:
        width = len(self.columns)
        for number, row in enumerate(self.rows):
            if len(row) != width:
                raise InputError(
                    f"table {self.title!r}: row {number} has {len(row)} cells, expected {width}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve: ``y[i]`` at ``x[i]``; None breaks the curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Curves, stacked areas or bars over one x axis."""

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    style: str = "line"
    """``line``, ``stacked``, ``bar``, ``stacked_bar`` (needs ``x_labels``) or ``scatter``."""
    x_is_time_ns: bool = False
    x_labels: Sequence[str] | None = None
    """Names of the bars, when ``style`` is ``bar`` or ``stacked_bar``."""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapBox:
    """A labelled frame over cells: rows and columns, both ends included."""

    label: str
    row_from: int
    row_to: int
    column_from: int
    column_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """A matrix of values, such as nodes × time or ToR × ToR; None is no data."""

    title: str
    row_labels: Sequence[str]
    column_labels: Sequence[str]
    """Empty where columns are times: then ``column_times_ns`` holds their starts."""
    values: Sequence[Sequence[float | None]]
    """``(rows, columns)``; a NumPy array serves, NaN is no data."""
    unit: str
    low: float | None = None
    high: float | None = None
    column_times_ns: Sequence[int] | None = None
    boxes: Sequence[HeatmapBox] = ()
    row_title: str = ""
    column_title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One bar of a timeline."""

    lane: int
    start_ns: int
    duration_ns: int
    name: str
    kind: str
    depth: int = 0
    mark: str | None = None
    """``late`` and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Spans on lanes (ranks, streams) over time."""

    title: str
    lanes: Sequence[str]
    spans: Sequence[Span]


Block = Heading | Sentence | Facts | Table | Series | Heatmap | Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One screen or page."""

    title: str
    blocks: Sequence[Block]

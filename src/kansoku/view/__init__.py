"""What a screen, a page or a terminal shows: figures already computed, ready to draw.

A View is a title and an ordered list of blocks. The same View is drawn by the command line
(:mod:`kansoku.cli`), by the self-contained HTML renderer (:func:`kansoku.view.html.render`) and
by the web pages. Drawing never computes a figure.
"""

from kansoku.view.blocks import (
    Block,
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

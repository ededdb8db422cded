"""Series blocks as Bokeh figures, handed to BokehJS as JSON."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

from kansoku.view.blocks import Series

__all__ = ["PALETTE", "series_item"]

# Okabe and Ito's colours, told apart by colour-blind readers, in light and dark.
PALETTE = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a8a3c", "#7f7f7f",
    "#6a5acd", "#b8860b",
)  # fmt: skip
# Phases keep their colours everywhere on a page; the timeline's script has the same.
_PHASES = {
    "data wait": "#e69f00",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "optimizer": "#009e73",
    "exposed collectives": "#d55e00",
    "collective": "#d55e00",
    "checkpoint": "#cc79a7",
    "other": "#9aa3ad",
}
_INK = "#808790"
Say = Callable[[str], str]
_HEIGHT = 260


def _plain(text: str) -> str:
    """Return text that BokehJS draws as it stands: it would read TeX between these marks."""
    gap = "\u200b"
    return text.replace("$$", f"${gap}$").replace("\\[", f"\\{gap}[").replace("\\(", f"\\{gap}(")


def series_item(block: Series, *, say: Say = str) -> dict[str, object]:
    """Return the JSON item of a figure for ``Bokeh.embed.embed_item``.

    ``say`` puts titles and names into the reader's language; colours go by the names as they are.
    """
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    bars = block.style in {"bar", "stacked_bar"}
    labels = [_plain(say(label)) for label in block.x_labels or ()]
    options: dict[str, Any] = {}
    if bars and labels:
        options["x_range"] = labels = _distinct(labels)
    plot = figure(
        height=_HEIGHT,
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,box_zoom,reset,save",
        x_axis_type="datetime" if block.x_is_time_ns else "log" if block.log_x else "auto",
        y_axis_type="log" if block.log_y else "auto",
        x_axis_label=_plain(say(block.x_title)),
        y_axis_label=_plain(say(block.y_title)),
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        output_backend="canvas",
        **options,
    )
    _style(plot)
    scale = 1e-6 if block.x_is_time_ns else 1.0
    if block.style == "stacked":
        _stacked(plot, block, scale, say)
    elif block.style == "stacked_bar" and labels:
        _stacked_bars(plot, block, labels, say)
    elif bars:
        _bars(plot, block, labels, scale, say)
    else:
        for number, line in enumerate(block.lines):
            colour = _colour(line.name, number)
            data = {"x": [x * scale for x in line.x], "y": _floats(line.y)}
            data["name"] = cast("list[float]", [_plain(say(line.name))] * len(data["x"]))
            source = ColumnDataSource(data)
            legend = {"legend_label": _plain(say(line.name))} if len(block.lines) > 1 else {}
            if block.style == "scatter":
                plot.scatter("x", "y", source=source, size=5, color=colour, alpha=0.7, **legend)
            else:
                plot.line("x", "y", source=source, line_width=1.5, color=colour, **legend)
        x_format = "@x{%F %T}" if block.x_is_time_ns else "@x{0,0.###}"
        plot.add_tools(
            HoverTool(
                tooltips=[
                    ("", "@name"),
                    (_plain(say(block.x_title)) or "x", x_format),
                    ("", "@y{0.000a}"),
                ],
                formatters={"@x": "datetime"} if block.x_is_time_ns else {},
                mode="mouse",
            )
        )
    for legend in plot.legend:
        legend.click_policy = "hide"
        legend.background_fill_alpha = 0
        legend.border_line_color = None
        legend.label_text_color = _INK
        legend.label_text_font_size = "11px"
        legend.padding = 2
        legend.spacing = 0
    if plot.legend and len(block.lines) > 1:
        plot.add_layout(plot.legend[0], "right")
    return cast("dict[str, object]", json_item(plot))


def _colour(name: str, number: int) -> str:
    return _PHASES.get(name, PALETTE[number % len(PALETTE)])


def _distinct(labels: Sequence[str]) -> list[str]:
    """Return factors without repeats: Bokeh refuses a name given twice."""
    seen: dict[str, int] = {}
    result = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        result.append(label if seen[label] == 1 else label + "\u200b" * (seen[label] - 1))
    return result


def _floats(values: Sequence[float | None]) -> list[float]:
    return [
        math.nan if value is None or not math.isfinite(value) else float(value) for value in values
    ]


def _style(plot: Any) -> None:
    """Give the axes a grey that reads on light and on dark ground."""
    from bokeh.models import BasicTickFormatter

    for axis in plot.axis:
        axis.axis_label_text_color = _INK
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = "12px"
        axis.major_label_text_color = _INK
        axis.axis_line_color = _INK
        axis.major_tick_line_color = _INK
        axis.minor_tick_line_color = None
        if isinstance(axis.formatter, BasicTickFormatter):
            # 500000, not 5.000e+5: people read tokens per second and steps off these axes.
            axis.formatter.power_limit_high = 9
    for grid in plot.grid:
        grid.grid_line_color = _INK
        grid.grid_line_alpha = 0.2
    plot.toolbar.logo = None
    plot.toolbar.autohide = True


def _stacked(plot: Any, block: Series, scale: float, say: Say) -> None:
    from bokeh.models import ColumnDataSource

    if not block.lines:
        return
    data: dict[str, list[float]] = {"x": [x * scale for x in block.lines[0].x]}
    keys = []
    for number, line in enumerate(block.lines):
        key = f"y{number}"
        keys.append(key)
        data[key] = [0.0 if math.isnan(v) else v for v in _floats(line.y)]
    plot.varea_stack(
        keys,
        x="x",
        source=ColumnDataSource(data),
        color=[_colour(line.name, n) for n, line in enumerate(block.lines)],
        fill_alpha=0.85,
        legend_label=[_plain(say(line.name)) for line in block.lines],
    )
    plot.y_range.start = 0


def _stacked_bars(plot: Any, block: Series, labels: Sequence[str], say: Say) -> None:
    from bokeh.models import ColumnDataSource, HoverTool

    data: dict[str, list[Any]] = {"x": list(labels)}
    for number, line in enumerate(block.lines):
        values = [0.0 if math.isnan(v) else v for v in _floats(line.y)]
        data[f"y{number}"] = (values + [0.0] * len(labels))[: len(labels)]
    names = [_plain(say(line.name)) for line in block.lines]
    drawn = plot.vbar_stack(
        [f"y{number}" for number in range(len(names))],
        x="x",
        width=0.7,
        source=ColumnDataSource(data),
        color=[_colour(line.name, n) for n, line in enumerate(block.lines)],
        line_color=None,
        legend_label=names,
    )
    for number, (name, bar) in enumerate(zip(names, drawn, strict=True)):
        plot.add_tools(
            HoverTool(renderers=[bar], tooltips=[("", "@x"), (name, f"@y{number}{{0,0.00}}")])
        )
    plot.y_range.start = 0
    if len(labels) > 8:
        plot.xaxis.major_label_orientation = 0.9


def _bars(plot: Any, block: Series, labels: Sequence[str], scale: float, say: Say) -> None:
    from bokeh.models import ColumnDataSource
    from bokeh.transform import dodge

    count = max(len(block.lines), 1)
    width = 0.8 / count
    for number, line in enumerate(block.lines):
        colour = _colour(line.name, number)
        legend = {"legend_label": _plain(say(line.name))} if count > 1 else {}
        tops = _floats(line.y)
        if labels:
            source = ColumnDataSource({"x": list(labels)[: len(tops)], "y": tops[: len(labels)]})
            at: Any = dodge("x", -0.4 + width * (number + 0.5), range=plot.x_range)
        else:
            xs = [x * scale for x in line.x]
            step = min((b - a for a, b in pairwise(xs) if b > a), default=1.0)
            source = ColumnDataSource(
                {"x": [x + step * (-0.4 + width * (number + 0.5)) for x in xs], "y": tops}
            )
            at = "x"
        bar = width * (1.0 if labels else step)
        plot.vbar(
            x=at, top="y", source=source, width=bar * 0.95, color=colour, line_color=None, **legend
        )
    if not block.log_y:
        plot.y_range.start = min(
            0.0, *(v for line in block.lines for v in _floats(line.y) if not math.isnan(v)), 0.0
        )
    if len(labels) > 8:
        plot.xaxis.major_label_orientation = 0.9

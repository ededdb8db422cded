"""Draw a View in the terminal with Rich."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kansoku.cli._columns import fit_columns
from kansoku.view import Facts, Heading, Heatmap, Sentence, Series, Table, Timeline, Tone, View
from kansoku.view.plain import plain_view

__all__ = ["draw"]

_STYLES = {
    Tone.PLAIN: "",
    Tone.GOOD: "green",
    Tone.NOTICE: "yellow",
    Tone.BAD: "red",
    Tone.MUTED: "dim",
}
_MARKS = {Tone.GOOD: "✓ ", Tone.NOTICE: "! ", Tone.BAD: "✗ "}
_SPARKS = "▁▂▃▄▅▆▇█"
_SHADES = " ░▒▓█"
_SPARK_WIDTH = 60
_ENDS_WIDTH = 24
_MAX_LANES = 16
_COLOURS = ("blue", "yellow", "green", "magenta", "red", "cyan")
_KIND_COLOURS = {
    "step": "bright_black",
    "data_wait": "yellow",
    "forward": "blue",
    "backward": "cyan",
    "optimizer": "green",
    "collective": "red",
    "collective_wait": "red",
    "checkpoint": "magenta",
}


def draw(view: View, console: Console) -> None:
    """Print every block of the view; what a terminal would obey in a name is written out."""
    view = plain_view(view)
    console.print(Text(view.title, style="bold"))
    for block in view.blocks:
        match block:
            case Heading():
                console.print()
                console.print(Text(block.text, style="bold"))
            case Sentence():
                _draw_sentence(block, console)
            case Facts():
                _draw_facts(block, console)
            case Table():
                _draw_table(block, console)
            case Series():
                _draw_series(block, console)
            case Heatmap():
                _draw_heatmap(block, console)
            case Timeline():
                _draw_timeline(block, console)


def _draw_sentence(block: Sentence, console: Console) -> None:
    mark = _MARKS.get(block.tone, "")
    _hanging(console, mark, block.text, _STYLES[block.tone])
    if block.detail:
        _hanging(console, "  ", block.detail, "dim")


def _hanging(console: Console, mark: str, text: str, style: str) -> None:
    """Print text whose further lines stand under the first."""
    if not mark:
        console.print(Text(text, style=style))
        return
    grid = RichTable.grid(padding=0)
    grid.add_column(width=len(mark), no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark, style=style), Text(text, style=style))
    console.print(grid)


def _draw_facts(block: Facts, console: Console) -> None:
    width = max((len(label) for label, _ in block.items), default=0)
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=width, no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, text in block.items:
        grid.add_row(Text(label), Text(text))
    console.print(grid)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _draw_table(block: Table, console: Console) -> None:
    rows = [[_cell(value) for value in row] for row in block.rows]
    title: str | None = block.title
    for band in fit_columns(block.columns, rows, room=console.width):
        table = RichTable(title=title, title_justify="left", title_style="bold", box=None)
        for fitted in band:
            column = block.columns[fitted.place]
            table.add_column(
                Text(column.title),
                justify="right" if column.numeric else "left",
                width=fitted.width,
                overflow="fold",
            )
        for number, row in enumerate(rows):
            style = _STYLES[block.tones[number]] if block.tones else ""
            table.add_row(*(Text(row[fitted.place]) for fitted in band), style=style)
        console.print()
        console.print(table)
        title = None
    if block.note:
        console.print(Text(block.note, style="dim"))


def _spark(values: Sequence[float | None], *, low: float, high: float, room: int) -> str:
    known = np.array([np.nan if v is None else v for v in values], dtype=float)
    if len(known) > room:
        chunks = np.array_split(known, room)
        known = np.array(
            [c[~np.isnan(c)].mean() if (~np.isnan(c)).any() else np.nan for c in chunks]
        )
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    levels = np.clip((known - low) * scale, 0, len(_SPARKS) - 1)
    return "".join(" " if np.isnan(v) else _SPARKS[round(v)] for v in levels)


def _finite(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None and np.isfinite(v)]


def _draw_series(block: Series, console: Console) -> None:
    console.print()
    console.print(Text(f"{block.title} ({block.y_title})", style="bold"))
    if block.style in {"bar", "stacked_bar"} and block.x_labels is not None:
        _draw_bars(block, console)
        return
    # Curves that belong together share one scale, so that large ones look large.
    every = [v for line in block.lines for v in _finite(line.y)]
    together = len(block.lines) > 1
    low = 0.0 if block.style in {"stacked", "bar"} or together else min(every, default=0.0)
    low, high = min([low, *every]), max(every, default=1.0)
    width = max((len(line.name) for line in block.lines), default=0)
    room = max(min(_SPARK_WIDTH, console.width - width - _ENDS_WIDTH), 10)
    for line in block.lines:
        finite = _finite(line.y)
        ends = f"{min(finite):.4g} – {max(finite):.4g}" if finite else "no data"
        spark = _spark(line.y, low=low, high=high, room=room)
        console.print(Text(f"{line.name:<{width}}  {spark}  {ends}"))


def _draw_bars(block: Series, console: Console) -> None:
    labels = list(block.x_labels or ())
    width = min(max((len(label) for label in labels), default=0), 32)
    every = [v for line in block.lines for v in _finite(line.y)]
    high = max([0.0, *every]) or 1.0
    room = max(min(console.width - width - 16, _SPARK_WIDTH), 10)
    names = max((len(line.name) for line in block.lines), default=0) if len(block.lines) > 1 else 0
    for number, label in enumerate(labels):
        for line in block.lines:
            value = line.y[number] if number < len(line.y) else None
            if value is None or not np.isfinite(value):
                text = "–"
            else:
                text = f"{'█' * round(max(value, 0) / high * room)} {value:.4g}"
            head = f"{label[:width]:<{width}}  {line.name if names else '':<{names}}"
            console.print(Text(f"{head.rstrip() if not names else head}  {text}"))


def _draw_timeline(block: Timeline, console: Console) -> None:
    """Draw one row a lane; each cell shows the innermost span that fills most of it."""
    console.print()
    console.print(Text(block.title, style="bold"))
    if not block.spans:
        console.print(Text("no spans", style="dim"))
        return
    lanes = list(block.lanes)[:_MAX_LANES]
    start = min(span.start_ns for span in block.spans)
    end = max(span.start_ns + span.duration_ns for span in block.spans)
    width = max(len(lane) for lane in lanes)
    room = max(min(console.width - width - 2, 100), 10)
    scale = room / max(end - start, 1)
    kinds = list(dict.fromkeys(span.kind for span in block.spans))
    filled = np.zeros((len(lanes), room, len(kinds)))
    # Inner spans hide outer ones: draw by depth and take away what is covered.
    for span in sorted(block.spans, key=lambda s: s.depth):
        if span.lane >= len(lanes):
            continue
        first = (span.start_ns - start) * scale
        last = first + span.duration_ns * scale
        for cell in range(int(first), min(int(np.ceil(last)), room)):
            share = min(last, cell + 1) - max(first, cell)
            filled[span.lane, cell] *= max(1 - share, 0)
            filled[span.lane, cell, kinds.index(span.kind)] += share
    colours = {kind: _KIND_COLOURS.get(kind, _COLOURS[n % 6]) for n, kind in enumerate(kinds)}
    for number, lane in enumerate(lanes):
        row = Text(f"{lane:>{width}}  ")
        for cell in range(room):
            shares = filled[number, cell]
            best = int(shares.argmax())
            row.append("█" if shares[best] > 0 else " ", style=colours[kinds[best]])
        console.print(row)
    legend = Text(" " * (width + 2))
    for kind in kinds:
        legend.append("█ ", style=colours[kind])
        legend.append(f"{kind.replace('_', ' ')}  ", style="dim")
    console.print(legend)
    rest = len(block.lanes) - len(lanes)
    more = f"; {rest} more lanes with --html" if rest > 0 else ""
    console.print(
        Text(f"{' ' * width}  {(end - start) / 1e6:.4g} ms from left to right{more}", "dim")
    )


def _draw_heatmap(block: Heatmap, console: Console) -> None:
    values = np.array(block.values, dtype=float)
    console.print()
    console.print(Text(f"{block.title} ({block.unit})", style="bold"))
    if values.size == 0 or np.isnan(values).all():
        console.print(Text("no data", style="dim"))
        return
    low = block.low if block.low is not None else float(np.nanmin(values))
    high = block.high if block.high is not None else float(np.nanmax(values))
    label_width = max(len(label) for label in block.row_labels)
    room = max(console.width - label_width - 2, 10)
    columns = np.array_split(np.arange(values.shape[1]), min(room, values.shape[1]))
    for label, row in zip(block.row_labels, values, strict=True):
        cells = []
        for chunk in columns:
            part = row[chunk]
            part = part[~np.isnan(part)]
            if len(part) == 0:
                cells.append("·")
                continue
            level = (float(part.mean()) - low) / (high - low) if high > low else 0.0
            cells.append(_SHADES[round(min(max(level, 0.0), 1.0) * (len(_SHADES) - 1))])
        console.print(Text(f"{label:>{label_width}}  {''.join(cells)}"))
    console.print(
        Text(f"{' ' * label_width}  {_SHADES[1]} {low:.4g}  {_SHADES[-1]} {high:.4g}", "dim")
    )

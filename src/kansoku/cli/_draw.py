"""Draw a View in the terminal with Rich."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kansoku.view import Facts, Heading, Heatmap, Sentence, Series, Table, Timeline, Tone, View

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


def draw(view: View, console: Console) -> None:
    """Print every block of the view."""
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
                # A timeline has no useful form in 80 columns; say where it can be seen.
                text = f"{block.title}: {len(block.spans)} spans; see --html or Perfetto"
                console.print(Text(text, style="dim"))


def _draw_sentence(block: Sentence, console: Console) -> None:
    console.print(Text(_MARKS.get(block.tone, "") + block.text, style=_STYLES[block.tone]))
    if block.detail:
        console.print(Text(f"  {block.detail}", style="dim"))


def _draw_facts(block: Facts, console: Console) -> None:
    width = max((len(label) for label, _ in block.items), default=0)
    for label, text in block.items:
        console.print(Text(f"{label:<{width}}  ", style="dim") + Text(text))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _draw_table(block: Table, console: Console) -> None:
    table = RichTable(title=block.title, title_justify="left", title_style="bold", box=None)
    for column in block.columns:
        table.add_column(column.title, justify="right" if column.numeric else "left")
    for number, row in enumerate(block.rows):
        style = _STYLES[block.tones[number]] if block.tones else ""
        table.add_row(*(Text(_cell(value)) for value in row), style=style)
    console.print()
    console.print(table)
    if block.note:
        console.print(Text(block.note, style="dim"))


def _spark(values: Sequence[float | None]) -> str:
    known = np.array([np.nan if v is None else v for v in values], dtype=float)
    if len(known) > _SPARK_WIDTH:
        chunks = np.array_split(known, _SPARK_WIDTH)
        known = np.array(
            [c[~np.isnan(c)].mean() if (~np.isnan(c)).any() else np.nan for c in chunks]
        )
    finite = known[~np.isnan(known)]
    if len(finite) == 0:
        return ""
    low, high = float(finite.min()), float(finite.max())
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if np.isnan(v) else _SPARKS[round((v - low) * scale)] for v in known)


def _draw_series(block: Series, console: Console) -> None:
    console.print()
    console.print(Text(f"{block.title} ({block.y_title})", style="bold"))
    width = max((len(line.name) for line in block.lines), default=0)
    for line in block.lines:
        finite = [v for v in line.y if v is not None]
        ends = f"{min(finite):.4g} – {max(finite):.4g}" if finite else "no data"
        console.print(Text(f"{line.name:<{width}}  {_spark(line.y)}  {ends}"))


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

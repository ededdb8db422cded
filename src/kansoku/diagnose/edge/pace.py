"""Step times and losses that training loops print.

Megatron, DeepSpeed, HF Trainer, NeMo, Lightning, torchtitan, MaxText and their like. A line that
states its step and how long it took is the best. Else lines' own stamps tell; else the elapsed time
of a progress bar (its rate may be the mean since the begin, which hides a change); else a
throughput, whose inverse is no time but changes as the time does.
"""

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import polars as pl

from kansoku.diagnose.edge.sieve import COLOUR, plain
from kansoku.diagnose.lines import FileFacts
from kansoku.diagnose.measures import MEASURE_COLUMNS
from kansoku.formats.job_log import parse_line

__all__ = ["Print", "pace_of", "print_of"]

# A step's number, then a time or a loss in the same line.
_STEP = r"(?i)\b(?:global[_ ]?step|steps?|iteration|iter)\b[\"']?\s*[:=#\[(/]?\s*(\d{1,9})"
_STEP_MS = (
    r"(?i)(?:train_step_timing in s|elapsed time per iteration"
    r"|(?:step|iter(?:ation)?)[_ -]?(?:time|duration)|time per step"
    r"|time/step|\bstep: \d+, seconds|\btime|\bdt|\belapsed)[\"']?\s*(?:\((ms|s|sec)\))?"
    r"\s*[:= ]\s*([\d.]+)\s*(ms|s\b|sec)?"
)
_LOSS = r"(?i)\b(?:lm |train(?:ing)?[_ ])?loss\b[\"']?\s*[:= ]\s*([-+]?\d[\d.]*(?:[eE][-+]?\d+)?)"
# DeepSpeed prints how the time divides, with a part that is called step.
_PARTS = "time (ms) |"
# tqdm: done/total [elapsed<left, rate
_BAR = (
    r"(\d{1,9})/(\d{1,9}) \[(?:(\d{1,4}):)?(\d\d):(\d\d)<[^,\]]{1,16}, +"
    r"(?:([\d.]+)s/it|([\d.]+)it/s)"
)
_RATE = (
    r"(?i)\b(?:tps|tok(?:en)?s?(?:/| per |_per_)s\w*(?:/\w+)?|samples(?:/| per |_per_)s\w*"
    r"|currsamplespersec)\b[\"']?\s*[:=]\s*([\d,]+(?:\.\d+)?)"
)
_HAS_STEPS, _HAS_BAR = re.compile(_STEP), re.compile(_BAR)
_FEW_STEPS = 12
_MOST_STAMPS = 20_000
_DATED_STEPS = 400
_MOST_LINES = 200_000
"""Of a file that has more, so many are read, in blocks from begin to end."""
_BLOCKS = 128
_SHOWN_CHARACTERS = 300
_BAR_SPAN_S = 20
"""Bars tell whole seconds: over a span so long that is 5 % at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """How a log prints its steps, as its begin and end show."""

    bars: bool
    """tqdm's, with or without line ends."""
    returns: bool
    """Bars end in a carriage return."""
    colours: bool
    line_bytes: float
    """Mean length of a line."""


def print_of(head: str, tail: str) -> Print | None:
    """Return how a log prints its steps; None where it prints none."""
    colours = "\x1b[" in tail or "\x1b[" in head
    ends = [plain(text) for text in (tail, head)]
    bars = any(_HAS_BAR.search(text) for text in ends)
    if not bars and not any(_HAS_STEPS.search(text) for text in ends):
        return None
    returns = bars and any("\r" in text for text in ends)
    count = head.count("\n") + tail.count("\n")
    if returns:
        count += head.count("\r") + tail.count("\r")
    size = (len(head) + len(tail)) / max(count, 1)
    return Print(bars=bars, returns=returns, colours=colours, line_bytes=size)


def pace_of(
    path: Path, text: bytes | None, facts: FileFacts, shown: Print
) -> tuple[pl.DataFrame, list[tuple[int, int]]]:
    """Return step times (s) and losses of a log as measures, and ``(step, Unix ns)`` of some.

    ``text`` is what was unpacked; None for a file that can be read as it is. Nothing is returned of
    a file that is not UTF-8.
    """
    size = path.stat().st_size if text is None else len(text)
    wanted = int(_MOST_LINES * shown.line_bytes)
    source: Path | io.BytesIO = path
    if size > wanted:
        with path.open("rb") if text is None else io.BytesIO(text) as file:
            source = io.BytesIO(_some(file, size, wanted, shown))
    elif text is not None:
        source = io.BytesIO(text)
    try:
        return _measures(pl.scan_lines(source, name="line"), facts, shown)
    except pl.exceptions.ComputeError:
        return pl.DataFrame(schema=MEASURE_COLUMNS), []


def _some(file: BinaryIO, size: int, wanted: int, shown: Print) -> bytes:
    """Return the whole lines of blocks that are spread over a file of ``size`` bytes."""
    block = wanted // _BLOCKS
    parts = []
    for number in range(_BLOCKS):
        file.seek(number * (size - block) // (_BLOCKS - 1))
        data = file.read(block)
        if shown.returns:
            data = data.replace(b"\r", b"\n")
        begin = data.find(b"\n") + 1 if number else 0
        parts.append(data[begin : max(begin, data.rfind(b"\n"))])
    return b"\n".join(parts)


def _number(match: pl.Expr) -> pl.Expr:
    return match.cast(pl.Int64, strict=False)


def _read(frame: pl.LazyFrame, shown: Print) -> pl.DataFrame:
    """Return the lines of steps in order: step, step_time (s), loss, line, and what bars say."""
    line = pl.col("line")
    if shown.returns:
        frame = frame.select(line.str.split("\r")).explode("line")
    if shown.colours:
        frame = frame.with_columns(line.str.replace_all(COLOUR, ""))
    wanted = line.str.contains(r"(?i)step|iter" + (r"|\d/\d+ \[" if shown.bars else ""))
    unit = pl.coalesce(line.str.extract(_STEP_MS, 1), line.str.extract(_STEP_MS, 3))
    said = line.str.extract(_STEP_MS, 2).cast(pl.Float64, strict=False)
    columns = {
        "step": _number(line.str.extract(_STEP, 1)),
        "step_time": pl.when(unit.str.to_lowercase() == "ms").then(said / 1e3).otherwise(said),
        "line": line.str.head(_SHOWN_CHARACTERS),
        "loss": line.str.extract(_LOSS, 1).cast(pl.Float64, strict=False),
    }
    known = pl.col("step").is_not_null()
    if shown.bars:
        hours, minutes, seconds = (
            _number(line.str.extract(_BAR, group)).fill_null(0) for group in (3, 4, 5)
        )
        slow, fast = (
            line.str.extract(_BAR, group).cast(pl.Float64, strict=False) for group in (6, 7)
        )
        columns |= {
            "done": _number(line.str.extract(_BAR, 1)),
            "total": _number(line.str.extract(_BAR, 2)),
            "elapsed_s": hours * 3600 + minutes * 60 + seconds,
            "rate_s": pl.coalesce(slow, pl.when(fast > 0).then(1 / fast)),
        }
        known |= pl.col("done").is_not_null()
    return (
        frame.filter(wanted & ~line.str.contains(_PARTS, literal=True))
        .select(**columns)
        .filter(known)
        .collect(engine="streaming")
    )


def _of_bars(found: pl.DataFrame) -> pl.DataFrame:
    """Return the steps of the bar that lasts longest: others are of evaluation, or of loading.

    A bar that begins anew (an epoch) is counted on.
    """
    bars = found.filter(pl.col("done").is_not_null())
    longest = bars.sort("elapsed_s").tail(1)["total"]
    bars = bars.filter(pl.col("total").is_in(longest.implode()))
    again = (pl.col("done").diff() < 0).fill_null(value=False).cum_sum()
    bars = bars.with_columns(
        step=pl.col("done") + again * pl.col("total"),
        span=again * 10**9 + pl.col("elapsed_s") // _BAR_SPAN_S,
        again=again,
    )
    spans = bars.group_by("span", maintain_order=True).first()
    steps, seconds = pl.col("step").diff(), pl.col("elapsed_s").diff()
    spans = spans.with_columns(
        step_time=pl.when((steps > 0) & (seconds > 0) & (pl.col("again").diff() == 0)).then(
            seconds / steps
        )
    )
    if spans["step_time"].count() < _FEW_STEPS:
        return bars.with_columns(step_time=pl.col("rate_s"))
    return spans


def _timed(found: pl.DataFrame, facts: FileFacts) -> pl.DataFrame:
    """Return the steps with their times from the lines' own stamps."""
    some = found.gather_every(len(found) // _MOST_STAMPS | 1)
    times = [parse_line(line, facts.clock).time_ns for line in some["line"]]
    each = pl.col("step").diff()
    return some.with_columns(time_ns=pl.Series(times, dtype=pl.Int64)).with_columns(
        step_time=pl.when(each > 0).then(pl.col("time_ns").diff() / 1e9 / each)
    )


def _by_rate(found: pl.DataFrame) -> pl.DataFrame:
    """Return the steps with how long each took against the median one, from their throughput."""
    rate = pl.col("line").str.extract(_RATE, 1).str.replace_all(",", "")
    found = found.with_columns(rate=rate.cast(pl.Float64, strict=False)).filter(pl.col("rate") > 0)
    return found.with_columns(relative=pl.col("rate").median() / pl.col("rate"))


def _measures(
    frame: pl.LazyFrame, facts: FileFacts, shown: Print
) -> tuple[pl.DataFrame, list[tuple[int, int]]]:
    found = _read(frame, shown)
    if found["step_time"].count() < _FEW_STEPS and shown.bars:
        numbered = found.filter(pl.col("step").is_not_null())
        found = numbered if len(numbered) >= _FEW_STEPS else _of_bars(found)
    found = found.filter(pl.col("step").is_not_null())
    if found["step_time"].count() < _FEW_STEPS <= len(found):
        found = _timed(found, facts)
    sample = found.gather_every(max(1, len(found) // _DATED_STEPS))
    stamps = [parse_line(line, facts.clock).time_ns for line in sample["line"]]
    clock = [(step, at) for step, at in zip(sample["step"], stamps, strict=True) if at is not None]
    columns = {"step_time": "step time s", "loss": "training loss"}
    if found["step_time"].count() < _FEW_STEPS:
        found = _by_rate(found) if len(found) >= _FEW_STEPS else found
        columns["relative"] = "step time by throughput"
    parts = [
        _as_measures(found.drop_nulls(column), column, metric, facts)
        for column, metric in columns.items()
        if column in found.columns and found[column].count() >= _FEW_STEPS
    ]
    return (pl.concat(parts) if parts else pl.DataFrame(schema=MEASURE_COLUMNS)), clock


def _as_measures(values: pl.DataFrame, column: str, metric: str, facts: FileFacts) -> pl.DataFrame:
    return values.select(
        metric=pl.lit(metric),
        node=pl.lit(facts.node if facts.rank is not None else None, pl.String),
        device=pl.lit(None, pl.String),
        target=pl.lit(None, pl.String),
        rank=pl.lit(facts.rank, pl.Int64),
        time_ns=pl.col("step"),
        value=pl.col(column),
    )

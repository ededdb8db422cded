"""SQL of metric ranges: samples and roll-ups to one value per series and step.

The grid lies on multiples of the step, so that a sliding window shows the same values again and
roll-ups serve. Gauges and counters are aggregated alike from samples (each its own partial) and
from roll-ups (partials of a bucket), merged in one GROUP BY.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson
import polars as pl

from kansoku.errors import InputError
from kansoku.store._interface import Aggregate
from kansoku.store._schema import ROLLUPS

__all__ = ["Grid", "merge_across", "range_sql", "rollup_for"]

MAX_POINTS = 50_000
_COUNTERS = {Aggregate.INCREASE, Aggregate.RATE}
_MERGE = {
    "avg": pl.col("value").mean(),
    "min": pl.col("value").min(),
    "max": pl.col("value").max(),
    "sum": pl.col("value").sum(),
    "count": pl.col("value").count().cast(pl.Float64),
}
LOOKBACK_NS = 300 * 10**9
"""How far before the range a counter's previous sample is looked for, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Steps of a range: starts are multiples of the step."""

    start_ns: int
    end_ns: int
    step_ns: int

    @classmethod
    def of(cls, start_ns: int, end_ns: int, step_ns: int) -> "Grid":
        """Widen a range to the grid; raise InputError for one without steps or with too many."""
        if step_ns <= 0:
            raise InputError(f"step of {step_ns} ns is not above zero")
        if end_ns <= start_ns:
            raise InputError(f"the range ends at {end_ns}, not after its start {start_ns}")
        low = start_ns // step_ns * step_ns
        high = -(-end_ns // step_ns) * step_ns
        if (high - low) // step_ns > MAX_POINTS:
            raise InputError(
                f"{(high - low) // step_ns} steps are more than {MAX_POINTS}",
                remedy="use a longer step or a shorter range",
            )
        return cls(start_ns=low, end_ns=high, step_ns=step_ns)

    @property
    def lookback_ns(self) -> int:
        """Start of what a counter's first step needs."""
        return self.start_ns - max(self.step_ns, LOOKBACK_NS)


def rollup_for(step_ns: int, aggregate: Aggregate, kind: str | None) -> str | None:
    """Return the widest roll-up that serves, or None for the samples themselves."""
    counter_like = kind in {"counter", "histogram"}
    if aggregate in _COUNTERS and kind in {"gauge", "delta"}:
        return None
    if aggregate not in _COUNTERS | {Aggregate.LAST, Aggregate.COUNT} and counter_like:
        return None
    fitting = [name for name, width in ROLLUPS.items() if step_ns % width == 0]
    return max(fitting, key=ROLLUPS.__getitem__, default=None)


def range_sql(grid: Grid, aggregate: Aggregate, *, samples: str, rollups: str | None) -> str:
    """Return SQL giving ``series, time_ns, value``.

    ``samples`` is a relation (series, time_ns, value); ``rollups`` one with the columns of the
    roll-up tables, or None. Both hold the wanted series and range only.
    """
    step = grid.step_ns
    each = (
        "SELECT series, time_ns AS t, 1 AS n, value AS total, value AS low, value AS high, "
        f"value AS first_value, value AS last_value, 0.0 AS growth FROM {samples}"
    )
    parts = [each]
    if rollups is not None:
        parts.append(
            "SELECT series, bucket AS t, n, total, low, high, first_value, last_value, growth "
            f"FROM {rollups}"
        )
    if aggregate not in _COUNTERS and rollups is None:
        simple = {
            Aggregate.AVG: "avg(value)",
            Aggregate.MIN: "min(value)",
            Aggregate.MAX: "max(value)",
            Aggregate.SUM: "sum(value)",
            Aggregate.COUNT: "count(*)::DOUBLE",
            Aggregate.LAST: "arg_max(value, time_ns)",
        }[aggregate]
        return (
            f"SELECT series, time_ns // {step} * {step} AS time_ns, {simple} AS value "
            f"FROM {samples} GROUP BY 1, 2"
        )
    both = " UNION ALL ".join(parts)
    if aggregate in _COUNTERS:
        scale = 1e9 / step if aggregate is Aggregate.RATE else 1.0
        return (
            f"SELECT series, t // {step} * {step} AS time_ns, sum(d) * {scale!r} AS value FROM ("
            "SELECT series, t, growth + CASE WHEN p IS NULL THEN 0 WHEN first_value >= p "
            "THEN first_value - p ELSE first_value END AS d FROM ("
            "SELECT *, lag(last_value) OVER (PARTITION BY series ORDER BY t) AS p "
            f"FROM ({both}))) WHERE t >= {grid.start_ns} GROUP BY 1, 2"
        )
    merged = {
        Aggregate.AVG: "sum(total) / sum(n)",
        Aggregate.MIN: "min(low)",
        Aggregate.MAX: "max(high)",
        Aggregate.SUM: "sum(total)",
        Aggregate.COUNT: "sum(n)::DOUBLE",
        Aggregate.LAST: "arg_max(last_value, t)",
    }[aggregate]
    return (
        f"SELECT series, t // {step} * {step} AS time_ns, {merged} AS value "
        f"FROM ({both}) GROUP BY 1, 2"
    )


def merge_across(
    frame: pl.DataFrame, labels: Mapping[int, str], by: Sequence[str], across: str
) -> pl.DataFrame:
    """Merge series that agree on the labels ``by``.

    ``frame`` is series, time_ns, value; ``labels`` the text of each series. Returns labels,
    time_ns, value. Groups are numbers until the end: texts cost three times as much.
    """
    if across not in _MERGE:
        raise InputError(f"across {across!r} is not one of {', '.join(_MERGE)}")
    texts: dict[str, int] = {}
    group_of = {}
    for series, text in labels.items():
        own = orjson.loads(text)
        kept = {name: own[name] for name in by if name in own}
        group = orjson.dumps(kept, option=orjson.OPT_SORT_KEYS).decode()
        group_of[series] = texts.setdefault(group, len(texts))
    groups = pl.DataFrame(
        {"series": list(group_of), "group": list(group_of.values())},
        schema={"series": pl.Int32, "group": pl.Int32},
    )
    names = pl.DataFrame(
        {"group": list(texts.values()), "labels": list(texts)},
        schema={"group": pl.Int32, "labels": pl.String},
    )
    return (
        frame.join(groups, on="series")
        .group_by("group", "time_ns")
        .agg(_MERGE[across].alias("value"))
        .join(names, on="group")
        .select("labels", "time_ns", "value")
        .sort("labels", "time_ns")
    )

"""PyTorch execution traces in ``trace breakdown``: what ran and how often; they hold no clock."""

from collections import Counter
from pathlib import Path

import polars as pl

from kansoku.formats.execution_trace import read_execution_trace
from kansoku.trace.kineto.report import RankBreakdown

__all__ = ["execution_breakdown"]

_NO_CLOCK = (
    "an execution trace holds no times: only what ran, and how often, is known (a profiler trace "
    "has the times)"
)
_SHOWN = 8


def execution_breakdown(path: Path) -> RankBreakdown:
    """Return the operators of one rank by number of calls, and its collectives as notes."""
    trace = read_execution_trace(path)
    incomplete = [_NO_CLOCK]
    if trace.set_aside:
        incomplete.append(f"{trace.set_aside} nodes set aside: no id or no name")
    calls = Counter(trace.spans["name"].to_list())
    world = max((len(group.ranks) for group in trace.groups), default=0)
    return RankBreakdown(
        file=str(path),
        named_rank=trace.rank,
        world_size=world or None,
        rows=len(trace.spans),
        operators=tuple(
            (name, count, None)
            for name, count in sorted(calls.items(), key=lambda item: (-item[1], item[0]))
        ),
        incomplete=tuple(incomplete),
        notes=(
            "most frequent: "
            + ", ".join(f"{count} × {name}" for name, count in calls.most_common(_SHOWN)),
            *_collectives(trace.spans),
        ),
    )


def _collectives(spans: pl.DataFrame) -> list[str]:
    groups = (
        spans.filter(pl.col("kind") == "collective")
        .group_by("name", "group")
        .agg(pl.len(), pl.col("bytes").sum(), pl.col("bytes").count().alias("sized"))
        .sort("name", "group")
    )
    return [
        f"{count} × {name}"
        + (f" in group {group}" if group is not None else "")
        + (f", {size} bytes" if sized else "")
        for name, group, count, size, sized in groups.iter_rows()
    ]

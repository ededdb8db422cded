"""Our own run directories as breakdowns, by the host's clock."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from kansoku.formats.run_directory import read_run
from kansoku.trace.kineto.breakdown import Figures, StepFigures
from kansoku.trace.kineto.intervals import IntervalSet, union
from kansoku.trace.kineto.report import RankBreakdown
from kansoku.trace.kineto.tables import CollectiveRow
from kansoku.trace.steps import step_rows

__all__ = ["own_run_breakdowns"]

_WORK = ("forward_ns", "backward_ns", "optimizer_ns")
_REMARK = (
    "own run: figures are by the host's clock (compute = forward, backward and optimizer outside "
    "collectives; exposed comm = the main thread blocked); kernels were not traced"
)


def own_run_breakdowns(path: Path) -> list[RankBreakdown]:
    """Return one breakdown per rank of a run directory."""
    data = read_run(path)
    steps = step_rows(data.spans, facts=data.facts, resources=data.resources)
    world = next((facts.world_size for facts in data.facts.ranks if facts.world_size), None)
    closed = data.spans.filter(pl.col("duration_ns").is_not_null() & pl.col("rank").is_not_null())
    devices = {facts.rank: facts.device for facts in data.facts.ranks}
    parts = []
    for rank in sorted(closed["rank"].unique().to_list()):
        spans = closed.filter(pl.col("rank") == rank)
        collectives = spans.filter(pl.col("kind") == "collective")
        sets = union(collectives["start_ns"].to_numpy(), collectives["duration_ns"].to_numpy())
        rows = steps.filter((pl.col("rank") == rank) & pl.col("duration_ns").is_not_null())
        found = [_step(row, sets) for row in rows.sort("start_ns").iter_rows(named=True)]
        start = int(spans["start_ns"].min() or 0)  # type: ignore[arg-type]
        end = int((spans["start_ns"] + spans["duration_ns"]).max() or 0)  # type: ignore[arg-type]
        parts.append(
            RankBreakdown(
                file=str(path),
                said_rank=int(rank),
                named_rank=None,
                world_size=world,
                device_name=devices.get(rank),
                base_ns=0,
                start_ns=start,
                devices=(),
                rows=len(spans),
                host_span_ns=end - start,
                figures=_sum(found),
                idle=None,
                steps=tuple(found),
                outside_steps_busy_ns=None,
                kernels=(),
                copies=(),
                launches=None,
                queues=(),
                annotations=(),
                modules=(),
                operators=(),
                collectives=tuple(_collective(row) for row in collectives.iter_rows(named=True)),
                incomplete=tuple(data.missing),
                notes=(_REMARK,),
            )
        )
    return parts


def _step(row: Mapping[str, Any], collectives: IntervalSet) -> StepFigures:
    start, end = row["start_ns"], row["start_ns"] + row["duration_ns"]
    compute = sum(row[name] or 0 for name in _WORK)
    exposed = row["collective_ns"] or 0
    communication = max(collectives.within(start, end), exposed)
    busy = compute + exposed + (row["checkpoint_ns"] or 0)
    return StepFigures(
        step=row["step"],
        source="own run",
        start_ns=start,
        end_ns=end,
        figures=Figures(
            span_ns=end - start,
            busy_ns=busy,
            idle_ns=end - start - busy,
            compute_ns=compute,
            communication_ns=communication,
            memory_ns=None,
            overlap_ns=communication - exposed,
            exposed_communication_ns=exposed,
        ),
    )


def _sum(steps: list[StepFigures]) -> Figures:
    """Return the sums over all steps; span is the time in steps."""

    def total(name: str) -> int | None:
        values = [getattr(step.figures, name) for step in steps]
        return int(np.sum(values)) if values and None not in values else None

    return Figures(**{name: total(name) for name in Figures.__dataclass_fields__})


def _collective(row: Mapping[str, Any]) -> CollectiveRow:
    size, duration = row["bytes"], row["duration_ns"]
    return CollectiveRow(
        operation=row["name"] or "collective",
        group=row["group"],
        description=None,
        group_size=None,
        sequence=row["sequence"],
        stream=str(row["device"] or "cpu"),
        start_ns=row["start_ns"],
        duration_ns=duration,
        dtype=row["dtype"],
        bytes=size,
        algorithm_bytes_per_s=size / duration * 1e9 if size is not None and duration else None,
        bus_bytes_per_s=None,
        ranks=None,
    )

"""Phase times of our runs and of Kineto traces as operations for the what-if analysis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from kansoku.app._few_ranks import few_ranks
from kansoku.app._trace_breakdown import breakdown
from kansoku.app.report import LoadedRun, load_run
from kansoku.trace.whatif.analyse import WhatIf, what_if
from kansoku.trace.whatif.phases import MEETING, phase_operations
from kansoku.trace.whatif.program import pipeline_program
from kansoku.trace.whatif.record import operations_of
from kansoku.trace.whatif.run_spans import RunOperations, span_operations

__all__ = ["kineto_operations", "run_operations"]

# The first step of a run holds compilation, allocation and connection set-up.
_WARM_UP_STEPS = 1
_FEWEST_STEPS = 2


def _blocks(ranks: Sequence[int], stages: int | None) -> list[list[int]] | None:
    if stages is None or stages < 2:
        return None
    size = -(-len(ranks) // stages)
    return [list(ranks[first : first + size]) for first in range(0, len(ranks), size)]


def _stages(roles: Mapping[int, tuple[int, ...]], ranks: Sequence[int]) -> list[list[int]] | None:
    """Return the ranks of each stage as process groups tell; None where one holds all."""
    found = [[rank for rank in role if rank in set(ranks)] for role in roles.values()]
    whole = len(found) > 1 and sorted(rank for stage in found for rank in stage) == list(ranks)
    return found if whole and len({len(stage) for stage in found}) == 1 else None


def run_operations(
    path: Path,
    *,
    stages: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> WhatIf | str:
    """Analyse a run directory; return the reason where it cannot be.

    A pipeline-parallel run is replayed operation by operation, any other, and one whose operations
    its spans do not tell, by the phases of its steps; ``missing`` then says why.
    """
    run = load_run(path)
    found = _pipeline_operations(run, stages=stages)
    if isinstance(found, RunOperations):
        operations = operations_of(found.table, source=str(path))
        program = pipeline_program(operations, data_parallel=operations.dp_size > 1)
        kept = run.steps.filter(pl.col("step").is_in(list(operations.steps)))
        return what_if(
            operations,
            program,
            missing=(*run.missing, *found.missing),
            measured_s=float(kept["duration_ns"].mean()) / 1e9,  # type: ignore[arg-type]
            progress=progress,
        )
    phases = "" if found is None else f"phases of steps were replayed, not operations: {found}"
    return _run_phases(run, path, stages=stages, remark=phases)


def _pipeline_operations(run: LoadedRun, *, stages: int | None) -> RunOperations | str | None:
    """Return the operations, why there are none, or None for a run without a pipeline."""
    pipelines = run.layout.pipelines
    if not pipelines and (stages is None or stages < 2):
        return None
    if stages is not None and (not pipelines or stages != len(pipelines[0])):
        return "--stages cuts the ranks in blocks, and says not who sends to whom"
    if run.layout.tp > 1 or run.layout.other:
        return "ranks share a model by tensor, context or expert parallelism as well"
    ranks = sorted(rank for pipeline in pipelines for rank in pipeline)
    known = sorted(run.steps["rank"].drop_nulls().unique().to_list())
    if len({len(pipeline) for pipeline in pipelines}) != 1 or ranks != known:
        return "the pipeline groups seen do not hold every rank once"
    steps = run.steps.filter(pl.col("duration_ns").is_not_null())["step"].drop_nulls().unique()
    first = int(steps.min() or 0)  # type: ignore[arg-type]
    if len(steps) >= _WARM_UP_STEPS + _FEWEST_STEPS:
        steps = steps.filter(steps >= first + _WARM_UP_STEPS)
    spans = run.spans.filter(pl.col("step").is_in(steps.implode()))
    found = span_operations(
        spans.with_columns(start_ns=run.clocks.corrected("start_ns")),
        pipelines=pipelines,
        groups={
            (facts.rank, group.name): group.ranks
            for facts in run.facts.ranks
            if facts.rank is not None
            for group in facts.groups
        },
    )
    if isinstance(found, RunOperations) and run.clocks.unmatched:
        alone = few_ranks(run.clocks.unmatched)
        remark = f"{alone}: no collective shared with the others, clocks as read"
        return replace(found, missing=(*found.missing, remark))
    return found


def _run_phases(run: LoadedRun, path: Path, *, stages: int | None, remark: str) -> WhatIf | str:
    rows = run.steps.filter(pl.col("duration_ns").is_not_null() & pl.col("rank").is_not_null())
    if rows.is_empty():
        return "the run has no complete step"
    first = int(rows["step"].min() or 0)  # type: ignore[arg-type]
    if rows["step"].n_unique() >= _WARM_UP_STEPS + _FEWEST_STEPS:
        rows = rows.filter(pl.col("step") >= first + _WARM_UP_STEPS)
    ranks = sorted(rows["rank"].unique().to_list())
    if len(ranks) < 2:
        return "the run has one rank: nobody to compare it with"
    rows = rows.with_columns(pl.col("^.*_ns$").fill_null(0))
    operations, program = phase_operations(
        rows,
        before={
            "data_wait_ns": "data-wait",
            "forward_ns": "forward-compute",
            "backward_ns": "backward-compute",
            "other_ns": "other",
        },
        blocked="collective_ns",
        after={"optimizer_ns": "optimizer", "checkpoint_ns": "checkpoint"},
        stages=_blocks(ranks, stages) or _stages(run.layout.roles(), ranks),
        source=str(path),
    )
    return what_if(
        operations,
        program,
        communication=frozenset({MEETING}),
        missing=(*run.missing, *((remark,) if remark else ())),
        measured_s=float(rows["duration_ns"].mean()) / 1e9,  # type: ignore[arg-type]
    )


def kineto_operations(
    paths: Sequence[Path],
    *,
    stages: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> WhatIf | str:
    """Analyse profiler traces of many ranks; return the reason where they cannot be."""
    result = breakdown(paths, progress=progress)
    steps = result.steps
    if steps.is_empty() or "span_us" not in steps.columns:
        return "the traces hold no step"
    rows = steps.filter(
        pl.col("rank").is_not_null()
        & pl.col("compute_us").is_not_null()
        & pl.col("exposed_comm_us").is_not_null()
    ).with_columns(pl.col("memory_us").fill_null(0.0))
    if rows.is_empty():
        return "the traces have no device rows of a known rank: nothing to replay"
    if rows["step"].null_count():
        # Steps without a number, such as whole windows, are matched by their place.
        rows = rows.with_columns(
            step=pl.col("start_ns").rank("ordinal").over("rank").cast(pl.Int64)
        )
    ranks = sorted(rows["rank"].unique().to_list())
    if len(ranks) < 2:
        return "the traces are of one rank: nobody to compare it with"
    rows = rows.with_columns(
        compute_ns=pl.col("compute_us") * 1000,
        blocked_ns=pl.col("exposed_comm_us") * 1000,
        idle_ns=pl.col("idle_us") * 1000,
        copies_ns=pl.max_horizontal(
            pl.col("busy_us") - pl.col("compute_us") - pl.col("exposed_comm_us"), 0.0
        )
        * 1000,
    )
    operations, program = phase_operations(
        rows,
        before={"compute_ns": "compute", "copies_ns": "memory-copy", "idle_ns": "device-idle"},
        blocked="blocked_ns",
        after={},
        stages=_blocks(ranks, stages),
        source=", ".join(map(str, paths)),
    )
    remarks = [text for texts in result.incomplete_of for text in texts]
    return what_if(
        operations,
        program,
        communication=frozenset({MEETING}),
        missing=tuple(dict.fromkeys(remarks)),
        measured_s=float(rows["span_us"].mean()) / 1e6,  # type: ignore[arg-type]
    )

"""Operations from phase times: for runs and profiler traces, where no operation trace is.

A step of one worker is its own work, then the time it was blocked in collectives. Of that, the
least among the step's workers is transfer (the last to arrive waits for nobody); the rest is
waiting, and arises again in the replay. So workers meet once a step, after their work.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from kansoku.errors import InputError
from kansoku.trace.whatif.program import Program, chain_program
from kansoku.trace.whatif.record import Operations, operations_of

__all__ = ["MEETING", "phase_operations"]

MEETING = "collective"
"""Type of the operation in which all workers meet."""


def phase_operations(
    rows: pl.DataFrame,
    *,
    before: Mapping[str, str],
    blocked: str,
    after: Mapping[str, str],
    stages: Sequence[Sequence[int]] | None,
    source: str,
) -> tuple[Operations, Program]:
    """Arrange one row per rank and step, with columns of nanoseconds, as operations.

    ``before`` and ``after`` map a column of own work to its operation type, before and after the
    meeting; ``blocked`` is the column of time blocked in collectives. ``stages`` lists the ranks of
    each pipeline stage; None: one stage. Raises InputError if the ranks share no step.
    """
    ranks = sorted(set(rows["rank"].to_list()))
    places = _places(stages, ranks, source)
    columns = [*before, blocked, *after]
    rows = (
        rows.drop_nulls(["rank", "step", *columns])
        .unique(subset=["rank", "step"], keep="first")
        .with_columns(pl.len().over("step").alias("workers"))
    )
    whole = rows.filter(pl.col("workers") == len(ranks)).sort("step", "rank")
    if whole.is_empty():
        raise InputError("no step that all ranks have", where=source)
    lost = rows["step"].n_unique() - whole["step"].n_unique()
    count = len(whole) // len(ranks)
    times = {
        name: whole[name].to_numpy().astype(np.float64).reshape(count, len(ranks)) / 1e9
        for name in columns
    }
    work = sum((times[name] for name in before), np.zeros((count, len(ranks))))
    meeting_end = work.max(axis=1) + times[blocked].min(axis=1)
    at = np.zeros((count, len(ranks)))
    frames = []
    kinds = {**before, blocked: MEETING, **after}
    for number, name in enumerate(columns):
        duration = times[name] if name != blocked else meeting_end[:, None] - at
        frames.append(
            pl.DataFrame(
                {
                    "dp_rank": [places[rank][0] for rank in whole["rank"].to_list()],
                    "stage": [places[rank][1] for rank in whole["rank"].to_list()],
                    "rank": whole["rank"],
                    "step": whole["step"].cast(pl.Int64),
                    "optype": kinds[name],
                    "seq_id": number,
                    "mc": 0,
                    "mb_id": -1,
                    "gmc": -1,
                    "start_ts": at.reshape(-1),
                    "duration": duration.reshape(-1),
                }
            )
        )
        at = at + duration
    operations = operations_of(pl.concat(frames, how="vertical_relaxed"), source=source)
    if lost:
        operations = _with_missing(operations, f"{lost} steps are not on all ranks: left out")
    return operations, chain_program(operations, across_dp=frozenset({MEETING}))


def _with_missing(operations: Operations, sentence: str) -> Operations:
    return Operations(
        nodes=operations.nodes,
        steps=operations.steps,
        dp_size=operations.dp_size,
        start_s=operations.start_s,
        end_s=operations.end_s,
        ranks=operations.ranks,
        missing=(*operations.missing, sentence),
    )


def _places(
    stages: Sequence[Sequence[int]] | None, ranks: Sequence[int], source: str
) -> dict[int, tuple[int, int]]:
    """Return each rank's (place within its stage, stage)."""
    groups = [list(ranks)] if stages is None else [sorted(stage) for stage in stages]
    places = {
        rank: (place, number)
        for number, group in enumerate(groups)
        for place, rank in enumerate(group)
    }
    if len({len(group) for group in groups}) != 1 or set(places) != set(ranks):
        raise InputError(
            "the pipeline stages do not divide the ranks evenly",
            where=source,
            remedy="give --stages, or the traces of all ranks",
        )
    return places

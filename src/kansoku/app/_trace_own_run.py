"""Our own run directories in the trace commands, by the host's clock."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from kansoku.app._run_clocks import aligned_arrivals
from kansoku.errors import InputError
from kansoku.formats.run_directory import RunData, read_run
from kansoku.model.phase import PHASES
from kansoku.trace.clocks import ClockModel
from kansoku.trace.collectives import collective_rows
from kansoku.trace.host_path import HostSpan, LastArrival, host_path
from kansoku.trace.kineto.arrivals import (
    Arrival,
    ArrivalPolicy,
    ArrivalReport,
    find_stragglers,
)
from kansoku.trace.kineto.breakdown import Figures, StepFigures
from kansoku.trace.kineto.compare import Profile, summary
from kansoku.trace.kineto.critical_path import RankPaths
from kansoku.trace.kineto.intervals import IntervalSet, union
from kansoku.trace.kineto.report import RankBreakdown
from kansoku.trace.kineto.tables import CollectiveRow
from kansoku.trace.steps import step_rows

__all__ = [
    "own_run_breakdowns",
    "own_run_clocks",
    "own_run_paths",
    "own_run_profiles",
    "own_run_stragglers",
]

_WORK = ("forward_ns", "backward_ns", "optimizer_ns")
_REMARK = (
    "own run: figures are by the host's clock (compute = forward, backward and optimizer outside "
    "collectives; exposed comm = the main thread blocked); kernels were not traced"
)
_PATH_REMARK = (
    "own run: the path is the main thread's, by the host's clock; device rows were not traced"
)


def own_run_breakdowns(path: Path) -> list[RankBreakdown]:
    """Return one breakdown per rank of a run directory."""
    data = read_run(path)
    steps = step_rows(data.spans, facts=data.facts, resources=data.resources)
    world = next((facts.world_size for facts in data.facts.ranks if facts.world_size), None)
    closed = data.spans.filter(pl.col("duration_ns").is_not_null() & pl.col("rank").is_not_null())
    devices = {facts.rank: facts.device for facts in data.facts.ranks}
    parts = []
    ranks = sorted(closed["rank"].unique().to_list())
    for rank in ranks:
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
                world_size=world,
                device_name=devices.get(rank),
                start_ns=start,
                rows=len(spans),
                host_span_ns=end - start,
                figures=_sum(found),
                steps=tuple(found),
                collectives=tuple(_collective(row) for row in collectives.iter_rows(named=True)),
                incomplete=_missing_of(data.missing, rank, ranks),
                notes=(_REMARK,),
            )
        )
    return parts


def _missing_of(missing: Sequence[str], rank: int, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return what is missing of a rank or of the whole run, not what its peers lack."""
    others = tuple(f"rank {other}: " for other in ranks if other != rank)
    return tuple(
        text.removeprefix(f"rank {rank}: ") for text in missing if not text.startswith(others)
    )


def own_run_clocks(data: RunData) -> ClockModel:
    """Return the clocks of the run's hosts, as its report has them."""
    rows = collective_rows(data.spans, data.facts)
    return aligned_arrivals(rows, data.facts.node_of_rank)[1]


def own_run_stragglers(
    data: RunData, clocks: ClockModel, policy: ArrivalPolicy | None = None
) -> ArrivalReport:
    """Match the collectives of a run, on one clock, and name whom the others wait for."""
    by_rank = own_run_arrivals(data, clocks)
    added = dict.fromkeys(by_rank, 0)
    if clocks.applied:
        added |= {o.rank: -round(o.offset_ns) for o in clocks.offsets if o.rank in by_rank}
    return find_stragglers(by_rank, policy, added_ns=added)


def own_run_arrivals(data: RunData, clocks: ClockModel | None = None) -> dict[int, list[Arrival]]:
    """Return the finished collectives of each rank: on one clock where ``clocks`` are given."""
    spans = data.spans.filter(
        (pl.col("kind") == "collective")
        & pl.col("duration_ns").is_not_null()
        & pl.col("rank").is_not_null()
    )
    end: pl.Expr = pl.col("start_ns") + pl.col("duration_ns")
    rows = spans.select("rank", "name", "group", "sequence", "start_ns", end_ns=end)
    if clocks is not None:
        rows = rows.with_columns(clocks.corrected("start_ns"), clocks.corrected("end_ns"))
    by_rank: defaultdict[int, list[Arrival]] = defaultdict(list)
    for rank, name, group, sequence, start, finish in rows.iter_rows():
        by_rank[rank].append(
            Arrival(
                operation=name or "collective",
                group=group,
                sequence=sequence,
                start_ns=start,
                end_ns=finish,
            )
        )
    return dict(by_rank)


def own_run_paths(path: Path, *, steps: bool) -> list[RankPaths]:
    """Return what bounds each step of each rank (``steps=False``: all of its steps together)."""
    data = read_run(path)
    rows = _finished_steps(data, path)
    last = _last_arrivals(data)
    world = next((facts.world_size for facts in data.facts.ranks if facts.world_size), None)
    parts = []
    for rank in sorted(rows["rank"].unique().to_list()):
        own = rows.filter(pl.col("rank") == rank).sort("start_ns")
        windows = [
            (step, start, start + length)
            for step, start, length in own.select("step", "start_ns", "duration_ns").iter_rows()
        ]
        if not steps:
            windows = [(None, windows[0][1], max(end for _, _, end in windows))]
        spans = _main_thread(data.spans, rank)
        reach = list(accumulate((span.end_ns for span in spans), max))
        parts.append(
            RankPaths(
                file=str(path),
                said_rank=rank,
                named_rank=None,
                world_size=world,
                base_ns=0,
                paths=tuple(
                    host_path(
                        step, start, end, _between(spans, reach, start, end), last.get(rank, {})
                    )
                    for step, start, end in windows
                    if end > start
                ),
                incomplete=(*data.missing, _PATH_REMARK),
            )
        )
    return parts


def _finished_steps(data: RunData, path: Path) -> pl.DataFrame:
    steps = step_rows(data.spans, facts=data.facts, resources=data.resources)
    rows = steps.filter(pl.col("duration_ns").is_not_null() & pl.col("rank").is_not_null())
    if rows.is_empty():
        raise InputError("the run recorded no finished step", where=str(path))
    return rows


def _main_thread(spans: pl.DataFrame, rank: int) -> list[HostSpan]:
    """Return the closed spans of the thread that its steps are on, in order of their starts."""
    own = spans.filter((pl.col("rank") == rank) & pl.col("duration_ns").is_not_null())
    threads = own.filter(pl.col("kind") == "step")["thread"].drop_nulls()
    main = threads[0] if len(threads) else None
    kept = own.filter(
        ~pl.col("kind").is_in(["step", "note"])
        & ((pl.col("thread") == main) | pl.col("thread").is_null() | pl.lit(main is None))
        # Issued without blocking: the thread went on, and what it waited has a span of its own.
        & ~pl.col("attributes").str.contains('"async":true', literal=True).fill_null(value=False)
    ).sort("start_ns")
    return [
        HostSpan(
            kind=kind,
            name=name or kind,
            start_ns=start,
            end_ns=start + length,
            collective=(group, name or "collective", sequence)
            if kind == "collective" and sequence is not None
            else None,
        )
        for kind, name, group, sequence, start, length in kept.select(
            "kind", "name", "group", "sequence", "start_ns", "duration_ns"
        ).iter_rows()
    ]


def _between(spans: list[HostSpan], reach: list[int], start: int, end: int) -> list[HostSpan]:
    """Return at least the spans that touch a window; ``reach`` is the latest end so far."""
    low = bisect_right(reach, start)
    return spans[low : bisect_left(spans, end, key=lambda span: span.start_ns)]


def _last_arrivals(
    data: RunData,
) -> dict[int, dict[tuple[str | None, str, int], LastArrival]]:
    """Return for each rank and collective when its last member came, on the rank's own clock."""
    found: defaultdict[int, dict[tuple[str | None, str, int], LastArrival]] = defaultdict(dict)
    clocks = own_run_clocks(data)
    starts = {
        (rank, row.group, row.operation, row.sequence): row.start_ns
        for rank, rows in own_run_arrivals(data).items()
        for row in rows
    }
    for one in own_run_stragglers(data, clocks).collectives:
        for rank, after_first in one.arrivals:
            own = starts.get((rank, one.group, one.operation, one.sequence))
            if own is not None:
                found[rank][one.group, one.operation, one.sequence] = LastArrival(
                    rank=one.last_rank, at_ns=own + one.spread_ns - after_first
                )
    return found


def own_run_profiles(path: Path) -> list[Profile]:
    """Return what a comparison needs of each rank: phases of its steps, and collectives."""
    data = read_run(path)
    rows = _finished_steps(data, path)
    closed = data.spans.filter(
        (pl.col("kind") == "collective") & pl.col("duration_ns").is_not_null()
    )
    parts = []
    for rank in sorted(rows["rank"].unique().to_list()):
        own = rows.filter(pl.col("rank") == rank)
        grouped: defaultdict[str, list[int]] = defaultdict(list)
        for name, size, length in (
            closed.filter(pl.col("rank") == rank).select("name", "bytes", "duration_ns").iter_rows()
        ):
            grouped[f"{name or 'collective'}{'' if size is None else f' {size} B'}"].append(length)
        phases = {"step": "duration_ns", **{p.value: f"{p.value}_ns" for p in PHASES}}
        parts.append(
            Profile(
                file=str(path),
                steps=len(own),
                kernels={},
                collectives={
                    name: summary(np.sort(np.array(lengths, np.int64)))
                    for name, lengths in grouped.items()
                },
                operators={},
                phases={
                    name.replace("_", " "): tuple(own[column].fill_null(0).to_list())
                    for name, column in phases.items()
                },
                incomplete=tuple(data.missing),
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

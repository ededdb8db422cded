"""Everything the breakdown says of one rank, small enough to travel between processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kansoku.catalog.kernels import RowKind
from kansoku.formats.kineto import KinetoTrace
from kansoku.trace.kineto.breakdown import (
    NO_FIGURES,
    Figures,
    IdleSplit,
    StepFigures,
    bounds_of_parts,
    figures_of_parts,
    idle_split,
    steps_of_parts,
    unions,
)
from kansoku.trace.kineto.joined import Joined, alone, join
from kansoku.trace.kineto.rows import DeviceRows, codes_in, device_rows
from kansoku.trace.kineto.tables import (
    CallCost,
    CollectiveRow,
    CopyRow,
    KernelRow,
    LaunchFigures,
    QueueRow,
    call_costs,
    collectives_of_parts,
    copies,
    kernels,
    launches,
    queues,
)

__all__ = ["RankBreakdown", "break_down", "break_down_together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBreakdown:
    """The breakdown of one file. What a source cannot tell keeps its default."""

    file: str
    said_rank: int | None = None
    """From distributedInfo."""
    named_rank: int | None = None
    """From the file name."""
    world_size: int | None
    device_name: str | None = None
    base_ns: int = 0
    start_ns: int | None = None
    """First device start on the file's clock."""
    devices: tuple[int, ...] = ()
    rows: int
    host_span_ns: int | None = None
    figures: Figures = NO_FIGURES
    idle: IdleSplit | None = None
    steps: tuple[StepFigures, ...] = ()
    outside_steps_busy_ns: int | None = None
    """Busy time in no step's window: the device ran before the first or after the last step."""
    kernels: tuple[KernelRow, ...] = ()
    copies: tuple[CopyRow, ...] = ()
    launches: LaunchFigures | None = None
    queues: tuple[QueueRow, ...] = ()
    annotations: tuple[CallCost, ...] = ()
    modules: tuple[CallCost, ...] = ()
    operators: tuple[tuple[str, int, int | None], ...] = ()
    """Host operators: name, calls, total ns (None without a clock); longest first."""
    collectives: tuple[CollectiveRow, ...] = ()
    incomplete: tuple[str, ...]
    notes: tuple[str, ...] = ()


def break_down(trace: KinetoTrace, named_rank: int | None = None) -> RankBreakdown:
    """Analyse one trace."""
    return _of_set(alone(trace), [named_rank])[0]


def break_down_together(
    traces: Sequence[KinetoTrace], named_ranks: Sequence[int | None]
) -> list[RankBreakdown]:
    """Analyse several traces, small ones best: together they take little more than one."""
    ranks = iter(named_ranks)
    return [
        part
        for joined in join(traces)
        for part in _of_set(joined, list(islice(ranks, len(joined.traces))))
    ]


def _of_set(joined: Joined, named_ranks: Sequence[int | None]) -> list[RankBreakdown]:
    rows = device_rows(joined)
    sets = unions(rows)
    return [
        _of_part(*of_part)
        for of_part in zip(
            joined.traces,
            named_ranks,
            joined.shifts,
            bounds_of_parts(joined, rows),
            _devices(joined, rows),
            steps_of_parts(joined, rows, sets),
            zip(
                figures_of_parts(joined, rows, sets),
                idle_split(joined, rows, sets),
                kernels(joined, rows),
                copies(joined, rows),
                launches(joined, rows),
                queues(joined, rows),
                call_costs(joined, rows, RowKind.ANNOTATION),
                call_costs(joined, rows, RowKind.MODULE),
                collectives_of_parts(joined, rows),
                strict=True,
            ),
            strict=True,
        )
    ]


def _devices(joined: Joined, rows: DeviceRows) -> list[list[int]]:
    """Return the indexes of the devices of each part, ascending."""
    found: list[set[int]] = [set() for _ in joined.traces]
    for lane in codes_in(rows.lane):
        device = joined.lanes[lane][2]
        if device is not None and device >= 0:
            found[joined.lane_part[lane]].add(device)
    return [sorted(devices) for devices in found]


def _of_part(
    trace: KinetoTrace,
    named_rank: int | None,
    shift: int,
    bounds: tuple[int, int] | None,
    devices: list[int],
    steps: list[StepFigures],
    rest: tuple[
        Figures,
        IdleSplit | None,
        list[KernelRow],
        list[CopyRow],
        LaunchFigures | None,
        list[QueueRow],
        list[CallCost],
        list[CallCost],
        list[CollectiveRow],
    ],
) -> RankBreakdown:
    whole, idle, by_name, moved, launched, queued, annotations, modules, collective = rest
    host = None
    if trace.host_start_ns is not None and trace.host_end_ns is not None:
        host = trace.host_end_ns - trace.host_start_ns
    outside = None
    if whole.busy_ns is not None:
        outside = max(whole.busy_ns - sum(step.figures.busy_ns or 0 for step in steps), 0)
    notes = list(trace.notes)
    if len(devices) > 1:
        notes.append(
            f"rows of {len(devices)} devices in one file: figures are over all of them together"
        )
    return RankBreakdown(
        file=trace.file,
        said_rank=trace.metadata.rank,
        named_rank=named_rank,
        world_size=trace.metadata.world_size,
        device_name=trace.metadata.device_name,
        base_ns=trace.base_ns,
        start_ns=None if bounds is None else bounds[0] - shift,
        devices=tuple(devices),
        rows=trace.rows,
        host_span_ns=host,
        figures=whole,
        idle=idle,
        steps=tuple(steps),
        outside_steps_busy_ns=outside,
        kernels=tuple(by_name),
        copies=tuple(moved),
        launches=launched,
        queues=tuple(queued),
        annotations=tuple(annotations),
        modules=tuple(modules),
        operators=tuple(
            (name, calls, total)
            for name, (calls, total, _) in sorted(
                trace.operators.items(), key=lambda item: (-item[1][1], item[0])
            )
        ),
        collectives=tuple(collective),
        incomplete=tuple(trace.problems),
        notes=tuple(notes),
    )

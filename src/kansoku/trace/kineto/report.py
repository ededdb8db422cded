"""Everything the breakdown says of one rank, small enough to travel between processes."""

from dataclasses import dataclass

from kansoku.catalog.kernels import RowKind
from kansoku.formats.kineto import KinetoTrace
from kansoku.trace.kineto.breakdown import (
    NO_FIGURES,
    Figures,
    IdleSplit,
    StepFigures,
    figures,
    find_steps,
    idle_split,
    unions,
)
from kansoku.trace.kineto.rows import device_rows
from kansoku.trace.kineto.tables import (
    CallCost,
    CollectiveRow,
    CopyRow,
    KernelRow,
    LaunchFigures,
    QueueRow,
    call_costs,
    collectives,
    copies,
    kernels,
    launches,
    queues,
)

__all__ = ["RankBreakdown", "break_down"]


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
    rows = device_rows(trace)
    sets = unions(rows)
    steps = find_steps(trace, rows, sets)
    devices = sorted(
        {
            device
            for lane in set(rows.lane.tolist())
            if (device := trace.lanes[lane][2]) is not None and device >= 0
        }
    )
    host = None
    if trace.host_start_ns is not None and trace.host_end_ns is not None:
        host = trace.host_end_ns - trace.host_start_ns
    outside = None
    if len(rows.start):
        inside = sum(step.figures.busy_ns or 0 for step in steps)
        outside = max(sets.busy.total_ns - inside, 0)
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
        start_ns=int(rows.start.min()) if len(rows.start) else None,
        devices=tuple(devices),
        rows=trace.rows,
        host_span_ns=host,
        figures=figures(sets, rows),
        idle=idle_split(trace, rows, sets),
        steps=tuple(steps),
        outside_steps_busy_ns=outside,
        kernels=tuple(kernels(trace, rows)),
        copies=tuple(copies(trace, rows)),
        launches=launches(trace, rows),
        queues=tuple(queues(trace, rows)),
        annotations=tuple(call_costs(trace, rows, RowKind.ANNOTATION)),
        modules=tuple(call_costs(trace, rows, RowKind.MODULE)),
        operators=tuple(
            (name, calls, total)
            for name, (calls, total, _) in sorted(
                trace.operators.items(), key=lambda item: (-item[1][1], item[0])
            )
        ),
        collectives=tuple(collectives(trace, rows)),
        incomplete=tuple(trace.problems),
        notes=tuple(notes),
    )

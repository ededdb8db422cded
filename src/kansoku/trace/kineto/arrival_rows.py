"""The collectives of one Kineto trace as arrivals."""

from dataclasses import dataclass

import numpy as np

from kansoku.catalog.kernels import RowKind, kernel_rules
from kansoku.formats.kineto import KinetoTrace
from kansoku.trace.kineto.arrivals import Arrival
from kansoku.trace.kineto.rows import device_rows
from kansoku.trace.kineto.tables import collectives

__all__ = ["RankArrivals", "rank_arrivals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArrivals:
    """The arrivals of one file."""

    file: str
    said_rank: int | None
    named_rank: int | None
    world_size: int | None
    arrivals: tuple[Arrival, ...]
    incomplete: tuple[str, ...]


def rank_arrivals(trace: KinetoTrace, named_rank: int | None) -> RankArrivals:
    """Return collective kernels, or the host's collective rows where there is no device."""
    rows = device_rows(trace)
    found = [
        Arrival(
            operation=row.operation,
            group=None if row.group is None else f"{row.group} {row.ranks or ''}".strip(),
            sequence=row.sequence,
            start_ns=trace.base_ns + row.start_ns,
            end_ns=trace.base_ns + row.start_ns + row.duration_ns,
        )
        for row in collectives(trace, rows)
    ]
    if len(rows.start) == 0:
        found = _host_arrivals(trace)
    return RankArrivals(
        file=trace.file,
        said_rank=trace.metadata.rank,
        named_rank=named_rank,
        world_size=trace.metadata.world_size,
        arrivals=tuple(found),
        incomplete=tuple(trace.problems),
    )


def _host_arrivals(trace: KinetoTrace) -> list[Arrival]:
    columns = trace.columns
    rules = kernel_rules()
    rows = np.flatnonzero(columns["kind"] == RowKind.HOST_COLLECTIVE)
    out = []
    for row in rows.tolist():
        name = trace.names[int(columns["name"][row])]
        if not name.startswith(("gloo:", "mpi:")):
            continue  # device collectives return before they end; only these block
        start = trace.base_ns + int(columns["start_ns"][row])
        out.append(
            Arrival(
                operation=rules.operation(name),
                group=None,
                sequence=None,
                start_ns=start,
                end_ns=start + int(columns["duration_ns"][row]),
            )
        )
    return out

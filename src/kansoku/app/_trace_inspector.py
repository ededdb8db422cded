"""NCCL Inspector's files in the trace commands: collectives with bandwidths, and who comes late."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.errors import InputError
from kansoku.formats.nccl_inspector import read_inspector
from kansoku.trace.kineto.arrivals import Arrival
from kansoku.trace.kineto.report import RankBreakdown
from kansoku.trace.kineto.tables import CollectiveRow

__all__ = ["InspectorRank", "inspector_arrivals", "inspector_breakdown", "read_ranks"]

_ONLY = (
    "NCCL Inspector records collectives and nothing else: span, busy, compute and overlap are "
    "unknown"
)
# All members need something of all others, so none can end before the last has come.
_MEETINGS = frozenset({"all_reduce", "all_gather", "reduce_scatter"})
# The size that nccl-tests counts is the larger buffer; the file has that of one rank's part.
_WHOLE = frozenset({"all_gather", "reduce_scatter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorRank:
    """What one process wrote."""

    file: str
    rank: int | None
    """Its place in the communicator that holds all processes; None where there is none."""
    world_size: int | None
    spans: pl.DataFrame
    damaged: int


def read_ranks(files: Sequence[Path]) -> list[InspectorRank]:
    """Read the files of one job; a file is one process."""
    found = [read_inspector(path) for path in files]
    sizes: dict[str, int] = {}
    members: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for number, one in enumerate(found):
        groups = one.spans.unique("group", keep="first")
        for group, rank, attributes in groups.select("group", "rank", "attributes").iter_rows():
            sizes[group] = int(json.loads(attributes).get("ranks") or 0)
            members[group][number] = rank
    # A rank is its place in the largest communicator, if every file knows that one.
    world = max(sizes, key=lambda group: (sizes[group], group))
    common = len(members[world]) == len(found)
    return [
        InspectorRank(
            file=str(path),
            rank=members[world][number] if common else None,
            world_size=sizes[world] if common and sizes[world] > 0 else None,
            spans=one.spans,
            damaged=one.damaged,
        )
        for number, (path, one) in enumerate(zip(files, found, strict=True))
    ]


def inspector_breakdown(part: InspectorRank) -> RankBreakdown:
    """Return the collectives of one process; every figure that needs other rows is unknown."""
    incomplete = [_ONLY]
    rows = [
        _collective(row, json.loads(row["attributes"])) for row in part.spans.iter_rows(named=True)
    ]
    if not part.spans["attributes"].str.contains('"start": "traced"').all():
        incomplete.append(
            "starts are the time of writing minus the duration (NCCL_INSPECTOR_DUMP_VERBOSE=1 "
            "records them)"
        )
    if part.damaged:
        incomplete.append(f"{part.damaged} damaged stretches could not be read and were left out")
    return RankBreakdown(
        file=part.file,
        said_rank=part.rank,
        world_size=part.world_size,
        rows=len(rows),
        collectives=tuple(rows),
        incomplete=tuple(incomplete),
    )


def _collective(row: dict[str, Any], facts: dict[str, Any]) -> CollectiveRow:
    size, members = row["bytes"], facts.get("ranks")
    if row["name"] in _WHOLE:
        size = size * members if size is not None and members else None
    computed = size / row["duration_ns"] * 1e9 if size is not None and row["duration_ns"] else None
    return CollectiveRow(
        operation=row["name"],
        group=row["group"],
        description=facts.get("communicator"),
        group_size=members,
        sequence=row["sequence"],
        stream="",
        start_ns=row["start_ns"],
        duration_ns=row["duration_ns"],
        dtype=None,
        bytes=size,
        algorithm_bytes_per_s=facts.get("algorithm_bytes_per_s", computed),
        bus_bytes_per_s=facts.get("bus_bytes_per_s"),
        ranks=None,
    )


def inspector_arrivals(parts: Sequence[InspectorRank]) -> dict[int, list[Arrival]]:
    """Return each rank's arrivals, from durations alone.

    The members of a collective in which each needs all others end together; so whoever was in it
    the shortest came last. Other operations are passed over. Raises InputError without ranks.
    """
    if any(part.rank is None for part in parts):
        raise InputError(
            "no communicator is in all files: ranks are unknown",
            where=", ".join(part.file for part in parts[:3]),
            remedy="give the files of all ranks of one job",
        )
    columns = ("name", "group", "sequence", "start_ns", "duration_ns")
    ends: dict[tuple[str, str, int], int] = {}
    rows = [
        (part.rank or 0, name, group, sequence, start + duration, duration)
        for part in parts
        for name, group, sequence, start, duration in part.spans.select(columns).iter_rows()
        if name in _MEETINGS and sequence is not None
    ]
    for _, name, group, sequence, end, _ in rows:
        key = (name, group, sequence)
        ends[key] = max(ends.get(key, end), end)
    found: dict[int, list[Arrival]] = {part.rank or 0: [] for part in parts}
    for rank, name, group, sequence, _, duration in rows:
        end = ends[name, group, sequence]
        found[rank].append(
            Arrival(
                operation=name,
                group=group,
                sequence=sequence,
                start_ns=end - duration,
                end_ns=end,
            )
        )
    return found

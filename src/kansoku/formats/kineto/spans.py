"""Every slice of a trace as rows of the ``spans`` table, chunk by chunk.

``attributes`` holds what the table has no column for: category, process and thread as the file
wrote them, and all arguments, so that a conversion back loses no slice's content.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from kansoku.catalog.kernels import RowKind, kernel_rules
from kansoku.formats.kineto._events import FullEvent, decode, nanoseconds
from kansoku.formats.kineto._scan import split
from kansoku.formats.kineto._source import Source, read_blocks
from kansoku.model.tables import table_schema

__all__ = ["SpanFacts", "read_spans"]

_KINDS = {
    RowKind.COMPUTE: "kernel",
    RowKind.COLLECTIVE: "collective",
    RowKind.MEMCPY: "memcpy",
    RowKind.MEMSET: "memset",
    RowKind.DEVICE_SYNC: "device_sync",
    RowKind.LAUNCH: "launch",
    RowKind.ANNOTATION: "annotation",
    RowKind.DEVICE_ANNOTATION: "device_annotation",
    RowKind.MODULE: "module",
    RowKind.HOST_COLLECTIVE: "host_collective",
    RowKind.OPERATOR: "operator",
    RowKind.PYTHON: "python",
    RowKind.OTHER: "other",
}
_DEVICE = frozenset(
    {"kernel", "collective", "memcpy", "memset", "device_sync", "device_annotation"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFacts:
    """What a first pass over the file found."""

    run: str
    rank: int | None
    base_ns: int
    steps: tuple[tuple[int | None, int, int], ...]
    """(step, start, end) on the file's clock, ascending."""


def read_spans(source: Source, facts: SpanFacts) -> Iterator[pl.DataFrame]:
    """Yield the slices of each chunk as ``spans`` rows; unreadable ones are left out.

    How many those are, the first pass (:func:`kansoku.formats.kineto.read_trace`) has said.
    """
    schema = table_schema("spans")
    starts = [start for _, start, _ in facts.steps]
    number = 0
    pieces = split(read_blocks(source, []))
    next(pieces)
    for piece in pieces:
        decoded = decode(piece, full=True)
        rows = []
        for event in decoded.events:
            row = _row(event, facts, starts)
            if row is None:
                continue
            number += 1
            row["id"] = number
            rows.append(row)
        yield pl.DataFrame(rows, schema=schema, orient="row")
        if decoded.tail is not None:
            return


def _row(event: FullEvent, facts: SpanFacts, starts: list[int]) -> dict[str, Any] | None:
    start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
    if start is None or duration is None or duration < 0:
        return None
    arguments = _arguments(event.args)
    name = str(event.name)
    rules = kernel_rules()
    kind = _KINDS[
        rules.refine(
            rules.category(event.cat), name, has_collective_arguments="Collective name" in arguments
        )
    ]
    place = bisect_right(starts, start) - 1
    step = None
    if place >= 0 and start < facts.steps[place][2]:
        step = facts.steps[place][0]
    on_device = kind in _DEVICE
    dtype = arguments.get("dtype")
    return {
        "run": facts.run,
        "rank": facts.rank,
        "step": step,
        "kind": kind,
        "name": name,
        "start_ns": facts.base_ns + start,
        "duration_ns": duration,
        "group": _text(arguments.get("Process Group Name")),
        "sequence": _whole(arguments.get("Seq")),
        "bytes": _whole(arguments.get("bytes")),
        "dtype": dtype if isinstance(dtype, str) else None,
        "device": f"gpu:{arguments.get('device', event.pid)}" if on_device else "cpu",
        "thread": _whole(event.tid),
        "attributes": msgspec.json.encode(
            {"cat": event.cat, "pid": event.pid, "tid": event.tid, "args": arguments}
        ).decode(),
    }


def _arguments(raw: msgspec.Raw) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.isdigit() and len(value) < 19:
        value = int(value)
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None

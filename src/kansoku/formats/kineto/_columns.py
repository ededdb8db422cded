"""Turn decoded events into columns; merge the columns of many chunks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind, kernel_rules
from kansoku.formats.kineto._events import (
    Damage,
    Decoded,
    decode,
    exact_needed,
    nanoseconds,
)
from kansoku.formats.kineto._scan import Piece

__all__ = ["COLUMNS", "NO_ID", "Batch", "CollectiveArguments", "read_piece"]

NO_ID = np.iinfo(np.int64).min
"""Column value of an absent id, byte count or sequence number."""

COLUMNS: dict[str, Any] = {
    "kind": np.uint8,
    "name": np.int32,
    "lane": np.int32,
    "start_ns": np.int64,
    "duration_ns": np.int64,
    "correlation": np.int64,
    "bytes": np.int64,
    "collective": np.int32,
    "sequence": np.int32,
}

_KEPT_CATEGORIES = frozenset(
    {
        RowKind.COMPUTE,
        RowKind.MEMCPY,
        RowKind.MEMSET,
        RowKind.DEVICE_SYNC,
        RowKind.LAUNCH,
        RowKind.ANNOTATION,
        RowKind.DEVICE_ANNOTATION,
        RowKind.HOST_COLLECTIVE,
    }
)
_DEVICE = frozenset(
    {
        RowKind.COMPUTE,
        RowKind.MEMCPY,
        RowKind.MEMSET,
        RowKind.DEVICE_SYNC,
        RowKind.DEVICE_ANNOTATION,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveArguments:
    """What the arguments of a collective's rows say; the same object serves many rows."""

    operation: str | None
    group: str | None
    description: str | None
    ranks: str | None
    group_size: int | None
    dtype: str | None
    in_elements: int | None
    out_elements: int | None


@dataclass(slots=True, kw_only=True)
class Batch:
    """Columns of one chunk: rows that analyses use, and sums of the others."""

    columns: dict[str, NDArray[Any]]
    names: list[str]
    lanes: list[tuple[str, str, int | None]]
    """Process, thread (stream) and device index (None on the host) of each lane."""
    collectives: list[CollectiveArguments]
    operators: dict[str, tuple[int, int]]
    """Operator name to (calls, total ns), rows themselves not kept."""
    python_rows: int
    rows: int
    slices: int
    """Slices (``ph`` X) read, set-aside ones included."""
    set_aside: Counter[str]
    host_start_ns: int | None
    host_end_ns: int | None
    damage: Damage
    tail: str | None
    exact: bool
    offset: int = 0


@dataclass(slots=True)
class _Interner:
    index: dict[Any, int] = field(default_factory=dict)

    def __call__(self, value: Any) -> int:
        return self.index.setdefault(value, len(self.index))


class _Kinds(dict[Any, RowKind]):
    def __missing__(self, category: Any) -> RowKind:
        self[category] = found = kernel_rules().category(category)
        return found


_KINDS = _Kinds()


def read_piece(piece: Piece, *, exact: bool = False) -> Batch:
    """Decode a piece and return its columns; a function of the piece alone, for any process."""
    decoded = decode(piece, exact=exact)
    if not exact and exact_needed([event.ts for event in decoded.events]):
        exact = True
        decoded = decode(piece, exact=True)
    batch = _columns(decoded, exact=exact)
    batch.offset = piece.offset
    return batch


def _columns(decoded: Decoded, *, exact: bool) -> Batch:
    kinds = _KINDS
    kept: list[Any] = []
    row_kinds: list[RowKind] = []
    operators: list[Any] = []
    python_rows = 0
    for event in decoded.events:
        kind = kinds[event.cat]
        if kind is RowKind.OPERATOR:
            if event.name == "record_param_comms":
                kept.append(event)
                row_kinds.append(kind)
            else:
                operators.append(event)
        elif kind in _KEPT_CATEGORIES:
            kept.append(event)
            row_kinds.append(kind)
        elif kind is RowKind.PYTHON:
            if str(event.name).startswith("nn.Module: "):
                kept.append(event)
                row_kinds.append(kind)
            else:
                python_rows += 1
    set_aside: Counter[str] = Counter()
    start, duration, valid = _stamps(kept, set_aside)
    if not valid.all():
        chosen = np.flatnonzero(valid)
        kept = [kept[i] for i in chosen]
        row_kinds = [row_kinds[i] for i in chosen]
        start, duration = start[chosen], duration[chosen]
    sums, op_start, op_end = _operator_sums(operators, set_aside)
    batch = _build(kept, row_kinds, start, duration)
    edges = [*(op_start, op_end), *_host_edges(batch, start, duration)]
    known = [edge for edge in edges if edge is not None]
    return Batch(
        columns=batch[0],
        names=batch[1],
        lanes=batch[2],
        collectives=batch[3],
        operators=sums,
        python_rows=python_rows,
        rows=decoded.rows,
        slices=len(decoded.events),
        set_aside=set_aside,
        host_start_ns=min(known, default=None),
        host_end_ns=max(known, default=None),
        damage=decoded.damage,
        tail=decoded.tail,
        exact=exact,
    )


_Built = tuple[
    dict[str, NDArray[Any]],
    list[str],
    list[tuple[str, str, int | None]],
    list[CollectiveArguments],
]


def _host_edges(
    built: _Built, start: NDArray[np.int64], duration: NDArray[np.int64]
) -> tuple[int | None, int | None]:
    kind = built[0]["kind"]
    host = (kind == RowKind.LAUNCH) | (kind == RowKind.ANNOTATION) | (kind >= RowKind.MODULE)
    host &= start > 0
    if not host.any():
        return None, None
    return int(start[host].min()), int((start + duration)[host].max())


def _stamps(
    events: Sequence[Any], set_aside: Counter[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    start = _to_ns([event.ts for event in events])
    duration = _to_ns([event.dur for event in events])
    no_stamp = (start == NO_ID) | (duration == NO_ID)
    negative = ~no_stamp & (duration < 0)
    if no_stamp.any():
        set_aside["no readable stamp"] += int(no_stamp.sum())
    if negative.any():
        set_aside["negative duration"] += int(negative.sum())
    return start, duration, ~(no_stamp | negative)


def _to_ns(values: list[Any]) -> NDArray[np.int64]:
    types = set(map(type, values))
    if types <= {int} and _fits(values):
        return np.array(values, dtype=np.int64) * 1000
    if types <= {int, float} and _fits(values):
        # Integers and fractions apart: the product of a double with 1000 would round.
        numbers = np.array(values, dtype=np.float64)
        whole = np.floor(numbers)
        return whole.astype(np.int64) * 1000 + np.rint((numbers - whole) * 1000).astype(np.int64)
    if types == {msgspec.Raw}:
        return np.fromiter(map(_raw_ns, values), dtype=np.int64, count=len(values))
    found = (nanoseconds(value) for value in values)
    return np.array([NO_ID if ns is None else ns for ns in found], dtype=np.int64)


def _fits(values: list[Any]) -> bool:
    return not values or (min(values) > -(1 << 52) and max(values) < (1 << 52))


def _raw_ns(raw: msgspec.Raw) -> int:
    text = bytes(raw)
    whole, _, fraction = text.partition(b".")
    if len(fraction) <= 3 and whole.isdigit() and len(whole) < 16:
        return int(whole) * 1000 + (int(fraction.ljust(3, b"0")) if fraction else 0)
    found = nanoseconds(raw)
    return NO_ID if found is None else found


def _operator_sums(
    operators: list[Any], set_aside: Counter[str]
) -> tuple[dict[str, tuple[int, int]], int | None, int | None]:
    if not operators:
        return {}, None, None
    start, duration, valid = _stamps(operators, set_aside)
    names = _Interner()
    codes = np.fromiter((names(event.name) for event in operators), np.int64, len(operators))
    codes, start, duration = codes[valid], start[valid], duration[valid]
    calls = np.bincount(codes, minlength=len(names.index))
    total = np.bincount(codes, weights=duration, minlength=len(names.index))
    sums = {
        str(name): (int(calls[code]), int(total[code]))
        for name, code in names.index.items()
        if calls[code]
    }
    stamped = start > 0
    if not stamped.any():
        return sums, None, None
    return sums, int(start[stamped].min()), int((start + duration)[stamped].max())


def _build(
    events: list[Any],
    kinds: list[RowKind],
    start: NDArray[np.int64],
    duration: NDArray[np.int64],
) -> _Built:
    size = len(events)
    names, lanes, shapes = _Interner(), _Interner(), _Interner()
    refined: dict[tuple[RowKind, Any, bool], RowKind] = {}
    rules = kernel_rules()
    kind = np.empty(size, np.uint8)
    lane = np.empty(size, np.int32)
    correlation = np.full(size, NO_ID, np.int64)
    moved = np.full(size, NO_ID, np.int64)
    collective = np.full(size, -1, np.int32)
    sequence = np.full(size, -1, np.int32)
    name = np.fromiter((names(str(event.name)) for event in events), np.int32, size)
    for row, (event, category) in enumerate(zip(events, kinds, strict=True)):
        arguments = event.args
        has_collective = False
        if arguments is not None:
            if (value := arguments.correlation) is not None:
                correlation[row] = value if _small(value) else _fold(value)
            if value := arguments.bytes if arguments.bytes is not None else arguments.size:
                moved[row] = _count(value)
            if arguments.collective is not None or arguments.group is not None:
                has_collective = arguments.collective is not None
                collective[row] = shapes(_collective(arguments))
                if (number := _whole(arguments.sequence)) is not None and 0 <= number < 1 << 31:
                    sequence[row] = number
        key = (category, event.name, has_collective)
        found = refined.get(key)
        if found is None:
            found = refined[key] = rules.refine(
                category, str(event.name), has_collective_arguments=has_collective
            )
        kind[row] = found
        if category in _DEVICE:
            lane[row] = lanes(_device_lane(event, arguments))
        else:
            lane[row] = lanes((event.pid, event.tid, None))
    columns: dict[str, NDArray[Any]] = {
        "kind": kind,
        "name": name,
        "lane": lane,
        "start_ns": start,
        "duration_ns": duration,
        "correlation": correlation,
        "bytes": moved,
        "collective": collective,
        "sequence": sequence,
    }
    places = [(str(pid), str(tid), device) for pid, tid, device in lanes.index]
    return columns, list(names.index), places, list(shapes.index)


def _device_lane(event: Any, arguments: Any) -> tuple[Any, Any, int | None]:
    device = None if arguments is None else _whole(arguments.device)
    if device is None:
        device = _whole(event.pid)
    stream = event.tid
    if arguments is not None and arguments.stream is not None:
        stream = arguments.stream
    return (event.pid, stream, -1 if device is None else device)


def _small(value: Any) -> bool:
    return type(value) is int and -(1 << 63) < value < 1 << 63


def _fold(value: Any) -> int:
    """Fold an id of any size or form into 64 bits, so that equal ids stay equal."""
    number = _whole(value)
    if number is None:
        return NO_ID
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _count(value: Any) -> int:
    number = _whole(value)
    return NO_ID if number is None or not 0 <= number < 1 << 62 else number


def _whole(value: Any) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        try:
            return int(value, 0)
        except ValueError:
            return None
    return None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _collective(arguments: Any) -> CollectiveArguments:
    return CollectiveArguments(
        operation=_text(arguments.collective),
        group=_text(arguments.group),
        description=_text(arguments.group_description),
        ranks=_text(arguments.group_ranks),
        group_size=_whole(arguments.group_size),
        dtype=_text(arguments.dtype),
        in_elements=_whole(arguments.in_elements),
        out_elements=_whole(arguments.out_elements),
    )

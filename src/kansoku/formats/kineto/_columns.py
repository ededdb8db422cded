"""Turn decoded events into columns; merge the columns of many chunks."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind, kernel_rules
from kansoku.formats.kineto._events import (
    EXACT_LIMIT_US,
    Damage,
    Decoded,
    End,
    Event,
    decode,
    nanoseconds,
)
from kansoku.formats.kineto._pairs import Edge
from kansoku.formats.kineto._scan import Piece

__all__ = [
    "COLUMNS",
    "DETAILS",
    "DEVICE",
    "IDLE_CALLS",
    "KEPT_CATEGORIES",
    "KINDS",
    "NO_ID",
    "Batch",
    "Codes",
    "CollectiveArguments",
    "DeviceLanes",
    "Notes",
    "endless",
    "host_edges",
    "read_paired",
    "read_piece",
    "refined",
    "sums_of",
]

NO_ID = np.iinfo(np.int64).min
"""Column value of an absent id, byte count or sequence number."""

COLUMNS: dict[str, Any] = {
    "kind": np.uint8,
    "name": np.int32,
    "lane": np.int32,
    "start_ns": np.int64,
    "duration_ns": np.int64,
    "correlation": np.int64,
}
"""Widest type of each column; a trace holds the narrowest that its values fit."""

DETAILS = ("bytes", "collective", "sequence")
"""What few rows have: kept for those alone."""

KEPT_CATEGORIES = frozenset(
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
DEVICE = frozenset(
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
    details: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
    """Name of a detail to the rows that have it, ascending, and their values."""
    names: list[str]
    lanes: list[tuple[str, str, int | None]]
    """Process, thread (stream) and device index (None on the host) of each lane."""
    collectives: list[CollectiveArguments]
    operators: dict[str, tuple[int, int, float]]
    """Operator name to (calls, total ns, sum of squared ns); rows themselves are not kept."""
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
    edges: list[Edge]
    """Beginnings and ends of slices, to be paired when all chunks are there."""
    offset: int = 0


class Codes(dict[Any, int]):
    """Value to code in order of appearance; a plain lookup once a value is known."""

    def __missing__(self, value: Any) -> int:
        self[value] = code = len(self)
        return code


class _Kinds(dict[Any, RowKind]):
    def __missing__(self, category: Any) -> RowKind:
        self[category] = found = kernel_rules().category(category)
        return found


class _IdleCalls(dict[Any, bool]):
    """Name of a runtime call to whether it launches nothing; bounded against hostile files."""

    def __missing__(self, name: Any) -> bool:
        found = kernel_rules().is_idle_call(str(name))
        if len(self) < 1 << 14:
            self[name] = found
        return found


_LONGEST_NS = 10 * 86_400 * 10**9
"""No call takes longer; it keeps sums far from 2**63."""
# So that ns stay below 2**62; Unix time in µs has 16 digits.
_THREE_DECIMALS = re.compile(rb"(?:[1-3]?\d{1,15}\.\d{3}(?: |$))++")
_LONG_STAMP = re.compile(rb"\"ts\"\s*:\s*\d{14,}\.\d")
"""Beyond EXACT_LIMIT_US, with a fraction: seen early, it spares decoding a chunk twice."""
_LOOK_BYTES = 1 << 13
KINDS = _Kinds()
IDLE_CALLS = _IdleCalls()


class _InexactError(Exception):
    """Some stamp has a fraction that a double of its size cannot hold."""


def read_piece(piece: Piece, *, exact: bool = False) -> Batch:
    """Decode a piece and return its columns; a function of the piece alone, for any process."""
    exact = exact or _LONG_STAMP.search(piece.data, 0, _LOOK_BYTES) is not None
    try:
        batch = _columns(decode(piece, exact=exact), exact=exact)
    except _InexactError:
        batch = _columns(decode(piece, exact=True), exact=True)
    batch.offset = piece.offset
    return batch


def read_paired(events: list[Event]) -> Batch:
    """Return the columns of slices that were joined from beginnings and ends."""
    return _columns(Decoded(events=events, rows=0, damage=Damage(), tail=None), exact=True)


def _edges(decoded: Decoded, set_aside: Counter[str]) -> list[Edge]:
    out = []
    for edge in decoded.edges:
        at = nanoseconds(edge.ts)
        if at is None:
            set_aside["no readable stamp"] += 1
            continue
        out.append(
            Edge(
                at_ns=at,
                ends=type(edge) is End,
                category=edge.cat,
                name=edge.name,
                process=edge.pid,
                thread=edge.tid,
                arguments=edge.args,
            )
        )
    return out


def _columns(decoded: Decoded, *, exact: bool) -> Batch:
    groups: defaultdict[Any, list[Any]] = defaultdict(list)
    for event in decoded.events:
        groups[event.cat].append(event)
    kept: list[Any] = []
    row_kinds: list[RowKind] = []
    operators: list[Any] = []
    python_rows = 0
    for category, group in groups.items():
        kind = KINDS[category]
        if kind is RowKind.OPERATOR:
            operators += group
            used = [event for event in group if event.name == "record_param_comms"]
        elif kind is RowKind.PYTHON:
            python_rows += len(group)
            used = [event for event in group if str(event.name).startswith("nn.Module: ")]
        elif kind is RowKind.LAUNCH:
            used = [event for event in group if not IDLE_CALLS[event.name]]
        else:
            used = group if kind in KEPT_CATEGORIES else []
        kept += used
        row_kinds += [kind] * len(used)
    set_aside: Counter[str] = Counter()
    start, duration, valid = _stamps(kept, set_aside)
    if not valid.all():
        chosen = np.flatnonzero(valid)
        kept = [kept[i] for i in chosen]
        row_kinds = [row_kinds[i] for i in chosen]
        start, duration = start[chosen], duration[chosen]
    sums, op_start, op_end = _operator_sums(operators, set_aside)
    built = _build(kept, row_kinds, start, duration)
    whole = np.array((0, len(start)), np.int64)
    edges = [op_start, op_end, *host_edges(built[0]["kind"], start, duration, whole)[0]]
    known = [edge for edge in edges if edge is not None]
    return Batch(
        columns=built[0],
        details=built[1],
        names=built[2],
        lanes=built[3],
        collectives=built[4],
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
        edges=_edges(decoded, set_aside),
    )


_Built = tuple[
    dict[str, NDArray[Any]],
    dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]],
    list[str],
    list[tuple[str, str, int | None]],
    list[CollectiveArguments],
]


Edges = tuple[int | None, int | None]


def host_edges(
    kind: NDArray[np.uint8],
    start: NDArray[np.int64],
    duration: NDArray[np.int64],
    files: NDArray[np.int64],
) -> list[Edges]:
    """Return the first start and the last end of the host's rows of each file, ns.

    ``files``: first row of each file, and the number of rows.
    """
    host = (kind == RowKind.LAUNCH) | (kind == RowKind.ANNOTATION) | (kind >= RowKind.MODULE)
    return _edges_of(np.flatnonzero(host & (start > 0)), start, duration, files)


def _edges_of(
    rows: NDArray[np.int64],
    start: NDArray[np.int64],
    duration: NDArray[np.int64],
    files: NDArray[np.int64],
) -> list[Edges]:
    found: list[Edges] = [(None, None)] * (len(files) - 1)
    cuts = np.searchsorted(rows, files)
    some = np.flatnonzero(cuts[1:] > cuts[:-1])
    if len(some):
        begin = start[rows]
        first = np.minimum.reduceat(begin, cuts[some]).tolist()
        last = np.maximum.reduceat(begin + duration[rows], cuts[some]).tolist()
        for file, low, high in zip(some.tolist(), first, last, strict=True):
            found[file] = (low, high)
    return found


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
    return (
        start,
        duration,
        ~(no_stamp | negative | endless(np.where(no_stamp, 0, duration), set_aside)),
    )


def endless(duration: NDArray[np.int64], set_aside: Counter[str]) -> NDArray[np.bool_]:
    """Return which durations no call has, and count them."""
    found: NDArray[np.bool_] = duration > _LONGEST_NS
    if found.any():
        set_aside["longer than ten days"] += int(found.sum())
    return found


def _to_ns(values: list[Any]) -> NDArray[np.int64]:
    types = set(map(type, values))
    numbers = _numbers(values) if types <= {int, float} else None
    if numbers is not None and types <= {int}:
        return np.array(values, dtype=np.int64) * 1000
    if numbers is not None:
        # Integers and fractions apart: the product of a double with 1000 would round.
        whole = np.floor(numbers)
        if ((np.abs(numbers) > EXACT_LIMIT_US) & (whole != numbers)).any():
            raise _InexactError
        return whole.astype(np.int64) * 1000 + np.rint((numbers - whole) * 1000).astype(np.int64)
    if types == {msgspec.Raw}:
        return _raw_to_ns(values)
    found = (nanoseconds(value) for value in values)
    return np.array([NO_ID if ns is None else ns for ns in found], dtype=np.int64)


def _raw_to_ns(values: list[msgspec.Raw]) -> NDArray[np.int64]:
    """Return stamps kept as text; all at once where each has three decimals, as Kineto writes."""
    text = b" ".join(cast("list[bytes]", values))  # they are buffers
    if _THREE_DECIMALS.fullmatch(text):
        return np.fromstring(text.replace(b".", b""), dtype=np.int64, sep=" ")
    return np.fromiter(map(_raw_ns, values), dtype=np.int64, count=len(values))


def _numbers(values: list[Any]) -> NDArray[np.float64] | None:
    """Return numbers as doubles; None where one is too large to be a stamp."""
    try:
        numbers = np.array(values, dtype=np.float64)
    except OverflowError:
        return None
    return numbers if (np.abs(numbers) < 1 << 52).all() else None


def _raw_ns(raw: msgspec.Raw) -> int:
    text = bytes(raw)
    whole, _, fraction = text.partition(b".")
    if len(fraction) <= 3 and whole.isdigit() and len(whole) < 16:
        return int(whole) * 1000 + (int(fraction.ljust(3, b"0")) if fraction else 0)
    found = nanoseconds(raw)
    return NO_ID if found is None else found


def _operator_sums(
    operators: list[Any], set_aside: Counter[str]
) -> tuple[dict[str, tuple[int, int, float]], int | None, int | None]:
    """Sum host operators by name; collectives among them stand in the columns as well."""
    if not operators:
        return {}, None, None
    start, duration, valid = _stamps(operators, set_aside)
    names = Codes()
    codes = np.array([names[event.name] for event in operators], np.int64)
    if not valid.all():
        codes, start, duration = codes[valid], start[valid], duration[valid]
    whole = np.array((0, len(start)), np.int64)
    (found,) = sums_of(names, codes, start, duration, whole)
    return found


Sums = tuple[dict[str, tuple[int, int, float]], int | None, int | None]


def sums_of(
    names: Mapping[Any, int],
    codes: NDArray[Any],
    start: NDArray[np.int64],
    duration: NDArray[np.int64],
    files: NDArray[np.int64],
) -> list[Sums]:
    """Return calls, total and squares by name, and the first start and last end, ns, by file.

    ``files``: first row of each file, and the number of rows.
    """
    count = len(files) - 1
    sums: list[dict[str, tuple[int, int, float]]] = [{} for _ in range(count)]
    texts, width = [str(name) for name in names], max(len(names), 1)
    keys = codes if count == 1 else np.repeat(np.arange(count) * width, np.diff(files)) + codes
    calls = np.bincount(keys)
    total = np.bincount(keys, weights=duration)
    squares = np.bincount(keys, weights=duration.astype(np.float64) ** 2)
    called = np.flatnonzero(calls)
    for key, number, length, square in zip(
        called.tolist(),
        calls[called].tolist(),
        total[called].tolist(),
        squares[called].tolist(),
        strict=True,
    ):
        sums[key // width][texts[key % width]] = (number, int(length), square)
    edges = _edges_of(np.flatnonzero(start > 0), start, duration, files)
    return [(of_file, *its) for of_file, its in zip(sums, edges, strict=True)]


def _build(
    events: list[Any],
    categories: list[RowKind],
    start: NDArray[np.int64],
    duration: NDArray[np.int64],
) -> _Built:
    size = len(events)
    names, lanes, shapes = Codes(), Codes(), Codes()
    device_lanes = DeviceLanes(lanes)
    name = np.array([names[event.name] for event in events], np.int32)
    arguments = [event.args for event in events]
    category = np.array(categories, np.uint8)
    lane = np.array(
        [
            lanes[(event.pid, event.tid, None)]
            if kind not in DEVICE
            else device_lanes[(event.pid, event.tid, None, None)]
            if args is None
            else device_lanes[(event.pid, event.tid, args.device, args.stream)]
            for event, args, kind in zip(events, arguments, categories, strict=True)
        ],
        np.int32,
    )
    correlation = _ids([None if args is None else args.correlation for args in arguments])
    noted = Notes()
    said = np.zeros(size, bool)
    for row, args in enumerate(arguments):
        if args is None:
            continue
        length = args.bytes if args.bytes is not None else args.size
        if length is not None and (count := _count(length)) != NO_ID:
            noted.add("bytes", row, count)
        said[row] = args.collective is not None
        noted.collective(row, args, shapes)
    columns: dict[str, NDArray[Any]] = {
        "kind": refined(category, name, said, list(names)),
        "name": name,
        "lane": lane,
        "start_ns": start,
        "duration_ns": duration,
        "correlation": correlation,
    }
    places = [(str(pid), str(tid), device) for pid, tid, device in lanes]
    return columns, noted.arrays(), [str(value) for value in names], places, list(shapes)


class Notes(dict[str, tuple[list[int], list[int]]]):
    """Details as they are found: rows, ascending, and their values."""

    def __init__(self) -> None:
        super().__init__((name, ([], [])) for name in DETAILS)

    def add(self, detail: str, row: int, value: int) -> None:
        self[detail][0].append(row)
        self[detail][1].append(value)

    def collective(self, row: int, args: Any, shapes: Codes) -> None:
        """Note what the arguments of a row say of a collective, if they are of one."""
        if args.collective is None and args.group is None:
            return
        self.add("collective", row, shapes[_collective(args)])
        if (number := _whole(args.sequence)) is not None and 0 <= number < 1 << 31:
            self.add("sequence", row, number)

    def arrays(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return rows and values of each detail."""
        return {
            name: (np.array(rows, np.int64), np.array(values, np.int64))
            for name, (rows, values) in self.items()
        }


def refined(
    category: NDArray[np.uint8], name: NDArray[np.int32], said: NDArray[np.bool_], names: list[Any]
) -> NDArray[np.uint8]:
    """Apply the name rules once per distinct (category, arguments, name)."""
    if not len(name):
        return category
    keys = (name.astype(np.int64) << 8) | (category.astype(np.int64) << 1) | said
    # Counting beats np.unique, which sorts.
    seen = np.zeros(len(names) << 8, bool)
    seen[keys] = True
    unique = np.flatnonzero(seen)
    kinds = np.zeros(len(seen), np.uint8)
    kinds[unique] = [
        _refine((key >> 1) & 0x7F, str(names[key >> 8]), key & 1) for key in unique.tolist()
    ]
    found: NDArray[np.uint8] = kinds[keys]
    return found


@lru_cache(maxsize=1 << 16)
def _refine(kind: int, name: str, said: int) -> RowKind:
    """Apply the rules; names repeat in every file, and patterns are slow."""
    return kernel_rules().refine(RowKind(kind), name, has_collective_arguments=bool(said))


def _ids(values: list[Any]) -> NDArray[np.int64]:
    filled = [NO_ID if value is None else value for value in values]
    if set(map(type, filled)) <= {int}:
        try:
            return np.array(filled, np.int64)
        except OverflowError:
            pass
    return np.array([NO_ID if v == NO_ID else _fold(v) for v in filled], np.int64)


def _device_lane(pid: Any, thread: Any, device: Any, stream: Any) -> tuple[Any, Any, int]:
    index = _whole(device)
    if index is None:
        index = _whole(pid)
    return (pid, thread if stream is None else stream, -1 if index is None else index)


class DeviceLanes(dict[Any, int]):
    """Process, thread, device and stream as the events say them to the code of their lane."""

    def __init__(self, lanes: Codes) -> None:
        super().__init__()
        self._lanes = lanes

    def __missing__(self, said: tuple[Any, Any, Any, Any]) -> int:
        self[said] = code = self._lanes[_device_lane(*said)]
        return code


def _fold(value: Any) -> int:
    """Fold an id of any size or form into 64 bits, so that equal ids stay equal."""
    number = _whole(value)
    if number is None:
        return NO_ID
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _count(value: Any) -> int:
    number = _whole(value)
    return NO_ID if number is None or not 0 <= number < 1 << 62 else number


def _size(value: Any) -> int | None:
    """Return a number of ranks or elements; None beyond what times 16 bytes fits 64 bits."""
    number = _whole(value)
    return number if number is not None and 0 <= number < 1 << 53 else None


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
        group_size=_size(arguments.group_size),
        dtype=_text(arguments.dtype),
        in_elements=_size(arguments.in_elements),
        out_elements=_size(arguments.out_elements),
    )

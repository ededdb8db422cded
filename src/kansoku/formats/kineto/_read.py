"""Read a whole trace: chunks to columns on one core or many, then one set of columns."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind
from kansoku.formats.kineto._columns import COLUMNS, DETAILS, NO_ID, Batch, read_paired, read_piece
from kansoku.formats.kineto._compiled import library, readers
from kansoku.formats.kineto._events import Damage
from kansoku.formats.kineto._header import rank_from_name, read_metadata
from kansoku.formats.kineto._pairs import Edge, pair
from kansoku.formats.kineto._scan import CHUNK_BYTES, POOL_CHUNK_BYTES, Piece, split
from kansoku.formats.kineto._source import (
    Source,
    inflated_bytes,
    is_plain,
    read_blocks,
    read_stretch,
)
from kansoku.formats.kineto._trace import Detail, KinetoTrace

__all__ = ["head_of", "read_trace", "told"]

_GROWTH_ROWS = 1 << 16
_LIMITS = tuple((np.dtype(kind), int(np.iinfo(kind).max)) for kind in (np.int16, np.int32))
_AHEAD = 4
"""Chunks in flight to other processes: enough to keep two cores busy, few enough for memory."""


def read_trace(
    source: Source,
    *,
    executor: Executor | None = None,
    rank: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> KinetoTrace:
    """Read one trace; chunks go through ``executor`` where one is given.

    ``rank`` is the user's word where neither file nor name tells. ``progress`` gets the bytes
    (inflated) of each chunk done. Raises InputError where the file is no trace at all.
    """
    problems: list[str] = []
    reader = library(inflated_bytes(source))
    size = CHUNK_BYTES if executor is None else POOL_CHUNK_BYTES
    lend = executor is None
    pieces = split(read_blocks(source, problems), chunk_bytes=size, lend=lend)
    try:
        header = next(pieces)
    except Exception as error:
        _name_file(error, source)
        raise
    merger = _Merger()
    # Processes of this machine read plain files themselves: pipes would cost as much as decoding.
    path = source.path if _is_local_pool(executor) and is_plain(source) else None
    if executor is None and reader is not None:
        batches = _scanned(pieces, reader, progress, merger)
    else:
        batches = _batches(pieces, executor, progress, merger, path)
    for batch in batches:
        merger.add(batch)
    return merger.finish(source, header, problems, rank)


def _is_local_pool(executor: Executor | None) -> bool:
    if executor is None:
        return False
    # Here, not above: multiprocessing takes a while to load, and small files do without.
    from concurrent.futures import ProcessPoolExecutor

    return isinstance(executor, ProcessPoolExecutor)


def _name_file(error: Exception, source: Source) -> None:
    if getattr(error, "where", "") is None:
        error.where = str(source)  # type: ignore[attr-defined]


def _batches(
    pieces: Iterator[Piece],
    executor: Executor | None,
    progress: Callable[[int], None] | None,
    merger: "_Merger",
    path: Path | None,
) -> Iterator[Batch]:
    exact = False
    waiting: deque[tuple[Future[Batch], int]] = deque()

    def done(size: int) -> None:
        if progress is not None:
            progress(size)

    for number, piece in enumerate(_noted(pieces, merger)):
        # The first chunk tells whether stamps need exact reading, and starts no process.
        if executor is None or number == 0:
            batch = _read_any(piece, exact=exact)
            exact = batch.exact
            yield batch
            done(len(piece.data))
            continue
        size = len(piece.data)
        if path is None:
            waiting.append((executor.submit(_read_any, piece, exact=exact), size))
        else:
            hollow = replace(piece, data=b"")
            work = partial(_read_stretch, path, size, exact=exact)
            waiting.append((executor.submit(work, hollow), size))
        if len(waiting) >= _AHEAD:
            future, size = waiting.popleft()
            yield future.result()
            done(size)
    for future, size in waiting:
        yield future.result()
        done(size)


def _noted(pieces: Iterator[Piece], merger: "_Merger") -> Iterator[Piece]:
    for piece in pieces:
        if piece.kind == "headless":
            merger.problems.append("the beginning of the file is missing: its facts are unknown")
        yield piece


def _scanned(
    pieces: Iterator[Piece],
    loaded: Any,
    progress: Callable[[int], None] | None,
    merger: "_Merger",
) -> Iterator[Batch]:
    """Yield the batches of pieces: of many together by the compiled reader, or one it refused."""
    # Not in a thread beside this one: it would wait for Python's lock between any two pieces.
    exact = False
    with readers(loaded).lent() as reader:
        for piece in _noted(pieces, merger):
            if reader.waiting and not reader.has_room(piece):
                yield reader.take(exact=exact)
            if not reader.read(piece):
                if reader.waiting:
                    yield reader.take(exact=exact)
                batch = read_piece(_own(piece), exact=exact)
                exact = batch.exact
                yield batch
            if progress is not None:
                progress(len(piece.data))
        if reader.waiting:
            yield reader.take(exact=exact)


def _own(piece: Piece) -> Piece:
    """Return a piece whose data is its own, not lent."""
    return replace(piece, data=bytes(piece.data))


def _read_any(piece: Piece, *, exact: bool) -> Batch:
    """Read a piece in any process, by the compiled reader where there is one."""
    loaded = library(0)
    if loaded is not None:
        with readers(loaded).lent() as reader:
            if reader.read(piece):
                batch = reader.take(exact=exact)
                batch.offset = piece.offset
                return batch
    return read_piece(_own(piece), exact=exact)


def _read_stretch(path: Path, size: int, piece: Piece, *, exact: bool) -> Batch:
    data = read_stretch(path, piece.offset, size)
    return _read_any(replace(piece, data=data), exact=exact)


class _Column:
    """A column that grows in place, as narrow as its values allow.

    Growing in place (large arrays are remapped, not copied) keeps the peak at the column itself;
    parts joined at the end would take it twice.
    """

    def __init__(self, widest: Any) -> None:
        self._fixed = np.dtype(widest).itemsize == 1
        self._values: NDArray[Any] = np.empty(0, widest if self._fixed else np.int16)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def add(self, values: NDArray[Any]) -> None:
        if not len(values):
            return
        if not self._fixed:
            kind = np.promote_types(self._values.dtype, _narrowest(values))
            if kind != self._values.dtype:
                self._values = self._values.astype(kind)
        if not self._used:  # small files have one batch: no room for a second yet
            self._values = values.astype(self._values.dtype)
            self._used = len(values)
            return
        need = self._used + len(values)
        if need > len(self._values):
            size = len(self._values)
            self._values.resize(max(need, size + max(_GROWTH_ROWS, size // 16)), refcheck=False)
        self._values[self._used : need] = values
        self._used = need

    def take(self) -> NDArray[Any]:
        """Return the values; the column is done."""
        self._values.resize(self._used, refcheck=False)
        return self._values


def _narrowest(values: NDArray[Any]) -> Any:
    low, high = int(values.min()), int(values.max())
    for kind, limit in _LIMITS:
        if -limit < low and high < limit:
            return kind
    return np.dtype(np.int64)


class _Merger:
    """Sum batches into one set of columns, batch by batch, so that each can be freed."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._columns = {name: _Column(widest) for name, widest in COLUMNS.items()}
        self._details = {name: (_Column(np.int64), _Column(np.int64)) for name in DETAILS}
        self._names: dict[str, int] = {}
        self._lanes: dict[Any, int] = {}
        self._collectives: dict[Any, int] = {}
        self._operators: dict[str, tuple[int, int, float]] = {}
        self._rows = 0
        self._slices = 0
        self._python = 0
        self._damage = Damage()
        self._set_aside: Counter[str] = Counter()
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._tail: str | None = None
        self._edges: list[Edge] = []

    def add(self, batch: Batch) -> None:
        if self._tail is not None:  # events cannot follow the end of their array
            return
        columns = batch.columns
        columns["name"] = _recode(columns["name"], batch.names, self._names)
        columns["lane"] = _recode(columns["lane"], batch.lanes, self._lanes)
        columns["correlation"][columns["correlation"] == NO_ID] = -1
        before = len(self._columns["kind"])
        for name, part in columns.items():
            self._columns[name].add(part)
        for name, (rows, values) in batch.details.items():
            self._details[name][0].add(rows + before)
            self._details[name][1].add(
                _recode(values, batch.collectives, self._collectives)
                if name == "collective"
                else values
            )
        if self._operators:
            for name, (calls, total, squares) in batch.operators.items():
                known = self._operators.get(name, (0, 0, 0.0))
                self._operators[name] = (known[0] + calls, known[1] + total, known[2] + squares)
        else:
            self._operators = batch.operators
        self._rows += batch.rows
        self._slices += batch.slices
        self._python += batch.python_rows
        self._damage.add(batch.damage)
        self._set_aside.update(batch.set_aside)
        if batch.host_start_ns is not None and batch.host_end_ns is not None:
            self._starts.append(batch.host_start_ns)
            self._ends.append(batch.host_end_ns)
        self._edges += batch.edges
        self._tail = batch.tail

    def _pair(self) -> None:
        if not self._edges:
            return
        events, alone = pair(self._edges)
        self._set_aside.update(alone)
        tail, self._tail = self._tail, None
        self.add(read_paired(events))
        self._tail = tail

    def finish(
        self, source: Source, header: Piece, problems: list[str], rank: int | None
    ) -> KinetoTrace:
        self._pair()
        columns, details = self._sorted()
        trace = KinetoTrace(
            file=str(source),
            rank=None,
            rank_source=None,
            metadata=read_metadata([head_of(header), self._tail or ""]),
            columns=columns,
            details=details,
            names=list(self._names),
            lanes=list(self._lanes),
            collectives=list(self._collectives),
            operators=self._operators,
            rows=self._rows,
            slices=self._slices,
            host_start_ns=min(self._starts, default=None),
            host_end_ns=max(self._ends, default=None),
            damage=self._damage,
            set_aside=self._set_aside,
            problems=self.problems + problems,
        )
        return told(trace, source, header, self._tail, rank)

    def _sorted(self) -> tuple[dict[str, NDArray[Any]], dict[str, Detail]]:
        """Return columns and details in the order of the rows' starts."""
        columns = {name: self._columns.pop(name).take() for name in COLUMNS}
        order = np.lexsort(
            (columns["correlation"], columns["duration_ns"], columns["lane"], columns["start_ns"])
        )
        zero = self._zero_stamps(columns["start_ns"])
        if zero is not None:
            order = order[~zero[order]]
        columns = {name: columns.pop(name)[order] for name in list(columns)}
        details = {}
        for name in DETAILS:
            rows, values = (column.take().astype(np.int64) for column in self._details.pop(name))
            has = np.zeros(int(order.max(initial=-1)) + 1, bool)
            has[rows[rows < len(has)]] = True
            place = np.flatnonzero(has[order])
            details[name] = Detail(place, values[np.searchsorted(rows, order[place])])
        return columns, details

    def _zero_stamps(self, start: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Set rows stamped zero aside where the rest of the file is far from zero."""
        zero: NDArray[np.bool_] = start == 0
        if not zero.any() or zero.all():
            return None
        rest = start[~zero]
        first, last = int(rest.min()), int(rest.max())
        if first <= 2 * (last - first) + 1_000_000_000:
            return None
        self._set_aside["stamp of zero"] += int(zero.sum())
        return zero


def _recode(codes: NDArray[Any], values: Iterable[Any], index: dict[Any, int]) -> NDArray[np.int32]:
    table = np.fromiter((index.setdefault(value, len(index)) for value in values), np.int32)
    return table[codes] if len(codes) else codes.astype(np.int32)


def head_of(header: Piece) -> str:
    """Return the text before the events."""
    return str(header.data, "utf-8", "replace")


def told(
    trace: KinetoTrace, source: Source, header: Piece, tail: str | None, rank: int | None
) -> KinetoTrace:
    """Return a trace that says what is wrong with its file, and its rank."""
    is_object = not head_of(header).lstrip("\ufeff \t\r\n").startswith("[")
    if tail is None and is_object and not any("truncated" in p for p in trace.problems):
        trace.problems.append("truncated: the file ends inside traceEvents")
    _say_damage(trace)
    _set_rank(trace, source, rank)
    return trace


def _say_damage(trace: KinetoTrace) -> None:
    damage = trace.damage
    if damage.lost_stretches:
        trace.problems.append(
            f"{damage.lost_stretches} damaged stretches ({damage.lost_bytes} bytes, about "
            f"{damage.lost_events} events) could not be read and were left out"
        )
    for reason, count in sorted(trace.set_aside.items()):
        trace.problems.append(f"{count} slices set aside: {reason}")
    if damage.repaired:
        trace.notes.append(f"{damage.repaired} stretches were read after a repair of their JSON")
    if not trace.has_device_rows:
        trace.problems.append("no GPU rows: only the host was traced, no device figure is possible")
    elif not trace.of(RowKind.LAUNCH).any():
        trace.notes.append("no launch rows: launch and queue figures are unknown")


def _set_rank(trace: KinetoTrace, source: Source, rank: int | None) -> None:
    named = rank_from_name(source.file_name)
    if trace.metadata.rank is not None:
        trace.rank, trace.rank_source = trace.metadata.rank, "distributedInfo"
    elif named is not None:
        trace.rank, trace.rank_source = named, "file name"
    elif rank is not None:
        trace.rank, trace.rank_source = rank, "user"

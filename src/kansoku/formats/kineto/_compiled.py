"""Columns of a chunk by the compiled reader (``event_reader.c``); None where it must not answer.

It takes what Kineto writes as long as that is whole; anything else is left to the general reader,
whose answer it equals. The rows of several chunks become columns together, and texts are read once
for all of them: most of a small trace's time would go into calls on few rows.
"""

import ctypes
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind
from kansoku.formats.edge.compiled import kept_library
from kansoku.formats.kineto._columns import (
    DEVICE,
    IDLE_CALLS,
    KEPT_CATEGORIES,
    KINDS,
    NO_ID,
    Batch,
    Codes,
    CollectiveArguments,
    DeviceLanes,
    Edges,
    Notes,
    Sums,
    endless,
    host_edges,
    refined,
    sums_of,
)
from kansoku.formats.kineto._events import Arguments, Damage, cut_tail
from kansoku.formats.kineto._scan import CHUNK_BYTES, Piece
from kansoku.formats.kineto._spare import Spare

__all__ = ["SOURCE", "FileColumns", "FileFacts", "Reader", "declared", "library", "readers"]

SOURCE = Path(__file__).with_name("event_reader.c")
_WORTH_BUILDING_BYTES = 64 << 20
"""Reading this much saves what compiling takes (0.3 s)."""
_SHORTEST_SLICE_BYTES = 40
_USUAL_SLICE_BYTES = 160
"""Files of shorter ones are not read together: room for all that may be is 2 MB a column."""
# As in event_reader.c.
_TOKENS, _TOKEN_SLOTS, _PLACES, _PLACE_SLOTS = 1 << 15, 1 << 16, 1 << 12, 1 << 13
_TEXT_BYTES = 1 << 22
_CATEGORY, _NAME, _PLACE, _START, _DURATION, _CORRELATION, _SIZE, _ARGUMENTS, _LENGTH = range(9)
_COLUMNS = 9
_WAITING_ROWS = 1 << 15
"""Rows of this many slices become columns together: 2 MB."""
_KEPT = np.isin(np.arange(256), list(KEPT_CATEGORIES))
_ON_DEVICE = np.isin(np.arange(256), list(DEVICE))
_ARGUMENTS_OF = msgspec.json.Decoder(Arguments).decode
_TEXTS_OF = msgspec.json.Decoder(list[Any]).decode

Rows = NDArray[np.int64]


@functools.cache
def _library(*, build: bool) -> Any:
    return declared(kept_library(SOURCE, build=build))


def declared(loaded: Any) -> Any:
    """Return a loaded library with the types of its function told, None for None."""
    if loaded is not None:
        array, size = ctypes.c_void_p, ctypes.c_int64
        loaded.kineto_events_read.argtypes = [array, size, size, size, *(array,) * 7]
    return loaded


def library(size_bytes: int) -> Any:
    """Return the compiled reader, None where there is none; a large input has it built."""
    found = _library(build=False)
    if found is None and size_bytes >= _WORTH_BUILDING_BYTES:
        found = _library(build=True)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FileColumns:
    """Columns of the rows of several files, one file after the other; texts are shared."""

    columns: dict[str, NDArray[Any]]
    details: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
    names: list[str]
    lanes: list[list[tuple[str, str, int | None]]]
    """Of each file, as its rows count them."""
    collectives: list[CollectiveArguments]
    operators: list[dict[str, tuple[int, int, float]]]
    host_edges: list[Edges]
    bounds: NDArray[np.int64]
    """First row of each file, and the number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What one file held, as its batches count it."""

    rows: int
    slices: int
    tail: str | None


class Reader:
    """Reads pieces one after another; their rows wait until they are taken as columns."""

    def __init__(self, loaded: Any) -> None:
        self.library = loaded
        self._rows: Rows = np.empty((_COLUMNS, 0), np.int64)
        self._tokens = np.empty((_TOKENS, 2), np.int64)
        self._places = np.empty((_PLACES, 4), np.int32)
        self._bytes = np.empty(_TEXT_BYTES, np.uint8)
        self._slots = np.zeros(_TOKEN_SLOTS + _PLACE_SLOTS, np.int32)
        self._counts = np.zeros(6, np.int64)
        slots, place_slots = self._slots[:_TOKEN_SLOTS], self._slots[_TOKEN_SLOTS:]
        self._tables = [
            array.ctypes.data
            for array in (
                self._bytes, self._tokens, self._places, slots, place_slots, self._counts
            )
        ]  # fmt: skip
        self._texts: list[Any] = []
        self._spoiled = False
        self._start()

    def _start(self) -> None:
        self._used = self._events = 0
        self._tail: str | None = None
        self._said: list[tuple[int, Arguments]] = []
        self._ends: list[int] = []

    @property
    def waiting(self) -> bool:
        """Whether anything was read that was not taken."""
        return self._events > 0 or self._tail is not None or bool(self._ends)

    def has_room(self, piece: Piece) -> bool:
        """Say whether a piece may join the rows that wait; else they are to be taken first."""
        return (
            self._used + _room_for(piece) <= self._rows.shape[1]
            and not self._spoiled
            and not self._is_half_full()
        )

    def _is_half_full(self) -> bool:
        """Say whether texts or places fill half of their tables: one chunk needs the other half."""
        _, _, _, texts, places, text_bytes = self._counts.tolist()
        return 2 * texts > _TOKENS or 2 * places > _PLACES or 2 * text_bytes > _TEXT_BYTES

    def read(self, piece: Piece) -> bool:
        """Read the slices of a piece; False where the general reader must say what they are.

        Then nothing of it is kept; what waits is to be taken before the next piece.
        """
        if not self.waiting:
            self._make_room(_room_for(piece))
        data, tail = cut_tail(piece) if piece.last else (piece.data, None)
        before = self._counts.copy()
        if not self._scan(data):
            self._spoiled = True
            self._counts[:] = before
            return False
        known = len(self._texts)
        events, slices, of_collectives, _, _, text_bytes = self._counts.tolist()
        try:
            self._texts += _TEXTS_OF(b"[%b]" % bytes(self._bytes[before[5] : text_bytes].data)[:-1])
            said = self._arguments(data, slices) if of_collectives else []
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            del self._texts[known:]
            self._spoiled = True
            self._counts[:] = before
            return False
        self._said += said
        self._used += slices
        self._events += events
        self._tail = tail
        return True

    def _scan(self, data: bytes | memoryview) -> bool:
        self._counts[:3] = 0
        if not len(data):
            return True
        capacity = self._rows.shape[1]
        refused = self.library.kineto_events_read(
            np.frombuffer(data, np.uint8).ctypes.data,
            len(data),
            capacity - self._used,
            capacity,
            self._rows.ctypes.data + 8 * self._used,
            *self._tables,
        )
        return not refused

    def _make_room(self, room: int) -> None:
        if self._rows.shape[1] < room:
            self._rows = np.empty((_COLUMNS, max(room, _WAITING_ROWS)), np.int64)
        if self._spoiled or self._is_half_full():
            self._slots[:] = 0
            self._counts[:] = 0
            self._texts = []
            self._spoiled = False

    def _arguments(self, data: bytes | memoryview, slices: int) -> list[tuple[int, Arguments]]:
        """Return the rows just read that say something of a collective, and what."""
        new = slice(self._used, self._used + slices)
        rows = np.flatnonzero(self._rows[_LENGTH, new])
        spots = self._rows[_ARGUMENTS:, new][:, rows].T.tolist()
        return [
            (self._used + row, _ARGUMENTS_OF(data[at : at + length]))
            for row, (at, length) in zip(rows.tolist(), spots, strict=True)
        ]

    def reserve(self, size: int) -> None:
        """Make room for the pieces of so many bytes, of files that are read together."""
        self._make_room((size + CHUNK_BYTES) // _USUAL_SLICE_BYTES + _WAITING_ROWS)

    def forget(self) -> None:
        """Give up what waits, and the texts it brought."""
        self._start()
        self._spoiled = True

    def end_file(self) -> FileFacts:
        """Return what was read since the file before; the next piece is another file's."""
        slices = self._used - (self._ends[-1] if self._ends else 0)
        facts = FileFacts(rows=self._events, slices=slices, tail=self._tail)
        self._ends.append(self._used)
        self._events, self._tail = 0, None
        return facts

    def take_files(self, set_aside: Counter[str]) -> FileColumns:
        """Return the columns of the files that wait."""
        rows, places = self._rows[:, : self._used], self._places[: self._counts[4]]
        files = np.array((0, *self._ends), np.int64)
        found = _Columns(rows, self._texts, places, self._said).of_files(files, set_aside)
        self._start()
        return found

    def take(self, *, exact: bool) -> Batch:
        """Return the columns of what waits."""
        rows, places = self._rows[:, : self._used], self._places[: self._counts[4]]
        found = _Columns(rows, self._texts, places, self._said).batch(exact=exact)
        found.rows, found.tail = self._events, self._tail
        self._start()
        return found


def _room_for(piece: Piece) -> int:
    return len(piece.data) // _SHORTEST_SLICE_BYTES + 1


@functools.cache
def readers(loaded: Any) -> Spare[Reader]:
    """Return the readers of a library; the ranks of a job say the same texts."""
    return Spare(partial(Reader, loaded))


def _outer(*edges: Sequence[int | None]) -> Edges:
    """Return the first start and the last end of several, None where none is known."""
    first = [low for low, _ in edges if low is not None]
    last = [high for _, high in edges if high is not None]
    return min(first, default=None), max(last, default=None)


class _Columns:
    """Rows on their way to columns."""

    def __init__(
        self,
        rows: Rows,
        texts: list[Any],
        places: NDArray[np.int32],
        said: list[tuple[int, Arguments]],
    ) -> None:
        """Take the rows, shape (9, slices), in the order of ``event_reader.c``.

        Places, shape (n, 4): texts of process, thread, device, stream, -1 where absent. Said: rows
        with arguments of collectives.
        """
        self._rows, self._texts, self._places, self._said = rows, texts, places, said
        categories = rows[_CATEGORY]
        kinds = np.empty(len(texts) + 1, np.uint8)  # the last one: no category
        for code in _distinct(categories, len(texts) + 1):
            kinds[code] = KINDS[texts[code] if code < len(texts) else None]
        self._kind = kinds[categories]

    def batch(self, *, exact: bool) -> Batch:
        """Return the columns of one file."""
        set_aside: Counter[str] = Counter()
        found = self.of_files(np.array((0, self._rows.shape[1]), np.int64), set_aside)
        (sums,), (edges,) = found.operators, found.host_edges
        return Batch(
            columns=found.columns,
            details=found.details,
            names=found.names,
            lanes=found.lanes[0],
            collectives=found.collectives,
            operators=sums,
            python_rows=int((self._kind == RowKind.PYTHON).sum()),
            rows=0,
            slices=self._rows.shape[1],
            set_aside=set_aside,
            host_start_ns=edges[0],
            host_end_ns=edges[1],
            damage=Damage(),
            tail=None,
            exact=exact,
            edges=[],
        )

    def of_files(self, files: Rows, set_aside: Counter[str]) -> FileColumns:
        """Return the columns of several files; ``files``: first row of each, and of rows all."""
        rows = self._rows
        used = self._used()
        beyond = endless(rows[_DURATION, used], set_aside)
        if beyond.any():
            used = used[~beyond]
        sums = self._sums(files, set_aside)
        kinds = self._kind[used]
        start, duration = rows[_START, used], rows[_DURATION, used]
        bounds = np.searchsorted(used, files)
        names, name = self._names(rows[_NAME, used])
        lanes, lane = self._lanes(rows[_PLACE, used], kinds, bounds)
        noted, shapes, said = self._notes(used)
        refined_kinds = refined(kinds, name, said, list(names))
        of_host = host_edges(refined_kinds, start, duration, bounds)
        return FileColumns(
            columns={
                "kind": refined_kinds,
                "name": name,
                "lane": lane,
                "start_ns": start,
                "duration_ns": duration,
                "correlation": rows[_CORRELATION, used],
            },
            details=noted.arrays(),
            names=[str(value) for value in names],
            lanes=[[(str(pid), str(tid), device) for pid, tid, device in its] for its in lanes],
            collectives=list(shapes),
            operators=[of_file for of_file, *_ in sums],
            host_edges=[_outer(its, edges) for (_, *edges), its in zip(sums, of_host, strict=True)],
            bounds=bounds,
        )

    def _used(self) -> Rows:
        """Return the rows that analyses use."""
        kind, name = self._kind, self._rows[_NAME]
        used = _KEPT[kind]
        launches = np.flatnonzero(kind == RowKind.LAUNCH)
        used[launches] = ~self._named(name[launches], lambda text: IDLE_CALLS[text])
        operators = np.flatnonzero(kind == RowKind.OPERATOR)
        used[operators] = self._named(name[operators], lambda text: text == "record_param_comms")
        python = np.flatnonzero(kind == RowKind.PYTHON)
        used[python] = self._named(name[python], lambda text: str(text).startswith("nn.Module: "))
        return np.flatnonzero(used)

    def _named(self, codes: Rows, wanted: Any) -> NDArray[np.bool_]:
        """Return which of some names are wanted; asked once for each."""
        answers = np.zeros(len(self._texts), bool)
        for code in _distinct(codes, len(answers)):
            answers[code] = wanted(self._texts[code])
        return answers[codes]

    def _names(self, tokens: Rows) -> tuple[Codes, NDArray[np.int32]]:
        """Return the names and their codes; one name may be written in several ways."""
        names = Codes()
        table = np.zeros(len(self._texts), np.int32)
        for token in _distinct(tokens, len(table)):
            table[token] = names[self._texts[token]]
        return names, table[tokens]

    def _sums(self, files: Rows, set_aside: Counter[str]) -> list[Sums]:
        rows = self._rows
        chosen = np.flatnonzero(self._kind == RowKind.OPERATOR)
        chosen = chosen[~endless(rows[_DURATION, chosen], set_aside)]
        if not len(chosen):
            return [({}, None, None) for _ in files[1:]]
        names, codes = self._names(rows[_NAME, chosen])
        bounds = np.searchsorted(chosen, files)
        return sums_of(names, codes, rows[_START, chosen], rows[_DURATION, chosen], bounds)

    def _lanes(
        self, place: Rows, kinds: NDArray[np.uint8], bounds: Rows
    ) -> tuple[list[Codes], NDArray[np.int32]]:
        """Return the lanes of each file, and of each row its lane among those."""
        width = 2 * len(self._places)
        keys = 2 * place + _ON_DEVICE[kinds]
        keys += np.repeat(np.arange(len(bounds) - 1) * width, np.diff(bounds))
        lanes = [Codes() for _ in bounds[1:]]
        of_devices = [DeviceLanes(its) for its in lanes]
        table = np.zeros(width * len(lanes), np.int32)
        places = self._places.tolist()
        for key in _distinct(keys, len(table)):
            file, spot = divmod(key, width)
            said = tuple(None if at < 0 else self._texts[at] for at in places[spot >> 1])
            table[key] = (
                of_devices[file][said] if key & 1 else lanes[file][(said[0], said[1], None)]
            )
        return lanes, table[keys]

    def _notes(self, used: Rows) -> tuple[Notes, Codes, NDArray[np.bool_]]:
        """Return the details, the collectives, and which rows name one in their arguments."""
        noted, shapes = Notes(), Codes()
        said = np.zeros(len(used), bool)
        sizes = self._rows[_SIZE, used]
        sized = np.flatnonzero(sizes != NO_ID)
        noted["bytes"] = (sized.tolist(), sizes[sized].tolist())
        if self._said:
            place = np.full(self._rows.shape[1], -1)
            place[used] = np.arange(len(used))
            places = place[[row for row, _ in self._said]].tolist()
            for row, (_, arguments) in zip(places, self._said, strict=True):
                if row >= 0:
                    said[row] = arguments.collective is not None
                    noted.collective(row, arguments, shapes)
        return noted, shapes, said


def _distinct(codes: NDArray[Any], size: int) -> list[int]:
    """Return the codes that occur, ascending; -1 as the last of the size."""
    seen = np.zeros(size, bool)
    seen[codes] = True
    found: list[int] = np.flatnonzero(seen).tolist()
    return found

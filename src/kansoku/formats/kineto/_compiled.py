"""Columns of a chunk by the compiled reader (``event_reader.c``); None where it must not answer.

It takes what Kineto writes as long as that is whole; anything else is left to the general reader,
whose answer it equals. A scan holds no lock of Python: another thread can do it.
"""

import ctypes
import functools
from collections import Counter
from dataclasses import dataclass
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
    DeviceLanes,
    Notes,
    endless,
    host_edges,
    refined,
    sums_of,
)
from kansoku.formats.kineto._events import Arguments, Damage, cut_tail
from kansoku.formats.kineto._scan import Piece

__all__ = ["SOURCE", "Scan", "columns_of", "declared", "library", "scan"]

SOURCE = Path(__file__).with_name("event_reader.c")
_WORTH_BUILDING_BYTES = 64 << 20
"""Reading this much saves what compiling takes (0.3 s)."""
_SHORTEST_SLICE_BYTES = 40
# As in event_reader.c.
_TOKENS, _TOKEN_SLOTS, _PLACES, _PLACE_SLOTS = 1 << 14, 1 << 15, 1 << 12, 1 << 13
_CATEGORY, _NAME, _PLACE, _START, _DURATION, _CORRELATION, _SIZE, _ARGUMENTS, _LENGTH = range(9)
_COLUMNS = 9
_KEPT = np.isin(np.arange(256), list(KEPT_CATEGORIES))
_ON_DEVICE = np.isin(np.arange(256), list(DEVICE))
_ARGUMENTS_OF = msgspec.json.Decoder(Arguments).decode
_TEXTS_OF = msgspec.json.Decoder(list[Any]).decode

Rows = NDArray[np.int64]


@dataclass(slots=True)
class Scan:
    """What stands in a chunk."""

    data: bytes
    tail: str | None
    events: int
    rows: Rows
    """Shape (9, slices): the columns in the order of ``event_reader.c``."""
    tokens: Rows
    """Shape (texts, 2): place and length of each distinct text in the data, quotes included."""
    places: NDArray[np.int32]
    """Shape (places, 4): tokens of process, thread, device, stream; -1 where absent."""


@functools.cache
def _library(*, build: bool) -> Any:
    return declared(kept_library(SOURCE, build=build))


def declared(loaded: Any) -> Any:
    """Return a loaded library with the types of its function told, None for None."""
    if loaded is not None:
        array, size = ctypes.c_void_p, ctypes.c_int64
        loaded.kineto_events_read.argtypes = [ctypes.c_char_p, size, size, *(array,) * 6]
    return loaded


def library(size_bytes: int) -> Any:
    """Return the compiled reader, None where there is none; a large input has it built."""
    found = _library(build=False)
    if found is None and size_bytes >= _WORTH_BUILDING_BYTES:
        found = _library(build=True)
    return found


def scan(piece: Piece, reader: Any) -> Scan | None:
    """Find the slices of a piece; None where the general reader must say what they are."""
    data, tail = cut_tail(piece.data) if piece.last else (piece.data, None)
    room = len(data) // _SHORTEST_SLICE_BYTES + 1
    rows = np.empty((_COLUMNS, room), np.int64)
    tokens = np.empty((_TOKENS, 2), np.int64)
    places = np.empty((_PLACES, 4), np.int32)
    slots = np.zeros(_TOKEN_SLOTS + _PLACE_SLOTS, np.int32)
    counts = np.zeros(4, np.int64)
    refused = reader.kineto_events_read(
        data,
        len(data),
        room,
        rows.ctypes.data,
        tokens.ctypes.data,
        places.ctypes.data,
        slots.ctypes.data,
        slots[_TOKEN_SLOTS:].ctypes.data,
        counts.ctypes.data,
    )
    if refused:
        return None
    events, slices, texts, lanes = counts.tolist()
    return Scan(data, tail, events, rows[:, :slices], tokens[:texts], places[:lanes])


def columns_of(found: Scan, *, exact: bool) -> Batch | None:
    """Return the columns of a scanned piece; None where a text or an argument cannot be read."""
    try:
        return _Columns(found).batch(exact=exact)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None


class _Columns:
    """The rows of one scan on their way to columns."""

    def __init__(self, found: Scan) -> None:
        self._scan = found
        data = found.data
        spots = found.tokens.tolist()
        self._texts = _TEXTS_OF(b"[%b]" % b",".join([data[at : at + n] for at, n in spots]))
        categories = found.rows[_CATEGORY]
        kinds = np.empty(len(spots) + 1, np.uint8)  # the last one: no category
        for code in _distinct(categories + 1, len(spots) + 1):
            kinds[code - 1] = KINDS[self._texts[code - 1] if code else None]
        self._kind = kinds[categories]

    def batch(self, *, exact: bool) -> Batch:
        kind, rows = self._kind, self._scan.rows
        set_aside: Counter[str] = Counter()
        used = self._used()
        beyond = endless(rows[_DURATION, used], set_aside)
        if beyond.any():
            used = used[~beyond]
        sums, *edges = self._sums(set_aside)
        kinds = kind[used]
        start, duration = rows[_START, used], rows[_DURATION, used]
        names, name = self._names(rows[_NAME, used])
        lanes, lane = self._lanes(rows[_PLACE, used], kinds)
        noted, shapes, said = self._notes(used)
        refined_kinds = refined(kinds, name, said, list(names))
        edges += host_edges(refined_kinds, start, duration)
        known = [edge for edge in edges if edge is not None]
        return Batch(
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
            lanes=[(str(pid), str(tid), device) for pid, tid, device in lanes],
            collectives=list(shapes),
            operators=sums,
            python_rows=int((kind == RowKind.PYTHON).sum()),
            rows=self._scan.events,
            slices=rows.shape[1],
            set_aside=set_aside,
            host_start_ns=min(known, default=None),
            host_end_ns=max(known, default=None),
            damage=Damage(),
            tail=self._scan.tail,
            exact=exact,
            edges=[],
        )

    def _used(self) -> Rows:
        """Return the rows that analyses use."""
        kind, name = self._kind, self._scan.rows[_NAME]
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

    def _sums(self, set_aside: Counter[str]) -> Any:
        rows = self._scan.rows
        chosen = np.flatnonzero(self._kind == RowKind.OPERATOR)
        chosen = chosen[~endless(rows[_DURATION, chosen], set_aside)]
        if not len(chosen):
            return {}, None, None
        names, codes = self._names(rows[_NAME, chosen])
        return sums_of(names, codes, rows[_START, chosen], rows[_DURATION, chosen])

    def _lanes(self, place: Rows, kinds: NDArray[np.uint8]) -> tuple[Codes, NDArray[np.int32]]:
        lanes = Codes()
        of_devices = DeviceLanes(lanes)
        table = np.zeros(2 * len(self._scan.places), np.int32)
        keys = 2 * place + _ON_DEVICE[kinds]
        places = self._scan.places.tolist()
        for key in _distinct(keys, len(table)):
            said = tuple(None if at < 0 else self._texts[at] for at in places[key >> 1])
            table[key] = of_devices[said] if key & 1 else lanes[(said[0], said[1], None)]
        return lanes, table[keys]

    def _notes(self, used: Rows) -> tuple[Notes, Codes, NDArray[np.bool_]]:
        """Return the details, the collectives, and which rows name one in their arguments."""
        noted, shapes = Notes(), Codes()
        said = np.zeros(len(used), bool)
        data, rows = self._scan.data, self._scan.rows
        sizes = rows[_SIZE, used]
        sized = np.flatnonzero(sizes != NO_ID)
        noted["bytes"] = (sized.tolist(), sizes[sized].tolist())
        places = np.flatnonzero(rows[_LENGTH, used])
        spots = rows[_ARGUMENTS:, used[places]].T.tolist()
        for row, (at, length) in zip(places.tolist(), spots, strict=True):
            arguments = _ARGUMENTS_OF(data[at : at + length])
            said[row] = arguments.collective is not None
            noted.collective(row, arguments, shapes)
        return noted, shapes, said


def _distinct(codes: NDArray[Any], size: int) -> list[int]:
    """Return the codes that occur, ascending."""
    seen = np.zeros(size, bool)
    seen[codes] = True
    found: list[int] = np.flatnonzero(seen).tolist()
    return found

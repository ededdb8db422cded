"""Spans of a request to rows by columns."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from kansoku.telemetry._attributes import any_value, json_text
from kansoku.telemetry._known import KNOWN, PlainWalkError
from kansoku.telemetry._names import COLUMN_PREFIX, SPAN_COLUMNS, column_kinds
from kansoku.telemetry._texts import Ints, Spots, distinct, varints, words_of
from kansoku.telemetry.decode_plain import DROPPED_RESOURCE_KEYS, arrow_types

__all__ = ["SpanFields", "fields_of", "offsets_of", "span_rows", "times"]

_MAX = 2**63 - 1
_SPAN_KINDS = (None, "internal", "server", "client", "producer", "consumer")
_TAG_INT = 0x18


def offsets_of(lists: Any) -> Ints:
    """Return the offsets of a list column, the first one 0."""
    offsets: Ints = lists.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    return offsets


def times(column: Any) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return times of an Arrow column, and which are given."""
    raw = column.to_numpy()
    valid = (raw > 0) & (raw <= _MAX)
    return np.where(valid, raw, 0).astype(np.int64), valid


def _spots(column: Any) -> Spots:
    """Return the strings of an Arrow column of bytes."""
    stored = np.frombuffer(column.buffers()[1], np.int32)
    offsets: Ints = stored[column.offset : column.offset + len(column) + 1].astype(np.int64)
    raw = column.buffers()[2]
    data = np.frombuffer(raw, np.uint8) if raw is not None else np.zeros(0, np.uint8)
    rows = np.arange(len(column))
    return Spots(data, words_of(data), rows, offsets[:-1], np.diff(offsets))


@dataclass(slots=True)
class SpanFields:
    """What becomes rows of all spans of a request."""

    count: int
    name: Any
    """Arrow text."""
    start: Any
    end: Any
    """Unsigned nanoseconds, zero where not given."""
    attributes: dict[str, Spots]
    trace_id: Spots
    span_id: Spots
    parent_id: Spots
    kind: npt.NDArray[np.int32]
    failed: npt.NDArray[np.bool_]


def fields_of(spans: Any) -> SpanFields:
    """Return the fields of the spans of a request."""
    status = pc.struct_field(spans.field("status"), "code")
    failed = pc.fill_null(pc.equal(status, 2), False)  # noqa: FBT003
    return SpanFields(
        count=len(spans),
        name=spans.field("name"),
        start=spans.field("start"),
        end=spans.field("end"),
        attributes=_attributes_of(spans.field("attributes")),
        trace_id=_spots(spans.field("trace_id")),
        span_id=_spots(spans.field("span_id")),
        parent_id=_spots(spans.field("parent_span_id")),
        kind=spans.field("kind").to_numpy(),
        failed=failed.to_numpy(zero_copy_only=False),
    )


def _attributes_of(lists: Any) -> dict[str, Spots]:
    pairs = lists.flatten()
    keys = pairs.field("key").dictionary_encode()
    codes = keys.indices.to_numpy()
    names = keys.dictionary.to_pylist()
    if len(names) > 65_535:
        raise PlainWalkError
    # Sorting small integers is a radix sort: linear.
    small = codes.astype(np.uint8 if len(names) < 256 else np.uint16)
    order = np.argsort(small, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(names)))])
    every = _spots(pairs.field("value"))
    span = np.repeat(np.arange(len(lists)), np.diff(offsets_of(lists)))
    found = {}
    for code, name in enumerate(names):
        at = order[bounds[code] : bounds[code + 1]]
        found[name] = Spots(every.data, every.words, span[at], every.starts[at], every.lengths[at])
    return found


# Rows


def _integers(spots: Spots) -> Ints:
    """Return whole numbers of values that hold just one."""
    tags = spots.data.take(spots.starts, mode="clip")
    if bool((tags != _TAG_INT).any()) or bool((spots.lengths < 2).any()):
        raise PlainWalkError
    values = varints(spots.inner(1))
    if values is None:
        raise PlainWalkError
    return values


def _text_codes(spots: Spots) -> tuple[npt.NDArray[np.int32], list[str]]:
    codes, firsts = distinct(spots)
    texts = []
    for at in firsts:
        value = any_value(AnyValue.FromString(spots.raw(at)))
        if not isinstance(value, str):
            raise PlainWalkError
        texts.append(value)
    return codes, texts


class _Columns:
    """Columns of spans being filled."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.kinds = column_kinds("spans")
        self.done: dict[str, Any] = {}
        self.codes: dict[str, tuple[npt.NDArray[np.int32], list[str]]] = {}
        self.ints: dict[str, tuple[Ints, npt.NDArray[np.bool_]]] = {}

    def fill(self, name: str, spots: Spots) -> None:
        """Read one key's attributes into its column; of a repeated key the last counts."""
        rows = spots.rows
        if self.kinds[name] == "text":
            codes, texts = _text_codes(spots)
            every = np.full(self.count, -1, np.int32)
            every[rows] = codes
            self.codes[name] = (every, texts)
            return
        values = _integers(spots)
        if self.kinds[name] == "int32" and len(values):
            low, high = int(values.min()), int(values.max())
            if low < -(2**31) or high >= 2**31:
                raise PlainWalkError
        filled, valid = np.zeros(self.count, np.int64), np.zeros(self.count, np.bool_)
        filled[rows], valid[rows] = values, True
        self.ints[name] = (filled, valid)

    def table(self) -> pa.Table:
        """Return all columns in order."""
        types = arrow_types("spans")
        columns = []
        for name, kind in types.items():
            if name in self.done:
                columns.append(self.done[name])
            elif name in self.codes:
                codes, texts = self.codes[name]
                index = pa.array(codes, mask=codes < 0)
                dictionary = pa.array(texts, pa.string())
                columns.append(pa.DictionaryArray.from_arrays(index, dictionary))
            elif name in self.ints:
                values, valid = self.ints[name]
                typed = values.astype(np.int32) if kind == pa.int32() else values
                columns.append(pa.array(typed, kind, mask=~valid))
            else:
                columns.append(pa.nulls(self.count, kind))
        return pa.table(columns, names=list(types))


def span_rows(fields: SpanFields, resources: list[bytes], group_of: Ints) -> pa.Table:
    """Return rows of the spans table; ``group_of`` is each span's place among the resources."""
    columns = _Columns(fields.count)
    left = []
    for key, spots in fields.attributes.items():
        name = key.removeprefix(COLUMN_PREFIX)
        if name != key and name in SPAN_COLUMNS:
            columns.fill(name, spots)
        else:
            left.append(key)
    start, has_start = times(fields.start)
    end, has_end = times(fields.end)
    columns.done["name"] = fields.name
    columns.done["start_ns"] = pa.array(start, mask=~has_start)
    closed = has_start & has_end & (end >= start)
    columns.done["duration_ns"] = pa.array(end - start, mask=~closed)
    foreign = np.ones(fields.count, np.bool_)
    if "run" in columns.codes:
        foreign = columns.codes["run"][0] < 0
    if bool(foreign.any()):
        _fill_foreign(columns, fields, foreign)
    sets = _sets(fields, left, group_of, foreign)
    columns.done["attributes"] = _attribute_texts(sets, fields.attributes, left, resources)
    return columns.table()


def _ids(spots: Spots, count: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return 8-byte identifiers as signed integers, and which spans have one."""
    found, valid = np.zeros(count, np.int64), np.zeros(count, np.bool_)
    eight = spots.lengths == 8
    if bool(eight.any()):
        rows = spots.rows[eight]
        places = spots.starts[eight][:, None] + np.arange(8)
        found[rows] = spots.data[places].view(">i8")[:, 0]
        valid[rows] = True
    return found, valid


def _fill_foreign(columns: _Columns, fields: SpanFields, foreign: npt.NDArray[np.bool_]) -> None:
    """Give spans of other programs their run, kind, id and parent, where attributes do not."""
    own, firsts = distinct(fields.trace_id)
    hexes = [fields.trace_id.raw(at).hex() for at in firsts]
    known = np.array([len(text) > 0 for text in hexes], np.bool_)
    indices = np.full(columns.count, -1, np.int32)
    if hexes:
        indices[fields.trace_id.rows] = np.where(known[own], own, -1)
    codes, texts = columns.codes.get("run", (np.full(columns.count, -1, np.int32), []))
    wanted = foreign & (indices >= 0)
    codes[wanted] = indices[wanted] + len(texts)
    columns.codes["run"] = (codes, texts + hexes)

    kinds = fields.kind
    codes, texts = columns.codes.get("kind", (np.full(columns.count, -1, np.int32), []))
    wanted = foreign & (codes < 0) & (kinds > 0) & (kinds < len(_SPAN_KINDS))
    codes[wanted] = kinds[wanted] - 1 + len(texts)
    columns.codes["kind"] = (codes, texts + [kind for kind in _SPAN_KINDS if kind])

    for name, spots in (("id", fields.span_id), ("parent", fields.parent_id)):
        empty = (np.zeros(columns.count, np.int64), np.zeros(columns.count, np.bool_))
        values, valid = columns.ints.get(name, empty)
        ids, has = _ids(spots, columns.count)
        wanted = foreign & has & ~valid
        values[wanted], valid[wanted] = ids[wanted], True
        columns.ints[name] = (values, valid)


@dataclass(slots=True)
class _Sets:
    """Spans with equal left-over attributes share a set."""

    codes: npt.NDArray[np.int32]
    """Set of each span; -1 where nothing is left over."""
    firsts: list[int]
    """A span of each set."""
    error: npt.NDArray[np.bool_]
    foreign: npt.NDArray[np.bool_]
    group_of: Ints


def _sets(
    fields: SpanFields, left: list[str], group_of: Ints, foreign: npt.NDArray[np.bool_]
) -> _Sets:
    count = fields.count
    error = foreign & fields.failed
    totals = np.zeros(count, np.uint64)
    some = foreign.copy()
    for key in left:
        spots = fields.attributes[key]
        codes, firsts = distinct(spots)
        prefix = key.encode() + b"\0"
        numbers = np.fromiter(
            (KNOWN.number(prefix + spots.raw(at)) for at in firsts), np.uint64, len(firsts)
        )
        # Rows of one key come in span order or each once: a plain sum serves.
        rows = spots.rows
        if len(rows) > 1 and bool((rows[1:] == rows[:-1]).any()):
            raise PlainWalkError
        totals[rows] += numbers[codes]
        some[rows] = True
    mixed = totals + group_of.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) * foreign
    mixed += error * np.uint64(0xD1B54A32D192ED03) + foreign * np.uint64(0x8CB92BA72F3D8DD7)
    if not bool(some.any()):
        nothing = np.full(count, -1, np.int32)
        return _Sets(nothing, [], error, foreign, group_of)
    encoded = pa.array(mixed).dictionary_encode()
    set_of = encoded.indices.to_numpy().copy()
    first_of = np.zeros(len(encoded.dictionary), np.int64)
    first_of[set_of[::-1]] = np.arange(count)[::-1]
    set_of[~some] = -1
    return _Sets(set_of, first_of.tolist(), error, foreign, group_of)


def _attribute_texts(
    sets: _Sets, attributes: dict[str, Spots], left: list[str], resources: list[bytes]
) -> Any:
    used = np.zeros(len(sets.firsts), np.bool_)
    used[sets.codes[sets.codes >= 0]] = True
    if not used.any():
        return pa.nulls(len(sets.codes), pa.string())
    wanted = {span: number for number, span in enumerate(sets.firsts) if used[number]}
    found: dict[int, dict[str, Any]] = {number: {} for number in wanted.values()}
    is_first = np.zeros(len(sets.codes), np.bool_)
    is_first[list(wanted)] = True
    for key in left:
        spots = attributes[key]
        for at in np.nonzero(is_first[spots.rows])[0].tolist():
            value = any_value(AnyValue.FromString(spots.raw(at)))
            found[wanted[int(spots.rows[at])]][key] = value
    texts: list[str | None] = [None] * len(sets.firsts)
    for span, number in wanted.items():
        own = found[number]
        if sets.foreign[span]:
            resource = KNOWN.resource(resources[int(sets.group_of[span])])
            kept = {k: v for k, v in resource.items() if k not in DROPPED_RESOURCE_KEYS}
            own = kept | own
            if sets.error[span]:
                own["otel.status_code"] = "ERROR"
        texts[number] = json_text(own)
    index = pa.array(sets.codes, mask=sets.codes < 0)
    column = pa.DictionaryArray.from_arrays(index, pa.array(texts, pa.string()))
    # A set that is empty after all (a bare foreign resource) is no text.
    return column if None not in texts else column.cast(pa.string())

"""OTLP bytes to rows by columns: spans and number points.

Everything repeated is read once: attribute keys and texts through dictionaries, a point's whole
label set through a sum of random numbers, one for each distinct attribute, so that equal sets are
found without looking into them. What does not follow the expected types goes to the plain walk,
whose answer this must equal.
"""

import secrets
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from kansoku.errors import InputError
from kansoku.telemetry._attributes import any_value, attribute_dict, json_text, labels_json
from kansoku.telemetry._names import COLUMN_PREFIX, SPAN_COLUMNS, column_kinds
from kansoku.telemetry._trimmed import read_columns
from kansoku.telemetry.decode_plain import (
    DROPPED_RESOURCE_KEYS,
    Decoded,
    arrow_types,
    owner_of,
)

__all__ = ["decode_bulk"]

_MAX = 2**63 - 1
_SPAN_KINDS = (None, "internal", "server", "client", "producer", "consumer")
_TAG_BOOL, _TAG_INT, _TAG_DOUBLE = 0x10, 0x18, 0x21
_CACHE_ENTRIES = 500_000

Ints = npt.NDArray[np.int64]


class _PlainWalkError(Exception):
    """Something only the plain walk reads."""


class _Known:
    """What was read before, of all requests; emptied when it grows too large."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers: dict[bytes, int] = {}
        self.labels: dict[int, str] = {}
        self.resources: dict[bytes, dict[str, Any]] = {}

    def number(self, raw: bytes) -> int:
        """Return the random number of these bytes, the same at every call."""
        found = self.numbers.get(raw)
        if found is None:
            found = self.numbers[raw] = secrets.randbits(64)
        return found

    def resource(self, raw: bytes) -> dict[str, Any]:
        """Return the attributes of a resource."""
        found = self.resources.get(raw)
        if found is None:
            found = attribute_dict(Resource.FromString(raw).attributes)
            self.resources[raw] = found
        return found

    def trim(self) -> None:
        """Forget everything when too much is known: labels go with their numbers."""
        if max(len(self.numbers), len(self.labels), len(self.resources)) > _CACHE_ENTRIES:
            self.numbers.clear()
            self.labels.clear()
            self.resources.clear()


_known = _Known()


def decode_bulk(signal: str, payload: bytes) -> Decoded | None:
    """Return the rows of a body, or None for what the plain walk must read.

    Raises InputError for malformed bytes.
    """
    if signal not in {"traces", "metrics"}:
        return None
    try:
        groups = read_columns(signal, payload)
        with _known.lock:
            _known.trim()
            return _spans(groups) if signal == "traces" else _metrics(groups)
    except _PlainWalkError:
        return None
    except (ValueError, DecodeError) as error:
        raise InputError(f"malformed protobuf of {signal}: {error}") from None


def _offsets(lists: Any) -> Ints:
    """Return the offsets of a list column, the first one 0."""
    offsets: Ints = lists.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    return offsets


def _items(groups: Any, decoded: Decoded) -> tuple[Any, list[bytes], Ints]:
    """Return the items of all scopes, the groups' resources, and each item's group."""
    group = groups.flatten()
    resources = [raw or b"" for raw in group.field("resource").to_pylist()]
    for raw in resources:
        if (owner := owner_of(_known.resource(raw))) is not None:
            decoded.owners.add(owner)
    scopes = group.field("scopes")
    items = scopes.flatten().field("items")
    of_scope = np.repeat(np.arange(len(resources)), np.diff(_offsets(scopes)))
    return items.flatten(), resources, np.repeat(of_scope, np.diff(_offsets(items)))


# Spans


@dataclass(slots=True)
class _Attributes:
    """All attributes of all spans, sorted by key."""

    names: list[str]
    order: Ints
    """Positions of attributes, grouped by key, in span order within a key."""
    bounds: Ints
    """Where in ``order`` each key begins, and the end."""
    span: Ints
    """Span of each attribute."""
    values: Any
    data: npt.NDArray[np.uint8]
    starts: Ints
    lengths: Ints

    @classmethod
    def of(cls, lists: Any) -> "_Attributes":
        """Take the spans' list column apart."""
        pairs = lists.flatten()
        keys = pairs.field("key").dictionary_encode()
        codes = keys.indices.to_numpy()
        names = keys.dictionary.to_pylist()
        # Sorting small integers is a radix sort: linear.
        small = codes.astype(np.uint8 if len(names) < 256 else np.uint16)
        if len(names) > 65_535:
            raise _PlainWalkError
        order = np.argsort(small, kind="stable")
        bounds = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(names)))])
        values = pairs.field("value")
        stored = np.frombuffer(values.buffers()[1], np.int32)
        offsets: Ints = stored[values.offset : values.offset + len(values) + 1].astype(np.int64)
        raw = values.buffers()[2]
        data = np.frombuffer(raw, np.uint8) if raw is not None else np.zeros(0, np.uint8)
        return cls(
            names=names,
            order=order,
            bounds=bounds,
            span=np.repeat(np.arange(len(lists)), np.diff(_offsets(lists))),
            values=values,
            data=data,
            starts=offsets[:-1],
            lengths=np.diff(offsets),
        )

    def of_key(self, code: int) -> Ints:
        """Return the positions of one key's attributes, in span order."""
        return self.order[self.bounds[code] : self.bounds[code + 1]]


def _tagged(attributes: _Attributes, at: Ints, tag: int) -> tuple[Ints, Ints]:
    """Return start and length after the tag byte of values that all have it."""
    starts, lengths = attributes.starts[at], attributes.lengths[at]
    if len(at) and (int(lengths.min()) < 2 or bool((attributes.data[starts] != tag).any())):
        raise _PlainWalkError
    return starts + 1, lengths - 1


def _varints(attributes: _Attributes, at: Ints) -> Ints:
    """Return whole numbers of values that hold just one."""
    starts, lengths = _tagged(attributes, at, _TAG_INT)
    if not len(at):
        return np.zeros(0, np.int64)
    if int(lengths.max()) > 10:
        raise _PlainWalkError
    data = attributes.data
    if bool((data[starts + lengths - 1] & 0x80).any()):
        raise _PlainWalkError
    total = (data[starts] & 0x7F).astype(np.uint64)
    active = np.nonzero(lengths > 1)[0]
    for byte in range(1, 10):
        if not len(active):
            break
        before = data[starts[active] + byte - 1]
        if bool((before & 0x80 == 0).any()):
            raise _PlainWalkError
        part = (data[starts[active] + byte] & 0x7F).astype(np.uint64)
        total[active] |= part << np.uint64(7 * byte)
        active = active[lengths[active] > byte + 1]
    return total.view(np.int64)


def _text_codes(attributes: _Attributes, at: Ints) -> tuple[npt.NDArray[np.int32], list[str]]:
    encoded = attributes.values.take(pa.array(at)).dictionary_encode()
    texts = []
    for raw in encoded.dictionary.to_pylist():
        value = any_value(AnyValue.FromString(raw))
        if not isinstance(value, str):
            raise _PlainWalkError
        texts.append(value)
    return encoded.indices.to_numpy(), texts


class _Columns:
    """Columns of spans being filled."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.kinds = column_kinds("spans")
        self.done: dict[str, Any] = {}
        self.codes: dict[str, tuple[npt.NDArray[np.int32], list[str]]] = {}
        self.ints: dict[str, tuple[Ints, npt.NDArray[np.bool_]]] = {}

    def fill(self, name: str, attributes: _Attributes, at: Ints) -> None:
        """Read one key's attributes into its column; of a repeated key the last counts."""
        rows = attributes.span[at]
        if self.kinds[name] == "text":
            codes, texts = _text_codes(attributes, at)
            every = np.full(self.count, -1, np.int32)
            every[rows] = codes
            self.codes[name] = (every, texts)
            return
        values = _varints(attributes, at)
        if self.kinds[name] == "int32" and len(values):
            low, high = int(values.min()), int(values.max())
            if low < -(2**31) or high >= 2**31:
                raise _PlainWalkError
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


def _spans(groups: Any) -> Decoded:
    decoded = Decoded()
    spans, resources, group_of = _items(groups, decoded)
    count = decoded.items = len(spans)
    if not count:
        return decoded
    attributes = _Attributes.of(spans.field("attributes"))
    columns = _Columns(count)
    left = []
    for code, key in enumerate(attributes.names):
        name = key.removeprefix(COLUMN_PREFIX)
        if name != key and name in SPAN_COLUMNS:
            columns.fill(name, attributes, attributes.of_key(code))
        else:
            left.append(code)
    start, has_start = _times(spans.field("start"))
    end, has_end = _times(spans.field("end"))
    columns.done["name"] = spans.field("name")
    columns.done["start_ns"] = pa.array(start, mask=~has_start)
    closed = has_start & has_end & (end >= start)
    columns.done["duration_ns"] = pa.array(end - start, mask=~closed)
    foreign = np.ones(count, np.bool_)
    if "run" in columns.codes:
        foreign = columns.codes["run"][0] < 0
    if bool(foreign.any()):
        _fill_foreign(columns, spans, foreign)
    sets = _sets(spans, attributes, left, group_of, foreign)
    columns.done["attributes"] = _attribute_texts(sets, attributes, left, resources)
    decoded.tables["spans"] = columns.table()
    return decoded


def _times(column: Any) -> tuple[Ints, npt.NDArray[np.bool_]]:
    raw = column.to_numpy()
    valid = (raw > 0) & (raw <= _MAX)
    return np.where(valid, raw, 0).astype(np.int64), valid


def _ids(column: Any) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return 8-byte identifiers as signed integers, and which spans have one."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    valid = np.diff(offsets) == 8
    found = np.zeros(len(column), np.int64)
    if bool(valid.any()):
        data = np.frombuffer(column.buffers()[2], np.uint8)
        places = offsets[:-1][valid][:, None] + np.arange(8)
        found[valid] = data[places].view(">i8")[:, 0]
    return found, valid


def _fill_foreign(columns: _Columns, spans: Any, foreign: npt.NDArray[np.bool_]) -> None:
    """Give spans of other programs their run, kind, id and parent, where attributes do not."""
    traces = spans.field("trace_id").dictionary_encode()
    codes, texts = columns.codes.get("run", (np.full(columns.count, -1, np.int32), []))
    hexes = [raw.hex() for raw in traces.dictionary.to_pylist()]
    known = np.array([len(text) > 0 for text in hexes], np.bool_)
    indices = traces.indices.to_numpy()
    wanted = foreign & known[indices]
    codes[wanted] = indices[wanted] + len(texts)
    columns.codes["run"] = (codes, texts + hexes)

    kinds = spans.field("kind").to_numpy()
    codes, texts = columns.codes.get("kind", (np.full(columns.count, -1, np.int32), []))
    wanted = foreign & (codes < 0) & (kinds > 0) & (kinds < len(_SPAN_KINDS))
    codes[wanted] = kinds[wanted] - 1 + len(texts)
    columns.codes["kind"] = (codes, texts + [kind for kind in _SPAN_KINDS if kind])

    for name, field in (("id", "span_id"), ("parent", "parent_span_id")):
        empty = (np.zeros(columns.count, np.int64), np.zeros(columns.count, np.bool_))
        values, valid = columns.ints.get(name, empty)
        own, has = _ids(spans.field(field))
        wanted = foreign & has & ~valid
        values[wanted], valid[wanted] = own[wanted], True
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
    spans: Any,
    attributes: _Attributes,
    left: list[int],
    group_of: Ints,
    foreign: npt.NDArray[np.bool_],
) -> _Sets:
    count = len(spans)
    status = spans.field("status")
    failed = pc.fill_null(pc.equal(pc.struct_field(status, "code"), 2), False).to_numpy(  # noqa: FBT003
        zero_copy_only=False
    )
    error = foreign & failed
    totals = np.zeros(count, np.uint64)
    some = foreign.copy()
    for code in left:
        at = attributes.of_key(code)
        encoded = attributes.values.take(pa.array(at)).dictionary_encode()
        key = attributes.names[code].encode()
        numbers = np.fromiter(
            (_known.number(key + b"\0" + raw) for raw in encoded.dictionary.to_pylist()),
            np.uint64,
            len(encoded.dictionary),
        )
        # Positions of one key come in span order, at most one a span: a plain sum serves.
        rows = attributes.span[at]
        if len(rows) > 1 and bool((rows[1:] == rows[:-1]).any()):
            raise _PlainWalkError
        totals[rows] += numbers[encoded.indices.to_numpy()]
        some[rows] = True
    mixed = totals + group_of.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) * foreign
    mixed += error * np.uint64(0xD1B54A32D192ED03) + foreign * np.uint64(0x8CB92BA72F3D8DD7)
    encoded = pa.array(mixed).dictionary_encode()
    codes = encoded.indices.to_numpy().copy()
    firsts = np.zeros(len(encoded.dictionary), np.int64)
    firsts[codes[::-1]] = np.arange(count)[::-1]
    codes[~some] = -1
    return _Sets(codes, firsts.tolist(), error, foreign, group_of)


def _attribute_texts(
    sets: _Sets, attributes: _Attributes, left: list[int], resources: list[bytes]
) -> Any:
    used = np.zeros(len(sets.firsts), np.bool_)
    used[sets.codes[sets.codes >= 0]] = True
    if not used.any():
        return pa.nulls(len(sets.codes), pa.string())
    wanted = {span: number for number, span in enumerate(sets.firsts) if used[number]}
    found: dict[int, dict[str, Any]] = {number: {} for number in wanted.values()}
    is_first = np.zeros(len(sets.codes), np.bool_)
    is_first[list(wanted)] = True
    for code in left:
        at = attributes.of_key(code)
        for position in at[is_first[attributes.span[at]]].tolist():
            value = any_value(AnyValue.FromString(attributes.values[position].as_py()))
            number = wanted[int(attributes.span[position])]
            found[number][attributes.names[code]] = value
    texts: list[str | None] = [None] * len(sets.firsts)
    for span, number in wanted.items():
        own = found[number]
        if sets.foreign[span]:
            resource = _known.resource(resources[int(sets.group_of[span])])
            kept = {k: v for k, v in resource.items() if k not in DROPPED_RESOURCE_KEYS}
            own = kept | own
            if sets.error[span]:
                own["otel.status_code"] = "ERROR"
        texts[number] = json_text(own)
    index = pa.array(sets.codes, mask=sets.codes < 0)
    column = pa.DictionaryArray.from_arrays(index, pa.array(texts, pa.string()))
    # A set that is empty after all (a bare foreign resource) is no text.
    return column if None not in texts else column.cast(pa.string())


# Metrics


def _metrics(groups: Any) -> Decoded:
    decoded = Decoded()
    metrics, resources, group_of = _items(groups, decoded)
    if not len(metrics):
        return decoded
    for other in ("histogram", "exponential", "summary"):
        if metrics.field(other).null_count < len(metrics):
            raise _PlainWalkError
    parts = []
    for which in ("gauge", "sum"):
        numbers = metrics.field(which)
        if numbers.null_count == len(metrics):
            continue
        part = _numbers(metrics, numbers, which, group_of, resources, decoded)
        if part is not None:
            parts.append(part)
    if parts:
        decoded.tables["metrics"] = pa.concat_tables(parts).unify_dictionaries()
    return decoded


def _numbers(
    metrics: Any,
    numbers: Any,
    which: str,
    group_of: Ints,
    resources: list[bytes],
    decoded: Decoded,
) -> pa.Table | None:
    """Return the rows of gauges or of sums."""
    lists = pc.struct_field(numbers, "points")
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    points = lists.flatten()
    if not len(points):
        return None
    decoded.items += len(points)
    metric_of = np.repeat(np.arange(len(metrics)), counts)
    keep = _kept_points(points, decoded)
    labels = _labels(points.field("attributes"), group_of[metric_of], resources)
    values = _values(points)
    time, timed = _times(points.field("time"))
    names = metrics.field("name").dictionary_encode()
    metric = pa.DictionaryArray.from_arrays(
        pa.array(names.indices.to_numpy()[metric_of]), names.dictionary
    )
    rows = pa.table(
        [metric, labels, pa.array(time, mask=~timed), pa.array(values)],
        names=["metric", "labels", "time_ns", "value"],
    )
    if not keep.all():
        rows, metric_of = rows.filter(pa.array(keep)), metric_of[keep]
    _note_info(metrics, numbers, which, np.unique(metric_of).tolist(), decoded)
    return rows if len(rows) else None


def _kept_points(points: Any, decoded: Decoded) -> npt.NDArray[np.bool_]:
    """Return which points hold a value, counting those that do not."""
    unrecorded = (points.field("flags").to_numpy() & 1) == 1
    empty = pc.and_(
        pc.is_null(points.field("as_double")), pc.is_null(points.field("as_int"))
    ).to_numpy(zero_copy_only=False)
    if unrecorded.any():
        decoded.skip("no_recorded_value", int(unrecorded.sum()))
    if (missing := int((empty & ~unrecorded).sum())) > 0:
        decoded.skip("no_value", missing)
    keep: npt.NDArray[np.bool_] = ~(unrecorded | empty)
    return keep


def _values(points: Any) -> npt.NDArray[np.float64]:
    doubles, ints = points.field("as_double"), points.field("as_int")
    if not doubles.null_count:
        return np.asarray(doubles.to_numpy())
    whole = pc.cast(ints, pa.float64(), safe=False)
    return np.asarray(pc.fill_null(pc.coalesce(doubles, whole), 0.0).to_numpy())


def _labels(lists: Any, group_of: Ints, resources: list[bytes]) -> Any:
    """Return the label text of every point, merged with its resource."""
    flat = lists.flatten().dictionary_encode()
    raws = flat.dictionary.to_pylist()
    numbers = np.fromiter((_known.number(raw) for raw in raws), np.uint64, len(raws))
    codes = flat.indices.to_numpy()
    offsets = _offsets(lists)
    base = np.fromiter(
        (_known.number(b"resource\0" + raw) for raw in resources), np.uint64, len(resources)
    )
    totals = base[group_of]
    sizes = np.diff(offsets)
    filled = sizes > 0
    if filled.any():
        # Segments of empty points would take a neighbour's number: leave their starts out.
        totals[filled] += np.add.reduceat(numbers[codes], offsets[:-1][filled])
    encoded = pa.array(totals).dictionary_encode()
    sets = encoded.indices.to_numpy()
    firsts = np.zeros(len(encoded.dictionary), np.int64)
    firsts[sets[::-1]] = np.arange(len(sets))[::-1]
    texts = []
    for total, first in zip(encoded.dictionary.to_pylist(), firsts.tolist(), strict=True):
        text = _known.labels.get(total)
        if text is None:
            mine = codes[offsets[first] : offsets[first + 1]].tolist()
            own = attribute_dict(KeyValue.FromString(raws[code]) for code in mine)
            resource = _known.resource(resources[int(group_of[first])])
            kept = {k: v for k, v in resource.items() if k not in DROPPED_RESOURCE_KEYS}
            text = _known.labels[total] = labels_json(kept, own)
        texts.append(text)
    return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(texts, pa.string()))


def _note_info(metrics: Any, numbers: Any, which: str, used: list[int], decoded: Decoded) -> None:
    picked = pa.array(used, pa.int64())
    names, units, descriptions = (
        metrics.field(name).take(picked).to_pylist() for name in ("name", "unit", "description")
    )
    taken = numbers.take(picked)
    temporality = pc.struct_field(taken, "temporality").to_pylist()
    monotonic = pc.struct_field(taken, "monotonic").to_pylist()
    for number, name in enumerate(names):
        if name in decoded.info:
            continue
        kind = "gauge"
        if which == "sum" and temporality[number] == 1:
            kind = "delta"
        elif which == "sum" and monotonic[number]:
            kind = "counter"
        decoded.info[name] = (name, units[number] or None, kind, descriptions[number] or None)

"""OTLP bytes to rows by columns: spans and number points.

Everything repeated is read once: attribute keys and texts through dictionaries, a point's whole
label set through a sum of random numbers, one for each distinct attribute, so that equal sets are
found without looking into them. What does not follow the expected types goes to the plain walk,
whose answer this must equal.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from kansoku.errors import InputError
from kansoku.telemetry._attributes import attribute_dict, labels_json
from kansoku.telemetry._bulk_spans import fields_of, offsets_of, span_rows, times
from kansoku.telemetry._known import KNOWN, PlainWalkError
from kansoku.telemetry._native import SpansRead, read_spans
from kansoku.telemetry._texts import Ints
from kansoku.telemetry._trimmed import read_columns
from kansoku.telemetry.decode_plain import DROPPED_RESOURCE_KEYS, Decoded, owner_of

__all__ = ["decode_bulk"]


def decode_bulk(signal: str, payload: bytes) -> Decoded | None:
    """Return the rows of a body, or None for what the plain walk must read.

    Raises InputError for malformed bytes.
    """
    if signal not in {"traces", "metrics"}:
        return None
    try:
        with KNOWN.lock:
            KNOWN.trim()
            if signal == "metrics":
                return _metrics(read_columns(signal, payload))
            return _spans(_read_spans(payload))
    except PlainWalkError:
        return None
    except (ValueError, DecodeError) as error:
        raise InputError(f"malformed protobuf of {signal}: {error}") from None


def _read_spans(payload: bytes) -> SpansRead:
    if (read := read_spans(payload)) is not None:
        return read
    spans, resources, group_of = _items(read_columns("traces", payload))
    return SpansRead(fields_of(spans), resources, group_of)


def _spans(read: SpansRead) -> Decoded:
    decoded = Decoded(items=read.fields.count)
    _note_owners(read.resources, decoded)
    if decoded.items:
        decoded.tables["spans"] = span_rows(read.fields, read.resources, read.group_of)
    return decoded


def _note_owners(resources: list[bytes], decoded: Decoded) -> None:
    for raw in resources:
        if (owner := owner_of(KNOWN.resource(raw))) is not None:
            decoded.owners.add(owner)


def _items(groups: Any) -> tuple[Any, list[bytes], Ints]:
    """Return the items of all scopes, the groups' resources, and each item's group."""
    group = groups.flatten()
    resources = [raw or b"" for raw in group.field("resource").to_pylist()]
    scopes = group.field("scopes")
    items = scopes.flatten().field("items")
    of_scope = np.repeat(np.arange(len(resources)), np.diff(offsets_of(scopes)))
    return items.flatten(), resources, np.repeat(of_scope, np.diff(offsets_of(items)))


# Metrics


def _metrics(groups: Any) -> Decoded:
    decoded = Decoded()
    metrics, resources, group_of = _items(groups)
    _note_owners(resources, decoded)
    if not len(metrics):
        return decoded
    for other in ("histogram", "exponential", "summary"):
        if metrics.field(other).null_count < len(metrics):
            raise PlainWalkError
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
    time, timed = times(points.field("time"))
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
    used = np.zeros(len(metrics), np.bool_)
    used[metric_of] = True
    _note_info(metrics, numbers, which, np.nonzero(used)[0].tolist(), decoded)
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
    numbers = np.fromiter((KNOWN.number(raw) for raw in raws), np.uint64, len(raws))
    codes = flat.indices.to_numpy()
    offsets = offsets_of(lists)
    base = np.fromiter(
        (KNOWN.number(b"resource\0" + raw) for raw in resources), np.uint64, len(resources)
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
        text = KNOWN.labels.get(total)
        if text is None:
            mine = codes[offsets[first] : offsets[first + 1]].tolist()
            own = attribute_dict(KeyValue.FromString(raws[code]) for code in mine)
            resource = KNOWN.resource(resources[int(group_of[first])])
            kept = {k: v for k, v in resource.items() if k not in DROPPED_RESOURCE_KEYS}
            text = KNOWN.labels[total] = labels_json(kept, own)
        texts.append(text)
    return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(texts, pa.string()))


def _note_info(metrics: Any, numbers: Any, which: str, used: list[int], decoded: Decoded) -> None:
    picked = pa.array(used, pa.int64())
    names, units, descriptions = (
        metrics.field(name).take(picked).to_pylist() for name in ("name", "unit", "description")
    )
    temporality, monotonic = (
        pc.struct_field(numbers, name).take(picked).to_pylist()
        for name in ("temporality", "monotonic")
    )
    for number, name in enumerate(names):
        if name in decoded.info:
            continue
        kind = "gauge"
        if which == "sum" and temporality[number] == 1:
            kind = "delta"
        elif which == "sum" and monotonic[number]:
            kind = "counter"
        decoded.info[name] = (name, units[number] or None, kind, descriptions[number] or None)

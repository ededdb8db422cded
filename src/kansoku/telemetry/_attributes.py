"""OTLP attributes to and from plain values, labels and JSON texts."""

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

__all__ = ["add_attribute", "any_value", "attribute_dict", "json_text", "label_text", "labels_json"]

_SORTED = orjson.OPT_SORT_KEYS


def any_value(value: AnyValue) -> Any:
    """Return a plain value: text, bool, int, float, list, dict, None; bytes as base64 text."""
    which = value.WhichOneof("value")
    if which is None:
        return None
    if which == "array_value":
        return [any_value(one) for one in value.array_value.values]
    if which == "kvlist_value":
        return {one.key: any_value(one.value) for one in value.kvlist_value.values}
    if which == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, which)


def attribute_dict(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """Return attributes as a dictionary; of a repeated key the last counts."""
    return {one.key: any_value(one.value) for one in attributes}


def _plain(value: Any) -> Any:
    """Replace what JSON cannot say: NaN and infinities become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def json_text(values: Mapping[str, Any]) -> str | None:
    """Return a canonical JSON object, keys sorted; None when empty."""
    if not values:
        return None
    return orjson.dumps({k: _plain(v) for k, v in values.items()}, option=_SORTED).decode()


def label_text(value: Any) -> str:
    """Return a label's text of an attribute value."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value)
    return orjson.dumps(_plain(value), option=_SORTED).decode()


def labels_json(*sources: Mapping[str, Any]) -> str:
    """Return canonical labels of several attribute sets, later ones winning."""
    merged: dict[str, str] = {}
    for source in sources:
        for key, value in source.items():
            if text := label_text(value):
                merged[key] = text
            else:
                merged.pop(key, None)  # an empty label is an absent one
    return orjson.dumps(merged, option=_SORTED).decode()


def add_attribute(target: Any, key: str, value: Any) -> None:
    """Add an attribute to a repeated KeyValue field; None adds nothing."""
    if value is None:
        return
    _fill(target.add(key=key).value, value)


def _fill(target: AnyValue, value: Any) -> None:
    if isinstance(value, str):
        target.string_value = value
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int):
        if -(2**63) <= value < 2**63:
            target.int_value = value
        else:
            target.string_value = str(value)
    elif isinstance(value, float):
        target.double_value = value
    elif isinstance(value, Mapping):
        target.kvlist_value.SetInParent()
        for key, one in value.items():
            _fill(target.kvlist_value.values.add(key=str(key)).value, one)
    elif isinstance(value, list | tuple):
        target.array_value.SetInParent()
        for one in value:
            _fill(target.array_value.values.add(), one)

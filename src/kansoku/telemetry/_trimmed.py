"""Cut-down protobuf descriptions of OTLP requests, for reading bytes straight into columns.

They name the fields that become rows and no others: what is unnamed is skipped unread. An
attribute's value, a data point's whole attribute and a resource stay bytes here: a request
repeats the same few of them, so each distinct one is read once.

Measured (Python 3.11, one core, eight attributes a span): the full description gives 0.52 M
spans/s, this one 1.45 M; data points with bytes for attributes 6.5 M/s against 2.2 M.
"""

import functools
from typing import Any

import ptars
from google.protobuf import descriptor_pb2, descriptor_pool

__all__ = ["read_columns"]

_Field = descriptor_pb2.FieldDescriptorProto
# Message to its fields: (name, number, type or message, "many" or the name of a oneof).
_Fields = list[tuple[str, int, str, str]]

_TRACES: dict[str, _Fields] = {
    "KeyValue": [("key", 1, "string", ""), ("value", 2, "bytes", "")],
    "Status": [("code", 3, "int32", "")],
    "Span": [
        ("trace_id", 1, "bytes", ""),
        ("span_id", 2, "bytes", ""),
        ("parent_span_id", 4, "bytes", ""),
        ("name", 5, "string", ""),
        ("kind", 6, "int32", ""),
        ("start", 7, "fixed64", ""),
        ("end", 8, "fixed64", ""),
        ("attributes", 9, "KeyValue", "many"),
        ("status", 15, "Status", ""),
    ],
    "Scope": [("items", 2, "Span", "many")],
    "Group": [("resource", 1, "bytes", ""), ("scopes", 2, "Scope", "many")],
    "Request": [("groups", 1, "Group", "many")],
}
_METRICS: dict[str, _Fields] = {
    "Point": [
        ("time", 3, "fixed64", ""),
        ("as_double", 4, "double", "value"),
        ("as_int", 6, "sfixed64", "value"),
        ("attributes", 7, "bytes", "many"),
        ("flags", 8, "uint32", ""),
    ],
    "Numbers": [
        ("points", 1, "Point", "many"),
        ("temporality", 2, "int32", ""),
        ("monotonic", 3, "bool", ""),
    ],
    "Metric": [
        ("name", 1, "string", ""),
        ("description", 2, "string", ""),
        ("unit", 3, "string", ""),
        ("gauge", 5, "Numbers", "data"),
        ("sum", 7, "Numbers", "data"),
        ("histogram", 9, "bytes", "data"),
        ("exponential", 10, "bytes", "data"),
        ("summary", 11, "bytes", "data"),
    ],
    "Scope": [("items", 2, "Metric", "many")],
    "Group": [("resource", 1, "bytes", ""), ("scopes", 2, "Scope", "many")],
    "Request": [("groups", 1, "Group", "many")],
}
_SIGNALS = {"traces": _TRACES, "metrics": _METRICS}


def _descriptor(package: str, messages: dict[str, _Fields]) -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3"
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        choices: dict[str, int] = {}
        for field_name, number, kind, how in fields:
            field = message.field.add(name=field_name, number=number)
            field.label = _Field.LABEL_REPEATED if how == "many" else _Field.LABEL_OPTIONAL
            if kind in messages:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                field.type = getattr(_Field, f"TYPE_{kind.upper()}")
            if how not in {"", "many"}:
                if how not in choices:
                    choices[how] = len(message.oneof_decl)
                    message.oneof_decl.add(name=how)
                field.oneof_index = choices[how]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindFileByName(file.name)


@functools.cache
def _handler(signal: str) -> Any:
    file = _descriptor(f"kansoku.trimmed.{signal}", _SIGNALS[signal])
    return ptars.HandlerPool([file]).get_for_message(file.message_types_by_name["Request"])


def read_columns(signal: str, payload: bytes) -> Any:
    """Return the request's groups as an Arrow list column; raise ValueError for malformed bytes."""
    try:
        return _handler(signal).list_to_record_batch([payload]).column(0)
    except Exception as error:  # noqa: BLE001 - whatever the reader raises, the bytes are bad
        raise ValueError(str(error)) from None

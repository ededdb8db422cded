"""Bodies of OTLP requests to rows: protobuf by the bulk decoder where it is installed, or JSON."""

import base64
import functools
from collections.abc import Callable
from typing import Any

import orjson
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kansoku.errors import InputError
from kansoku.telemetry import profiles
from kansoku.telemetry.decode_plain import Decoded, decode_plain

__all__ = ["REQUESTS", "decode", "decode_json"]

REQUESTS: dict[str, Any] = {
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}
if profiles.OFFERED:
    REQUESTS["profiles"] = profiles.request_type()
_HEX_KEYS = {
    "traceId", "spanId", "parentSpanId", "profileId", "trace_id", "span_id", "parent_span_id",
    "profile_id",
}  # fmt: skip
_DEEPEST = 100


@functools.cache
def _bulk() -> Callable[[str, bytes], Decoded | None] | None:
    try:
        from kansoku.telemetry.decode_bulk import decode_bulk
    except ImportError:
        return None
    return decode_bulk


def decode(signal: str, payload: bytes, *, received_ns: int) -> Decoded:
    """Return the rows of a protobuf body; raise InputError for a malformed one.

    ``received_ns`` stands in for the time of log records that have none.
    """
    bulk = _bulk()
    if bulk is not None and (decoded := bulk(signal, payload)) is not None:
        return decoded
    try:
        request = REQUESTS[signal].FromString(payload)
    except DecodeError as error:
        raise InputError(f"malformed protobuf of {signal}: {error}") from None
    return _walk(signal, request, received_ns)


def _walk(signal: str, request: Any, received_ns: int) -> Decoded:
    if signal != "profiles":
        return decode_plain(signal, request, received_ns=received_ns)
    decoded = Decoded()
    profiles.decode_profiles(request, decoded)
    return decoded


def decode_json(signal: str, payload: bytes, *, received_ns: int) -> Decoded:
    """Return the rows of a JSON body; raise InputError for a malformed one."""
    try:
        document = orjson.loads(payload)
        if not isinstance(document, dict):
            raise InputError(f"malformed JSON of {signal}: expected an object")
        request = ParseDict(
            _base64_ids(document, 0), REQUESTS[signal](), ignore_unknown_fields=True
        )
    except (orjson.JSONDecodeError, ParseError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"malformed JSON of {signal}: {error}") from None
    return _walk(signal, request, received_ns)


def _base64_ids(value: Any, depth: int) -> Any:
    """Rewrite trace and span ids: OTLP says hex where protobuf's JSON says base64."""
    if depth > _DEEPEST:
        raise ValueError(f"nested deeper than {_DEEPEST}")
    if isinstance(value, list):
        return [_base64_ids(one, depth + 1) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(one)).decode()
        if key in _HEX_KEYS and isinstance(one, str)
        else _base64_ids(one, depth + 1)
        for key, one in value.items()
    }

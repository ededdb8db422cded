"""OTLP over HTTP and our Arrow batches, as ASGI routes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kansoku.errors import BusyError, InputError, StoreError
from kansoku.model import Origin, Receipt
from kansoku.telemetry import profiles
from kansoku.telemetry._names import AGENT_HEADER, SEQUENCE_HEADER
from kansoku.telemetry.batch import CONTENT_TYPE
from kansoku.telemetry.receive import Intake, TooLargeError, inflate

__all__ = ["Authorize", "export_response", "origin_of", "otlp_routes"]

Authorize = Callable[[Request], str | None]
"""Return why a request may not send, or None where it may."""

_PROTOBUF, _JSON = "application/x-protobuf", "application/json"
_RESPONSES: dict[str, tuple[Any, str]] = {
    "traces": (ExportTraceServiceResponse, "rejected_spans"),
    "metrics": (ExportMetricsServiceResponse, "rejected_data_points"),
    "logs": (ExportLogsServiceResponse, "rejected_log_records"),
}
if profiles.OFFERED:
    _RESPONSES["profiles"] = (profiles.response_type(), "rejected_profiles")


def export_response(signal: str, receipt: Receipt) -> Any:
    """Return OTLP's response message: what was rejected for good, and why."""
    message, field = _RESPONSES[signal]
    response = message()
    if receipt.rejected:
        setattr(response.partial_success, field, sum(receipt.rejected.values()))
        response.partial_success.error_message = ", ".join(
            f"{number} {reason}" for reason, number in sorted(receipt.rejected.items())
        )
    return response


def origin_of(agent: str | None, sequence: str | None) -> Origin | None:
    """Return the origin that headers name; raise InputError for a garbled one."""
    if not agent and not sequence:
        return None
    if not agent or not sequence or len(agent) > 200 or not sequence.isdecimal():
        raise InputError(f"{AGENT_HEADER} and {SEQUENCE_HEADER} must be a name and a number")
    number = int(sequence[:20])
    if number >= 2**63:
        raise InputError(f"{SEQUENCE_HEADER} {sequence} does not fit 63 bits")
    return Origin(agent=agent, sequence=number)


def _failure(status: int, text: str, *, json: bool, after_s: int | None = None) -> Response:
    """Return an error as OTLP wants it: a google.rpc.Status in the request's encoding."""
    headers = {} if after_s is None else {"retry-after": str(after_s)}
    if json:
        return JSONResponse({"code": status, "message": text}, status, headers)
    raw = text.encode()[:2000]
    size, varint = len(raw), b""
    while size >= 0x80:
        varint += bytes([size & 0x7F | 0x80])
        size >>= 7
    body = b"\x12" + varint + bytes([size]) + raw
    return Response(body, status, headers, media_type=_PROTOBUF)


async def _body(request: Request, limit: int) -> bytes:
    """Read a body of at most ``limit`` bytes; raise TooLargeError beyond."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise TooLargeError(f"body of {announced} bytes exceeds {limit}")
    parts, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise TooLargeError(f"body exceeds {limit} bytes")
        parts.append(chunk)
    return b"".join(parts)


class _Endpoint:
    """One path."""

    def __init__(self, intake: Intake, authorize: Authorize, signal: str | None) -> None:
        self._intake = intake
        self._authorize = authorize
        self._signal = signal

    async def __call__(self, request: Request) -> Response:
        """Answer one request; every way it can end is counted."""
        counts = self._intake.counts
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        json = kind == _JSON and self._signal is not None
        refusal = self._authorize(request)
        if refusal is not None:
            counts.unauthorized += 1
            return _failure(401, refusal, json=json)
        wanted = {_PROTOBUF, _JSON} if self._signal else {CONTENT_TYPE}
        if kind not in wanted:
            counts.wrong_type += 1
            known = " or ".join(sorted(wanted))
            return _failure(415, f"content type {kind!r} is not {known}", json=json)
        try:
            return await self._answer(request, json=json)
        except TooLargeError as error:
            counts.too_large += 1
            return _failure(413, str(error), json=json)
        except InputError as error:
            return _failure(400, str(error), json=json)
        except BusyError as error:
            return _failure(503, str(error), json=json, after_s=1)
        except StoreError as error:
            return _failure(503, str(error), json=json, after_s=5)
        except ClientDisconnect:
            return Response(status_code=499)

    async def _answer(self, request: Request, *, json: bool) -> Response:
        limits = self._intake.limits
        headers = request.headers
        origin = origin_of(headers.get(AGENT_HEADER), headers.get(SEQUENCE_HEADER))
        body = await _body(request, limits.max_body_bytes)
        encoding = headers.get("content-encoding", "")
        try:
            payload = await asyncio.to_thread(inflate, body, encoding, limits.max_inflated_bytes)
        except TooLargeError:
            raise
        except InputError:
            self._intake.counts.malformed += 1
            raise
        self._intake.begin(len(payload))
        try:
            if self._signal is None:
                answer = await asyncio.to_thread(self._intake.arrow, payload, origin=origin)
            else:
                answer = await asyncio.to_thread(
                    self._intake.otlp, self._signal, payload, json=json, origin=origin
                )
            receipt = await asyncio.wrap_future(answer)
        finally:
            self._intake.end(len(payload))
        return self._receipt(receipt, json=json)

    def _receipt(self, receipt: Receipt, *, json: bool) -> Response:
        if self._signal is None:
            document = {
                "rows": dict(receipt.rows),
                "rejected": dict(receipt.rejected),
                "duplicate": receipt.duplicate,
            }
            return Response(orjson.dumps(document), media_type=_JSON)
        message = export_response(self._signal, receipt)
        if json:
            from google.protobuf.json_format import MessageToJson

            return Response(MessageToJson(message, indent=None), media_type=_JSON)
        return Response(message.SerializeToString(), media_type=_PROTOBUF)


def otlp_routes(intake: Intake, authorize: Authorize = lambda _: None) -> list[Route]:
    """Return the routes of every signal and ``/v1/kansoku/batch``."""
    routes: dict[str, str | None] = {
        "/v1/traces": "traces",
        "/v1/metrics": "metrics",
        "/v1/logs": "logs",
        "/v1/kansoku/batch": None,
    }
    if profiles.OFFERED:
        routes[profiles.PATH] = "profiles"
    return [
        Route(path, _handler(_Endpoint(intake, authorize, signal)), methods=["POST"])
        for path, signal in routes.items()
    ]


def _handler(endpoint: _Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await endpoint(request)

    return handle

"""Ways to send a batch: our Arrow over HTTP, OTLP over HTTP, OTLP over gRPC.

Each returns what the receiver said, as one of: delivered (with rows rejected for good), retry
(nothing is known to be kept; send the same again), refused (sending again will not help).
"""

import gzip
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import orjson
import polars as pl
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from kansoku.errors import ConfigurationError, DependencyError
from kansoku.telemetry._names import AGENT_HEADER, SEQUENCE_HEADER
from kansoku.telemetry.batch import CONTENT_TYPE, unpack_batch
from kansoku.telemetry.encode import MetricInfo, encode
from kansoku.telemetry.spool import Record

__all__ = ["ArrowTransport", "GrpcTransport", "HttpTransport", "Outcome", "Tls", "Transport"]

_log = logging.getLogger(__name__)
_RESPONSES: dict[str, tuple[Any, str]] = {
    "traces": (ExportTraceServiceResponse, "rejected_spans"),
    "metrics": (ExportMetricsServiceResponse, "rejected_data_points"),
    "logs": (ExportLogsServiceResponse, "rejected_log_records"),
}
_NOT_OFFERED = {404, 405, 415, 501}
_RETRYABLE_HTTP = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the receiver said of one batch."""

    state: str
    """``delivered``, ``retry`` or ``refused``."""
    rejected_rows: int = 0
    reason: str = ""
    after_s: float | None = None
    """When the receiver wants to be asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates of a client: whom it trusts, and who it is (mTLS)."""

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a context for HTTPS; raise ConfigurationError for unreadable files."""
        try:
            context = ssl.create_default_context(
                cafile=str(self.authority) if self.authority else None
            )
            if self.certificate:
                context.load_cert_chain(str(self.certificate), str(self.key) if self.key else None)
        except OSError as error:
            raise ConfigurationError(f"certificates: {error}") from None
        return context


class Transport(Protocol):
    """One way to send."""

    def send(self, record: Record, agent: str) -> Outcome:
        """Send one batch; never raises for what a network or receiver does."""

    def close(self) -> None:
        """Let go of connections."""


def _after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdigit() else None


def _outcome(response: httpx.Response) -> Outcome:
    reason = f"HTTP {response.status_code}: {response.text[:200]}"
    if response.status_code in _RETRYABLE_HTTP:
        return Outcome(state="retry", reason=reason, after_s=_after(response))
    if response.status_code in {401, 403}:
        # A wrong token is mended by an operator; the rows are worth keeping until then.
        return Outcome(state="retry", reason=reason, after_s=30.0)
    return Outcome(state="refused", reason=reason)


@dataclass(slots=True)
class _Http:
    """A client with what every request carries."""

    base: str
    client: httpx.Client
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, endpoint: str, headers: Mapping[str, str], tls: Tls | None, timeout_s: float
    ) -> "_Http":
        # Plain HTTP has nothing to verify; loading the authorities would cost the agent 4 MB.
        verify = tls.context() if tls else not endpoint.startswith("http://")
        client = httpx.Client(timeout=timeout_s, verify=verify, headers=dict(headers))
        return cls(base=endpoint.rstrip("/"), client=client)

    def post(self, path: str, content: bytes, headers: dict[str, str]) -> httpx.Response | Outcome:
        try:
            return self.client.post(self.base + path, content=content, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            return Outcome(state="retry", reason=f"{type(error).__name__}: {error}")


class ArrowTransport:
    """Our columns over HTTP, to a kansoku server: exactly once."""

    def __init__(
        self,
        endpoint: str,
        *,
        headers: Mapping[str, str] | None = None,
        tls: Tls | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._http = _Http.of(endpoint, headers or {}, tls, timeout_s)

    def send(self, record: Record, agent: str) -> Outcome:
        """Send the batch as it is kept."""
        headers = {
            "content-type": CONTENT_TYPE,
            AGENT_HEADER: agent,
            SEQUENCE_HEADER: str(record.sequence),
        }
        response = self._http.post("/v1/kansoku/batch", record.payload, headers)
        if isinstance(response, Outcome):
            return response
        if response.status_code in _NOT_OFFERED:
            # It is the address that is wrong, or a proxy whose server is away: no batch's fault.
            reason = f"HTTP {response.status_code}: not a kansoku server, or one behind a proxy"
            return Outcome(state="retry", reason=reason, after_s=30.0)
        if response.status_code != 200:
            return _outcome(response)
        try:
            rejected = orjson.loads(response.content).get("rejected", {})
            return Outcome(state="delivered", rejected_rows=sum(rejected.values()))
        except (orjson.JSONDecodeError, AttributeError, TypeError):
            return Outcome(state="retry", reason="the answer is not a kansoku server's")

    def close(self) -> None:
        """Let go of connections."""
        self._http.client.close()


def _messages(record: Record, *, profiles: bool) -> dict[str, Any]:
    """Return signal to OTLP request of a kept batch.

    Profiles travel as their own signal, first, or as log records where the receiver has none.
    """
    tables, resource, metrics = unpack_batch(record.payload)
    info = {
        name: MetricInfo(
            unit=row.get("unit", ""),
            kind=row.get("kind", "gauge"),
            description=row.get("description", ""),
        )
        for name, row in metrics.items()
    }
    frames = {}
    for name, rows in tables.items():
        frame = pl.from_arrow(rows)
        assert isinstance(frame, pl.DataFrame)
        frames[name] = frame
    apart: dict[str, Any] = {}
    if profiles and "profiles" in frames:
        from kansoku.telemetry.profiles import OFFERED, encode_profiles

        if OFFERED:
            apart["profiles"] = encode_profiles(frames.pop("profiles"), resource)
    return apart | encode(frames, resource=resource, describe=info.get)


def _rejected(signal: str, payload: bytes) -> int:
    if signal == "profiles":
        return 0  # it counts profiles, and a batch counts their stacks
    message, field_name = _RESPONSES[signal]
    try:
        return int(getattr(message.FromString(payload).partial_success, field_name))
    except DecodeError:
        return 0


class HttpTransport:
    """OTLP over HTTP: exactly once to a kansoku server, at least once to any other receiver."""

    def __init__(
        self,
        endpoint: str,
        *,
        headers: Mapping[str, str] | None = None,
        tls: Tls | None = None,
        timeout_s: float = 30.0,
        paths: Mapping[str, str] | None = None,
    ) -> None:
        """Send to ``endpoint``/v1/SIGNAL, or to ``paths`` (signal to path) for other back ends."""
        self._http = _Http.of(endpoint, headers or {}, tls, timeout_s)
        # Named paths are those of other back ends: none has one for profiles.
        self._paths = paths or {"profiles": "/v1development/profiles"}
        self._profiles = paths is None

    def send(self, record: Record, agent: str) -> Outcome:
        """Send one request per signal of the batch."""
        rejected = 0
        for signal, message in _messages(record, profiles=self._profiles).items():
            headers = {
                "content-type": "application/x-protobuf",
                "content-encoding": "gzip",
                # Signals of one batch are numbered apart: one may arrive without the other.
                AGENT_HEADER: f"{agent}/{signal}",
                SEQUENCE_HEADER: str(record.sequence),
            }
            body = gzip.compress(message.SerializeToString(), compresslevel=1, mtime=0)
            path = self._paths.get(signal, f"/v1/{signal}")
            response = self._http.post(path, body, headers)
            if isinstance(response, Outcome):
                return response
            if signal == "profiles" and response.status_code in _NOT_OFFERED:
                self._profiles = False
                return self.send(record, agent)
            if response.status_code // 100 != 2:
                return _outcome(response)
            rejected += _rejected(signal, response.content)
        return Outcome(state="delivered", rejected_rows=rejected)

    def close(self) -> None:
        """Let go of connections."""
        self._http.client.close()


class GrpcTransport:
    """OTLP over gRPC, to ``host:port``; with certificates when given, else in plain text."""

    def __init__(
        self,
        endpoint: str,
        *,
        headers: Mapping[str, str] | None = None,
        tls: Tls | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        try:
            import grpc
        except ImportError:
            raise DependencyError.missing("OTLP over gRPC", "grpcio", "otlp") from None
        target = endpoint.removeprefix("http://").removeprefix("https://").rstrip("/")
        self._grpc = grpc
        self._timeout_s = timeout_s
        self._metadata = [(key.lower(), value) for key, value in (headers or {}).items()]
        if tls is not None:
            read = [
                p.read_bytes() if p else None for p in (tls.authority, tls.key, tls.certificate)
            ]
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(*read))
        else:
            self._channel = grpc.insecure_channel(target)
        self._calls = {
            signal: self._channel.unary_unary(
                f"/opentelemetry.proto.collector.{package}.{service}Service/Export",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=lambda payload: payload,
            )
            for signal, (package, service) in {
                "traces": ("trace.v1", "Trace"),
                "metrics": ("metrics.v1", "Metrics"),
                "logs": ("logs.v1", "Logs"),
                "profiles": ("profiles.v1development", "Profiles"),
            }.items()
        }
        self._profiles = True
        code = grpc.StatusCode
        self._retryable = {
            code.CANCELLED, code.DEADLINE_EXCEEDED, code.ABORTED, code.OUT_OF_RANGE,
            code.UNAVAILABLE, code.DATA_LOSS, code.RESOURCE_EXHAUSTED, code.UNAUTHENTICATED,
            code.PERMISSION_DENIED, code.INTERNAL, code.UNKNOWN,
        }  # fmt: skip

    def send(self, record: Record, agent: str) -> Outcome:
        """Send one call per signal of the batch."""
        rejected = 0
        for signal, message in _messages(record, profiles=self._profiles).items():
            metadata = [
                *self._metadata,
                (AGENT_HEADER, f"{agent}/{signal}"),
                (SEQUENCE_HEADER, str(record.sequence)),
            ]
            try:
                answer = self._calls[signal](
                    message,
                    timeout=self._timeout_s,
                    metadata=metadata,
                    compression=self._grpc.Compression.Gzip,
                )
            except self._grpc.RpcError as error:
                if signal == "profiles" and error.code() == self._grpc.StatusCode.UNIMPLEMENTED:
                    self._profiles = False
                    return self.send(record, agent)
                state = "retry" if error.code() in self._retryable else "refused"
                return Outcome(state=state, reason=f"{error.code().name}: {error.details()}")
            rejected += _rejected(signal, answer)
        return Outcome(state="delivered", rejected_rows=rejected)

    def close(self) -> None:
        """Let go of the channel."""
        self._channel.close()

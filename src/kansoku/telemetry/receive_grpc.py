"""OTLP over gRPC: raw bodies to the same intake as HTTP's."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kansoku.errors import BusyError, DependencyError, InputError, PlatformError, StoreError
from kansoku.model import Receipt
from kansoku.telemetry import profiles
from kansoku.telemetry._names import AGENT_HEADER, SEQUENCE_HEADER
from kansoku.telemetry.receive import Intake
from kansoku.telemetry.receive_http import export_response, origin_of

__all__ = ["GrpcReceiver", "GrpcTls"]

_SERVICES = {
    "traces": "opentelemetry.proto.collector.trace.v1.TraceService",
    "metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
    "logs": "opentelemetry.proto.collector.logs.v1.LogsService",
}
if profiles.OFFERED:
    _SERVICES["profiles"] = profiles.SERVICE
_COMMIT_TIMEOUT_S = 60.0

AuthorizeMetadata = Callable[[Mapping[str, str], str | None], str | None]
"""Return why a call with that metadata (and client certificate name) may not send, or None."""


class GrpcTls:
    """The server's certificate, and whose certificates clients must have."""

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        self.certificate = certificate.read_bytes()
        self.key = key.read_bytes()
        self.client_authority = client_authority.read_bytes() if client_authority else None


class GrpcReceiver:
    """A gRPC server on its own threads."""

    def __init__(
        self,
        intake: Intake,
        *,
        host: str,
        port: int,
        authorize: AuthorizeMetadata = lambda _metadata, _name: None,
        tls: GrpcTls | None = None,
        threads: int = 4,
    ) -> None:
        """Listen; raise PlatformError when the port is taken, DependencyError without grpcio."""
        try:
            import grpc
        except ImportError:
            raise DependencyError.missing("OTLP over gRPC", "grpcio", "otlp") from None
        self._grpc = grpc
        self._intake = intake
        self._authorize = authorize
        self._server = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix="otlp-grpc"),
            options=[
                ("grpc.max_receive_message_length", intake.limits.max_inflated_bytes),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=64,
        )
        handlers = [self._service(grpc, signal, name) for signal, name in _SERVICES.items()]
        self._server.add_generic_rpc_handlers(tuple(handlers))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                self.port = int(self._server.add_insecure_port(address))
            else:
                credentials = grpc.ssl_server_credentials(
                    [(tls.key, tls.certificate)],
                    root_certificates=tls.client_authority,
                    require_client_auth=tls.client_authority is not None,
                )
                self.port = int(self._server.add_secure_port(address, credentials))
        except RuntimeError as error:
            raise PlatformError(f"gRPC cannot listen: {error}", where=address) from None
        if not self.port:
            raise PlatformError("gRPC cannot listen: the port is taken", where=address)
        self._server.start()

    def _service(self, grpc: Any, signal: str, name: str) -> Any:
        def export(payload: bytes, context: Any) -> bytes:
            return self._export(signal, payload, context)

        # No deserializer: the intake decodes the bytes itself.
        method = grpc.unary_unary_rpc_method_handler(export)
        return grpc.method_handlers_generic_handler(name, {"Export": method})

    def _export(self, signal: str, payload: bytes, context: Any) -> bytes:
        code = self._grpc.StatusCode
        metadata = {key: value for key, value in context.invocation_metadata() if value}
        texts = {key: value for key, value in metadata.items() if isinstance(value, str)}
        names = context.auth_context().get("x509_common_name", [b""])
        refusal = self._authorize(texts, names[0].decode(errors="replace") or None)
        if refusal is not None:
            self._intake.counts.unauthorized += 1
            context.abort(code.UNAUTHENTICATED, refusal)
        try:
            return self._keep(signal, payload, texts)
        except InputError as error:
            context.abort(code.INVALID_ARGUMENT, str(error))
        except BusyError as error:
            context.abort(code.RESOURCE_EXHAUSTED, str(error))
        except (StoreError, TimeoutError) as error:
            context.abort(code.UNAVAILABLE, str(error))
        raise AssertionError("abort raises")

    def _keep(self, signal: str, payload: bytes, metadata: Mapping[str, str]) -> bytes:
        origin = origin_of(metadata.get(AGENT_HEADER), metadata.get(SEQUENCE_HEADER))
        self._intake.begin(len(payload))
        try:
            answer = self._intake.otlp(signal, payload, origin=origin)
            receipt: Receipt = answer.result(timeout=_COMMIT_TIMEOUT_S)
        finally:
            self._intake.end(len(payload))
        encoded: bytes = export_response(signal, receipt).SerializeToString()
        return encoded

    def close(self, *, grace_s: float = 2.0) -> None:
        """Finish calls in progress, then stop."""
        self._server.stop(grace_s).wait()

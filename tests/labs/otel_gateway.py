"""A stand-in for the collector gateway: OTLP over HTTP in; Prometheus series and log fields out.

Metric names follow OpenTelemetry's "Prometheus and OpenMetrics compatibility" text, written here
from that text and from the unit and kind on the wire, not from kansoku's catalogue: so a dashboard
that asks for a name which the translation would not make finds nothing. Log fields are those that
VictoriaLogs documents for OTLP: attributes and resource attributes under their own names, _msg,
_time, severity.
"""

import gzip
import re
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_WORDS = {
    "d": "days", "h": "hours", "min": "minutes", "s": "seconds", "ms": "milliseconds",
    "By": "bytes", "KiBy": "kibibytes", "m": "meters", "V": "volts", "A": "amperes",
    "J": "joules", "W": "watts", "g": "grams", "Cel": "celsius", "Hz": "hertz", "%": "percent",
}  # fmt: skip
_PER = {"s": "second", "m": "minute", "h": "hour", "d": "day"}


def prometheus_metric(name: str, unit: str, *, counter: bool, gauge: bool) -> str:
    """Return the Prometheus name of an OTLP metric."""
    tokens = [t for t in re.split(r"[^a-zA-Z0-9]+", name) if t]
    main, _, per = unit.partition("/")
    main, per = main.strip(), per.strip()
    if main and "{" not in main:
        word = _WORDS.get(main, "" if main == "1" else main)
        if word and word not in tokens:
            tokens.append(word)
    if per and "{" not in per:
        word = _PER.get(per, per)
        if word not in tokens:
            tokens += ["per", word]
    if counter:
        tokens = [t for t in tokens if t != "total"] + ["total"]
    if unit == "1" and gauge:
        tokens = [t for t in tokens if t != "ratio"] + ["ratio"]
    return "_".join(tokens)


def _text(value) -> str:
    which = value.WhichOneof("value")
    found = getattr(value, which) if which else ""
    return str(found).lower() if isinstance(found, bool) else str(found)


def _attributes(attributes) -> dict[str, str]:
    return {one.key: _text(one.value) for one in attributes}


class Gateway:
    """A running gateway; ``series`` and ``logs`` hold what came."""

    def __init__(self) -> None:
        self.series: dict[tuple[tuple[str, str], ...], list[tuple[int, float]]] = {}
        self.logs: list[dict[str, str]] = []
        self.spans = []
        self.lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                with owner.lock:
                    getattr(owner, "_" + self.path.rpartition("/")[2])(body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _metrics(self, body: bytes) -> None:
        request = ExportMetricsServiceRequest.FromString(body)
        for group in request.resource_metrics:
            resource = _attributes(group.resource.attributes)
            for scope in group.scope_metrics:
                for metric in scope.metrics:
                    self._metric(metric, resource)

    def _metric(self, metric, resource) -> None:
        kind = metric.WhichOneof("data")
        if kind is None:
            return
        monotonic = kind == "sum" and metric.sum.is_monotonic
        name = prometheus_metric(metric.name, metric.unit, counter=monotonic, gauge=kind == "gauge")
        for point in getattr(metric, kind).data_points:
            labels = resource | _attributes(point.attributes)
            plain = {re.sub(r"[^a-zA-Z0-9_]", "_", key): value for key, value in labels.items()}
            key = tuple(sorted({**plain, "__name__": name}.items()))
            self.series.setdefault(key, []).append((point.time_unix_nano // 10**6, point.as_double))

    def _logs(self, body: bytes) -> None:
        request = ExportLogsServiceRequest.FromString(body)
        for group in request.resource_logs:
            resource = _attributes(group.resource.attributes)
            for scope in group.scope_logs:
                for record in scope.log_records:
                    seconds, rest = divmod(record.time_unix_nano, 10**9)
                    stamp = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
                    entry = resource | _attributes(record.attributes)
                    entry |= {"_msg": _text(record.body), "_time": f"{stamp}.{rest:09d}Z"}
                    if record.severity_text:
                        entry["severity"] = record.severity_text
                    if record.event_name:
                        entry.setdefault("event.name", record.event_name)
                    self.logs.append({k: v for k, v in entry.items() if v})

    def _traces(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for group in request.resource_spans:
            service = _attributes(group.resource.attributes).get("service.name")
            for scope in group.scope_spans:
                self.spans += [(service, _attributes(s.attributes)) for s in scope.spans]

"""Telemetry: OTLP and our Arrow batches in and out, with a spool, retries and counts."""

from kansoku.telemetry.encode import Describe, MetricInfo, encode
from kansoku.telemetry.exporter import Exporter, ExporterCounts, make_transport
from kansoku.telemetry.receive import Intake, IntakeCounts, IntakeLimits, Sink
from kansoku.telemetry.receive_grpc import GrpcReceiver, GrpcTls
from kansoku.telemetry.receive_http import otlp_routes
from kansoku.telemetry.spool import Spool
from kansoku.telemetry.transport import Outcome, Tls, Transport

__all__ = [
    "Describe",
    "Exporter",
    "ExporterCounts",
    "GrpcReceiver",
    "GrpcTls",
    "Intake",
    "IntakeCounts",
    "IntakeLimits",
    "MetricInfo",
    "Outcome",
    "Sink",
    "Spool",
    "Tls",
    "Transport",
    "encode",
    "make_transport",
    "otlp_routes",
]

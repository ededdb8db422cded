"""Telemetry: OTLP and our Arrow batches in and out, with a spool, retries and counts."""

from kansoku.telemetry.encode import Describe, MetricInfo
from kansoku.telemetry.exporter import Exporter, ExporterCounts, make_transport
from kansoku.telemetry.spool import Spool
from kansoku.telemetry.transport import Outcome, Tls, Transport

__all__ = [
    "Describe",
    "Exporter",
    "ExporterCounts",
    "MetricInfo",
    "Outcome",
    "Spool",
    "Tls",
    "Transport",
    "make_transport",
]

"""Telemetry: OTLP and our Arrow batches in and out, with a spool, retries and counts.

The receiving half is imported when it is first asked for: a node agent only sends, and has 120 MB.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kansoku.telemetry.encode import Describe, MetricInfo, encode
from kansoku.telemetry.exporter import Exporter, ExporterCounts, make_transport
from kansoku.telemetry.spool import Spool
from kansoku.telemetry.transport import Outcome, Tls, Transport

if TYPE_CHECKING:
    from kansoku.telemetry.receive import Intake, IntakeCounts, IntakeLimits, Sink
    from kansoku.telemetry.receive_grpc import GrpcReceiver, GrpcTls
    from kansoku.telemetry.receive_http import otlp_routes

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

_LATER = {
    "Intake": "receive",
    "IntakeCounts": "receive",
    "IntakeLimits": "receive",
    "Sink": "receive",
    "GrpcReceiver": "receive_grpc",
    "GrpcTls": "receive_grpc",
    "otlp_routes": "receive_http",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kansoku.telemetry.{_LATER[name]}"), name)

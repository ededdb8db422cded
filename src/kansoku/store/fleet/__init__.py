"""A fleet's back ends: PromQL, LogsQL and Jaeger readers, remote write, one store over them."""

from kansoku.store.fleet._web import BackEnd
from kansoku.store.fleet.jaeger import JaegerSpans
from kansoku.store.fleet.logsql import LogsqlEvents, LogsqlSpans
from kansoku.store.fleet.names import KNOWN_LABELS, Naming
from kansoku.store.fleet.promql import PromMetrics
from kansoku.store.fleet.remote_write import RemoteWriter
from kansoku.store.fleet.store import FleetStore, PollListener, SpanReader

__all__ = [
    "KNOWN_LABELS",
    "BackEnd",
    "FleetStore",
    "JaegerSpans",
    "LogsqlEvents",
    "LogsqlSpans",
    "Naming",
    "PollListener",
    "PromMetrics",
    "RemoteWriter",
    "SpanReader",
]

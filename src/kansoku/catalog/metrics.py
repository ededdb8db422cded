"""Every metric, declared once: name, unit, kind, attributes, meaning.

Names are OpenTelemetry's semantic conventions where they have one (``hw.*``, ``system.*``,
``nfs.*``), and ``kansoku.*`` elsewhere. Collectors, exporters, dashboards and the documentation
read this table; a name that is not in it raises.
"""

import csv
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources

from kansoku.errors import InputError

__all__ = ["Metric", "MetricKind", "metric", "metrics", "prometheus_name"]


class MetricKind(StrEnum):
    """How values of a metric relate to time."""

    GAUGE = "gauge"
    """A state now; means over time and series make sense."""
    COUNTER = "counter"
    """Only grows (OTLP monotonic cumulative sum)."""
    UPDOWN = "updown"
    """A sum that may fall; adding over series makes sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric of the catalogue."""

    name: str
    unit: str
    """UCUM, as OpenTelemetry writes it: ``By``, ``s``, ``1``, ``{packet}``."""
    kind: MetricKind
    attributes: tuple[str, ...]
    """Beside ``host.name``, which every series of a node carries."""
    meaning: str
    convention: str
    """``opentelemetry`` or ``kansoku``."""


@cache
def metrics() -> dict[str, Metric]:
    """Return every metric by name."""
    file = resources.files("kansoku.catalog") / "data" / "metrics.csv"
    rows = csv.DictReader(file.read_text("utf-8").splitlines())
    return {
        row["name"]: Metric(
            name=row["name"],
            unit=row["unit"],
            kind=MetricKind(row["kind"]),
            attributes=tuple(a for a in row["attributes"].split(";") if a),
            meaning=row["meaning"],
            convention=row["convention"],
        )
        for row in rows
    }


def metric(name: str) -> Metric:
    """Return one metric; raise InputError for a name that is not declared."""
    try:
        return metrics()[name]
    except KeyError:
        raise InputError(
            f"no metric {name!r} in the catalogue", remedy="declare it in catalog/data/metrics.csv"
        ) from None


# OpenTelemetry's units as the Prometheus exporter and VictoriaMetrics spell them.
_UNIT_WORDS = {
    "By": "bytes",
    "s": "seconds",
    "J": "joules",
    "W": "watts",
    "Cel": "celsius",
    "Hz": "hertz",
    "By/s": "bytes_per_second",
}


def prometheus_name(name: str) -> str:
    """Return the name a metric has in PromQL after OpenTelemetry's own translation.

    Dots become underscores, the unit's word is appended unless the name ends in it, gauges of
    unit 1 get ``ratio``, counters ``total``.

    >>> prometheus_name("hw.energy"), prometheus_name("hw.gpu.utilization")
    ('hw_energy_joules_total', 'hw_gpu_utilization_ratio')
    """
    entry = metric(name)
    parts = name.replace(".", "_")
    word = _UNIT_WORDS.get(entry.unit)
    if entry.unit == "1" and entry.kind is MetricKind.GAUGE:
        word = "ratio"
    if word and not parts.endswith(f"_{word}"):
        parts += f"_{word}"
    if entry.kind is MetricKind.COUNTER and not parts.endswith("_total"):
        parts += "_total"
    return parts

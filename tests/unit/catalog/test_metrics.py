"""The metrics catalogue: sound, and the same as its documentation page."""

import re
from pathlib import Path

import pytest

from kansoku.catalog.metrics import MetricKind, metric, metrics, prometheus_name
from kansoku.errors import InputError

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
UNITS = re.compile(r"1|s|By|By/s|J|W|Hz|Cel|\{[a-z]+\}")


def test_names_units_and_conventions():
    for entry in metrics().values():
        assert re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", entry.name), entry.name
        assert UNITS.fullmatch(entry.unit), entry
        own = entry.name.startswith("kansoku.")
        assert entry.convention == ("kansoku" if own else "opentelemetry")
        assert entry.meaning


def test_unknown_metrics_raise():
    with pytest.raises(InputError, match="no metric 'hw"):
        metric("hw.gpu.utilisation")


# From the OpenTelemetry semantic conventions (model/hardware/*.yaml): unit and instrument.
@pytest.mark.parametrize(
    ("name", "unit", "kind"),
    [
        ("hw.gpu.io", "By", MetricKind.COUNTER),
        ("hw.gpu.memory.limit", "By", MetricKind.UPDOWN),
        ("hw.gpu.utilization", "1", MetricKind.GAUGE),
        ("hw.energy", "J", MetricKind.COUNTER),
        ("hw.power", "W", MetricKind.GAUGE),
        ("hw.errors", "{error}", MetricKind.COUNTER),
        ("hw.network.io", "By", MetricKind.COUNTER),
        ("hw.network.packets", "{packet}", MetricKind.COUNTER),
        ("hw.network.bandwidth.limit", "By/s", MetricKind.UPDOWN),
        ("hw.network.up", "1", MetricKind.UPDOWN),
    ],
)
def test_conventions_are_kept(name, unit, kind):
    assert (metric(name).unit, metric(name).kind) == (unit, kind)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hw.power", "hw_power_watts"),
        ("hw.gpu.memory.usage", "hw_gpu_memory_usage_bytes"),
        ("system.network.packet.count", "system_network_packet_count_total"),
        ("kansoku.gpu.throttle.time", "kansoku_gpu_throttle_time_seconds_total"),
        ("hw.network.up", "hw_network_up"),
    ],
)
def test_names_in_promql(name, expected):
    assert prometheus_name(name) == expected


def test_the_page_lists_every_metric():
    """``scripts/metrics_page.py`` writes the page; this is what fails when it was not run."""
    text = PAGE.read_text("utf-8")
    for entry in metrics().values():
        assert f"| `{entry.name}` | {entry.unit} | {entry.kind.value} |" in text, entry.name
    listed = set(re.findall(r"^\| `([a-z0-9_.]+)` \|", text, re.MULTILINE))
    assert listed == set(metrics())

"""Kinds of metrics as OTLP's shapes: what a collector's names depend on."""

import polars as pl
import pytest

from kansoku.telemetry import MetricInfo, encode


@pytest.mark.parametrize(
    ("kind", "shape", "monotonic"),
    [("gauge", "gauge", None), ("counter", "sum", True), ("updown", "sum", False)],
)
def test_kind_to_shape(kind, shape, monotonic):
    rows = pl.DataFrame({"metric": ["m"], "labels": ["{}"], "time_ns": [1], "value": [2.0]})
    request = encode(
        {"metrics": rows}, resource={}, describe=lambda _: MetricInfo(unit="1", kind=kind)
    )["metrics"]
    (metric,) = request.resource_metrics[0].scope_metrics[0].metrics
    assert metric.WhichOneof("data") == shape
    (point,) = getattr(metric, shape).data_points
    assert point.as_double == 2.0
    if shape == "sum":
        assert metric.sum.is_monotonic is monotonic
        assert metric.sum.aggregation_temporality == 2  # cumulative

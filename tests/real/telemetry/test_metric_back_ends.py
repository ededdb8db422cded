"""The same questions to the embedded store, VictoriaMetrics and Prometheus get the same answers."""

import time

import polars as pl
import pytest
from tests.labs.victoria import flush, prometheus, victoria_metrics

from kansoku.store import LocalStore, Matcher
from kansoku.store.fleet import BackEnd, FleetStore, Naming, PromMetrics, RemoteWriter

pytestmark = pytest.mark.real
SECOND = 10**9
STEP = 60 * SECOND


@pytest.fixture(scope="module")
def rows():
    """Two gauges and a resetting counter, every 10 s for the last half hour, whole milliseconds."""
    end = time.time_ns() // STEP * STEP
    times = [end - 1800 * SECOND + i * 10 * SECOND for i in range(180)]
    parts = []
    for gpu in "01":
        labels = f'{{"gpu":"{gpu}","host.name":"c001"}}'
        power = [400.0 + 10 * int(gpu) + (i * 7) % 50 for i in range(180)]
        total = [float((i * 5) % 400) for i in range(180)]
        for metric, values in (("hw.gpu.power", power), ("hw.errors", total)):
            parts.append(
                pl.DataFrame(
                    {"metric": metric, "labels": labels, "time_ns": times, "value": values}
                )
            )
    return pl.concat(parts)


@pytest.fixture(scope="module")
def local(tmp_path_factory, rows):
    with LocalStore(tmp_path_factory.mktemp("local")) as store:
        store.append("metrics", rows)
        yield store


def fleet_of(url):
    naming = Naming()
    return FleetStore(
        metrics=PromMetrics(BackEnd(url), naming=naming),
        remote_write=RemoteWriter(BackEnd(url), naming=naming),
    )


@pytest.fixture(scope="module", params=["victoria-metrics", "prometheus"])
def fleet(request, tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp(request.param)
    start = victoria_metrics if request.param == "victoria-metrics" else prometheus
    with start(folder) as server, fleet_of(server.url) as store:
        store.append("metrics", rows)
        if request.param == "victoria-metrics":
            flush(server)
        store.kind = request.param
        yield store


@pytest.mark.parametrize("aggregate", ["avg", "min", "max", "sum", "count", "last"])
def test_ranges_agree(local, fleet, rows, aggregate):
    ask = {
        "start_ns": rows["time_ns"].min(), "end_ns": rows["time_ns"].max() + 1, "step_ns": STEP,
        "aggregate": aggregate,
    }  # fmt: skip
    matchers = [Matcher.parse("gpu=~[01]"), Matcher.parse("host.name=c001")]
    here = local.metric_range("hw.gpu.power", matchers, **ask)
    there = fleet.metric_range("hw.gpu.power", matchers, **ask)
    assert here.height == 60
    assert here.drop("value").equals(there.drop("value"))
    assert (here["value"] - there["value"]).abs().max() < 1e-9


def test_increase_agrees_where_it_is_not_extrapolated(local, fleet, rows):
    """VictoriaMetrics counts as we do; Prometheus extrapolates, so only its order is compared."""
    ask = {
        "start_ns": rows["time_ns"].min() + 2 * STEP, "end_ns": rows["time_ns"].max() + 1,
        "step_ns": STEP, "aggregate": "increase",
    }  # fmt: skip
    here = local.metric_range("hw.errors", {"gpu": "0"}, **ask)
    there = fleet.metric_range("hw.errors", {"gpu": "0"}, **ask)
    # 5 every 10 s: 30 a minute, resets included (395 -> 0 counts 0).
    assert set(here["value"].to_list()) <= {25.0, 30.0}
    if fleet.kind == "victoria-metrics":
        assert here.equals(there)
    else:
        assert here.drop("value").equals(there.drop("value"))
        assert (here["value"] - there["value"]).abs().max() < 8


def test_latest_and_series_agree(local, fleet):
    for store in (local, fleet):
        latest = store.latest("hw.gpu.power", {"gpu": "1"})
        assert latest["value"].to_list() == [410.0 + (179 * 7) % 50]
        assert latest["labels"].to_list() == ['{"gpu":"1","host.name":"c001"}']
    assert local.series("hw.gpu.power").sort("labels").equals(
        fleet.series("hw.gpu.power").sort("labels")
    )  # fmt: skip


def test_samples_agree(local, fleet, rows):
    since, until = rows["time_ns"].min() + 30 * SECOND, rows["time_ns"].max() - 30 * SECOND
    answers = [
        store.table("metrics", since, until, {"metric": "hw.errors"}).sort("labels", "time_ns")
        for store in (local, fleet)
    ]
    assert answers[0].equals(answers[1])
    assert answers[0]["time_ns"].min() == since
    assert answers[0]["time_ns"].max() == until - 10 * SECOND


def test_merging_agrees(local, fleet, rows):
    ask = {
        "start_ns": rows["time_ns"].min(), "end_ns": rows["time_ns"].max() + 1, "step_ns": STEP,
        "by": ["host.name"], "across": "sum",
    }  # fmt: skip
    here = local.metric_range("hw.gpu.power", **ask)
    there = fleet.metric_range("hw.gpu.power", **ask)
    assert here.drop("value").equals(there.drop("value"))
    assert (here["value"] - there["value"]).abs().max() < 1e-9

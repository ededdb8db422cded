"""Roll-ups answer as the samples do: every aggregate against a plain computation."""

import numpy as np
import polars as pl
import pytest

from kansoku.store import LocalStore

SECOND, MINUTE, HOUR = 10**9, 60 * 10**9, 3600 * 10**9
NOW = 500_000 * HOUR
START = NOW - 5 * HOUR
SERIES = 12


def made(generator, *, counter):
    """Samples of one series: irregular, with gaps, a silent hour now and then, and resets."""
    gaps = generator.choice([1, 7, 10, 11, 60, 400, 4000], 900, p=[0.3, 0.2, 0.3, 0.1, 0.08, 0.015,
                                                                  0.005])  # fmt: skip
    times = START + np.cumsum(gaps * SECOND + generator.integers(0, SECOND, len(gaps)))
    times = times[times < NOW - 1]
    if not counter:
        return times, np.round(generator.normal(100, 50, len(times)), 1)
    value, values = 0.0, []
    for _ in times:
        value = 0.0 if generator.random() < 0.02 else value + float(generator.integers(0, 50))
        values.append(value)
    return times, np.array(values)


def plain(times, values, step, aggregate):
    """Return step start to value."""
    steps: dict[int, list[int]] = {}
    for at, time in enumerate(times.tolist()):
        steps.setdefault(time // step * step, []).append(at)
    answer = {}
    for begin, places in steps.items():
        some = values[places]
        if aggregate in {"increase", "rate"}:
            grown = 0.0
            for at in places:
                if at:
                    before, now = values[at - 1], values[at]
                    grown += now - before if now >= before else now
            answer[begin] = grown / (step / SECOND) if aggregate == "rate" else grown
        else:
            answer[begin] = {
                "avg": np.mean, "min": np.min, "max": np.max, "sum": np.sum, "count": len,
                "last": lambda one: one[-1],
            }[aggregate](some)  # fmt: skip
    return answer


@pytest.fixture(scope="module", params=["hot", "sealed", "both"])
def store(tmp_path_factory, request):
    """The same samples: all hot, all sealed, or the last hours hot."""
    data = {}
    with LocalStore(tmp_path_factory.mktemp("s") / "s", clock_ns=lambda: NOW) as store:
        for kind in ("gauge", "counter"):
            for number in range(SERIES):
                generator = np.random.default_rng([number, kind == "counter"])
                data[kind, number] = made(generator, counter=kind == "counter")
        for early in (True, False):
            rows = [
                pl.DataFrame({"metric": kind, "labels": f'{{"n":"{number}"}}',
                              "time_ns": times, "value": values})
                for (kind, number), (times, values) in data.items()
            ]  # fmt: skip
            before = pl.col("time_ns") < START + 3 * HOUR
            frame = pl.concat(rows).filter(before if early else ~before)
            info = [("gauge", "1", "gauge", None), ("counter", "1", "counter", None)]
            store.submit({"metrics": frame}, info=info).result()
            if request.param == "sealed" or (request.param == "both" and early):
                store.keeper.seal_all()
        yield store, data


@pytest.mark.parametrize("step", [MINUTE, 5 * MINUTE, 10 * MINUTE, HOUR], ids=str)
@pytest.mark.parametrize(
    ("kind", "aggregate"),
    [("gauge", one) for one in ("avg", "min", "max", "sum", "count", "last")]
    + [("counter", one) for one in ("increase", "rate", "last", "count", "max", "avg")],
)
def test_ranges_equal_a_plain_computation(store, kind, aggregate, step):
    store, data = store
    answer = store.metric_range(kind, start_ns=START, end_ns=NOW, step_ns=step, aggregate=aggregate)
    for number in range(SERIES):
        mine = answer.filter(pl.col("labels") == f'{{"n":"{number}"}}')
        expected = plain(*data[kind, number], step, aggregate)
        assert dict(zip(mine["time_ns"], mine["value"], strict=True)) == pytest.approx(expected)


@pytest.mark.parametrize("across", ["avg", "min", "max", "sum", "count"])
def test_series_that_agree_merge(store, across):
    store, data = store
    answer = store.metric_range(
        "gauge", start_ns=START, end_ns=NOW, step_ns=HOUR, by=[], across=across
    )
    steps: dict[int, list[float]] = {}
    for number in range(SERIES):
        for begin, value in plain(*data["gauge", number], HOUR, "avg").items():
            steps.setdefault(begin, []).append(value)
    merge = {"avg": np.mean, "min": min, "max": max, "sum": sum, "count": len}[across]
    expected = {begin: merge(values) for begin, values in steps.items()}
    assert dict(zip(answer["time_ns"], answer["value"], strict=True)) == pytest.approx(expected)
    assert answer["labels"].unique().to_list() == ["{}"]

"""An agent's window: counts, percentiles, histograms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kansoku.fabric.probe import Late, Result, StampSource
from kansoku.fabric.summary import WindowSummary, _bucket, bucket_middle_ns, percentile_of


def result(rtt=None, *, tuple_id=1, source=StampSource.KERNEL, delay=50):
    lost = rtt is None
    return Result(tuple_id, 0, 1, 2, 3, None if lost else delay, rtt, None if lost else 7,
                  source, lost, 99)  # fmt: skip


@given(st.integers(0, 10**12))
def test_a_bucket_is_within_a_thirtysecond_of_its_values(value):
    assert bucket_middle_ns(_bucket(value)) == pytest.approx(value, rel=1 / 31, abs=0.5)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_buckets_keep_the_order(a, b):
    if a <= b:
        assert _bucket(a) <= _bucket(b)


def test_percentiles_against_numpy():
    values = np.random.default_rng(3).lognormal(10, 1, 20_000).astype(int)
    histogram = {}
    for value in values.tolist():
        histogram[_bucket(value)] = histogram.get(_bucket(value), 0) + 1
    for q in (0.5, 0.9, 0.99, 0.999):
        assert percentile_of(histogram, q) == pytest.approx(np.quantile(values, q), rel=0.05)
    assert percentile_of({}, 0.5) is None


def test_a_row_by_hand():
    summary = WindowSummary(slow_rtt_ns=1000, slow_host_ns=600)
    for rtt in (100, 300, 200, None, 5000):
        summary.add(result(rtt), "cluster")
    summary.add_late(Late(1, 0, 700))
    summary.add_late(Late(1, 0, 700))  # there was one loss only
    (row,) = summary.rows({1: (4, 50000, 0)})
    assert (row.target, row.port, row.kind, row.qpn) == (4, 50000, 0, 99)
    assert (row.probes, row.lost, row.late, row.slow) == (5, 1, 1, 1)
    assert row.rtt_p50_ns == 300  # upper middle of 100, 200, 300, 5000
    assert row.rtt_p99_ns == 5000
    assert row.responder_p99_ns == 700
    assert row.stamps == 1


def test_a_late_answer_of_a_quick_host_is_the_networks_delay():
    summary = WindowSummary(slow_rtt_ns=1000, slow_host_ns=600)
    summary.add(result(), "cluster")
    summary.add_late(Late(1, 0, 50))
    (row,) = summary.rows({1: (4, 50000, 0)})
    assert (row.lost, row.late, row.stamps) == (1, 0, -1)


def test_the_weakest_stamp_names_the_row():
    summary = WindowSummary(slow_rtt_ns=1000, slow_host_ns=600)
    summary.add(result(1, source=StampSource.HARDWARE), "cluster")
    summary.add(result(1, source=StampSource.APPLICATION), "cluster")
    assert summary.rows({1: (0, 1, 0)})[0].stamps == 2


def test_tuples_that_left_the_pinglist_are_left_out():
    summary = WindowSummary(slow_rtt_ns=1000, slow_host_ns=600)
    summary.add(result(1), "service")
    assert summary.rows({}) == []
    assert sum(summary.histograms("rtt")["service"].values()) == 1

"""Bursts by hand-made readings; any cut into blocks gives the same answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kansoku.burst.detect import Detector, ratios
from kansoku.burst.policy import BurstPolicy
from kansoku.errors import ConfigurationError

MS = 1_000_000
RATE = 1_000_000_000  # bytes/s: one sample of 1 ms at full rate is 1 MB


def readings(shares, *, step=MS, begin=10**18):
    """Return times and counter for samples that are these shares of line rate."""
    times = begin + step * np.arange(len(shares) + 1, dtype=np.int64)
    grown = (np.asarray(shares) * RATE * step / 1e9).astype(np.int64)
    return times, np.concatenate([[7], 7 + np.cumsum(grown)]).astype(np.int64)


def detector(**policy):
    return Detector(line_rate_bytes_per_s=RATE, interval_ns=MS, policy=BurstPolicy(**policy))


def found(shares, **policy):
    one = detector(**policy)
    return one.feed(*readings(shares)) + one.flush(), one.window()


def test_a_burst_by_hand():
    shares = [0, 0, 0.6, 1.0, 0.8, 0, 0]
    (burst,), window = found(shares)
    assert burst.start_ns == 10**18 + 2 * MS
    assert burst.duration_ns == 3 * MS
    assert (burst.bytes, burst.samples) == (2_400_000, 3)
    assert burst.peak_ratio == pytest.approx(1.0)
    assert burst.mean_ratio == pytest.approx(0.8)
    assert [round(r, 2) for _, r in burst.raw] == shares
    assert burst.raw[0][0] == -MS  # the first sample ends one sample before the burst begins
    assert (window.bursts, window.burst_bytes, window.bytes) == (1, 2_400_000, 2_400_000)
    assert (window.samples, window.missed, window.single_sample) == (7, 0, 0)


def test_hysteresis_holds_a_dip_and_parts_a_gap():
    bursts, _ = found([0.9, 0.45, 0.9, 0, 0.9, 0.3, 0.9, 0])
    assert [b.samples for b in bursts] == [3, 1, 1]
    bursts, _ = found([0.9, 0.45, 0.9, 0], start_ratio=0.5, end_ratio=0.5)
    assert [b.samples for b in bursts] == [1, 1]
    # Between the thresholds nothing begins.
    assert found([0.45] * 10)[0] == []


def test_a_late_reading_is_no_burst():
    """3 ms between two readings at 20 % load: 60 % by the nominal interval, 20 % by the real."""
    times = np.array([0, 1, 4, 5], dtype=np.int64) * MS
    counter = (times // 1000 * 200).astype(np.int64)
    one = detector()
    assert one.feed(times, counter) + one.flush() == []
    window = one.window()
    assert window.missed == 2
    assert window.peak_ratio == pytest.approx(0.2)
    assert ratios(times, counter, RATE)[0] == pytest.approx([0.2] * 3)


def test_a_counter_that_went_back_gives_nothing_for_that_sample():
    times, counter = readings([0.1, 0.1, 0.1])
    counter[2:] -= counter[2]
    one = detector()
    assert one.feed(times, counter) + one.flush() == []
    assert one.window().bytes == 200_000


def test_counters_beside_are_counted_around_the_burst():
    times, counter = readings([0] * 20 + [1.0] * 4 + [0] * 20)
    drops = np.where(np.arange(45) >= 23, 5, 0).astype(np.int64)
    drops[0:] += np.where(np.arange(45) >= 40, 100, 0)  # long after it
    one = detector()
    (burst,) = one.feed(times, counter, {"rx_dropped": drops}) + one.flush()
    assert burst.beside == {"rx_dropped": 5}
    assert one.window().beside == {"rx_dropped": 105}


def test_a_run_without_end_is_cut_and_memory_stays_bounded():
    one = detector(longest_ns=100 * MS)
    times, counter = readings([1.0] * 1000)
    bursts = []
    for low in range(0, 1001, 10):
        bursts += one.feed(times[low : low + 10], counter[low : low + 10])
        assert len(one._times) < 200
    bursts += one.flush()
    assert len(bursts) == pytest.approx(9, abs=1)
    assert sum(b.bytes for b in bursts) == 1000 * MS


def test_many_raw_samples_are_thinned_to_both_ends():
    (burst,), _ = found([0] * 8 + [1.0] * 500 + [0] * 8, raw_samples=20)
    assert len(burst.raw) == 20
    assert burst.raw[0][1] == 0 == burst.raw[-1][1]


def test_thresholds_that_make_no_sense_are_refused():
    with pytest.raises(ConfigurationError, match="burst thresholds"):
        BurstPolicy(start_ratio=0.3, end_ratio=0.4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.2, 0.45, 0.55, 1.0]), min_size=1, max_size=60),
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
)
def test_blocks_of_any_size_give_the_same_bursts(shares, cuts):
    times, counter = readings(shares)
    whole = detector()
    expected = whole.feed(times, counter) + whole.flush()
    parts, at, bursts = detector(), 0, []
    for size in [*cuts, len(times)]:
        bursts += parts.feed(times[at : at + size], counter[at : at + size])
        at += size
    bursts += parts.flush()
    assert bursts == expected
    a, b = whole.window(), parts.window()
    assert (a.bytes, a.samples, a.bursts, a.burst_bytes) == (
        b.bytes, b.samples, b.bursts, b.burst_bytes,
    )  # fmt: skip


def test_runs_agree_with_a_plain_loop():
    rng = np.random.default_rng(3)
    shares = rng.choice([0.1, 0.45, 0.7], size=500)
    expected, inside = [], False
    for share in shares:
        if share >= 0.5 and not inside:
            expected.append(0)
            inside = True
        elif share < 0.4:
            inside = False
        if inside:
            expected[-1] += 1
    assert [b.samples for b in found(shares)[0]] == expected

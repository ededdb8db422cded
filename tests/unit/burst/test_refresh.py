"""Counters that are renewed more slowly than they are read."""

import numpy as np

from kansoku.burst.detect import Detector
from kansoku.burst.refresh import refresh_samples

MS = 1_000_000
RATE = 1_000_000_000


def held(counter, every):
    """Return what a reader sees of a counter that is renewed every so many samples."""
    return counter[np.arange(len(counter)) // every * every]


def steady(share, samples):
    return (np.arange(samples + 1) * share * RATE / 1000).astype(np.int64)


def test_a_held_counter_is_recognised_and_a_fresh_one_is_not():
    fresh = steady(0.3, 2000)
    assert refresh_samples(fresh) is None
    assert refresh_samples(held(fresh, 10)) == 10
    assert refresh_samples(held(fresh, 3)) == 3
    assert refresh_samples(np.zeros(1000, dtype=np.int64)) is None


def test_irregular_sparse_traffic_is_not_called_slow():
    rng = np.random.default_rng(1)
    grown = (rng.random(5000) < 0.1) * 1500
    assert refresh_samples(np.cumsum(grown)) is None


def test_steps_no_line_could_carry_prove_it_and_the_rate_comes_out_right():
    """30 % load behind a renewal of 10 ms: samples of 300 % would be bursts that never were."""
    samples = 2000
    times = 10**18 + MS * np.arange(samples + 1, dtype=np.int64)
    one = Detector(line_rate_bytes_per_s=RATE, interval_ns=MS)
    bursts = []
    for low in range(0, samples + 1, 250):
        part = slice(low, low + 250)
        bursts += one.feed(times[part], held(steady(0.3, samples), 10)[part])
    bursts += one.flush()
    window = one.window()
    assert bursts == []
    assert (window.refresh_ns, window.refresh_certain) == (10 * MS, True)
    assert 0.29 < window.peak_ratio < 0.34
    assert window.missed == 0


def test_a_burst_behind_a_slow_renewal_is_still_seen():
    share = np.where((np.arange(2000) % 500 - 100) // 100 == 0, 1.0, 0.02)
    counter = np.concatenate([[0], np.cumsum(share * RATE / 1000)]).astype(np.int64)
    times = 10**18 + MS * np.arange(2001, dtype=np.int64)
    one = Detector(line_rate_bytes_per_s=RATE, interval_ns=MS)
    bursts = one.feed(times, held(counter, 10)) + one.flush()
    assert [b.duration_ns // MS for b in bursts] == [100] * 4


def test_regular_bursts_of_one_sample_stay_bursts_and_are_remarked():
    """Ten bursts a second that fit the line: the same rhythm, but nothing proves a slow counter."""
    grown = np.where(np.arange(3000) % 100 == 50, int(0.9 * RATE / 1000), 0)
    counter = np.concatenate([[0], np.cumsum(grown)]).astype(np.int64)
    times = 10**18 + MS * np.arange(3001, dtype=np.int64)
    one = Detector(line_rate_bytes_per_s=RATE, interval_ns=MS)
    bursts = one.feed(times, counter) + one.flush()
    window = one.window()
    assert len(bursts) == 30
    assert (window.refresh_certain, window.single_sample) == (False, 30)
    assert window.refresh_ns == 100 * MS

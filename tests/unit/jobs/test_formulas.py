"""Formulas against published numbers; intervals against scipy."""

import pytest
from scipy.stats import chi2

from kansoku.errors import InputError
from kansoku.jobs import formulas as f
from kansoku.stats.intervals import (
    binomial_interval,
    chi_square_quantile,
    mean_time_interval,
    rate_ratio_interval,
)


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.803), (131_072, 0.225)])
def test_projected_mttf_as_published(gpus, hours):
    """Kokolis et al. 2024: 6.50 failures per 1,000 node-days, nodes of 8 GPUs."""
    assert f.mttf_from_rate_h(6.50, gpus) == pytest.approx(hours, abs=5e-4)


@pytest.mark.parametrize(("minutes", "ettr"), [(60, 0.676), (30, 0.815), (15, 0.884), (5, 0.931)])
def test_expected_ettr_as_published(minutes, ettr):
    """16,384 GPUs at 6.50 per 1,000 node-days, restart 5 min, writes that cost nothing."""
    mttf_s = f.mttf_from_rate_h(6.50, 16_384) * 3600
    got = f.expected_ettr(mttf_s, minutes * 60, restart_s=300)
    assert got == pytest.approx(ettr, abs=6e-4)


def test_checkpoint_intervals_as_published():
    assert f.checkpoint_interval_young(6490, 60) == pytest.approx(882.5, abs=0.05)
    assert f.checkpoint_interval_daly(6490, 60) == pytest.approx(822.5, abs=0.05)
    assert f.checkpoint_interval_daly_higher_order(6490, 60) == pytest.approx(843.0, abs=0.06)


def test_llama_3():
    """419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783)."""
    mttf = 54 * 24 / 419
    assert mttf == pytest.approx(3.093, abs=5e-4)
    rate = f.rate_per_1000_node_days(419, 54 * 24 * 2048)
    assert f.mttf_from_rate_h(rate, 16_384) == pytest.approx(mttf)


def test_writes_that_take_longer_than_the_mttf():
    assert f.checkpoint_interval_daly_higher_order(60, 120) == 60
    assert f.checkpoint_interval_daly(60, 60) == 60
    assert f.expected_ettr(60, 3600, restart_s=300) == 0


@pytest.mark.parametrize("arguments", [(0, 60), (60, 0), (-1, 1)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(InputError):
        f.checkpoint_interval_young(*arguments)


def test_the_chi_square_interval_as_published():
    low, high = mean_time_interval(10, 1000, confidence=0.9)
    assert (low, high) == (pytest.approx(58.95, abs=0.01), pytest.approx(184.3, abs=0.05))
    low, high = mean_time_interval(0, 1000, confidence=0.9)
    assert low == pytest.approx(2000 / chi2.ppf(0.95, 2))
    assert high is None


@pytest.mark.parametrize("probability", [1e-6, 0.001, 0.025, 0.05, 0.5, 0.95, 0.999, 0.999999])
@pytest.mark.parametrize("degrees", [1, 2, 3, 10, 22, 100, 838, 20_000])
def test_quantiles_against_scipy(probability, degrees):
    expected = chi2.ppf(probability, degrees)
    assert chi_square_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9)


def test_shares_and_ratios():
    """Wilson's interval for 8 of 10 at 95 %: 0.490-0.943 (Agresti & Coull 1998)."""
    low, high = binomial_interval(8, 10, confidence=0.95)
    assert (low, high) == (pytest.approx(0.490, abs=5e-4), pytest.approx(0.943, abs=5e-4))
    low, high = rate_ratio_interval(20, 100, 10, 100)
    assert low < 2 < high
    assert rate_ratio_interval(0, 100, 0, 100) == (None, None)

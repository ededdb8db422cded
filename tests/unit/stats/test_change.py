"""Change points and slopes, on series whose answer is known."""

import numpy as np
import pytest

from kansoku.stats.change import change_point, theil_sen


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_found_where_it_is(seed):
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.normal(50, 1, 60), rng.normal(60, 1, 40)])
    values[rng.integers(0, 100, 5)] += 500  # wild values
    found = change_point(values)
    assert abs(found.index - 60) <= 2
    assert found.score > 20
    assert found.before == pytest.approx(50, abs=1)
    assert found.after == pytest.approx(60, abs=1)


def test_noise_alone_scores_low():
    scores = [change_point(np.random.default_rng(n).normal(50, 1, 100)).score for n in range(50)]
    assert np.median(scores) < 4
    assert max(scores) < 8


def test_too_few_values_are_no_answer():
    assert change_point([1.0] * 9) is None
    assert np.isnan(theil_sen([1, 2, 3], [1, 2, 3]).slope)
    assert np.isnan(theil_sen([1] * 9, range(9)).slope)


def test_slope_ignores_wild_values():
    x = np.arange(100.0)
    y = 3 + 0.5 * x
    y[::7] += 1000
    found = theil_sen(x, y)
    assert found.slope == pytest.approx(0.5)
    assert found.error == pytest.approx(0, abs=1e-9)  # more than half lie on one line


def test_the_error_of_a_slope_is_what_repeated_draws_scatter():
    x = np.arange(100.0)
    found = [theil_sen(x, np.random.default_rng(n).normal(0, 1, 100)) for n in range(200)]
    scatter = np.std([one.slope for one in found])
    assert np.median([one.error for one in found]) == pytest.approx(scatter, rel=0.2)

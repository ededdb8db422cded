"""The ratio that live lines show, by hand."""

import pytest

from kansoku.model.mfu import live_mfu


@pytest.mark.parametrize(
    ("flops", "step_s", "peak", "ratio"),
    [
        (2e9, 0.05, 100e9, 0.4),  # 40e9 a second
        (2e9, 0.05, 40e9, 1.0),
        (2e9, 0.05, 39e9, None),  # above the peak: the peak is wrong
        (2e9, 0.0, 40e9, None),
    ],
)
def test_ratio_of_a_step(flops, step_s, peak, ratio):
    found = live_mfu(flops, step_s, peak)
    assert found == (None if ratio is None else pytest.approx(ratio))

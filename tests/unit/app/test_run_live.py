"""The line beside a running job, by hand."""

import pytest

from kansoku.app._run_live import RankNow, describe

RANK = RankNow(
    rank=0, step=7, step_ns=50e6, wait_ratio=0.1, tokens=1_000.0, flops=2e9, device="cpu"
)


@pytest.mark.parametrize(
    ("peak", "said"),
    [
        (100e9, "MFU 40.0 %"),  # 2e9 FLOPs in 50 ms are 40e9 a second
        (40e9, "MFU 100.0 %"),
        (39e9, "no MFU: the peak is too low"),  # measured on a busy machine
    ],
)
def test_mfu_is_never_above_the_peak(peak, said):
    line = describe([RANK], {"flops": peak})
    assert line is not None
    assert line.split(" · ")[:4] == ["step 7", "50.0 ms", "20,000 tokens/s on this node", said]


def test_nothing_is_said_before_a_step_ended():
    assert describe([], {}) is None

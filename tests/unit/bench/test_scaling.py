"""Scaling by hand, and SAKURAONE's published pair: 2.516 × on three times the nodes."""

import pytest

from kansoku.app.bench_scaling import published
from kansoku.bench.scaling import Measurement, scaling_rows
from kansoku.errors import InputError


def test_slower_steps_and_more_tokens_by_hand():
    """Twice the GPUs at 90 % of the rate and 25 % more tokens: 0.9 / 1.25 = 72 % efficiency."""
    base = Measurement(nodes=1, gpus=8, minutes=100, tokens=8e9, tokens_per_s_per_gpu=1e9 / 6000)
    more = Measurement(
        nodes=2, gpus=16, minutes=10e9 / (16 * 0.9 * 1e9 / 6000) / 60, tokens=10e9,
        tokens_per_s_per_gpu=0.9e9 / 6000,
    )  # fmt: skip
    row = scaling_rows([more, base])[1]
    assert row.efficiency == pytest.approx(0.72)
    assert row.step_factor == pytest.approx(0.9)
    assert row.convergence_factor == pytest.approx(0.8)
    assert row.lost_to_steps + row.lost_to_convergence == pytest.approx(row.lost)


def test_what_is_not_known_is_not_split():
    rows = scaling_rows(
        [Measurement(nodes=1, gpus=8, minutes=10), Measurement(nodes=2, gpus=16, minutes=6)]
    )
    assert rows[1].step_factor is None
    assert "neither" in rows[1].reason


def test_one_size_is_no_scaling():
    with pytest.raises(InputError, match="two sizes"):
        scaling_rows([Measurement(nodes=1, gpus=8, minutes=10)])


def test_the_published_sakuraone_result():
    """105.310 and 41.862 min on 32 and 96 nodes (talk of 2025-12-22)."""
    result = published("sakuraone-gpt3")
    last = result.rows[-1]
    assert last.speedup == pytest.approx(2.516, abs=0.0005)
    assert last.efficiency == pytest.approx(2.516 / 3, abs=0.0005)
    assert result.label == "unverified"
    # 757.13 / 0.383, 815 / 0.412, 710.73 / 0.359: the dense FP8 peak of 1,979 TFLOP/s.
    assert {check.peak_name for check in result.consistency} == {"fp8"}
    text = " ".join(result.remarks)
    assert "contradict each other" in text
    assert "66" in text.split("contradict each other:")[1][:8]  # about 663 tokens/s implied
    assert "tokens to converge" in text


def test_unknown_published_name():
    with pytest.raises(InputError, match="sakuraone-gpt3"):
        published("nope")

"""Rates, buckets, the comparison of sizes, lost hours, covariates."""

import polars as pl
import pytest

from kansoku.jobs.reliability import ReliabilityPolicy, by_covariate, reliability, steadier

H = 3600 * 10**9


def frame(rows):
    """rows: (gpus, hours, broke)."""
    return pl.DataFrame(
        [
            {
                "cluster": "c", "raw_id": n, "logical": 0, "submit_ns": 0, "start_ns": 0,
                "run_ns": round(hours * H), "size_gpus": gpus, "size_nodes": max(gpus // 8, 1),
                "gpu_hours": gpus * hours, "node_hours": max(gpus // 8, 1) * hours,
                "infrastructure": broke, "last": True, "cause": "node_fail" if broke else "none",
            }
            for n, (gpus, hours, broke) in enumerate(rows)
        ]
    )  # fmt: skip


def test_measured_mttf_with_its_interval_beside_the_projected():
    """k = 10 in 1,000 h is the published interval; 8 nodes fail 8 times as often as one."""
    result = reliability(frame([(64, 100, True)] * 10), policy=ReliabilityPolicy())
    (bucket,) = result.buckets
    assert (bucket.failures, bucket.run_hours, bucket.mttf_h) == (10, 1000, 100)
    assert bucket.interval_h == (pytest.approx(58.95, abs=0.01), pytest.approx(184.3, abs=0.05))
    # 10 failures in 8,000 node-hours = 30 per 1,000 node-days; of 8 nodes: 100 h again.
    assert result.rate_per_1000_node_days == pytest.approx(30)
    assert bucket.projected_mttf_h == pytest.approx(100)


def test_no_failure_gives_a_lower_end_only():
    (bucket,) = reliability(frame([(8, 500, False)]), policy=ReliabilityPolicy()).buckets
    assert bucket.mttf_h is None
    assert bucket.interval_h[0] == pytest.approx(500 / 2.995732)  # -ln 0.05
    assert bucket.interval_h[1] is None


@pytest.mark.parametrize(
    ("small", "large", "answer"),
    [
        ((2, 1000), (1, 400), "cannot tell"),
        ((0, 100), (0, 100), "cannot tell"),
        ((10, 4000), (40, 1000), "yes"),
        ((40, 1000), (10, 4000), "no"),
        ((0, 10_000), (30, 1000), "yes"),
    ],
)
def test_steadier(small, large, answer):
    rows = []
    for nodes, (failures, hours) in ((32, small), (64, large)):
        parts = max(failures, 1)
        rows += [(nodes * 8, hours / parts, k < failures) for k in range(parts)]
    result = reliability(frame(rows), policy=ReliabilityPolicy(), compare=(32, 64))
    assert result.steadier.answer == answer
    assert result.steadier.projected_ratio == 2
    assert (result.steadier.a.failures, result.steadier.b.failures) == (small[0], large[0])
    swapped = steadier((64, 32), result.steadier.b, result.steadier.a)
    assert swapped.answer == {"yes": "no", "no": "yes"}.get(answer, answer)


def test_lost_hours():
    policy = ReliabilityPolicy(interval_s=3600, restart_s=600)
    lost = reliability(
        frame([(64, 100, True), (64, 0.1, True), (64, 50, False)]), policy=policy
    ).lost
    assert lost.without_checkpoints == pytest.approx(64 * 100.1)
    assert lost.with_checkpoints == pytest.approx(64 * (2400 / 3600 + 0.1))


def test_checkpoint_advice_says_whether_the_mttf_was_measured():
    result = reliability(frame([(64, 1.8028, True)] * 10 + [(128, 5, True)]),
                         policy=ReliabilityPolicy(write_s=60))  # fmt: skip
    a, b = result.checkpoint
    assert (a.measured, b.measured) == (True, False)
    # MTTF 1.8028 h is 6,490 s: the published 882.5 / 822.5 / 843.0 s.
    assert (a.young_s, a.daly_s, a.higher_order_s) == (
        pytest.approx(882.5, abs=0.1), pytest.approx(822.5, abs=0.1), pytest.approx(843.0, abs=0.1),
    )  # fmt: skip


def test_ettr_by_hand():
    """One run of 10 h and one cut off after 5 h: u₀ 5 min each, half an hour lost once."""
    rows = frame([(64, 10, False), (64, 5, True)])
    ettr = reliability(rows, policy=ReliabilityPolicy()).ettr
    assert ettr.measured == pytest.approx((15 - 2 / 12 - 0.5) / 15)
    assert (ettr.runs, ettr.interruptions) == (2, 1)


def test_rates_against_a_quantity():
    rows = by_covariate(
        "temperature", "Cel", [40, 50, 60, 70, 80, 90], [0, 0, 1, 1, 5, 5], [100] * 6
    )
    assert [r.failures for r in rows] == [0, 2, 10]
    assert rows[2].rate_per_1000_node_days == pytest.approx(50)
    assert rows[0].interval[0] == 0
    assert rows[2].interval[0] > rows[0].interval[1]

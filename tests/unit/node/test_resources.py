"""Energy and bytes of spans: by hand, and sums that equal the totals."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.labs.generated_run import Schedule, generate

from kansoku.model import PHASES, table_schema
from kansoku.node.resources import (
    SAMPLES_SCHEMA,
    Place,
    curve_of,
    join_resources,
    phase_segments,
)
from kansoku.trace.steps import step_rows

S = 1_000_000_000
T0 = 1_800_000_000 * S


def samples(device, quantity, points, node="n"):
    return pl.DataFrame(
        [(node, device, quantity, T0 + round(t * S), float(v)) for t, v in points],
        schema=SAMPLES_SCHEMA,
        orient="row",
    )


def frame(table, rows):
    return pl.DataFrame(rows, schema=table_schema(table))


def step(number, start, end, rank=0, tokens=None):
    return {
        "rank": rank, "step": number, "start_ns": T0 + round(start * S),
        "duration_ns": round((end - start) * S), "tokens": tokens,
    }  # fmt: skip


def span(kind, start, end, rank=0, attributes=None):
    return {
        "rank": rank, "kind": kind, "name": kind, "start_ns": T0 + round(start * S),
        "duration_ns": round((end - start) * S), "thread": 1, "attributes": attributes,
    }  # fmt: skip


def pieces(spans, start=0.0, end=10.0):
    found = phase_segments(frame("steps", [step(1, start, end)]), frame("spans", spans))
    return [
        (row["phase"], (row["start_ns"] - T0) / S, (row["end_ns"] - T0) / S)
        for row in found.iter_rows(named=True)
    ]


def test_innermost_span_has_the_time():
    found = pieces(
        [
            span("step", 0, 10), span("data_wait", 0, 1), span("forward", 1, 4),
            span("collective", 2, 3), span("backward", 5, 9), span("forward", 6, 7),
            span("gc", 7.5, 8), span("evaluation", 9.2, 9.8), span("forward", 9.3, 9.5),
        ]
    )  # fmt: skip
    merged = {}
    for phase, a, b in found:
        merged[phase] = round(merged.get(phase, 0) + b - a, 9)
    assert merged == {"data_wait": 1, "forward": 2, "collective": 1, "other": 2, "backward": 4}


def test_a_span_that_reaches_into_the_step_is_clipped():
    assert pieces([span("data_wait", -1, 2), span("optimizer", 9, 12)]) == [
        ("data_wait", 0, 2), ("other", 2, 9), ("optimizer", 9, 10),
    ]  # fmt: skip


def test_async_collectives_are_not_main_thread_time():
    spans = [span("backward", 0, 10), span("collective", 2, 8, attributes='{"async": true}')]
    assert pieces(spans) == [("backward", 0, 10)]


def test_pieces_agree_with_the_step_table():
    _, spans, _ = generate(Schedule(ranks=2, steps=5))
    rows = step_rows(spans)
    found = phase_segments(rows, spans)
    mine = (
        found.group_by("rank", "step", "phase")
        .agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns"))
        .pivot("phase", index=["rank", "step"], values="ns")
        .sort("rank", "step")
    )
    theirs = rows.sort("rank", "step")
    for phase in PHASES:
        column = (
            mine[phase.value].fill_null(0) if phase.value in mine.columns else pl.Series([0] * 10)
        )
        assert column.to_list() == theirs[f"{phase.value}_ns"].to_list(), phase


def test_energy_of_phases_by_hand():
    """100 J/s for 4 s, then 300 J/s: forward 0-4 s has 400 J, backward 4-6 s has 600 J."""
    readings = samples("gpu0", "energy_j", [(t, 1000 + 100 * t) for t in range(5)])
    readings = pl.concat(
        [readings, samples("gpu0", "energy_j", [(4 + t, 1400 + 300 * t) for t in range(1, 5)])]
    )
    use = join_resources(
        frame("steps", [step(1, 0, 6, tokens=500.0)]),
        frame("spans", [span("forward", 0, 4), span("backward", 4, 6)]),
        readings,
        {0: Place(node="n", gpu="gpu0")},
    )
    by_phase = dict(use.phases.select("phase", "energy_j").iter_rows())
    assert by_phase == pytest.approx({"forward": 400, "backward": 600})
    assert use.steps["energy_j"].to_list() == pytest.approx([1000])
    assert use.totals["energy_per_token_j"] == pytest.approx(2.0)
    assert use.sampling_ns == S
    # edges stand exactly on readings: nothing is uncertain
    assert use.totals["energy_error_j"] == pytest.approx(0)


def test_power_becomes_energy_by_trapezoids():
    readings = samples("gpu0", "power_w", [(0, 100), (1, 300), (2, 300)])
    use = join_resources(
        frame("steps", [step(1, 0, 2)]),
        frame("spans", []),
        readings,
        {0: Place(node="n", gpu="gpu0")},
    )
    assert use.steps["energy_j"].to_list() == pytest.approx([200 + 300])


def test_the_error_is_what_the_readings_around_allow():
    """A step from 0.25 s to 1.5 s; readings each second, 100 J and 200 J apart."""
    readings = samples("gpu0", "energy_j", [(0, 0), (1, 100), (2, 300)])
    use = join_resources(
        frame("steps", [step(1, 0.25, 1.5)]), frame("spans", []), readings,
        {0: Place(node="n", gpu="gpu0")},
    )  # fmt: skip
    assert use.steps["energy_j"].to_list() == pytest.approx([200 - 25])
    assert use.steps["energy_error_j"].to_list() == pytest.approx([75 + 100])


def test_outside_the_readings_is_unknown_not_zero():
    readings = samples("gpu0", "energy_j", [(0, 0), (1, 100)])
    use = join_resources(
        frame("steps", [step(1, 0, 1), step(2, 0.5, 1.5)]), frame("spans", []), readings,
        {0: Place(node="n", gpu="gpu0")},
    )  # fmt: skip
    assert use.steps["energy_j"].to_list() == [pytest.approx(100), None]
    assert "1 of 2 steps lie outside the sampled time" in use.missing


def test_without_readings_everything_is_null_and_said():
    use = join_resources(
        frame("steps", [step(1, 0, 1)]),
        frame("spans", []),
        pl.DataFrame(schema=SAMPLES_SCHEMA),
        {0: Place(node="n", gpu=None)},
    )
    assert use.steps["energy_j"].to_list() == [None]
    assert use.missing


def test_what_a_node_shares_is_split_and_own_nics_are_not():
    readings = pl.concat(
        [
            samples("mlx5_0", "receive_bytes", [(0, 0), (1, 1000)]),
            samples("mlx5_1", "receive_bytes", [(0, 0), (1, 500)]),
            samples("package-0", "energy_j", [(0, 0), (1, 80)]),
        ]
    )
    steps = frame("steps", [step(1, 0, 1, rank=r) for r in range(2)])
    shared = {r: Place(node="n", gpu=None, share=0.5) for r in range(2)}
    use = join_resources(steps, frame("spans", []), readings, shared)
    assert use.steps["nic_bytes"].to_list() == [750, 750]
    assert use.steps["energy_j"].to_list() == pytest.approx([40, 40])
    own = {r: Place(node="n", gpu=None, nics=(f"mlx5_{r}",), share=0.5) for r in range(2)}
    use = join_resources(steps, frame("spans", []), readings, own)
    assert use.steps["nic_bytes"].to_list() == [1000, 500]


def test_a_gpu_of_two_ranks_is_counted_once():
    readings = pl.concat(
        [
            samples("gpu0", "energy_j", [(0, 0), (1, 300)]),
            samples("gpu0", "nvlink_receive_bytes", [(0, 0), (1, 1000)]),
        ]
    )
    steps = frame("steps", [step(1, 0, 1, rank=r) for r in range(2)])
    places = {r: Place(node="n", gpu="gpu0", share=0.5, gpu_share=0.5) for r in range(2)}
    use = join_resources(steps, frame("spans", []), readings, places)
    assert use.steps["energy_j"].to_list() == [150, 150]
    assert use.totals["energy_j"] == 300


def test_resets_duplicates_and_disorder():
    times = np.array([3, 0, 1, 1, 2]) * S
    curve = curve_of("receive_bytes", times, np.array([40.0, 100.0, 150.0, 150.0, 30.0]))
    # 100 → 150, reset to 30, → 40
    assert curve.values.tolist() == [0, 50, 80, 90]


def test_an_energy_counter_renewed_slowly_is_not_a_staircase():
    """Read every 10 ms, renewed every 100 ms: half a renewal has half its energy."""
    times = np.arange(0, 1_000_000_001, 10_000_000)
    values = np.floor(times / 100_000_000) * 10.0
    curve = curve_of("energy_j", times, values)
    assert curve.at(np.array([350_000_000]))[0] == pytest.approx(35)


@given(
    st.lists(st.floats(0, 1e6), min_size=3, max_size=30),
    st.lists(st.integers(1, 10**9 - 1), min_size=1, max_size=20, unique=True),
)
def test_parts_sum_to_the_total(growth, cuts):
    """However the sampled time is cut, the pieces sum to what the counter grew."""
    times = T0 + np.linspace(0, S, len(growth)).astype(np.int64)
    curve = curve_of("receive_bytes", times, np.cumsum(growth))
    edges = T0 + np.array([0, *sorted(cuts), S])
    amounts = np.diff(curve.at(edges))
    assert (amounts >= -1e-6).all()
    assert amounts.sum() == pytest.approx(sum(growth) - growth[0], rel=1e-9, abs=1e-6)

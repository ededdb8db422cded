"""A counter among several jobs: parts that sum to the whole, gaps where nobody knows."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kansoku.node.curves import Curve
from kansoku.node.resources import SAMPLES_SCHEMA, Place, join_resources
from kansoku.node.sharing import NODE, Claim, Others, other_ranks, others_of

S = 1_000_000_000


def samples(rows):
    return pl.DataFrame(
        [("n", d, q, round(t * S), v) for d, q, t, v in rows], schema=SAMPLES_SCHEMA, orient="row"
    )


def line(rate, seconds=10):
    times = np.arange(seconds + 1) * S
    return Curve(times, np.arange(seconds + 1) * float(rate))


def test_a_look_a_second_counts_the_most_it_can_have_been():
    """One other rank seen at 4 s only: it may have been there from 3 to 5 s."""
    seen = [(NODE, "other_ranks", t, float(t == 4)) for t in range(11)]
    split = others_of(samples(seen))["n", NODE].split(line(60), own=2)
    assert np.diff(split.values).tolist() == pytest.approx([60] * 3 + [40, 40] + [60] * 5)
    assert split.covers(np.array([0]), np.array([10 * S])).all()


def test_an_unknown_number_makes_a_gap():
    seen = [(NODE, "other_ranks", t, None if t == 4 else 0.0) for t in range(11)]
    others = others_of(samples(seen))["n", NODE]
    split = others.split(line(60), own=1)
    starts, ends = np.array([0, 2, 4, 5]) * S, np.array([3, 4, 5, 10]) * S
    assert split.covers(starts, ends).tolist() == [True, False, False, True]
    assert others.alone(line(60)).covers(starts, ends).tolist() == [True, False, False, True]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 10), st.integers(1, 8)), min_size=2, max_size=5
    )
)
def test_what_all_jobs_get_is_never_more_than_there_was(jobs):
    """Over the whole time, and exactly all of it where a job is there throughout."""
    jobs = [(0, 10, 1), *jobs]
    claims = [
        Claim(run=str(n), device="gpu0", ranks=r, start_ns=a * S, end_ns=min(a + d, 10) * S)
        for n, (a, d, r) in enumerate(jobs)
    ]
    total = 0.0
    for n, (a, d, r) in enumerate(jobs):
        rows = other_ranks(claims, run=str(n), devices=["gpu0"])
        others = Others(
            np.array([at for _, at, _ in rows]), np.array([float(c or 0) for _, _, c in rows])
        )
        curve = others.split(line(100), own=r)
        edges = np.array([a, min(a + d, 10)]) * S
        total += float(np.diff(curve.at(edges))[0])
    assert total == pytest.approx(1000)


def test_a_job_whose_gpu_is_not_known_may_be_on_any():
    claims = [Claim(run="b", device="gpu", ranks=1, start_ns=5, end_ns=9)]
    assert other_ranks(claims, run="a", devices=["gpu0", NODE]) == [
        ("gpu0", 5, 0.0), ("gpu0", 5, None), ("gpu0", 9, None), ("gpu0", 9, 0.0),
    ]  # fmt: skip
    assert other_ranks(claims, run="b", devices=["gpu0"]) == []


def test_the_report_says_what_was_split_and_what_is_not_known():
    steps = pl.DataFrame(
        [
            {"rank": r, "step": 1, "start_ns": S, "duration_ns": 2 * S, "tokens": None}
            for r in range(2)
        ]
    )
    spans = pl.DataFrame(
        schema={
            "rank": pl.Int32, "kind": pl.String, "thread": pl.Int64, "start_ns": pl.Int64,
            "duration_ns": pl.Int64, "attributes": pl.String,
        }
    )  # fmt: skip
    rows = [("gpu0", "energy_j", t, 100.0 * t) for t in range(5)]
    rows += [("package-0", "energy_j", t, 30.0 * t) for t in range(5)]
    rows += [(d, "other_ranks", t, 1.0) for d in (NODE, "gpu0") for t in range(5)]
    places = {
        0: Place(node="n", gpu="gpu0", share=0.5),
        1: Place(node="n", gpu=None, share=0.5, note="a MIG slice has no energy counter"),
    }
    use = join_resources(steps, spans, samples(rows), places)
    # rank 0: half of 200 J of the GPU, a third of 60 J of the package; rank 1 nobody knows
    assert use.steps["energy_j"].to_list() == [pytest.approx(100 + 20), None]
    assert "rank 1: energy unknown: a MIG slice has no energy counter" in use.missing
    assert any("other jobs used the node" in text for text in use.missing)
    assert any("other jobs used a GPU of rank 0" in text for text in use.missing)

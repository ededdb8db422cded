"""What-if on jobs whose step times follow from hand."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.labs.operation_traces import pipeline_rows

from kansoku.errors import InputError
from kansoku.trace.whatif.analyse import what_if
from kansoku.trace.whatif.program import pipeline_program
from kansoku.trace.whatif.record import operations_of


def analyse(rows, *, data_parallel=True):
    operations = operations_of(rows, source="test")
    return what_if(operations, pipeline_program(operations, data_parallel=data_parallel))


def test_a_balanced_job_runs_as_fast_as_its_ideal():
    # (4 + 2 - 1) micro-batch times of 3 s, and 0.5 s of the optimizer.
    found = analyse(pipeline_rows())
    assert found.actual_s == pytest.approx(15.5)
    assert found.ideal_s == pytest.approx(15.5)
    assert found.measured_s == pytest.approx(15.5)
    assert (found.verdict, found.culprit) == ("none", None)


def test_one_slow_worker_is_the_culprit():
    # Stage 0 of dp 2 takes twice as long: 4 micro-batches of 6 s, and 1 s of waiting for the first
    # backward, which starts on stage 1 at 3 s and ends at 5 s, when two forwards have taken 4 s.
    found = analyse(
        pipeline_rows(forward=lambda dp, pp, _step, _mb: 2.0 if (dp, pp) == (2, 0) else 1.0)
    )
    assert found.actual_s == pytest.approx(24 + 1 + 0.5)
    assert found.verdict == "found"
    assert (found.culprit.kind, found.culprit.dp, found.culprit.pp) == ("worker", 2, 0)
    # Replacing it leaves every worker at 1 s forward but it at the mean, 9/8 s, or less.
    assert found.slow_workers.removed_share > 0.9
    assert found.causes[0].cause == "slow_worker"


def test_several_slow_workers_are_workers_not_a_stage():
    slow = {(1, 1), (6, 1), (11, 1), (13, 1)}
    found = analyse(
        pipeline_rows(
            dp_size=16, forward=lambda dp, pp, _step, _mb: 1.5 if (dp, pp) in slow else 1.0
        )
    )
    assert found.culprit.kind == "worker"
    assert set(found.culprit.workers) == slow


def test_a_long_last_stage_is_the_culprit():
    found = analyse(pipeline_rows(forward=lambda _dp, pp, _step, _mb: 1.5 if pp == 1 else 1.0))
    # 4 micro-batches of 4.5 s on the last stage, the first forward and last backward of stage 0.
    assert found.actual_s == pytest.approx(4 * 4.5 + 3 + 0.5)
    # Means: forward 1.25, backward 2.5.
    assert found.ideal_s == pytest.approx(5 * 3.75 + 0.5)
    assert (found.culprit.kind, found.culprit.pp) == ("stage", 1)
    assert found.imbalance.last_stage_ratio == pytest.approx(1.5)
    assert [cause.cause for cause in found.causes] == ["last_stage"]


def test_unequal_sequences_are_told_from_slow_workers():
    random = np.random.default_rng(7)
    length = random.choice([1.0, 1.0, 1.0, 3.0], size=(8, 10, 4))

    found = analyse(
        pipeline_rows(
            dp_size=8, steps=10, forward=lambda dp, _pp, step, mb: float(length[dp, step, mb])
        )
    )
    assert found.culprit.kind == "operation"
    assert found.culprit.type == "backward-compute"
    assert found.causes[0].cause == "sequence_length"
    assert found.imbalance.correlation == pytest.approx(1.0)


def test_a_transfer_that_is_sometimes_slow_is_an_operation():
    found = analyse(pipeline_rows(steps=8, transfer=lambda _dp, step: 6.0 if step == 5 else 0.1))
    # The median transfer is 0.1 s, so one step of eight loses 5.9 s.
    assert found.actual_s - found.ideal_s == pytest.approx(5.9 / 8)
    assert (found.culprit.kind, found.culprit.type) == ("operation", "grads-reduce-scatter")
    assert "communication" in {cause.cause for cause in found.causes}


def test_without_pipeline_no_stage_is_blamed():
    found = analyse(
        pipeline_rows(stages=1, forward=lambda dp, _pp, _step, _mb: 1.4 if dp == 3 else 1.0)
    )
    assert (found.culprit.kind, found.culprit.dp) == ("worker", 3)


def test_one_worker_a_stage_is_a_stage():
    found = analyse(
        pipeline_rows(
            dp_size=1, stages=4, forward=lambda _dp, pp, _step, _mb: 1.6 if pp == 3 else 1.0
        ),
        data_parallel=False,
    )
    assert (found.culprit.kind, found.culprit.pp) == ("stage", 3)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_rows_does_not_matter(seed):
    rows = pipeline_rows(forward=lambda dp, pp, step, mb: 1 + 0.1 * ((dp + pp + step + mb) % 3))
    expected = analyse(rows)
    found = analyse(rows.sample(fraction=1.0, shuffle=True, seed=seed))
    assert found.actual_s == expected.actual_s
    assert found.workers == expected.workers


def test_the_replay_of_recorded_times_is_the_recorded_step():
    rows = pipeline_rows(
        stages=3, micro_batches=6, forward=lambda dp, pp, step, mb: 1 + 0.1 * ((dp * pp + mb) % 4)
    )
    found = analyse(rows)
    assert found.actual_s == pytest.approx(found.measured_s)


def test_steps_with_holes_are_left_out_and_said():
    rows = pipeline_rows(steps=4)
    hole = (
        (pl.col("step") == 2) & (pl.col("dp_rank") == 1) & (pl.col("optype") == "forward-compute")
    )
    found = analyse(rows.filter(~hole))
    assert found.steps == (0, 1, 3)
    assert "1 of 4 steps lack operations" in found.missing[0]


def test_no_whole_step_is_an_error():
    with pytest.raises(InputError, match="no step"):
        operations_of(
            pipeline_rows()
            .filter(~((pl.col("dp_rank") == 1) & (pl.col("optype") == "forward-compute")))
            .filter(~((pl.col("dp_rank") == 0) & (pl.col("optype") == "optimizer"))),
            source="test",
        )


def test_progress_counts_every_replay():
    operations = operations_of(pipeline_rows(), source="test")
    program = pipeline_program(operations, data_parallel=True)
    seen = []
    what_if(operations, program, progress=lambda done, total: seen.append((done, total)))
    done = [one for one, _ in seen]
    assert done == sorted(done)
    assert {total for _, total in seen} == {seen[-1][0]}

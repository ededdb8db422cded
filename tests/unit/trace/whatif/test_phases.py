"""Runs from a known schedule: whom the what-if analysis blames."""

import pytest
from tests.labs.generated_run import MS, Schedule, generate

from kansoku.errors import InputError
from kansoku.trace.whatif.analyse import what_if
from kansoku.trace.whatif.phases import MEETING, phase_operations

BEFORE = {
    "data_wait_ns": "data-wait",
    "forward_ns": "forward-compute",
    "backward_ns": "backward-compute",
    "other_ns": "other",
}


def analyse(schedule, *, stages=None):
    _, _, steps = generate(schedule)
    operations, program = phase_operations(
        steps,
        before=BEFORE,
        blocked="collective_ns",
        after={"optimizer_ns": "optimizer"},
        stages=stages,
        source="generated",
    )
    return what_if(operations, program, communication=frozenset({MEETING}))


def test_a_slow_rank_and_its_cost():
    found = analyse(Schedule(ranks=8, jitter=0.0, slow={(5, "forward"): 2.0}))
    # Own work 51 ms and 15 more on rank 5; four transfers of 0.5 ms.
    assert found.actual_s == pytest.approx(0.068, rel=1e-9)
    assert found.ideal_s == pytest.approx(0.053 + 0.015 / 8, rel=1e-9)
    assert (found.culprit.kind, found.culprit.dp) == ("worker", 5)
    assert found.causes[0].cause == "slow_worker"


def test_equal_ranks_have_no_culprit():
    found = analyse(Schedule(ranks=8, jitter=0.005))
    assert (found.verdict, found.culprit) == ("none", None)


def test_work_that_rotates_is_no_ranks_fault():
    found = analyse(Schedule(ranks=8, jitter=0.0, rotating_ns=20 * MS))
    assert found.actual_s == pytest.approx(0.073, rel=1e-9)
    assert (found.culprit.kind, found.culprit.type) == ("operation", "forward-compute")
    assert [cause.cause for cause in found.causes] == ["varying_compute"]


def test_ranks_of_a_long_last_stage_are_a_stage():
    slow = {(rank, phase): 1.5 for rank in (4, 5, 6, 7) for phase in ("forward", "backward")}
    found = analyse(Schedule(ranks=8, jitter=0.0, slow=slow), stages=[[0, 1, 2, 3], [4, 5, 6, 7]])
    assert (found.culprit.kind, found.culprit.pp) == ("stage", 1)
    assert found.causes[0].cause == "last_stage"


def test_uneven_stages_are_refused():
    with pytest.raises(InputError, match="evenly"):
        analyse(Schedule(ranks=4), stages=[[0, 1, 2], [3]])


def test_ranks_without_a_common_step_are_refused():
    _, _, steps = generate(Schedule(ranks=2, steps=3))
    rows = steps.filter((steps["rank"] == 0) | (steps["step"] == 9))
    lonely = rows.vstack(
        steps.filter(steps["rank"] == 1).with_columns(step=steps["step"].max() + 9)
    )
    with pytest.raises(InputError, match="no step that all ranks have"):
        phase_operations(
            lonely, before=BEFORE, blocked="collective_ns", after={}, stages=None, source="x"
        )

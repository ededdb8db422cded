"""A plan beside measured figures, without a run on disk."""

import pytest

from kansoku.app._plan_compare import compare_groups, compare_phases
from kansoku.app.plan import PlanRequest, explain
from kansoku.model import ProcessGroup, RankFacts, RunFacts
from kansoku.trace.collectives import CollectiveSummary


@pytest.fixture(scope="module")
def plan():
    return explain(
        PlanRequest(
            model="22b", gpu="h100", gpus=16, tp=4, pp=2, dp=2, micro_batch=1, global_batch=16,
            recompute="none",
        )
    )  # fmt: skip


def summary(group, op, members, size, **more):
    values = {
        "description": None, "count": 10, "transfer_ns": 10_000_000, "wait_ns": 4_000_000,
        "algbw_bytes_per_s": None, "busbw_bytes_per_s": None, "wait_ratio": None,
    }  # fmt: skip
    return CollectiveSummary(group=group, op=op, members=members, bytes=size, **values | more)


def facts(groups):
    ranks = tuple(
        RankFacts(
            rank=r, local_rank=r, world_size=16, node="n", pid=r, device=None, torch_version=None,
            python_version=None, groups=tuple(g for g in groups if r in g.ranks),
        )
        for r in range(16)
    )  # fmt: skip
    return RunFacts(
        run="r", command=(), start_ns=0, end_ns=None, exit_code=None, slurm_job=None, nodes=("n",),
        ranks=ranks,
    )  # fmt: skip


def test_groups_are_found_by_their_ranks(plan):
    """Strides of the placement: tensor 1, data 4, pipeline 8."""
    groups = [
        ProcessGroup(name="7", description=None, ranks=(0, 1, 2, 3)),
        ProcessGroup(name="8", description=None, ranks=(0, 4)),
        ProcessGroup(name="9", description=None, ranks=(0, 8)),
    ]
    measured = [
        summary("7", "all_reduce", 4, 1_000),
        summary("8", "reduce_scatter", 2, 500),
        summary("9", "send", 2, 70),
        summary("0", "broadcast", 16, 10**9),
    ]
    found = {
        g.axis: g
        for g in compare_groups(plan.candidate, plan.traffic, measured, facts(groups), steps=10)
    }
    assert found["tp"].groups == ("7",)
    assert found["tp"].observed_bytes == 1_000 * 2 * 3 / 4 / 10
    assert found["dp"].observed_bytes == 500 / 2 / 10
    assert found["pp"].observed_bytes == 7
    assert found["tp"].observed_s == pytest.approx(1e-3)
    assert found["tp"].observed_wait_s == pytest.approx(4e-3 / 4 / 10)
    assert "other" not in found


def test_side_by_side_groups_count_once(plan):
    """Four tensor groups of one axis: a rank sees one of them."""
    measured = [summary(f"tp[{s}]", "all_reduce", 4, 1_000, description="tp") for s in range(4)]
    found = compare_groups(plan.candidate, plan.traffic, measured, facts([]), steps=10)
    (tp,) = [g for g in found if g.axis == "tp"]
    assert tp.observed_bytes == 1_000 * 2 * 3 / 4 / 10


def test_phases_by_hand(plan):
    shares = {"forward": 0.25, "backward": 0.5, "collective": 0.25}
    phases = {p.phase: p for p in compare_phases(plan.candidate, plan.traffic, 2.0, shares)}
    assert phases["forward"].observed_s == 0.5
    assert phases["forward"].lost_s == 0.5 - phases["forward"].predicted_s
    assert phases["optimizer"].observed_s is None
    planned = sum(p.predicted_s for p in phases.values())
    assert planned == pytest.approx(plan.candidate.step_s)


def test_without_steps_nothing_is_invented(plan):
    phases = compare_phases(plan.candidate, plan.traffic, None, None)
    assert all(p.observed_s is None and p.lost_s is None for p in phases)

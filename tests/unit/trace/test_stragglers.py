"""Who is slow, on schedules whose answer is known."""

import numpy as np
import polars as pl
import pytest
from tests.labs.generated_run import MS, Schedule, generate

from kansoku.model import Phase, Verdict
from kansoku.trace.collectives import arrivals, collective_rows
from kansoku.trace.steps import step_rows
from kansoku.trace.stragglers import find_stragglers


def judge(schedule, **changes):
    facts, spans, _ = generate(schedule)
    steps = step_rows(spans, facts=facts)
    for name, value in changes.pop("columns", {}).items():
        steps = steps.with_columns(value.alias(name))
    roles = changes.pop("roles", {0: tuple(range(schedule.ranks))})
    matched = arrivals(collective_rows(spans, facts))
    return find_stragglers(steps, roles, matched=matched, **changes)


@pytest.mark.parametrize("seed", range(12))
def test_the_slow_rank_and_phase_are_named(seed):
    rng = np.random.default_rng(seed)
    rank, ranks = int(rng.integers(8)), 8
    phase, factor = [("forward", 1.6), ("backward", 1.4), ("optimizer", 4.0), ("data_wait", 5.0)][
        int(rng.integers(4))
    ]
    answer = judge(Schedule(ranks=ranks, slow={(rank, phase): factor}, seed=seed, jitter=0.1))
    assert answer.verdict is Verdict.FOUND
    assert [(s.rank, s.phase.value) for s in answer.stragglers] == [(rank, phase)]
    straggler = answer.stragglers[0]
    work = {"forward": 15, "backward": 30, "optimizer": 3, "data_wait": 2}
    extra = work[phase] * (factor - 1)
    # By hand: all work is 51 ms, with mean |noise| of 0.1·√(2/π) on top of each part but other.
    assert straggler.ratio == pytest.approx((51 + extra) / 51, rel=0.05)
    assert straggler.excess_ns == pytest.approx(extra * MS * 1.08, rel=0.2)
    assert 0 < straggler.cost_ratio < extra / 51
    assert straggler.blame_share > 0.5


@pytest.mark.parametrize("seed", range(40))
def test_nothing_wrong_is_none(seed):
    ranks = [2, 4, 8, 64][seed % 4]
    answer = judge(Schedule(ranks=ranks, seed=seed, jitter=0.05 + 0.2 * (seed % 3), steps=60))
    assert answer.verdict is Verdict.NONE, answer.stragglers


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rotating_delay_is_nobodys_fault(ranks):
    answer = judge(Schedule(ranks=ranks, rotating_ns=30 * MS))
    assert answer.verdict is Verdict.NONE
    assert answer.rotating_ratio > 0.1
    assert "moves from rank to rank" in answer.reason


def test_two_slow_ranks_are_both_named():
    answer = judge(Schedule(ranks=8, slow={(3, "backward"): 1.5, (4, "backward"): 1.55}))
    assert sorted(s.rank for s in answer.stragglers) == [3, 4]


def test_pipeline_stages_differ_by_nature():
    slow = {(rank, phase): 2.0 for rank in (2, 3) for phase in ("forward", "backward")}
    schedule = Schedule(ranks=4, slow=slow)
    assert judge(schedule, roles={0: (0, 1), 1: (2, 3)}).verdict is Verdict.NONE
    within = Schedule(ranks=4, slow={**slow, (3, "forward"): 3.0})
    answer = judge(within, roles={0: (0, 1), 1: (2, 3)})
    assert [(s.rank, s.phase) for s in answer.stragglers] == [(3, Phase.FORWARD)]


def test_a_stage_of_one_has_no_peers():
    answer = judge(Schedule(ranks=2, slow={(1, "forward"): 2.0}), roles={0: (0,), 1: (1,)})
    assert answer.verdict is Verdict.UNKNOWN
    assert "peer" in answer.reason


def test_one_rank_or_few_steps_are_unknown():
    assert judge(Schedule(ranks=1)).verdict is Verdict.UNKNOWN
    answer = judge(Schedule(steps=5, slow={(1, "forward"): 3.0}))
    assert answer.verdict is Verdict.UNKNOWN
    assert "steps" in answer.reason


def test_a_delay_in_one_window_only_does_not_persist():
    facts, spans, _truth = generate(Schedule(steps=100))
    late = (pl.col("rank") == 2) & pl.col("step").is_between(40, 49)
    steps = step_rows(spans, facts=facts).with_columns(
        forward_ns=pl.col("forward_ns") + pl.when(late).then(100 * MS).otherwise(0),
        duration_ns=pl.col("duration_ns") + pl.when(late).then(100 * MS).otherwise(0),
    )
    assert find_stragglers(steps, {0: (0, 1, 2, 3)}).verdict is Verdict.NONE


def test_cpu_taken_from_outside_is_the_hosts_doing():
    facts, spans, _ = generate(Schedule(slow={(1, "forward"): 3.0}))
    queue = pl.when(pl.col("rank") == 1).then(30 * MS).otherwise(1 * MS)
    steps = step_rows(spans, facts=facts).with_columns(run_delay_ns=queue)
    answer = find_stragglers(steps, {0: (0, 1, 2, 3)})
    assert [(s.rank, s.cause) for s in answer.stragglers] == [(1, "cpu_contention")]
    # Time in the run queue that all ranks share is nobody's.
    even = step_rows(generate(Schedule())[1]).with_columns(run_delay_ns=pl.lit(20 * MS))
    assert find_stragglers(even, {0: (0, 1, 2, 3)}).verdict is Verdict.NONE


def test_whoever_computes_more_queues_more_on_a_busy_machine():
    """Own optimizer work 25 ms longer, 44 against 19 ms of CPU; 3 ms in the queue for each of it.

    So rank 1 queues 75 ms longer than its peers, and nothing outside is to blame.
    """
    facts, spans, _ = generate(Schedule(slow={(1, "optimizer"): 9.0}))
    cpu = pl.when(pl.col("rank") == 1).then(44 * MS).otherwise(19 * MS)
    steps = step_rows(spans, facts=facts).with_columns(
        cpu_ns=cpu, run_delay_ns=3 * cpu, duration_ns=pl.col("duration_ns") + 3 * cpu,
        optimizer_ns=pl.col("optimizer_ns") + 3 * cpu,
    )  # fmt: skip
    (found,) = find_stragglers(steps, {0: (0, 1, 2, 3)}).stragglers
    assert (found.rank, found.cause, found.phase) == (1, "work", Phase.OPTIMIZER)
    assert found.queue_excess_ns == pytest.approx(75 * MS)


def test_a_queue_without_work_of_its_own_is_from_outside():
    """The same queue, but no more CPU time than the peers: something else has the CPU."""
    facts, spans, _ = generate(Schedule())
    queue = pl.when(pl.col("rank") == 1).then(132 * MS).otherwise(57 * MS)
    steps = step_rows(spans, facts=facts).with_columns(
        cpu_ns=pl.lit(19 * MS), run_delay_ns=queue, duration_ns=pl.col("duration_ns") + queue,
        other_ns=pl.col("other_ns") + queue,
    )  # fmt: skip
    (found,) = find_stragglers(steps, {0: (0, 1, 2, 3)}).stragglers
    assert (found.rank, found.cause) == (1, "cpu_contention")


def test_periodic_garbage_collection_is_named():
    facts, spans, _ = generate(Schedule(steps=80))
    steps = step_rows(spans, facts=facts)
    pause = (pl.col("rank") == 3) & (pl.col("step") % 8 == 5)
    steps = steps.with_columns(
        pl.col(name) + pl.when(pause).then(80 * MS).otherwise(0)
        for name in ("other_ns", "duration_ns")
    )
    gc = pl.DataFrame({"rank": [3] * 10, "step": list(range(5, 80, 8)), "gc_ns": [80 * MS] * 10})
    answer = find_stragglers(steps, {0: (0, 1, 2, 3)}, gc=gc)
    assert [(s.rank, s.cause, s.phase) for s in answer.stragglers] == [
        (3, "garbage_collection", Phase.OTHER)
    ]

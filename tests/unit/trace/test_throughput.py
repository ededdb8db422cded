"""Step time and rates of a job, from step rows made by hand."""

import polars as pl
import pytest

from kansoku.model import PHASES, RankFacts, RunFacts
from kansoku.trace.clocks import ClockModel, ClockOffset
from kansoku.trace.layout import Layout
from kansoku.trace.throughput import job_steps, measure

# When each rank ended its steps, ms. The job's steps end at 110, 210, 310, 410.
ENDS = {0: [100, 210, 300, 410], 1: [110, 200, 310, 400]}
MS = 1_000_000


def rows(ends, *, complete=True, first_ns=0):
    found = []
    for rank, times in ends.items():
        for step, (start, end) in enumerate(zip([0, *times], times, strict=False)):
            length = (end - start) * MS
            found.append(
                {"rank": rank, "step": step, "start_ns": first_ns + start * MS, "duration_ns": length,
                 "complete": complete, "tokens": 50.0, "flops": 7.0,
                 **{f"{p.value}_ns": length if p.value == "forward" else 0 for p in PHASES}}
            )  # fmt: skip
    return pl.DataFrame(found)


def facts(ranks, world=None):
    return RunFacts(
        run="r", command=(), start_ns=0, end_ns=None, exit_code=0, slurm_job=None, nodes=("a",),
        ranks=tuple(
            RankFacts(rank=r, local_rank=r, world_size=world or ranks, node="a", pid=r + 1,
                      device="cpu", torch_version=None, python_version=None)
            for r in range(ranks)
        ),
    )  # fmt: skip


def layout(world):
    return Layout(world=world, dp=world, tp=1, pp=1)


def test_a_step_of_the_job_lasts_from_last_end_to_last_end():
    found = job_steps(rows(ENDS))
    assert found["duration_ns"].to_list() == [110 * MS, 100 * MS, 100 * MS, 100 * MS]
    assert found["start_ns"].to_list() == [0, 110 * MS, 210 * MS, 310 * MS]
    # The longest of the ranks' own would be 110 every time: 440 ms of a run that took 410.
    assert found["duration_ns"].sum() == 410 * MS


def test_rates_are_those_of_the_wall_clock():
    found = measure(rows(ENDS), facts(2), layout(2))
    # 3 steps of 2 x 50 tokens from 110 to 410 ms.
    assert found.tokens_per_s == pytest.approx(300 / 0.3)
    assert found.tokens_per_s_per_gpu == pytest.approx(500)
    assert (found.mean_step_ns, found.median_step_ns) == (pytest.approx(100 * MS), 100 * MS)
    assert (found.steps, found.complete_steps) == (4, 4)


def test_more_jitter_of_more_ranks_makes_no_step_longer():
    """A step is 100 ms of every rank, ends noticed up to 40 ms late; 64 ranks."""
    late = [[(7 * rank + 13 * step) % 41 for step in range(50)] for rank in range(64)]
    ends = {r: [100 * (s + 1) + late[r][s] for s in range(50)] for r in range(64)}
    found = measure(rows(ends), facts(64), layout(64))
    assert found.mean_step_ns == pytest.approx(100 * MS, rel=0.001)


def test_shifted_clocks_do_not_change_a_step():
    """Rank 1's clock is 5 s ahead and corrected: the steps are those of one clock."""
    shifted = rows(ENDS).with_columns(
        start_ns=pl.col("start_ns") + pl.when(pl.col("rank") == 1).then(5_000 * MS).otherwise(0)
    )
    offsets = [
        ClockOffset(rank=r, offset_ns=5e9 * r, drift_ppm=0.0, residual_ns=0.0, matches=9)
        for r in range(2)
    ]
    model = ClockModel(
        reference=0, origin_ns=0, offsets=tuple(offsets), applied=True, reason="by hand"
    )
    assert job_steps(shifted, model).equals(job_steps(rows(ENDS)))


def test_totals_of_some_ranks_are_those_of_some_ranks():
    found = measure(rows(ENDS), facts(2, world=4), layout(4))
    assert found.ranks_seen == 2
    assert found.tokens_per_s == pytest.approx(1_000)
    assert found.tokens_per_s_per_gpu == pytest.approx(500)  # not 250: two GPUs made them


def test_a_rank_that_did_a_step_twice_counts_with_the_later_one():
    again = rows({0: [90]}, first_ns=1_000 * MS)
    found = job_steps(pl.concat([rows({0: ENDS[0]}), again]))
    assert found["ranks"].to_list() == [1, 1, 1, 1]
    assert found["duration_ns"].to_list() == [90 * MS, 110 * MS, 90 * MS, 110 * MS]


def test_nothing_complete_gives_no_figures():
    found = measure(rows(ENDS, complete=False), facts(2), layout(2))
    assert (found.steps, found.complete_steps, found.mean_step_ns) == (4, 0, None)

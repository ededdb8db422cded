"""Windows, midnight, suspension, requeue chains, recycled ids."""

import itertools

import polars as pl
import pytest

from kansoku.formats.slurm import JOB_SCHEMA, STEP_SCHEMA
from kansoku.jobs.runs import (
    in_window,
    node_buckets,
    size_buckets,
    with_logical_runs,
    with_outcomes,
)

S = 10**9
H = 3600 * S


def table(*rows):
    full = [
        {"cluster": "c", "state": "COMPLETED", "job_id": str(r.get("raw_id")), **r} for r in rows
    ]
    return pl.DataFrame(full, schema=JOB_SCHEMA, orient="row")


def window(rows, since, until):
    return in_window(table(*rows).lazy(), since, until).collect()


JOB = {
    "raw_id": 1,
    "submit_ns": 10 * H,
    "start_ns": 11 * H,
    "end_ns": 15 * H,
    "gpus": 8,
    "nodes": 1,
}


def test_time_outside_the_window_is_cut_off():
    assert window([JOB], 0, 100 * H)["gpu_hours"].item() == 32
    assert window([JOB], 12 * H, 14 * H)["gpu_hours"].item() == 16
    assert window([JOB], 15 * H, 20 * H).height == 0
    assert window([JOB], 0, 10 * H).height == 0


def test_windows_add_up():
    parts = [window([JOB], a * H, (a + 1) * H)["gpu_hours"].sum() for a in range(24)]
    assert sum(parts) == pytest.approx(32)


def test_a_job_that_ends_later_counts_as_running_or_pending():
    assert window([JOB], 0, 13 * H)["state"].item() == "RUNNING"
    assert window([JOB], 0, 11 * H)["state"].item() == "PENDING"


def test_jobs_without_an_end():
    running = {**JOB, "end_ns": None, "state": "RUNNING"}
    lost = {**JOB, "end_ns": None, "state": "FAILED"}
    assert window([running], 0, 20 * H)["gpu_hours"].item() == 72
    assert window([lost], 0, 20 * H)["gpu_hours"].item() == 0


def test_suspension_is_not_allocated_time():
    job = {**JOB, "suspended_s": 3600}
    assert window([job], 0, 100 * H)["gpu_hours"].item() == pytest.approx(24)


def test_never_started_jobs_have_their_size_but_no_time():
    job = {"raw_id": 2, "submit_ns": H, "end_ns": 2 * H, "state": "CANCELLED", "requested_gpus": 48}
    row = window([job], 0, 10 * H).row(0, named=True)
    assert (row["size_gpus"], row["gpu_hours"]) == (48, 0)


def test_incarnations_chain_and_recycled_ids_do_not():
    rows = [
        {"raw_id": 7, "submit_ns": 0, "start_ns": S, "end_ns": 100 * S, "state": "REQUEUED",
         "user": "a", "name": "n"},
        {"raw_id": 7, "submit_ns": 100 * S, "start_ns": 220 * S, "end_ns": 300 * S,
         "state": "NODE_FAIL", "user": "a", "name": "n"},
        {"raw_id": 7, "submit_ns": 301 * S, "start_ns": 400 * S, "end_ns": 500 * S,
         "user": "a", "name": "n"},
        {"raw_id": 7, "submit_ns": 9000 * H, "start_ns": 9001 * H, "end_ns": 9002 * H,
         "user": "a", "name": "n"},
        {"raw_id": 7, "submit_ns": 9002 * H, "start_ns": 9003 * H, "end_ns": 9004 * H,
         "user": "other", "name": "n"},
    ]  # fmt: skip
    frame = with_logical_runs(table(*rows[::-1])).sort("submit_ns")
    assert frame["incarnation"].to_list() == [0, 1, 2, 0, 0]
    assert frame["requeue_of_ns"].to_list() == [None, 0, 100 * S, None, None]
    assert frame["last"].to_list() == [False, False, True, True, True]
    assert frame["logical"].n_unique() == 3


def test_a_step_killed_for_memory_makes_the_outcome():
    jobs = table(
        {**JOB, "state": "FAILED"}, {**JOB, "raw_id": 2, "state": "FAILED"}, {**JOB, "raw_id": 3}
    )
    step = {"cluster": "c", "state": "OUT_OF_MEMORY", "start_ns": 12 * H, "step": "0"}
    steps = pl.DataFrame(
        [{**step, "raw_id": 1}, {**step, "raw_id": 2, "start_ns": 99 * H}, {**step, "raw_id": 3}],
        schema=STEP_SCHEMA,
        orient="row",
    )
    got = with_outcomes(jobs.lazy(), steps.lazy()).sort("raw_id").collect()["outcome"].to_list()
    # Another incarnation's step (99 h) says nothing, nor does one of a job that completed.
    assert got == ["OUT_OF_MEMORY", "FAILED", "COMPLETED"]


def test_buckets_touch_and_do_not_overlap():
    for buckets in (size_buckets(800), node_buckets(100)):
        for (_, high), (low, _) in itertools.pairwise(buckets):
            assert low == high + 1
    assert size_buckets(800)[-1] == (513, 1024)
    assert node_buckets(64)[-1] == (33, 64)

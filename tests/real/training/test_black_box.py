"""The black box: killed ranks, hangs, a killed drain, a ring far smaller than the run."""

import json
import os
import signal
import subprocess
import sys
import time

import polars as pl
import psutil
import pytest
from tests.labs.training import ROOT, end_cases, observed_environment, run_cases, start_cases

from kansoku.capture.payload.drain import Drain
from kansoku.formats.run_directory import read_run

pytestmark = pytest.mark.real


def wait_until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to this"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def hanging(tmp_path_factory):
    """Rank 0 waits in an all_reduce that rank 1 never enters; then both are killed."""
    folder = tmp_path_factory.mktemp("hang")
    process = start_cases(folder, ["hang"], observed_environment(folder))
    rings = folder / "rings" / "hang"
    try:
        wait_until(lambda: (folder / "hanging-0").exists() and (folder / "hanging-1").exists())

        def waits():
            spans = read_run(rings).spans
            return len(spans.filter(pl.col("duration_ns").is_null() & (pl.col("bytes") == 28))) == 1

        wait_until(waits)
        pids = [int(pid) for pid in (folder / "hang.pids").read_text().split()]
        alive = read_run(rings)
        for pid in pids:  # nobody gets to say good-bye
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            wait_until(lambda pid=pid: not psutil.pid_exists(pid) or _zombie(pid))
        yield folder, alive, pids
    finally:
        end_cases(process)


def _zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_hang_says_who_waits_for_whom(hanging):
    _, alive, _ = hanging
    open_ = alive.spans.filter(pl.col("duration_ns").is_null())
    waiting = open_.filter(pl.col("kind") == "collective").to_dicts()
    assert [(row["rank"], row["name"], row["group"]) for row in waiting] == [(0, "all_reduce", "0")]
    blocked = open_.filter(pl.col("kind") == "collective_wait")
    assert blocked["rank"].to_list() == [0]
    # Rank 1 has not come: its newest collective in the group is the one before.
    other = alive.spans.filter((pl.col("rank") == 1) & (pl.col("group") == "0"))
    assert other["sequence"].max() == waiting[0]["sequence"] - 1
    age = time.time_ns() - waiting[0]["start_ns"]
    assert 0 < age < 300_000_000_000


def test_after_kill_9_the_same_is_still_there(hanging):
    folder, alive, _ = hanging
    dead = read_run(folder / "rings" / "hang")
    where = pl.col("duration_ns").is_null()
    columns = ("rank", "kind", "name", "sequence", "start_ns")
    assert (
        dead.spans.filter(where).select(columns).equals(alive.spans.filter(where).select(columns))
    )
    assert [p.state for p in dead.processes] == ["recording", "recording"]
    assert [p.step for p in dead.processes] == [3, 3]


def test_the_report_command_names_what_each_was_in_and_who_is_waited_for(hanging):
    folder, alive, _ = hanging
    answers = []

    def are_gone():  # their parent may not have taken notice yet
        done = subprocess.run(
            [sys.executable, "-m", "kansoku", "report", str(folder / "rings" / "hang"), "--json"],
            capture_output=True, text=True, check=False, timeout=240, cwd=ROOT,
        )  # fmt: skip
        answers.append(json.loads(done.stdout)["job"])
        return {state["process"] for state in answers[-1]["last_states"]} == {"gone"}

    wait_until(are_gone)
    job = answers[-1]
    entered = alive.spans.filter(pl.col("bytes") == 28).to_dicts()
    waits = next(row for row in entered if row["rank"] == 0 and row["duration_ns"] is None)
    states = {state["rank"]: state for state in job["last_states"]}
    assert set(states) == {0, 1}
    assert (states[0]["in"], states[0]["name"]) == ("collective", "all_reduce")
    assert (states[0]["sequence"], states[0]["since_ns"]) == (waits["sequence"], waits["start_ns"])
    assert [state["step"] for state in states.values()] == [3, 3]
    assert job["waiting"] == [
        {
            "group": "0",
            "op": "all_reduce",
            "sequence": waits["sequence"],
            "waiting": [0],
            "missing": [1],
        }
    ]


def test_the_drain_keeps_it_after_the_rings_are_gone(hanging, tmp_path):
    folder, alive, _ = hanging
    drain = Drain(str(folder / "rings" / "hang"), str(tmp_path))
    drain.poll()
    kept = read_run(tmp_path)
    where = pl.col("duration_ns").is_null()
    assert kept.spans.filter(where)["kind"].to_list() == (
        alive.spans.filter(where)["kind"].to_list()
    )
    assert len(kept.spans) == len(alive.spans)


def test_5000_steps_through_a_small_ring_count_exactly(tmp_path):
    """A ring of 1 MiB holds a fraction; the drain follows and is killed and replaced midway."""
    environment = observed_environment(tmp_path, LONG_STEPS=5_000)
    environment["KANSOKU_RING_BYTES"] = str(1 << 20)
    process = start_cases(tmp_path, ["long"], environment)
    rings, out = tmp_path / "rings" / "long", tmp_path / "out"
    drain = Drain(str(rings), str(out))
    try:
        polls = 0
        while process.poll() is None:
            drain.poll()
            polls += 1
            if polls % 40 == 0:  # as if the process had been killed: nothing is carried over
                drain.release()
                drain = Drain(str(rings), str(out))
            time.sleep(0.05)
        output, _ = process.communicate()
        assert process.returncode == 0, output[-3000:]
    finally:
        process.kill()
        process.wait()
    while drain.copies:
        drain.poll()
    data = read_run(out)
    assert [p.lost for p in data.processes] == [0, 0]
    for rank in range(2):
        counted = json.loads((tmp_path / f"long-{rank}.json").read_text())
        spans = data.spans.filter(pl.col("rank") == rank)
        steps = spans.filter(pl.col("kind") == "step")
        complete = steps.filter(~pl.col("attributes").fill_null("").str.contains("incomplete"))
        assert len(complete) == counted["steps"] == 5_000
        sums = spans.filter((pl.col("kind") == "collective") & pl.col("step").is_not_null())
        assert len(sums) == counted["collectives"] == 2_500
        assert sums["bytes"].sum() == counted["bytes"]
        own = data.counters.filter((pl.col("rank") == rank) & (pl.col("kind") == "step"))
        assert own["count"].to_list() == [5_000]
    assert sum(file.stat().st_size for file in out.rglob("*.ring")) > 4 << 20


def test_without_a_drain_the_counters_still_know(tmp_path):
    """Whatever was overwritten, the header has the counts and bytes since the start."""
    environment = observed_environment(tmp_path, LONG_STEPS=600)
    environment["KANSOKU_RING_BYTES"] = str(100_000)
    cases = run_cases(tmp_path, ["long"], environment)
    data = cases.data("long")
    counted = cases.counted("long", 0)
    own = {row["kind"]: row for row in data.counters.filter(pl.col("rank") == 0).to_dicts()}
    assert own["step"]["count"] == counted["steps"]
    assert own["collective"]["bytes"] == counted["bytes"]
    assert data.processes[0].lost > 0
    assert any("overwritten" in text for text in data.missing)


def test_no_room_for_the_ring_runs_the_job_without_it(tmp_path):
    environment = observed_environment(tmp_path, LONG_STEPS=5)
    environment["KANSOKU_RING_DIR"] = "/proc/nowhere"
    cases = run_cases(tmp_path, ["long"], environment)
    assert cases.counted("long", 0)["steps"] == 5

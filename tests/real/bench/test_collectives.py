"""Real Gloo ranks: every operation measured, the link file read by the planner."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.real


def test_sweep_and_link_file(tmp_path):
    links = tmp_path / "links.json"
    answer = subprocess.run(
        [sys.executable, "-m", "kansoku", "bench", "collectives", "--ranks", "2", "--sizes",
         "4k,64k,1m", "--repetitions", "3", "--links", str(links), "--json"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert {p["operation"] for p in told["points"]} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"
    }  # fmt: skip
    for point in told["points"]:
        assert point["algbw_bytes_per_s"] == pytest.approx(
            point["bytes"] / (point["median_us"] / 1e6)
        )
    plan = subprocess.run(
        [sys.executable, "-m", "kansoku", "plan", "explain", "--model", "gpt2", "--gpu", "h100-sxm",
         "--gpus", "8", "--global-batch", "64", "--tp", "4", "--links", str(links), "--json"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert plan.returncode == 0, plan.stderr
    assert json.loads(plan.stdout)["step_s"] > 0


def test_ranks_that_fail_are_told_with_their_last_words():
    answer = subprocess.run(
        [sys.executable, "-m", "kansoku", "bench", "collectives", "--operations", "all_shuffle"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.returncode == 2
    assert "unknown operation 'all_shuffle'" in answer.stderr

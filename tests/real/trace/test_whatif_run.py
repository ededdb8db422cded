"""What-if on a real pipeline-parallel training that was recorded as it ran."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.labs.pipeline_training import MICRO_BATCHES, SLOW
from tests.labs.training import observed_environment

from kansoku.app.trace_whatif import whatif

SCRIPT = Path(__file__).parents[2] / "labs" / "pipeline_training.py"


@pytest.mark.real
def test_the_slow_worker_of_a_recorded_pipeline(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "8"],
        env=observed_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "rings" / "pipeline"
    (run / "run.json").write_text('{"schema":"kansoku.run/1","run":"pipeline"}')
    result = whatif([run])
    answer = result.to_json()
    assert (answer["source"], answer["verdict"]) == ("run", "found")
    assert {one["type"] for one in answer["operations"]} >= {
        "forward-compute", "backward-compute", "forward-pp-comm", "backward-pp-comm",
        "grads-reduce-scatter", "optimizer",
    }  # fmt: skip
    assert len(answer["steps"]) == 7
    culprit = answer["culprit"]
    assert (culprit["kind"], culprit["dp"], culprit["pp"]) == ("worker", 1, 0)
    assert result.workers.sort("share")["rank"][-1] == SLOW
    # Its 40 ms forward and backward a micro-batch bound the step: replayed, it takes no less.
    assert answer["actual_s"] >= MICRO_BATCHES * 0.08
    assert answer["ideal_s"] < answer["actual_s"]

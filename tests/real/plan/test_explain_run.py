"""A plan beside a real run: two ranks of the example GPT, data parallel over Gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kansoku.app.plan import PlanRequest, explain

ROOT = Path(__file__).parents[3]
LAYERS, WIDTH, CONTEXT, VOCABULARY = 2, 64, 32, 128


@pytest.mark.real
def test_bytes_per_group_equal_the_plan(tmp_path):
    """DDP all-reduces every fp32 gradient once a step: 118,528 parameters, 4 bytes, 2 (n-1)/n."""
    sizes = ["--layers", LAYERS, "--width", WIDTH, "--context", CONTEXT, "--vocabulary", VOCABULARY]
    job = ["torchrun", "--nproc-per-node", "2", "examples/train_gpt.py", "--steps", "20"]
    folder = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "run", "--no-report", "--out", str(out), "--", *job,
         *map(str, sizes)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = explain(
        PlanRequest(
            layers=LAYERS, hidden=WIDTH, heads=4, seq=CONTEXT, vocab=VOCABULARY, tied=False,
            gpu="h100", gpus=2, tp=1, pp=1, dp=2, zero=0, grad_bytes=4, micro_batch=4,
            global_batch=8,
        ),
        run=out,
    )  # fmt: skip
    beside = answer.comparison
    (group,) = beside.groups
    assert group.axis == "dp"
    assert group.predicted_bytes == 118_528 * 4
    assert group.observed_bytes == pytest.approx(118_528 * 4, rel=0.01)
    assert beside.steps == 20
    assert beside.reason is None
    assert {p.phase for p in beside.phases} >= {"forward", "backward", "optimizer", "collective"}
    assert sum(p.observed_s for p in beside.phases) == pytest.approx(
        beside.observed_step_s, rel=1e-6
    )

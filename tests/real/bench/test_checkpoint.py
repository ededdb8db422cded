"""Real checkpoints on a real folder: bytes come back as written, figures follow by hand."""

import json
import subprocess
import sys

import pytest

from kansoku.app.bench_checkpoint import CheckpointMethod, CheckpointReport, bench_checkpoint
from kansoku.errors import InputError

pytestmark = pytest.mark.real


def test_both_methods_write_and_read_back(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-m", "kansoku", "bench", "checkpoint", str(tmp_path), "--size", "8m",
         "--repetitions", "1", "--mttf-h", "1", "--json"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    for method in json.loads(answer.stdout)["methods"]:
        assert method["bytes"] == 8 << 20
        assert method["wrong_tensors"] == 0
        assert method["durable_s"] >= method["stall_s"] > 0
        assert method["write_bytes_per_s"] == pytest.approx(method["bytes"] / method["durable_s"])
        assert method["best_interval_s"] == pytest.approx((2 * method["stall_s"] * 3600) ** 0.5)
    assert list(tmp_path.iterdir()) == []


def test_lost_work_by_hand():
    method = CheckpointMethod(
        method="dcp", bytes=100, stall_s=10, durable_s=20, read_s=30, wrong_tensors=0
    )
    report = CheckpointReport(path="x", ranks=1, interval_s=990, mttf_s=None, methods=(method,))
    assert report.overhead(method) == pytest.approx(0.01)
    assert report.lost_s(method) == pytest.approx(500 + 30)
    assert report.best_interval_s(method) is None


def test_it_never_fills_a_file_system(tmp_path):
    with pytest.raises(InputError, match="GiB free"):
        bench_checkpoint(tmp_path, nbytes=1 << 50)

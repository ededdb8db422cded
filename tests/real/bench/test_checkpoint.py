"""Real checkpoints on a real folder: bytes come back as written, figures follow by hand."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from kansoku.app.bench_checkpoint import CheckpointMethod, CheckpointReport, bench_checkpoint
from kansoku.errors import InputError, PlatformError

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


def test_it_leaves_nothing_when_it_is_ended(tmp_path):
    """SIGTERM to the command alone while its ranks write: the folder is empty afterwards."""
    ours = subprocess.Popen(
        [sys.executable, "-m", "kansoku", "bench", "checkpoint", str(tmp_path), "--size", "16m",
         "--repetitions", "500"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not list(tmp_path.glob("kansoku-checkpoint-*/*/*")):
        assert ours.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    ours.terminate()
    assert ours.wait(timeout=60) != 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(InputError, match="cannot be written: Permission denied") as caught:
        bench_checkpoint(tmp_path, nbytes=1 << 20)
    assert str(tmp_path) in str(caught.value)


def test_a_disk_that_fills_up_meanwhile_is_named(tmp_path, monkeypatch):
    """torch.distributed.checkpoint says "unexpected pos 704 vs 598" on a full tmpfs."""

    def fail(*_, **__):
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 << 20))
        raise PlatformError("the ranks ended with 1: unexpected pos 704 vs 598")

    monkeypatch.setattr("kansoku.app.bench_checkpoint.launch_ranks", fail)
    with pytest.raises(PlatformError, match=r"filled up \(5\.0 MiB are left\).*pos 704") as caught:
        bench_checkpoint(tmp_path, nbytes=30 << 20)
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []

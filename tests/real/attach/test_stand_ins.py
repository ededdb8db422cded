"""NCCL and CUDA entry points, on stand-ins with their names: not yet run on a GPU."""

import errno
import os
import subprocess

import polars as pl
import pytest
from tests.labs.stand_ins import build_job

from kansoku.app.attach import attach
from kansoku.errors import PlatformError
from kansoku.formats.run_directory import read_run

pytestmark = pytest.mark.real


def test_calls_of_a_job_without_torch(tmp_path):
    job = subprocess.Popen(
        [build_job(tmp_path)],
        stdin=subprocess.PIPE,
        env={**os.environ, "RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"},
    )

    def go(_line):
        if not job.stdin.closed:
            job.stdin.write(b"\n")
            job.stdin.close()

    outcome = attach([job.pid], out=tmp_path / "run", launches=True, say=go)
    assert job.wait() == 3
    assert [p["exit_code"] for p in outcome.processes] == [3]
    assert [p["rank"] for p in outcome.processes] == [2]
    data = read_run(tmp_path / "run")
    counted = {
        row[:2]: row[2:]
        for row in data.spans.group_by("kind", "name").agg(pl.len(), pl.col("bytes").sum()).rows()
    }
    assert counted == {
        ("collective", "all_reduce"): (10, 10 * 1000 * 4),
        ("collective", "all_gather"): (10, 10 * 10 * 2 * 4),
        ("collective", "send"): (10, 10 * 6 * 4),
        ("device_copy", "cudaMemcpyAsync"): (10, 40_960),
        ("device_copy", "cuMemcpyHtoDAsync_v2"): (10, 1000),
        ("device_launch", "cudaLaunchKernel"): (10, 0),
        ("device_launch", "cuLaunchKernel"): (10, 0),
        ("device_sync", "cudaStreamSynchronize"): (10, 0),
        ("device_sync", "cuCtxSynchronize"): (10, 0),
    }
    synchronised = data.spans.filter(pl.col("kind") == "device_sync")["duration_ns"]
    assert synchronised.drop_nulls().len() >= 16  # the place it returns to is learnt from the first
    assert synchronised.min() >= 3_000_000
    sent = data.spans.filter(pl.col("name") == "send")["attributes"][0]
    assert '"peer":3' in sent


def test_only_what_calls_has_a_ring_and_that_until_it_ends(tmp_path, monkeypatch):
    """A shell with sleeps around one rank: one ring in all, removed before the shell ends."""
    monkeypatch.setenv("KANSOKU_RING_DIR", str(tmp_path / "rings"))
    script = """
        for i in 1 2 3 4; do sleep 0.4; done
        (sleep 1; echo) | "$0"; code=$?
        sleep 1; exit $code
    """
    job = subprocess.Popen(["bash", "-c", script, build_job(tmp_path)])
    seen = []

    def look():
        names = sorted(path.name for path in (tmp_path / "rings").glob("*/*"))
        if not seen or seen[-1] != names:
            seen.append(names)
        return False

    outcome = attach([job.pid], out=tmp_path / "run", until=look)
    assert job.wait() == 3
    (rank,) = [process["pid"] for process in outcome.processes if process["calls"]]
    name = f"{os.uname().nodename}-{rank}.ring"
    assert seen == [[], [name], []]
    assert [path.name for path in (tmp_path / "run").glob("*/*.ring")] == [name]
    assert len(read_run(tmp_path / "run").spans.filter(pl.col("kind") == "collective")) == 30
    assert list((tmp_path / "rings").iterdir()) == []


def test_no_room_for_a_ring_is_said_and_the_job_goes_on(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    job = subprocess.Popen([build_job(tmp_path)], stdin=subprocess.PIPE)

    def go(_line):
        if not job.stdin.closed:
            job.stdin.write(b"\n")
            job.stdin.close()

    with pytest.raises(PlatformError, match="No space left"):
        attach([job.pid], out=tmp_path / "run", say=go)
    assert job.wait() == 3
    assert not (tmp_path / "run").exists()

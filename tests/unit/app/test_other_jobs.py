"""Who else is on the node, by the rings beside the job's own."""

import os
from pathlib import Path

import pytest

from kansoku.app._other_jobs import OtherJobs
from kansoku.model import ring

UUIDS = {"GPU-a": "gpu0", "GPU-b": "gpu1"}


@pytest.fixture
def proc(tmp_path):
    """A /proc with process 7 of this user, started at tick 42."""
    one = tmp_path / "proc" / "7"
    one.mkdir(parents=True)
    (one / "stat").write_text("7 (python) R " + " ".join(["0"] * 18) + " 42 0\n")
    return tmp_path / "proc"


def rank(home, run, *, pid=7, start=42, device="NVIDIA H100", local=0, **said):
    buffer = bytearray(1 << 18)
    ring.format_ring(buffer, pid=pid, process_start=start, anchor=(1, 1), lane_shares=(1,))
    writer = ring.RingWriter(buffer)
    writer.set_ranks(local, local, 2)
    writer.set_facts({"run": run, "device": device, "extra": said})
    (home / run).mkdir(parents=True, exist_ok=True)
    (home / run / f"n-{local}.ring").write_bytes(buffer)


def look(home, proc, **environment):
    return OtherJobs(home / "own", environment=environment, proc=proc)(UUIDS)


def test_ranks_of_other_jobs_are_counted_by_device(tmp_path, proc):
    home = tmp_path / "rings"
    rank(home, "own")
    assert look(home, proc) == {}
    rank(home, "b", local=0, CUDA_VISIBLE_DEVICES="1")
    rank(home, "b", local=1, device="cpu")
    assert look(home, proc) == {"node": 2, "gpu1": 1}


@pytest.mark.parametrize(("pid", "start"), [(8, 42), (7, 41)])
def test_a_process_that_ended_holds_nothing(tmp_path, proc, pid, start):
    """Gone, or another one with its number."""
    home = tmp_path / "rings"
    rank(home, "b", pid=pid, start=start)
    assert look(home, proc) == {}


def test_a_gpu_that_is_not_known_may_be_any(tmp_path, proc):
    home = tmp_path / "rings"
    rank(home, "b", CUDA_VISIBLE_DEVICES="MIG-1")
    found = look(home, proc)
    assert (found["node"], found["gpu0"], found["gpu1"]) == (1, None, None)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"node": None, "gpu0": None, "gpu1": None}),
        ({"SLURM_JOB_GPUS": "0"}, {"node": None}),  # what Slurm gave is this job's own
    ],
)
def test_rings_of_another_user_cannot_be_counted(
    tmp_path, proc, monkeypatch, environment, expected
):
    home = tmp_path / "rings"
    (home / "b").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "b")
    assert look(home, proc, **environment) == expected
    (proc / "7" / "stat").unlink()
    (proc / "7").rmdir()
    assert look(home, proc, **environment) == {}, "none of that user's processes lives"


def test_a_ring_that_is_none_is_passed_over(tmp_path, proc):
    home = tmp_path / "rings"
    (home / "b").mkdir(parents=True)
    (home / "b" / "n-1.ring").write_bytes(b"no ring")
    assert look(home, proc) == {}
    assert OtherJobs(tmp_path / "none" / "own", environment={}, proc=proc)(UUIDS) == {}

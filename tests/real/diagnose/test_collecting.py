"""What is fetched from a live rank from outside: its Flight Recorder, served or written."""

import json
import os
import subprocess
import sys

import pytest

from kansoku.diagnose.edge.dumps import fetch_dump
from kansoku.formats.flight_recorder import read_dump

pytestmark = pytest.mark.real

RANK = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.elastic.control_plane import _worker_server

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
with _worker_server(os.environ["TORCH_WORKER_SERVER_SOCKET"]):
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_a_rank_that_serves_its_flight_recorder_is_asked(tmp_path):
    socket = tmp_path / "rank0.sock"
    env = os.environ | {
        "TORCH_WORKER_SERVER_SOCKET": str(socket), "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path / "rendezvous")], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert rank.stdout.readline() == "ready\n"
        path = fetch_dump(rank.pid, 0, tmp_path / "kept")
        entries = read_dump(path)["entries"]
        names = [entry["profiling_name"] for entry in entries]
        assert sum("all_reduce" in name or "allreduce" in name for name in names) == 3
    finally:
        rank.stdin.close()
        rank.wait(60)
        rank.stdout.close()


@pytest.fixture
def silent(tmp_path):
    """A process that serves nothing and names where it writes its dumps."""
    env = os.environ | {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_")}
    process = subprocess.Popen(["sleep", "1000"], env=env)
    yield process
    process.kill()
    process.wait(30)


def test_a_dump_that_it_wrote_itself_is_taken_unless_old_linked_or_no_file(tmp_path, silent):
    path = tmp_path / "dump_3"
    assert fetch_dump(silent.pid, 3, tmp_path / "kept") is None
    path.write_text(json.dumps({"version": "2.9", "entries": []}))
    assert fetch_dump(silent.pid, 3, tmp_path / "kept").read_text() == path.read_text()
    os.utime(path, (1, 1))
    assert fetch_dump(silent.pid, 3, tmp_path / "kept") is None
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert fetch_dump(silent.pid, 3, tmp_path / "kept") is None
    path.unlink()
    os.mkfifo(path)
    assert fetch_dump(silent.pid, 3, tmp_path / "kept") is None

"""Whether a followed run has ended, by its run.json and by its processes."""

import json
import os
import subprocess
import sys

import pytest

from kansoku.app.fabric._following import _ended
from kansoku.capture.attach.process import Process
from kansoku.formats.run_directory import read_run
from kansoku.model import ring


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made


def save_ring(folder, pid, started, node):
    buffer = bytearray(1 << 17)
    ring.format_ring(
        buffer, pid=pid, process_start=started, anchor=(1_000, 10**18), lane_shares=(1,)
    )
    ring.RingWriter(buffer).set_facts({"node": node, "run": "r", "groups": []})
    (folder / f"{node}-{pid}.ring").write_bytes(buffer)


def test_a_run_ends_with_its_json(tmp_path, process):
    save_ring(tmp_path, process.pid, Process(process.pid).start, os.uname().nodename)
    facts = {"schema": "kansoku.run/1", "run": "r", "end_ns": None}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    data = read_run(tmp_path)
    assert _ended(tmp_path, data) is None
    (tmp_path / "run.json").write_text(json.dumps(facts | {"end_ns": 5, "exit_code": 3}))
    assert _ended(tmp_path, data) == "the run ended with exit code 3"


def test_a_run_that_nobody_closed_ends_with_its_processes(tmp_path, process):
    started = Process(process.pid).start
    save_ring(tmp_path, process.pid, started, os.uname().nodename)
    data = read_run(tmp_path)
    assert _ended(tmp_path, data) is None
    process.kill()
    process.wait()
    assert _ended(tmp_path, data) == "all processes of the run are gone"


def test_processes_of_other_nodes_cannot_be_seen(tmp_path):
    save_ring(tmp_path, 2**22 + 9, 9, "elsewhere")
    assert _ended(tmp_path, read_run(tmp_path)) is None

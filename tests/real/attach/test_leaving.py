"""How the command ends where the machine refuses something, and what it leaves behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.labs.stand_ins import build_job

from kansoku.app.attach import attach
from kansoku.errors import InputError, PlatformError
from kansoku.formats.run_directory import read_run

pytestmark = pytest.mark.real
ROUNDS = 10
COLLECTIVES = 3 * ROUNDS


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A job without torch: it waits for a line, makes its calls for 0.5 s, and exits with 3."""
    return build_job(tmp_path_factory.mktemp("program"))


@pytest.fixture
def small(tmp_path):
    """Return a function that mounts a small file system; it is gone after the test."""
    mounted = []

    def mount(name, size):
        folder = tmp_path / name
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)  # rings stay mapped in us


@pytest.fixture(autouse=True)
def rings(tmp_path, monkeypatch):
    folder = tmp_path / "rings"
    monkeypatch.setenv("KANSOKU_RING_DIR", str(folder))
    return folder


def start(program, rank=0, **more):
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return subprocess.Popen([program], stdin=subprocess.PIPE, env=environment, **more)


def goes(*jobs):
    """Return what lets the jobs go at the observer's first look, when its probes are set."""

    def go(_line):
        for job in jobs:
            if not job.stdin.closed:
                job.stdin.write(b"\n")
                job.stdin.close()

    return go


def ends(process):
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def kansoku(*arguments, prefix=()):
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", "from kansoku.cli import main; main()",
         *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_probes(command):
    """Wait until a command has set its probes: it holds a link for each, and no more for a second."""
    deadline = time.monotonic() + 60
    links, since = 0, time.monotonic()
    while not links or time.monotonic() - since < 1:
        assert time.monotonic() < deadline
        assert command.poll() is None, command.communicate()
        now = 0
        for descriptor in Path(f"/proc/{command.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                now += "bpf_link" in os.readlink(descriptor)
        if now != links:
            links, since = now, time.monotonic()
        time.sleep(0.02)


def fill(folder):
    """Take the room that is left."""
    with open(folder / "filled", "ab", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass


def collectives(run):
    spans = read_run(run).spans
    return len(spans.filter(spans["kind"] == "collective"))


# -- a full disk ------------------------------------------------------------------------------


def test_a_disk_that_fills_is_said_and_its_rings_can_be_read(program, small, rings):
    out = small("tiny", "64k") / "run"
    job = start(program)
    command = kansoku("attach", job.pid, "--out", out)
    wait_for_probes(command)
    fill(out.parent)
    goes(job)("")
    _, said = command.communicate(timeout=60)
    assert job.wait() == 3
    assert command.returncode == 3, said
    (folder,) = rings.iterdir()
    last = said.strip().splitlines()[-2]
    for needed in (str(out), "No space left on device", f"kansoku report {out}", f"rm -r {folder}"):
        assert needed in last
    facts = json.loads((out / "run.json").read_text())
    assert facts["end_ns"] is not None
    assert facts["exit_code"] == 3
    assert any(str(folder) in sentence for sentence in facts["missing"])
    assert sorted(path.name for path in out.iterdir()) == ["run.json"]
    assert len(list(folder.iterdir())) == 1
    report = kansoku("report", out, "--json")
    answer, said = report.communicate(timeout=60)
    assert json.loads(answer)["schema"] == "kansoku.report/1", said
    assert collectives(out) == COLLECTIVES


def test_a_disk_that_is_full_from_the_start_leaves_nothing(program, small, rings):
    disk = small("full", "64k")
    fill(disk)
    job = start(program)
    command = kansoku("attach", job.pid, "--out", disk / "run", "--json")
    answer, said = command.communicate(timeout=60)
    goes(job)("")
    assert job.wait() == 3
    assert (command.returncode, answer) == (3, "")
    assert str(disk / "run") in said
    assert "No space left on device" in said
    assert "--out" in said
    assert [path.name for path in disk.iterdir()] == ["filled"]
    assert list(rings.iterdir()) == []


@pytest.mark.parametrize("size", ["48k", "96k", "140k", "144k", "148k", "160k"])
def test_whatever_fits_nothing_is_lost(program, small, size):
    """Wherever the disk ends, copies and rings together hold every call with its name."""
    out = small("disk", size) / "run"
    job = start(program)
    outcome = attach([job.pid], out=out, say=goes(job))
    assert job.wait() == 3
    spans = read_run(out).spans
    spans = spans.filter(spans["kind"] == "collective")
    names = ("all_reduce", "all_gather", "send")
    assert sorted(spans["name"]) == sorted(names * ROUNDS), outcome.left


def test_no_room_for_rings_is_an_error_and_nothing_else_is_said(program, small, tmp_path,
                                                                 monkeypatch):  # fmt: skip
    monkeypatch.setenv("KANSOKU_RING_DIR", str(small("memory", "1m")))
    job = start(program)
    out = tmp_path / "run"
    with pytest.raises(PlatformError) as raised:
        attach([job.pid], out=out, say=goes(job))
    assert job.wait() == 3
    for needed in (str(job.pid), "No space left on device", str(tmp_path / "memory"),
                   "KANSOKU_RING_DIR"):  # fmt: skip
        assert needed in str(raised.value)
    assert "no process was seen to train" not in str(raised.value)
    assert not out.exists()
    assert list((tmp_path / "memory").iterdir()) == []


def test_room_for_one_ring_of_two_records_that_one(program, small, tmp_path, monkeypatch):
    monkeypatch.setenv("KANSOKU_RING_DIR", str(small("memory", "9m")))
    jobs = [start(program, rank) for rank in (0, 1)]
    outcome = attach([job.pid for job in jobs], out=tmp_path / "run", say=goes(*jobs))
    assert [job.wait() for job in jobs] == [3, 3]
    assert collectives(tmp_path / "run") == COLLECTIVES
    (sentence,) = [text for text in outcome.missing if "ring cannot be made" in text]
    assert "No space left on device" in sentence
    assert not any("no process was seen" in text for text in outcome.missing)
    assert outcome.left is None


# -- exit codes -------------------------------------------------------------------------------


def test_each_process_has_its_own_end_in_run_json(program, tmp_path):
    """One exits in order, one is killed, one still runs when we leave; node and time are said."""
    before = time.time_ns()
    jobs = [start(program, rank) for rank in (0, 1)]
    living = start(program)

    def leave():
        return all(job.poll() is not None for job in jobs) and time.monotonic() > left_at()

    since = []

    def left_at():
        since.append(time.monotonic())
        return since[0] + 1.0

    killed = []

    def go(line):
        goes(*jobs)(line)
        if not killed:
            killed.append(time.monotonic())
            time.sleep(0.2)
            jobs[1].kill()

    outcome = attach(
        [jobs[0].pid, jobs[1].pid, living.pid], out=tmp_path / "run", say=go, until=leave
    )
    assert [job.wait() for job in jobs] == [3, -signal.SIGKILL]
    ends(living)
    assert outcome.reason == "detached"
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    seen = {entry["pid"]: entry for entry in facts["processes"]}
    assert list(seen) == [jobs[0].pid, jobs[1].pid, living.pid]
    ended, lost, alive = seen.values()
    assert (ended["rank"], ended["exit_code"]) == (0, 3)
    assert (lost["rank"], lost["exit_code"]) == (1, None)
    assert (alive["rank"], alive["exit_code"], alive["ended_ns"]) == (None, None, None)
    assert before < lost["ended_ns"] < ended["ended_ns"] < time.time_ns()
    assert {entry["node"] for entry in seen.values()} == {os.uname().nodename}
    assert facts["ranks"][0]["node"] == os.uname().nodename


# -- refusals ---------------------------------------------------------------------------------


@pytest.fixture
def forbidden():
    """A process that even root may not look into, where the machine has one."""
    try:
        Path("/proc/1/environ").read_bytes()
    except PermissionError:
        return 1
    pytest.skip("this machine forbids root nothing")


def test_a_refusal_of_root_says_what_was_refused_and_not_be_root(forbidden, tmp_path, rings):
    command = kansoku("attach", forbidden, "--no-children", "--out", tmp_path / "new" / "run")
    _, said = command.communicate(timeout=60)
    assert command.returncode == 3, said
    for needed in ("process 1 ", "/proc/1/", "EACCES", "namespace"):
        assert needed in said
    assert "run as root" not in said
    assert not (tmp_path / "new").exists()
    assert not rings.exists() or list(rings.iterdir()) == []


def test_one_refusal_does_not_end_the_watch_of_others(forbidden, program, tmp_path):
    job = start(program)
    outcome = attach([forbidden, job.pid], out=tmp_path / "run", children=False, say=goes(job))
    assert job.wait() == 3
    assert outcome.reason == "ended"  # who may not be watched is not waited for
    assert collectives(tmp_path / "run") == COLLECTIVES
    (sentence,) = [text for text in outcome.missing if "may not be watched" in text]
    assert "process 1 " in sentence
    assert "EACCES" in sentence


def test_that_nobody_trained_is_said_of_those_alone_that_were_seen(forbidden, program, tmp_path):
    job = start(program)
    outcome = attach([forbidden, job.pid], out=tmp_path / "run", children=False, duration_s=0.3)
    ends(job)
    (sentence,) = [text for text in outcome.missing if "was seen to train" in text]
    assert sentence.startswith("no process that may be watched was seen")


def test_a_user_without_rights_leaves_nothing(tmp_path, rings):
    out = tmp_path / "new" / "run"
    command = kansoku(
        "attach", os.getpid(), "--out", out,
        prefix=["setpriv", "--bounding-set", "-sys_admin,-bpf,-perfmon"],
    )  # fmt: skip
    _, said = command.communicate(timeout=60)
    assert command.returncode == 3, said
    assert "bpf()" in said
    assert "EPERM" in said
    assert "CAP_BPF" in said
    assert not out.parent.exists()
    assert not rings.exists()


def test_a_folder_that_cannot_be_made_leaves_no_other(program, tmp_path, rings):
    (tmp_path / "file").touch()
    job = start(program)
    with pytest.raises(InputError) as raised:
        attach([job.pid], out=tmp_path / "file" / "run")
    goes(job)("")
    assert job.wait() == 3
    assert "--out" in str(raised.value)
    assert not rings.exists() or list(rings.iterdir()) == []


def test_the_ring_folders_parent_is_everybodys(program, tmp_path, rings):
    """A user's job of later needs to make a folder beside that of root."""
    job = start(program)
    attach([job.pid], out=tmp_path / "run", say=goes(job))
    assert job.wait() == 3
    assert rings.stat().st_mode & 0o7777 == 0o1777


# -- threads, and many deaths at once ---------------------------------------------------------

THREADED = """
import ctypes, sys, threading, time
number = []
thread = threading.Thread(target=lambda: (number.append(threading.get_native_id()), time.sleep(60)),
                          daemon=True)
thread.start()
while not number:
    time.sleep(0.01)
nccl = ctypes.CDLL(sys.argv[1])
print(number[0], flush=True)
sys.stdin.readline()
for _ in range(10):
    nccl.ncclAllReduce(None, None, ctypes.c_size_t(10), 7, 0, None, None)
    time.sleep(0.02)
"""


def test_a_thread_stands_for_its_process(program, tmp_path):
    job = subprocess.Popen(
        [sys.executable, "-c", THREADED, program.parent / "libnccl.so.2"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    thread = int(job.stdout.readline())
    assert thread != job.pid
    outcome = attach([thread, job.pid], out=tmp_path / "run", say=goes(job))
    assert job.wait() == 0
    job.stdout.close()
    (seen,) = outcome.processes
    assert seen["pid"] == job.pid
    assert seen["calls"] > 0
    assert outcome.reason == "ended"
    assert collectives(tmp_path / "run") == 10


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombies"])
def test_all_ranks_killed_at_once(program, tmp_path, rings, reaped):
    """Every rank is in the record with what it did; the watch ends by itself; no ring stays."""
    jobs = [start(program, rank) for rank in (0, 1)]
    began = []

    def go(line):
        if not began:
            goes(*jobs)(line)
            began.append(time.monotonic())
            time.sleep(0.25)
            for job in jobs:
                os.kill(job.pid, signal.SIGKILL)
            if reaped:
                for job in jobs:
                    job.wait()

    outcome = attach([job.pid for job in jobs], out=tmp_path / "run", say=go)
    assert time.monotonic() - began[0] < 10
    assert [job.wait() for job in jobs] == [-signal.SIGKILL] * 2
    assert outcome.reason == "ended"
    data = read_run(tmp_path / "run")
    assert [rank.rank for rank in data.facts.ranks] == [0, 1]
    assert {state.state for state in data.processes} == {"recording"}
    for rank in (0, 1):
        seen = data.spans.filter(
            (data.spans["rank"] == rank) & (data.spans["kind"] == "collective")
        )
        assert 0 < len(seen) < COLLECTIVES
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [entry["exit_code"] for entry in facts["processes"]] == [None, None]
    assert all(entry["ended_ns"] for entry in facts["processes"])
    assert list(rings.iterdir()) == []

"""Compilers that a job starts: found, told apart, ended with the job however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kansoku.capture.payload import building
from kansoku.capture.plugin import BuildError, build_plugin

# As a driver does, it starts the compiler proper, and waits for it.
DRIVER = """#!/bin/sh
sleep 300 &
echo $$ $! > "$1.new"
mv "$1.new" "$1"
wait
"""
JOB = """
import sys
from kansoku.capture.payload import building
building.built("phases.c", "part", (), lambda source, target: [sys.argv[1:]])
"""
# A child subreaper, as PID 1 of a container is; a child of it is waited for here or not at all.
ADOPTS = """
import ast, ctypes, os, signal, sys
from kansoku.capture.payload import building
building._TIMEOUT_S = 20
signal.signal(signal.SIGTERM, getattr(signal, sys.argv[1]))
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
print([building._compile(way, dict(os.environ)) for way in ast.literal_eval(sys.argv[2])])
try:
    print(os.waitpid(-1, 0))
except ChildProcessError:
    print("no child")
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A compiler that never ends, and where it notes its processes."""
    monkeypatch.setenv("KANSOKU_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "slow-cc"
    path.write_text(DRIVER)
    path.chmod(0o755)
    return [str(path), str(tmp_path / "pids")]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def compilers(driver):
    return [int(text) for text in Path(driver[1]).read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_killed_leaves_no_compiler(driver, number):
    job = subprocess.Popen([sys.executable, "-c", JOB, *driver], stderr=subprocess.DEVNULL)
    wait_for(lambda: Path(driver[1]).exists())
    assert len(compilers(driver)) == 2
    assert all(map(runs, compilers(driver)))
    job.send_signal(number)
    assert job.wait(60) != 0
    wait_for(lambda: not any(map(runs, compilers(driver))))


def test_a_compiler_that_never_ends_is_ended(driver, monkeypatch):
    monkeypatch.setattr(building, "_TIMEOUT_S", 1)
    with pytest.raises(OSError, match="did not end within 1 s"):
        building.built("phases.c", "part", (), lambda *_: [driver])
    wait_for(lambda: not any(map(runs, compilers(driver))))


def test_commands_are_tried_in_turn_and_the_last_complaint_is_told(driver):
    """The second writes the library; of those that all fail, the last says why."""
    fails = ["sh", "-c", "echo no such standard >&2; exit 4"]
    made = building.built(
        "phases.c", "part", (), lambda _, target: [fails, ["sh", "-c", 'echo made > "$0"', target]]
    )
    assert Path(made).read_text() == "made\n"
    with pytest.raises(OSError, match="no such standard"):
        building.built("phases.c", "other", (), lambda *_: [fails])


def test_a_compiler_gets_nothing_of_ours_on_its_descriptors(driver):
    """It reads nothing, and what it starts cannot hold the pipe that ends it."""
    made = building.built(
        "phases.c",
        "part",
        (),
        lambda _, target: [["sh", "-c", 'ls /proc/self/fd > "$0"; cat', target]],
    )
    assert Path(made).read_text().split() == ["0", "1", "2", "3"]  # 3 is the listing's own


def test_the_environment_names_the_compiler():
    there = {"cc": "/bin/cc", "clang": "/bin/clang", "ccache": "/bin/ccache"}.get

    def found(value=None):
        environment = {} if value is None else {"CC": value}
        return building.compiler(*building.C, environment=environment, find=there)

    assert found() == ["/bin/cc"]
    assert found("clang") == ["/bin/clang"]
    assert found("ccache gcc-13 -m64") == ["/bin/ccache", "gcc-13", "-m64"]
    with pytest.raises(FileNotFoundError, match="icc"):
        found("icc")
    with pytest.raises(FileNotFoundError, match="CC is no command"):
        found('gcc "')
    with pytest.raises(FileNotFoundError, match="cc, gcc, clang"):
        building.compiler(*building.C, environment={}, find=lambda _: None)


@pytest.mark.parametrize("term", ["SIG_DFL", "SIG_IGN"])
def test_a_job_that_adopts_orphans_keeps_no_zombie_of_a_compile(term):
    """Nor waits for what TERM should have ended where the job ignores it."""
    ways = [["true"], ["sh", "-c", "echo refused >&2; exit 3"]]
    job = subprocess.run(
        [sys.executable, "-c", ADOPTS, term, repr(ways)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert job.stdout == "[(0, b''), (3, b'refused\\n')]\nno child\n"
    assert job.stderr == ""


def test_a_build_is_told_of_only_where_there_is_a_compiler(driver, capfd, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(FileNotFoundError, match="no-such-compiler"):
        building.built(
            "phases.c", "part", (), lambda *_: [building.compiler(*building.C)], "compiling, once"
        )
    assert capfd.readouterr() == ("", "")
    building.built(
        "phases.c",
        "part",
        (),
        lambda _, target: [["sh", "-c", ': > "$0"', target]],
        "compiling, once",
    )
    assert capfd.readouterr() == ("", "compiling, once\n")


def test_the_plugin_is_built_by_the_compiler_that_cc_names(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        build_plugin(str(tmp_path))
    assert os.listdir(tmp_path) == []

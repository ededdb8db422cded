"""Traces of a running two-rank Gloo training that knows nothing of us."""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.labs.training import bare_environment

from kansoku.app.trace import breakdown
from kansoku.app.trace_record import record
from kansoku.errors import InputError, PlatformError
from kansoku.formats.kineto import find_sources, read_trace
from kansoku.trace.edge.kineto_daemon import KinetoEndpoint
from kansoku.trace.recording import Plan

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).parents[2] / "labs" / "plain_training.py"


@contextlib.contextmanager
def training(folder, sockets, **more):
    """Run two ranks until the block ends; check that they end well, and at the same step."""
    ranks = []
    try:
        for rank in range(2):
            environment = bare_environment(
                RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank, KINETO_IPC_SOCKET_DIR=sockets, **more
            )
            with (folder / f"log{rank}").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, SCRIPT, folder],
                        env=environment,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )
        deadline = time.monotonic() + 60
        # While nobody answers, a process waits ever longer between its attempts to ask.
        with KinetoEndpoint(Path(sockets)) as endpoint:
            while not all((folder / f"started-{rank}").exists() for rank in range(2)):
                assert all(one.poll() is None for one in ranks), (folder / "log0").read_text()
                assert time.monotonic() < deadline
                endpoint.serve(lambda _pid, _message: "", 0.1)
        yield ranks
        (folder / "stop").touch()
        steps = [int(one.communicate(timeout=30)[0]) for one in ranks]
        assert [one.returncode for one in ranks] == [0, 0]
        assert steps[0] == steps[1] > 1
    finally:
        for one in ranks:
            if one.poll() is None:
                one.kill()
            one.wait()
            if one.stdout:
                one.stdout.close()


@pytest.fixture(scope="module")
def sockets():
    """Return a folder for the endpoint, short enough for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="kr-") as name:
        yield name


@pytest.fixture(scope="module")
def taken(tmp_path_factory, sockets):
    """Record 300 ms, then five steps, of one training."""
    folder = tmp_path_factory.mktemp("job")
    with training(folder, sockets, KINETO_USE_DAEMON=1) as ranks:
        pids = [one.pid for one in ranks]
        stretch = record(pids, plan=Plan(duration_ms=300), out=folder / "stretch")
        steps = record(pids, plan=Plan(steps=5, round_up=400), out=folder / "steps")
    return stretch, steps


def test_both_ranks_record_the_same_stretch(taken):
    stretch, _ = taken
    assert stretch.missing == ()
    assert [trace.rank for trace in stretch.traces] == [0, 1]
    assert stretch.overlap_ratio > 0.5
    assert all(150 < trace.duration_ms < 1500 for trace in stretch.traces)
    assert all(trace.rows > 100 for trace in stretch.traces)


def test_steps_are_the_number_asked_for_and_the_same(taken):
    _, steps = taken
    assert [trace.rank for trace in steps.traces] == [0, 1]
    counts = [
        len(re.findall(r'"name": "Optimizer\.step#SGD\.step"', trace.file.read_text()))
        for trace in steps.traces
    ]
    # Kineto stops from a thread of its own: on a busy machine a step more may get in.
    assert all(count in (5, 6) for count in counts), counts
    assert steps.overlap_ratio > 0.5


def test_the_traces_are_whole_and_analysable(taken):
    stretch, _ = taken
    for trace in stretch.traces:
        read = read_trace(find_sources([trace.file])[0])
        assert read.rank == trace.rank
        assert [text for text in read.problems if not text.startswith("no GPU rows")] == []
    assert sorted(breakdown([stretch.out]).ranks["rank"].to_list()) == [0, 1]


def test_a_job_that_was_not_started_for_it_is_refused():
    own = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(InputError, match="no process maps torch"):
            record([own.pid], plan=Plan(duration_ms=1))
    finally:
        own.communicate(b"\n")


def test_a_second_daemon_is_refused(sockets):
    with (
        KinetoEndpoint(Path(sockets)),
        pytest.raises(PlatformError, match="another profiling daemon"),
    ):
        KinetoEndpoint(Path(sockets))

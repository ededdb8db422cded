"""Real trainings watched from outside, beside the recorder inside them."""

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from tests.labs.training import observed_environment

from kansoku.app.attach import attach
from kansoku.capture.attach import Process
from kansoku.capture.attach.elf import Library
from kansoku.capture.attach.probes import PROBES, cheap_offset, library_of
from kansoku.formats.run_directory import read_run

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).parents[2] / "labs" / "attach_ranks.py"
STEPS = 40


class Trainings:
    """One Python that has imported torch and forks ranks on demand, with the recorder inside."""

    def __init__(self, folder):
        self.folder = folder
        self.started = 0
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env=observed_environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self):
        line = self.process.stdout.readline().strip()
        assert line, "the trainings ended"
        return line

    def start(self, case, steps, name):
        """Start two ranks that wait for ``go``; return their folder and pids."""
        self.started += 1  # a test tried again starts another training
        folder = self.folder / f"{name}-{self.started}"
        folder.mkdir()
        self.process.stdin.write(f"{case} {steps} {folder}\n")
        self.process.stdin.flush()
        return folder, [int(pid) for pid in self._line().split()]

    def ended(self):
        """Wait for the ranks; return their exit codes."""
        return [int(code) for code in self._line().split()]

    def inside(self, folder):
        return read_run(self.folder / "rings" / folder.name)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    made = Trainings(tmp_path_factory.mktemp("trainings"))
    yield made
    for folder in made.folder.iterdir():  # whatever a failed test left training
        (folder / "stop").touch()
    made.process.stdin.close()
    try:
        made.process.wait(10)
    except subprocess.TimeoutExpired:
        made.process.kill()
        made.process.wait()
    made.process.stdout.close()


KINDS = ["step", "data_wait", "backward", "optimizer", "collective"]


def counts(spans, rank):
    """Return {(kind, name, group): (count, bytes)} of one rank, without steps that were not whole."""
    rows = (
        spans.filter(
            (pl.col("rank") == rank)
            & pl.col("kind").is_in(KINDS)
            & ~pl.col("attributes").fill_null("").str.contains("incomplete")
        )
        .with_columns(name=pl.when(pl.col("kind") != "step").then("name"))
        .group_by("kind", "name", "group")
        .agg(pl.len(), pl.col("bytes").fill_null(0).sum())
    )
    return {tuple(row[:3]): tuple(row[3:]) for row in rows.iter_rows()}


def wait_for(condition, process):
    """Wait until something is so, while the process runs."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@functools.cache
def probed_places(path):
    """Return (name, offset) of every function of a library that may be probed."""
    name = library_of(os.path.basename(path))
    found = Library(path).find([p.symbol for p in PROBES if p.library == name])
    return [
        (function.name, function.offset + cheap_offset(function.code)[0])
        for functions in found.values()
        for function in functions
    ]


def probes_in(pid):
    """Return the functions whose first instruction in memory is a breakpoint."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for mapping in Process(pid).mappings():
            if library_of(os.path.basename(mapping.path)) is None:
                continue
            for name, place in probed_places(mapping.path):
                if mapping.offset <= place < mapping.offset + mapping.end - mapping.start:
                    memory.seek(mapping.start + place - mapping.offset)
                    if memory.read(1) == b"\xcc":
                        found.append(name)
    return found


def says_go(folder):
    """Return what releases the ranks once the observer is there, at its first look."""

    def go(_line):
        (folder / "go").touch()

    return go


# Micro-batches a step that a schedule marks; 1F1B of one stage a rank has no marks.
FORWARDS = {"pipeline": None, "gpipe": 4, "interleaved": 2 * 4}
CASES = ["ddp", "fsdp", "inside", "pairs", "tensor", "mesh", *FORWARDS]


@pytest.mark.parametrize("case", CASES)
def test_counts_equal_the_recorder_inside(trainings, case):
    folder, pids = trainings.start(case, STEPS, case)
    outcome = attach(pids, out=folder / "run", say=says_go(folder))
    assert trainings.ended() == [0] * len(pids)
    assert outcome.reason == "ended"
    assert outcome.dropped == 0
    assert [p["exit_code"] for p in outcome.processes] == [0] * len(pids)
    inside, outside = trainings.inside(folder), read_run(folder / "run")
    for rank in range(len(pids)):
        seen = counts(outside.spans, rank)
        assert seen == counts(inside.spans, rank)
        assert seen["step", None, None] == (STEPS, 0)
        forwards = outside.spans.filter((pl.col("rank") == rank) & (pl.col("kind") == "forward"))
        if a_step := FORWARDS.get(case, 1):
            # In the first step torch runs the last stage once more, to learn the shapes.
            assert len(forwards.filter(pl.col("step") > 0)) == a_step * (STEPS - 1)
        else:
            assert forwards["attributes"].str.contains("derived").all()
            assert set(forwards["step"]) == set(range(STEPS))
        assert forwards["duration_ns"].min() > 0
    facts = outside.facts.ranks[0]
    assert facts.recorder == "attach"
    assert facts.torch_version == inside.facts.ranks[0].torch_version
    groups = {(0, 1), (0, 2), (0, 1, 2, 3)} if case == "mesh" else {(0, 1)}
    assert {g.ranks for g in facts.groups} == groups
    assert any("MFU" in sentence for sentence in facts.missing)


def losses(folder, rank):
    return json.loads((folder / f"{rank}.json").read_text())["losses"]


def test_late_and_gone_again_without_a_trace(trainings):
    """Attached in the middle, left before the end: whole steps, no probe left, the same losses."""
    folder, _ = trainings.start("ddp", 400, "undisturbed")
    (folder / "go").touch()
    assert trainings.ended() == [0, 0]
    undisturbed = [losses(folder, rank) for rank in (0, 1)]

    folder, pids = trainings.start("ddp", 0, "late")
    (folder / "go").touch()
    within = []
    outcome = attach(
        pids,
        out=folder / "run",
        duration_s=1.0,
        say=lambda _: within.append(len(probes_in(pids[0]))),
    )
    after = [probes_in(pid) for pid in pids]
    (folder / "stop").touch()
    assert trainings.ended() == [0, 0]
    assert outcome.reason == "duration"
    assert max(within) > 30
    assert after == [[], []]
    for rank in (0, 1):
        disturbed = losses(folder, rank)
        common = min(len(disturbed), 400)
        assert common > 20
        assert disturbed[:common] == undisturbed[rank][:common]
    # The same number is the same update on both ranks, though probes reached them one by one.
    spans = read_run(folder / "run").spans.filter(
        (pl.col("kind") == "collective") & (pl.col("bytes") > 4)
    )
    for rank in (0, 1):  # one a step: it is counted from the second or third update on
        assert spans.filter(pl.col("rank") == rank)["step"].null_count() <= 3
    spans = spans.filter(pl.col("step") >= 0)
    sequences = [
        dict(spans.filter(pl.col("rank") == rank).select("step", "sequence").iter_rows())
        for rank in (0, 1)
    ]
    both = sequences[0].keys() & sequences[1].keys()
    assert len(both) > 5
    assert [sequences[0][step] for step in both] == [sequences[1][step] for step in both]


def ranks_in(run):
    return {rank.rank for rank in read_run(run).facts.ranks}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_leaving_in_any_way_leaves_the_job_alone(trainings, number):
    """The command is interrupted, or killed outright: no probe stays, the job trains on."""
    folder, pids = trainings.start("ddp", 0, f"left-{number.name}")
    (folder / "go").touch()
    command = subprocess.Popen(
        [sys.executable, "-c", "from kansoku.cli import main; main()", "attach", *map(str, pids), "--out",
         str(folder / "run"), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    wait_for(lambda: probes_in(pids[0]), command)
    wait_for((folder / "run" / "run.json").exists, command)
    wait_for(lambda: ranks_in(folder / "run") == {0, 1}, command)
    command.send_signal(number)
    answer, said = command.communicate(timeout=30)
    after = [probes_in(pid) for pid in pids]
    (folder / "stop").touch()
    assert trainings.ended() == [0, 0]
    assert after == [[], []]
    if number == signal.SIGINT:
        assert command.returncode == 0, said
        outcome = json.loads(answer)
        assert outcome["schema"] == "kansoku.attach/1"
        assert outcome["reason"] == "detached"
        assert sorted(p["pid"] for p in outcome["processes"]) == sorted(pids)
        assert read_run(folder / "run").facts.end_ns is not None
    else:  # the rings are still where run.json says
        assert ranks_in(folder / "run") == {0, 1}
        shutil.rmtree(json.loads((folder / "run" / "run.json").read_text())["ring_dir"])


def test_without_rights_it_says_what_is_needed(tmp_path):
    """Root without the capabilities: exit 3, the reason and the remedy, nothing left behind."""
    done = subprocess.run(
        ["setpriv", "--bounding-set", "-sys_admin,-bpf,-perfmon", sys.executable, "-c",
         "from kansoku.cli import main; main()", "attach", str(os.getpid()),
         "--out", str(tmp_path / "run")],
        env={**os.environ, "KANSOKU_RING_DIR": str(tmp_path / "rings")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "CAP_BPF" in done.stderr
    assert list(tmp_path.glob("rings/*")) == []


PROGRAM = Path(__file__).parents[2] / "labs" / "attach_program.py"


def whole_steps(run, rank=None):
    """Return the numbers of the complete steps of a rank, or of the only process."""
    incomplete = pl.col("attributes").fill_null("").str.contains("incomplete")
    spans = run.spans.filter((pl.col("kind") == "step") & ~incomplete)
    return sorted((spans if rank is None else spans.filter(pl.col("rank") == rank))["step"])


def test_a_shell_that_becomes_the_rank_is_watched_from_its_first_step(tmp_path):
    """``exec`` gives the process another memory, environment and libraries."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        number = str(port.getsockname()[1])
    command = f"read; export RANK=$0 WORLD_SIZE=2; exec {sys.executable} {PROGRAM} 20 optimizer"
    shells = [
        subprocess.Popen(
            ["bash", "-c", command, str(rank)],
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number},
            stdin=subprocess.PIPE,
        )
        for rank in range(2)
    ]

    def go(_line):
        for shell in shells:
            if not shell.stdin.closed:
                shell.stdin.write(b"\n")
                shell.stdin.close()

    outcome = attach([shell.pid for shell in shells], out=tmp_path / "run", say=go)
    assert [shell.wait() for shell in shells] == [0, 0]
    assert [(p["rank"], p["exit_code"]) for p in outcome.processes] == [(0, 0), (1, 0)]
    run = read_run(tmp_path / "run")
    for rank, facts in enumerate(run.facts.ranks):
        assert {g.name: g.ranks for g in facts.groups} == {"0": (0, 1), "1": (0, 1)}
        assert facts.world_size == 2
        assert whole_steps(run, rank) == list(range(20))
        assert not any("could not be read" in sentence for sentence in facts.missing)


@pytest.mark.parametrize("update", ["optimizer", "by-hand"])
def test_a_process_found_before_its_first_step(tmp_path, update):
    """It has imported torch: every step counts. Without an optimizer none does, which is said."""
    job = subprocess.Popen(
        [sys.executable, str(PROGRAM), "20", update], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    job.stdout.readline()

    def go(_line):
        if not job.stdin.closed:
            job.stdin.write(b"\n")
            job.stdin.close()

    attach([job.pid], out=tmp_path / "run", say=go)
    assert job.wait() == 0
    job.stdout.close()
    run = read_run(tmp_path / "run")
    assert len(run.spans.filter(pl.col("kind") == "backward")) == 20
    told = [s for s in run.facts.ranks[0].missing if "no update by a torch optimizer" in s]
    if update == "optimizer":
        assert whole_steps(run) == list(range(20))
        assert told == []
    else:
        assert whole_steps(run) == []
        assert len(told) == 1

"""A run watched from a terminal whose drain is killed: the live line, the report, the job's result."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time

import polars as pl
import psutil
import pytest
from tests.labs.training import ROOT, bare_environment

from kansoku.app.report import report
from kansoku.formats.run_directory import read_run

pytestmark = pytest.mark.real

DEADLINE_S = 240
RANKS, TOKENS, WIDTH, HEADS = 2, 4 * 64, 256, 512
FLOPS = 3 * 2 * TOKENS * WIDTH * HEADS
"""Of a step and rank by hand: forward and twice that backward, 2 a multiply-add."""
LATE_MS = 40.0

JOB = f"""
import json, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

def train(rank, folder, limit):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{{folder}}/rendezvous", rank=rank, world_size={RANKS}
    )
    bare = nn.Sequential(nn.Embedding(64, {WIDTH}), nn.Linear({WIDTH}, {HEADS}))
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    steps, over = 0, torch.zeros(1, dtype=torch.int64)
    while not over:
        loss = model(torch.randint(64, (4, 64))).pow(2).mean()
        if rank == 1 and limit == 0:
            time.sleep({LATE_MS / 1e3})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == limit or (limit == 0 and (folder / "stop").exists()):
            over += 1
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
    gradient_bytes = sum(p.numel() * 4 for p in bare.parameters())
    if rank == 0:
        print("loss", float(loss.detach()).hex(), flush=True)
        (folder / "counted.json").write_text(json.dumps([steps, gradient_bytes]))
    dist.destroy_process_group()

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    arguments = Path(sys.argv[1]), int(sys.argv[2])
    ranks = [context.Process(target=train, args=(r, *arguments)) for r in range({RANKS})]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))
"""
LINE = re.compile(
    r"step (\d+) · ([\d.]+) ms · ([\d,]+) tokens/s on this node · MFU ([\d.]+) % · slowest rank (\d+)"
)


class Terminal:
    """Collects what is written to a pseudo-terminal."""

    def __init__(self):
        self.ours, self.theirs = pty.openpty()
        self.text = ""

    def read(self):
        while select.select([self.ours], [], [], 0.05)[0]:
            try:
                self.text += os.read(self.ours, 65536).decode()
            except OSError:  # nobody holds the other side any more
                return

    def until(self, condition):
        deadline = time.monotonic() + DEADLINE_S
        while not (answer := condition()):
            assert time.monotonic() < deadline, self.text[-3000:]
            self.read()
        return answer


def drains(process):
    found = set()
    for child in psutil.Process(process.pid).children():
        try:
            if "_kansoku.drain" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Run until the line has been seen whole, kill the drain twice while the job trains, stop."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "train.py").write_text(textwrap.dedent(JOB))
    job = [sys.executable, str(folder / "train.py"), str(folder)]
    terminal = Terminal()
    process = subprocess.Popen(
        [sys.executable, "-m", "kansoku", "run", "--out", str(folder / "out"), "--", *job, "0"],
        env=bare_environment(KANSOKU_RING_DIR=folder / "rings"), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=terminal.theirs,
    )  # fmt: skip
    os.close(terminal.theirs)
    try:
        line = terminal.until(lambda: LINE.search(terminal.text))
        for _ in range(2):
            (pid,) = terminal.until(lambda: drains(process))
            os.kill(pid, signal.SIGKILL)
            terminal.until(lambda pid=pid: drains(process) - {pid})
        (folder / "stop").touch()
        terminal.until(lambda: process.poll() is not None)
        terminal.read()
        output = process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(terminal.ours)
    (folder / "rendezvous").unlink(missing_ok=True)
    steps = json.loads((folder / "counted.json").read_text())[0]
    bare = subprocess.run(
        [*job, str(steps)], env=bare_environment(), capture_output=True, text=True, check=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    return folder, line, terminal.text, (process.returncode, output), bare.stdout


def test_the_line_says_how_the_job_does(watched):
    folder, line, _, _, _ = watched
    step, step_ms, tokens_per_s, mfu, slowest = (float(x.replace(",", "")) for x in line.groups())
    steps, _ = json.loads((folder / "counted.json").read_text())
    assert 1 <= step <= steps
    assert step_ms >= LATE_MS
    assert slowest == 1
    # The other figures follow from the step time: tokens and FLOPs of a step are known by hand.
    assert tokens_per_s == pytest.approx(RANKS * TOKENS / (step_ms / 1e3), rel=0.01)
    peak = json.loads((folder / "out" / "run.json").read_text())["peak"]["flops"]
    assert mfu == pytest.approx(100 * RANKS * FLOPS / (step_ms / 1e3) / peak, rel=0.01, abs=0.06)


def test_the_line_is_rewritten_in_place_and_leaves_none_behind(watched):
    _, _, text, _, _ = watched
    shown = re.findall(r"\r\x1b\[K(step [^\r\n]*)", text)
    assert shown
    last = text.rindex(shown[-1])
    assert text[last + len(shown[-1]) :].startswith("\r\x1b[K")
    assert not text[text.index(shown[0]) : last].count("\n")


def test_the_jobs_result_is_its_own(watched):
    _, _, _, observed, bare = watched
    assert observed == (0, bare)


def test_a_killed_drain_loses_nothing(watched):
    folder = watched[0]
    steps, gradient_bytes = json.loads((folder / "counted.json").read_text())
    data = read_run(folder / "out")
    assert [p.lost for p in data.processes] == [0] * RANKS
    assert data.spans["duration_ns"].null_count() == 0
    for rank in range(RANKS):
        spans = data.spans.filter(pl.col("rank") == rank)
        assert len(spans.filter(pl.col("kind") == "forward")) == steps
        complete = ~pl.col("attributes").fill_null("").str.contains("incomplete")
        assert len(spans.filter(complete & (pl.col("kind") == "step"))) == steps
        reduced = spans.filter((pl.col("name") == "all_reduce") & pl.col("step").is_not_null())
        assert len(reduced.filter(pl.col("dtype") == "int64")) == steps
        gradients = reduced.filter(pl.col("dtype") == "float32")
        assert gradients["bytes"].sum() == steps * gradient_bytes


def test_the_report_says_all_and_that_it_was_killed(watched):
    folder = watched[0]
    answer = report(folder / "out").to_json()
    steps, _ = json.loads((folder / "counted.json").read_text())
    assert answer["ranks"] == RANKS
    assert answer["steps"] == steps
    # What ran after the last update is a step begun.
    assert answer["job"]["steps_begun"] in (steps, steps + 1)
    assert any("the drain was killed and started again" in text for text in answer["missing"])

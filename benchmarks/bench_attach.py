"""What ``kansoku attach`` costs a running job: step time, CPU time, the watcher's own, one call."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.labs.training import bare_environment

from benchmarks.bench_capture import Overhead, added, overhead_rows
from benchmarks.table import Row, print_table
from kansoku.capture.attach.bpf import Bpf
from kansoku.capture.attach.elf import Library
from kansoku.capture.attach.probes import cheap_offset
from kansoku.formats.run_directory import read_run

PAIRS = 20
WINDOW_S, SETTLING_S = 1.0, 0.3
"""A window holds some twenty steps. In the first ones the watcher learns where calls end."""
CALLS, TIMES = 20_000, 60
ROOT = Path(__file__).parents[1]

# One entry that the kernel emulates, as nearly all that are probed, and one it steps through.
CALLED = """
#include <time.h>
__attribute__((naked, noinline)) void pushes(void) { __asm__("push %rbp\\n pop %rbp\\n ret"); }
__attribute__((naked, noinline)) void moves(void) { __asm__("mov %rdi, %rax\\n ret"); }
long timed(void (*call)(void), int count) {
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < count; i++) call();
    clock_gettime(CLOCK_MONOTONIC, &b);
    return (b.tv_sec - a.tv_sec) * 1000000000L + b.tv_nsec - a.tv_nsec;
}
"""


def hit_cost_ns():
    """Return ns a call, bare and probed, of a function that begins with a push and of another."""
    import ctypes

    with tempfile.TemporaryDirectory() as name:
        path = f"{name}/called.so"
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", path, "-x", "c", "-"],
            input=CALLED, text=True, check=True,
        )  # fmt: skip
        library, kernel = ctypes.CDLL(path), Bpf()
        library.timed.restype = ctypes.c_long
        found = Library(path).find(["pushes$", "moves$"])
        costs = {}
        try:
            for symbol in ("pushes", "moves"):
                function = getattr(library, symbol)
                (place,) = found[f"{symbol}$"]
                skip, cheap = cheap_offset(place.code)
                assert cheap == (symbol == "pushes")
                bare = probed = float("inf")
                for _ in range(TIMES):
                    bare = min(bare, library.timed(function, CALLS) / CALLS)
                    link = kernel.attach(
                        kernel.program("plain", 0), path, [place.offset + skip], [1], os.getpid()
                    )
                    probed = min(probed, library.timed(function, CALLS) / CALLS)
                    kernel.detach(link)
                    assert len(kernel.poll()) == CALLS
                costs[symbol] = (bare, probed)
        finally:
            kernel.close()
    return costs["pushes"], costs["moves"]


def cpu_ns(pid):
    """Return the CPU time of a process's threads so far, by the scheduler's own account."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def until(condition, process):
    """Wait for something while a process runs."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended early"
        assert time.monotonic() < deadline
        time.sleep(0.2)


@contextmanager
def attached(pids, out):
    """Watch the ranks with the command itself; yields it once every rank is in its record."""
    watcher = subprocess.Popen(
        [sys.executable, "-c", "from kansoku.cli import main; main()", "attach", *map(str, pids),
         "--out", str(out), "--no-report", "--json"],
        env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: seen(out) == len(pids), watcher)
        yield watcher
    finally:
        watcher.send_signal(signal.SIGINT)
        (out.with_suffix(".json")).write_bytes(watcher.communicate()[0])


def seen(out):
    """Return how many ranks have begun a step in the record."""
    if not (out / "run.json").exists():
        return 0
    spans = read_run(out).spans
    return spans.filter(spans["kind"] == "step")["rank"].n_unique()


@dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of the job's time, and what the watcher used of it."""

    attached: bool
    begin_ns: int
    end_ns: int
    watcher_ns: int


def window(watcher=None):
    """Let the job train for a while, attached or not."""
    time.sleep(SETTLING_S)
    before = cpu_ns(watcher.pid) if watcher else 0
    begin = time.monotonic_ns()
    time.sleep(WINDOW_S)
    end = time.monotonic_ns()
    used = cpu_ns(watcher.pid) - before if watcher else 0
    return Window(attached=watcher is not None, begin_ns=begin, end_ns=end, watcher_ns=used)


def watch_in_turn(pids, folder, pairs):
    """Return pairs of windows, bare and attached, which take turns at being first."""
    windows = [window()]
    for number in range((pairs + 1) // 2):
        with attached(pids, folder / f"run-{number}") as watcher:
            windows += [window(watcher), window(watcher)]
        windows += [window(), window()]
    return list(zip(windows[::2], windows[1::2], strict=False))[:pairs]


def within(rank, one):
    """Return the median step time and the CPU time a step of a rank in a window, in s."""
    ends, cpu = np.array(rank["ends_ns"]), np.array(rank["cpu_ns"])
    first, last = np.searchsorted(ends, [one.begin_ns, one.end_ns])
    wall = np.diff(ends[first:last])
    return float(np.median(wall)) / 1e9, (cpu[last - 1] - cpu[first]) / len(wall) / 1e9


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What watching cost a job."""

    ranks: int
    step_ms: float
    wall: Overhead
    cpu: Overhead
    watcher_percent: float
    """CPU time of the attaching process, of one core."""
    calls_a_step: float
    """Noted by the kernel, of one rank."""


def cost(ranks, layers, pairs):
    """Watch a training of so many ranks and leave it, in turn, while it goes on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.attach_job", name, str(ranks), str(layers)],
            cwd=ROOT, env=bare_environment(),
        )  # fmt: skip
        try:
            until(lambda: len(list(folder.glob("*.ready"))) == ranks, job)
            pids = [int(text) for text in (folder / "pids").read_text().split()]
            windows = watch_in_turn(pids, folder, pairs)
            (folder / "stop").touch()
            assert job.wait(60) == 0
        finally:
            if job.poll() is None:
                job.kill()
        results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        calls = calls_a_step(folder)

    def blocks(wanted, part):
        """All ranks together: they wait for each other, so one rank's CPU moves to another."""
        chosen = [next(w for w in pair if w.attached == wanted) for pair in windows]
        return [sum(within(rank, one)[part] for rank in results) for one in chosen]

    bare, watched = blocks(False, 0), [w for pair in windows for w in pair if w.attached]
    return Cost(
        ranks=ranks,
        step_ms=statistics.median(bare) / ranks * 1e3,
        wall=added(bare, blocks(True, 0)),
        cpu=added(blocks(False, 1), blocks(True, 1)),
        watcher_percent=100 * statistics.median(
            w.watcher_ns / (w.end_ns - w.begin_ns) for w in watched
        ),
        calls_a_step=calls,
    )  # fmt: skip


def calls_a_step(folder):
    """Return the calls noted a step and rank over all attachments; none may be lost."""
    noted = steps = 0
    for answer in folder.glob("run-*.json"):
        outcome = json.loads(answer.read_text())
        assert outcome["dropped"] == 0, outcome
        noted += outcome["events"]
        spans = read_run(answer.with_suffix("")).spans
        steps += spans.filter(spans["kind"] == "step").height
    return noted / steps


def cost_rows(one):
    """Return the rows of one number of ranks."""
    attached = "attached against detached"
    return [
        *overhead_rows(one.ranks, one.step_ms, one.wall, one.cpu, what=attached, most=None),
        Row(
            what="the attaching process's own CPU time",
            measured=one.watcher_percent,
            unit="% of a core",
            target="",
            peer=f"{one.calls_a_step:.0f} calls a step and rank",
        ),
    ]


def main():
    """Print the table; the layers are chosen for about 50 ms a step on two cores."""
    (bare_push, push), (bare_move, move) = hit_cost_ns()
    rows = [
        *cost_rows(cost(4, 2, PAIRS)),
        *cost_rows(cost(2, 7, PAIRS)),
        Row(
            what="one call noted, entry a push (nearly every probe)",
            measured=push - bare_push,
            unit="ns",
            target="",
            peer=f"the call alone {bare_push:.1f} ns",
        ),
        Row(
            what="one call noted, entry stepped through",
            measured=move - bare_move,
            unit="ns",
            target="",
            peer=f"the call alone {bare_move:.1f} ns",
        ),
    ]
    print_table(f"attach (load {os.getloadavg()[0]:.1f})", rows)


if __name__ == "__main__":
    main()

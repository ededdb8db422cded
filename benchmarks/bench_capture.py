"""What the recorder costs a job, what a span costs, how fast a run is read."""

import json
import math
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
from tests.labs.training import observed_environment

from benchmarks.capture_cold import OPERATIONS
from benchmarks.table import Row, print_table
from kansoku.capture.payload.recorder import Recorder
from kansoku.formats.run_directory import RECORD, read_run
from kansoku.model import ring

SPANS = 2_000_000
LAYERS = {4: 3, 2: 7, 1: 10}
"""Of the model, for about 50 ms a step on two cores with so many ranks."""
ROUNDS = {4: 600, 2: 120, 1: 200}
"""Ranks that share cores differ more from block to block."""
PROFILED = 6
COLD_ROUNDS = 40


def span_cost_ns():
    """Return ns per recorded span (two clock reads, open, close) and per pair of clock reads."""
    buffer = mmap.mmap(-1, 8 << 20)
    ring.format_ring(buffer, pid=1, process_start=0, anchor=(0, 0))
    writer = ring.RingWriter(buffer)
    template = ring.pack_template(3, name=writer.intern("forward"))
    clock, count = time.monotonic_ns, 2_000
    best = clocks = float("inf")
    for _ in range(300):  # short ones: the quiet among them count
        begin = time.perf_counter_ns()
        for _ in range(count):
            start = clock()
            span = writer.open(template, start, 1, 0)
            writer.close(span, start, clock(), -1)
        best = min(best, (time.perf_counter_ns() - begin) / count)
        begin = time.perf_counter_ns()
        for _ in range(count):
            clock()
            clock()
        clocks = min(clocks, (time.perf_counter_ns() - begin) / count)
    return best, clocks


class Optimizer:
    """Stands for one in the recorder's eyes."""

    param_groups = (1,)


def phase_cost_ns():
    """Return ns per span of a step of four phases as the hooks record them.

    That is with the parent and the counters; of so short ones the kernel is asked nothing.
    """
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as rings,
        mock.patch.dict(os.environ, KANSOKU_RING_DIR=rings, KANSOKU_RUN_ID="bench"),
    ):
        recorder, optimizer = Recorder(), Optimizer()
        recorder.start()
        recorder.optimizers.add(optimizer)
        best = float("inf")
        for _ in range(300):
            begin = time.perf_counter_ns()
            for _ in range(40):
                for kind in (2, 3, 4):
                    recorder.close(recorder.open(kind, "phase"))
                recorder.update_begins(optimizer)
                recorder.update_ends(optimizer)
            best = min(best, (time.perf_counter_ns() - begin) / 40 / 5)
        recorder.finish()
    return best


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What recording added, in percent of the bare job: the median of pairs of blocks."""

    percent: float
    low: float
    high: float
    """95 % interval of the median, from order statistics."""
    pairs: int


def added(bare, other):
    """Return the overhead of blocks over the bare blocks beside them."""
    ratios = sorted((b / a - 1) * 100 for a, b in zip(bare, other, strict=False))
    reach = 0.98 * math.sqrt(len(ratios))
    middle = len(ratios) / 2
    return Overhead(
        percent=statistics.median(ratios),
        low=ratios[max(math.floor(middle - reach), 0)],
        high=ratios[min(math.ceil(middle + reach), len(ratios) - 1)],
        pairs=len(ratios),
    )


def overhead(ranks, *, profiled=0):
    """Return step ms, and the overhead of recording (wall, CPU) and of the profiler (wall).

    The drain that ``kansoku run`` starts runs beside the recorded blocks. Rings are where they are
    by default: in memory.
    """
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory(dir="/dev/shm") as rings,
    ):
        folder = Path(name)
        environment = observed_environment(folder) | {
            "KANSOKU_RING_DIR": rings,
            "KANSOKU_RUN_ID": "bench",
        }
        del environment["KANSOKU_RING_BYTES"]
        job = Path(__file__).with_name("capture_job.py")
        drain = subprocess.Popen(
            [
                sys.executable, "-S", str(job.with_name("capture_drain.py")),
                f"{rings}/bench", str(folder / "out"),
            ],
            env={"PYTHONPATH": str(folder / "payload")},
            stdin=subprocess.PIPE,
        )  # fmt: skip
        pipe = drain.stdin.fileno()
        try:
            subprocess.run(
                [
                    sys.executable, str(job), name,
                    *map(str, (ranks, ROUNDS[ranks], profiled, LAYERS[ranks], pipe)),
                ],
                env=environment,
                pass_fds=(pipe,),
                check=True,
                timeout=1_000,
                stderr=subprocess.DEVNULL,  # the profiler's own notes
            )  # fmt: skip
        finally:
            drain.kill()
            drain.communicate()
        results = [json.loads((folder / f"bench-{rank}.json").read_text()) for rank in range(ranks)]

    def blocks(mode, part):
        """All ranks together: they wait for each other, so one rank's CPU moves to another."""
        return [sum(block[part] for block in row) for row in zip(*(r[mode] for r in results))]  # noqa: B905

    wall, cpu = blocks("bare", 0), blocks("bare", 1)
    return (
        statistics.median(wall) / ranks * 1e3,
        added(wall, blocks("recorded", 0)),
        added(cpu, blocks("recorded", 1)),
        added(wall, blocks("profiler", 0)) if profiled else None,
    )


def cold_rows():
    """Return what recording adds to each operation of a step with cold caches."""
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory(dir="/dev/shm") as rings,
    ):
        folder = Path(name)
        environment = observed_environment(folder) | {"KANSOKU_RING_DIR": rings}
        job = Path(__file__).with_name("capture_cold.py")
        subprocess.run(
            [sys.executable, str(job), name, str(COLD_ROUNDS)],
            env=environment,
            check=True,
            timeout=300,
        )
        found = json.loads((folder / "cold.json").read_text())
    bare, recorded, again = (
        [value / 1e3 for value in found[mode]] for mode in ("bare", "recorded", "bare again")
    )
    added = [b - a for a, b in zip(bare, recorded, strict=True)]
    noise = max(abs(b - a) for a, b in zip(bare, again, strict=True))
    return [
        Row(
            what="recording one step's operations with cold caches, together",
            measured=sum(added),
            unit="µs",
            target="",
            peer=f"bare {sum(bare):.0f} µs; bare against bare differs by {noise:.1f} at most",
        ),
        *(
            Row(what=f"  {what}", measured=more, unit="µs", target="", peer=f"bare {one:.0f} µs")
            for what, more, one in zip(OPERATIONS, added, bare, strict=True)
        ),
    ]


def read_speed():
    """Return million spans a CPU second into columns, and the same for NumPy's bare copy."""
    with tempfile.TemporaryDirectory() as folder:
        buffer = bytearray(1 << 20)
        ring.format_ring(buffer, pid=1, process_start=0, anchor=(0, 10**18))
        writer = ring.RingWriter(buffer)
        names = np.array([writer.intern(n) for n in ("GPT", "all_reduce", "AdamW", "all_gather")])
        group = writer.intern("dp")
        writer.set_facts({"node": "n"})
        number = np.arange(1, SPANS + 1)
        rows = np.zeros(SPANS, RECORD)
        rows["id"] = rows["id_again"] = number
        rows["start_ns"], rows["duration_ns"], rows["cpu_ns"] = number * 1_000, 500, -1
        rows["step"], rows["kind"] = number // 50, np.where(number % 50 == 0, 1, number % 5 + 2)
        rows["name"] = names[number % 4]
        is_collective = rows["kind"] == 6
        rows["group"] = np.where(is_collective, group, 0)
        rows["sequence"] = rows["bytes"] = np.where(is_collective, number, -1)
        rows["peak_rss_bytes"] = rows["device_ns"] = -1
        header = ring.read_header(buffer)
        head = bytearray(buffer[: header.records_offset])
        struct.pack_into("<I", head, 28, ring.LOG)
        path = Path(folder) / "n-1.ring"
        with path.open("wb") as stream:
            stream.write(head)
            stream.write(rows.tobytes())
        best = copy = float("inf")
        for _ in range(4):
            begin = time.process_time()
            spans = read_run(folder).spans
            best = min(best, time.process_time() - begin)
            assert len(spans) == SPANS
            del spans
            begin = time.process_time()
            np.fromfile(path, np.uint8).sum()
            copy = min(copy, time.process_time() - begin)
    return SPANS / best / 1e6, SPANS / copy / 1e6


def overhead_rows(ranks, step_ms, wall, cpu, *, what="recorder on against off", most=0.5):
    """Return the rows of one number of ranks; ``most`` percent are aimed at, None: no aim."""
    load = f"{ranks} rank{'s' * (ranks > 1)} on {os.cpu_count()} cores, {step_ms:.0f} ms"
    return [
        Row(
            what=f"{what}, step time, {load}",
            measured=wall.percent,
            unit="%",
            target="" if most is None else f"≤ {most}",
            peer=f"the same job, bare; [{wall.low:.1f}, {wall.high:.1f}] of {wall.pairs} pairs",
            met=None if most is None else wall.percent <= most,
        ),
        Row(
            what="the same, CPU time of all ranks",
            measured=cpu.percent,
            unit="%",
            target="",
            peer=f"the same job, bare; [{cpu.low:.1f}, {cpu.high:.1f}]",
        ),
    ]


def main():
    """Print the table."""
    span, clocks = span_cost_ns()
    phase = phase_cost_ns()
    speed, copy = read_speed()
    step_ms, wall, cpu, profiler = overhead(4, profiled=PROFILED)
    rows = [
        *overhead_rows(4, step_ms, wall, cpu),
        *(row for n in (2, 1) for row in overhead_rows(n, *overhead(n)[:3])),
        *cold_rows(),
        Row(
            what="torch.profiler on the same job of 4 ranks, step time",
            measured=profiler.percent,
            unit="%",
            target="",
            peer=f"the same job, off; {profiler.pairs} blocks",
        ),
        Row(
            what="one recorded span, two clock reads included",
            measured=span,
            unit="ns",
            target="≤ 1000",
            peer=f"the two clock reads alone {clocks:.0f} ns",
            met=span <= 1_000,
        ),
        Row(
            what="one phase as the hooks record it, within 20 µs of the one before",
            measured=phase,
            unit="ns",
            target="",
            peer="five of them a step at least; later ones ask the kernel once or twice",
        ),
        Row(
            what="reading a run into columns",
            measured=speed,
            unit="M spans/s",
            target="≥ 5 a core",
            peer=f"reading and summing its bytes {copy:.0f}",
            met=speed >= 5,
        ),
    ]
    print_table(f"capture (load {os.getloadavg()[0]:.1f})", rows)


if __name__ == "__main__":
    main()

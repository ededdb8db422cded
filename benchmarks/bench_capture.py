"""What the recorder costs a job, what a span costs, how fast a run is read."""

import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tests.labs.training import observed_environment

from benchmarks.table import Row, print_table
from kansoku.formats.run_directory import RECORD, read_run
from kansoku.model import ring

SPANS = 2_000_000


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


def overhead():
    """Return step ms, and the median ratios of recorded and profiled over bare blocks."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(__file__).with_name("capture_job.py")
        subprocess.run(
            [sys.executable, str(job), folder],
            env=observed_environment(Path(folder)),
            check=True,
            timeout=500,
            stderr=subprocess.DEVNULL,  # the profiler's own notes
        )
        ranks = [json.loads((Path(folder) / f"bench-{rank}.json").read_text()) for rank in range(4)]

    def ratios(mode, part):
        """All ranks together: they wait for each other, so one rank's CPU moves to another."""
        pairs = []
        total = [sum(rank[mode][i][part] for rank in ranks) for i in range(len(ranks[0][mode]))]
        base = [sum(rank["bare"][i][part] for rank in ranks) for i in range(len(ranks[0]["bare"]))]
        stride = len(base) // len(total)
        for i, value in enumerate(total):
            pairs.append(value / base[i * stride])
        return statistics.median(pairs), len(pairs)

    step_ms = statistics.median(wall for rank in ranks for wall, _ in rank["bare"]) * 1e3
    return step_ms, ratios("recorded", 0), ratios("recorded", 1), ratios("profiler", 0)


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


def main():
    """Print the table."""
    span, clocks = span_cost_ns()
    speed, copy = read_speed()
    step_ms, wall, cpu, profiler = overhead()
    percent = (wall[0] - 1) * 100
    rows = [
        Row(
            what="recorder on against off, step time",
            measured=percent,
            unit="%",
            target="≤ 0.5",
            peer="the same job, off",
            met=percent <= 0.5,
        ),
        Row(
            what="the same, CPU time of all ranks",
            measured=(cpu[0] - 1) * 100,
            unit="%",
            target="",
            peer="the same job, off",
        ),
        Row(
            what="torch.profiler on the same job, step time",
            measured=(profiler[0] - 1) * 100,
            unit="%",
            target="",
            peer=f"the same job, off; {profiler[1]} blocks",
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
            what="reading a run into columns",
            measured=speed,
            unit="M spans/s",
            target="≥ 5 a core",
            peer=f"reading and summing its bytes {copy:.0f}",
            met=speed >= 5,
        ),
    ]
    print_table(
        f"capture (4 ranks, {step_ms:.0f} ms a step, {wall[1]} interleaved pairs of blocks, "
        f"load {os.getloadavg()[0]:.1f})",
        rows,
    )


if __name__ == "__main__":
    main()

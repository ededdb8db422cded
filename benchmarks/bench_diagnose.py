"""Diagnosis: score sheets, time for a bundle of 1,024 ranks, live detection, false alarms.

The score sheets write bundles whose causes are known anew from a seed: 80 of `tests.labs.bundles`,
and 28 in other words of `tests.labs.bundle_fresh`. The large bundle (2 GB of logs, dumps and
numbers) is made anew as well.
"""

import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import polars as pl
from tests.labs import bundle_fresh, bundles
from tests.labs.bundle_scores import score

from benchmarks.table import Row, print_table
from kansoku.diagnose.live import Detector
from kansoku.model import table_schema

MS, S = 1_000_000, 1_000_000_000
RANKS, NODES = 1024, 128
BUNDLE_BYTES = 2_000_000_000
SEEDS = (1, 2)
BAD = 517
_OTHER_BYTES = 210_000_000
"""Of dumps, numbers and kernel logs."""


def generated_sheet(seed: int, writer: ModuleType) -> list[Row]:
    """Return accuracy over the bundles that a writer makes of a seed; prints those that are wrong.

    A row each: right domains, forbidden ones first, parts in the first three, time to verdict.
    """
    with tempfile.TemporaryDirectory(prefix="kansoku-bundles-") as folder:
        cases = writer.write_bundles(Path(folder), seed)
        scores = [score(case) for case in cases]
    name = f"{len(scores)} {writer.__name__.rpartition('.')[2].replace('_', ' ')}, seed {seed}"
    for one in scores:
        if not one.domain or one.forbidden_first:
            print(f"  wrong: {one.name}: {one.said}")
    right = sum(s.domain for s in scores) / len(scores)
    parts = [s.component for s in scores if s.component is not None]
    forbidden = sum(s.forbidden_first for s in scores)
    seconds = [s.seconds for s in scores]
    return [
        Row(what=f"domain right, {name}", measured=right, unit="share", target="≥ 0.9",
            met=right >= 0.9),
        Row(what="forbidden domain first", measured=forbidden, unit="bundles", target="0",
            met=not forbidden),
        Row(what="component in the first three", measured=sum(parts) / len(parts), unit="share",
            target=""),
        Row(what="time to verdict, median", measured=statistics.median(seconds), unit="s",
            target=""),
        Row(what="time to verdict, worst", measured=max(seconds), unit="s", target=""),
    ]  # fmt: skip


def _stamp(second: float) -> str:
    whole = int(second)
    clock = f"{5 + whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"2026-03-04 {clock}.{int(second * 1000) % 1000:03d}"


def make_bundle(folder: Path) -> int:
    """Write 1,024 rank logs, dumps of all, kernel logs and node numbers; return the bytes."""
    (folder / "logs").mkdir(parents=True)
    (folder / "dumps").mkdir()
    each = (BUNDLE_BYTES - _OTHER_BYTES) // RANKS
    lines = [
        f"{_stamp(i * 0.4)} [INFO] iteration {i} | elapsed time per iteration (ms): 400.{i % 10} | "
        f"lm loss: {4 - i / 5000:.4f} | grad norm: 1.{i % 90:02d} | tokens/s/gpu 10213"
        for i in range(9000)
    ]
    whole = "\n".join(lines)
    whole = (whole * (each // len(whole) + 1))[:each]
    last = whole.rfind("\n")
    for rank in range(RANKS):
        text = whole[:last] + "\n"
        if rank != BAD:
            text += (
                f"{_stamp(4200)} [rank{rank}]:[E304 06:10:00.{rank:06d} ProcessGroupNCCL.cpp:616] "
                f"[Rank {rank}] Watchdog caught collective operation timeout: "
                "WorkNCCL(SeqNum=9001, OpType=ALLREDUCE, Timeout(ms)=600000) "
                "ran for 600012 milliseconds\n"
            )
        (folder / "logs" / f"node{rank // 8:03d}_rank{rank}.log").write_text(text)
        _dump(folder / "dumps" / f"nccl_trace_rank_{rank}", rank)
    for node in range(NODES):
        text = "".join(f"[{i * 9}.000000] audit: type=1400 routine {i}\n" for i in range(2000))
        if node == BAD // 8:
            text += (
                "Mar  4 06:00:01 node064 kernel: NVRM: Xid (PCI:0000:5d:00): 79, pid=4242, "
                "GPU has fallen off the bus.\n"
            )
        (folder / f"node{node:03d}_dmesg.log").write_text(text)
    _numbers(folder / "gpus.csv")
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _dump(path: Path, rank: int) -> None:
    stuck = 9000 if rank == BAD else 9001
    entries = [
        {"record_id": i, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": i,
         "p2p_seq_id": 0, "op_id": i, "profiling_name": "nccl:all_reduce",
         "time_created_ns": 1_772_600_000 * S + i * 400 * MS, "input_sizes": [[1048576]],
         "input_dtypes": ["Float"], "output_sizes": [[1048576]], "output_dtypes": ["Float"],
         "state": "completed" if i <= 9000 else "started", "retired": i <= 9000,
         "is_p2p": False, "timeout_ms": 600000}
        for i in range(stuck - 300, stuck + 1)
    ]  # fmt: skip
    status = {"0": {"last_enqueued_collective": stuck, "last_started_collective": stuck,
                    "last_completed_collective": 9000}}  # fmt: skip
    group = {"name": "0", "desc": "default_pg", "ranks": str(list(range(RANKS)))}
    whole = {"version": "2.10", "rank": rank, "pg_status": status, "entries": entries}
    path.write_text(json.dumps(whole | {"pg_config": {"0": group}}))


def _numbers(path: Path) -> None:
    frame = pl.select(t=pl.int_range(0, 4200, 2)).join(
        pl.select(gpu=pl.int_range(0, RANKS)), how="cross"
    )
    frame.select(
        timestamp=pl.col("t") + 1_772_600_400,
        node=pl.format("node{}", (pl.col("gpu") // 8).cast(pl.String).str.zfill(3)),
        gpu=pl.col("gpu") % 8,
        sm_clock_mhz=pl.lit(1965) + (pl.col("t") * 7 + pl.col("gpu")) % 15,
        temp_c=pl.lit(61) + (pl.col("t") + pl.col("gpu") * 3) % 5,
        power_w=pl.lit(640) + (pl.col("t") * 3 + pl.col("gpu")) % 40,
    ).write_csv(path)


_CHILD = """
import os, resource, sys, time
from pathlib import Path
from kansoku.app.diagnose import diagnose_folder
begin = time.perf_counter()
answer = diagnose_folder(Path(sys.argv[1]))
seconds = time.perf_counter() - begin
first = answer.incidents[0].hypotheses[0]
own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
readers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (os.cpu_count() or 1)
print(seconds, (own + readers) * 1024, first.domain, first.subject)
"""


def _room() -> str | None:
    """Return the memory file system where it has room: a busy disk is not what is measured."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 3 * BUNDLE_BYTES:
        return str(memory)
    return None


def large_bundle() -> list[Row]:
    """Return time and memory of a verdict over 2 GB."""
    folder = Path(tempfile.mkdtemp(prefix="kansoku-bundle-", dir=_room()))
    try:
        size = make_bundle(folder / "job")
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(folder / "job")],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    seconds, memory, domain, subject = done.stdout.split()
    time_s, gigabytes = float(seconds), float(memory) / 1e9
    return [
        Row(what=f"verdict over {size / 1e9:.2f} GB of {RANKS} ranks ({domain}, {subject})",
            measured=time_s, unit="s", target="≤ 30", met=time_s <= 30),
        Row(what="its memory, all processes at their most", measured=gigabytes, unit="GB",
            target="≤ 2", met=gigabytes <= 2),
    ]  # fmt: skip


def _steps(
    first: int, count: int, now: int, duration_ms: float, noise: random.Random, ranks: int = 4
):
    rows, schema = [], table_schema("steps")
    for step in range(first, first + count):
        took = round(duration_ms * MS * (1 + noise.gauss(0, 0.01)))
        rows += [
            dict.fromkeys(schema)
            | {"run": "r", "rank": rank, "step": step, "start_ns": now, "duration_ns": took,
               "forward_ns": took * 8 // 10, "complete": True}
            for rank in range(ranks)
        ]  # fmt: skip
        now += took
    return pl.DataFrame(rows, schema=schema), now


def live() -> list[Row]:
    """Return steps to tell a slow-down of 10 %, and false alarms of a quiet day."""
    told = []
    for seed in range(10):
        noise, detector, now, step = random.Random(seed), Detector(), 1_790_000_000 * S, 0
        frame, now = _steps(0, 200, now, 500, noise)
        detector.steps(frame, now)
        for step in range(200, 260):
            frame, now = _steps(step, 1, now, 550, noise)
            if detector.steps(frame, now):
                break
        told.append(step - 199)
    noise, detector, now = random.Random(99), Detector(), 1_790_000_000 * S
    alarms, step, day = 0, 0, 86_400 * S + 1_790_000_000 * S
    while now < day:
        frame, now = _steps(step, 20, now, 2000, noise)
        step += 20
        alarms += len(detector.steps(frame, now)) + len(detector.tick(now))
    worst = max(told)
    return [
        Row(what="steps until a slow-down of 10 % is told, worst of 10", measured=worst,
            unit="steps", target="≤ 20", met=worst <= 20),
        Row(what=f"false alarms in a simulated day ({step} steps)", measured=alarms, unit="alarms",
            target="0", met=alarms == 0),
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    rows = [row for seed in SEEDS for row in generated_sheet(seed, bundles)]
    rows += [*generated_sheet(SEEDS[0], bundle_fresh), *large_bundle(), *live()]
    print_table("Diagnosis", rows)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"  (this process: {own:.2f} GB)")


if __name__ == "__main__":
    main()

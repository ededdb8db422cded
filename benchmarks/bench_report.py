"""Reading run directories and reporting a thousand ranks.

``reading`` turns drained ring copies of five million spans into analysis columns on one core;
the peer is Python's own ``struct.iter_unpack`` over the same records, which gives tuples only.
``a thousand ranks`` reports a run of 1,000 steps x 1,024 ranks kept as step rows, with full spans
(50 a step) of every 20th step; the peer is DuckDB answering one question of the same files: each
kind's total time.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.table import Row, print_table
from kansoku.formats.run_directory import RECORD
from kansoku.formats.run_tables import write_tables
from kansoku.model import ring

ROOT = Path(__file__).parents[1]
RANKS, PER_RANK = 8, 640_000
SPANS_A_STEP = 50

_READ = """
import json, sys, time
from kansoku.formats.run_directory import read_run
read_run(sys.argv[1])
times = []
for _ in range(3):
    t = time.perf_counter(); c = time.process_time()
    data = read_run(sys.argv[1])
    times.append((time.process_time() - c, time.perf_counter() - t))
print(json.dumps({"spans": len(data.spans), "cpu": min(t[0] for t in times),
    "wall": min(t[1] for t in times)}))
"""


# Its own word for its peak: what the kernel tells the parent counts the parent's memory too.
_REPORT = """
import atexit, sys
def tell():
    lines = open("/proc/self/status").read().splitlines()
    sys.stderr.write(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
atexit.register(tell)
from kansoku.cli import main
sys.argv = ["kansoku", "report", sys.argv[1], "--json"]
main()
"""


def write_copy(path: Path, rank: int) -> None:
    """Write one rank's drained copy as the drain does, spans of 50 a step."""
    head = bytearray(1 << 20)
    anchor = (10**9, 1_767_225_600 * 10**9)
    ring.format_ring(head, pid=1000 + rank, process_start=1, anchor=anchor)
    writer = ring.RingWriter(head)
    writer.set_ranks(rank, rank, RANKS)
    writer.set_facts({"run": "bench", "node": "n0", "device": "cpu", "groups": []})
    name, group, dtype = (writer.intern(text) for text in ("all_reduce", "0", "float32"))
    offset = ring.read_header(head).records_offset
    head[28:32] = ring.LOG.to_bytes(4, "little")
    n = np.arange(PER_RANK)
    records = np.zeros(PER_RANK, RECORD)
    records["id"] = records["id_again"] = n + 1
    place = n % SPANS_A_STEP
    records["start_ns"] = 10**9 + n * 1000
    records["duration_ns"] = np.where(place == 0, SPANS_A_STEP * 1000, 900)
    records["cpu_ns"] = 500
    records["parent"] = np.where(place == 0, 0, n - place + 1)
    records["step"] = n // SPANS_A_STEP
    kinds = np.full(SPANS_A_STEP, 6)
    kinds[:5] = 1, 2, 3, 4, 5
    records["kind"] = kinds[place]
    collective = place >= 5
    records["name"] = np.where(collective, name, 0)
    records["group"] = np.where(collective, group, 0)
    records["dtype"] = np.where(collective, dtype, 0)
    records["thread"] = 77
    records["sequence"] = np.where(collective, n, -1)
    records["bytes"] = np.where(collective, 4096, -1)
    records["peak_rss_bytes"] = records["device_ns"] = -1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(head[:offset]) + records.tobytes())


def _measure(script: str, folder: Path, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True, text=True, env={**os.environ, **environment}, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def _report(folder: Path) -> tuple[dict, float, int]:
    """Return the answer of ``kansoku report --json``, its seconds and its peak memory in bytes."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _REPORT, str(folder)], capture_output=True, check=False
    )
    wall = time.perf_counter() - start
    assert done.returncode in {0, 1}, done.stderr  # 1: it found something
    return json.loads(done.stdout), wall, int(done.stderr) << 10


def reading(folder: Path) -> list[Row]:
    """Measure reading on one core."""
    for rank in range(RANKS):
        write_copy(folder / "n0" / f"n0-{rank}.ring", rank)
    result = _measure(_READ, folder, POLARS_MAX_THREADS="1", OMP_NUM_THREADS="1")
    rate = result["spans"] / result["cpu"] / 1e6
    data = (folder / "n0" / "n0-0.ring").read_bytes()
    layout = struct.Struct("<QqqqQiHHHHHHHHIqqqqddQQ")
    body = memoryview(data)[len(data) % ring.RECORD_BYTES :]
    body = body[: len(body) // layout.size * layout.size]
    start = time.process_time()
    count = sum(1 for _ in layout.iter_unpack(body))
    peer = count / (time.process_time() - start) / 1e6
    return [
        Row(what=f"run directory of {result['spans']:,} spans to columns, one core", measured=rate,
            unit="M spans/s", target="≥ 5", peer=f"struct.iter_unpack {peer:.2f} M/s",
            met=rate >= 5),
        Row(what="its ratio to the peer", measured=rate / peer, unit="×", target=""),
    ]  # fmt: skip


def thousand_ranks(folder: Path) -> list[Row]:
    """Measure the report of 1,024 ranks."""
    sys.path.insert(0, str(ROOT))
    import duckdb
    from tests.labs.generated_run import Schedule, generate

    schedule = Schedule(ranks=1024, tensor_parallel=8, steps=1000, forward_collectives=20,
                        backward_collectives=25, slow={(77, "forward"): 1.6})  # fmt: skip
    facts, spans, steps = generate(schedule, spans_every=20)
    rows = len(spans)
    folder.mkdir(parents=True, exist_ok=True)
    peak = {"flops": 1e15, "source": "measured: generated", "precision": "float32"}
    run = {"schema": "kansoku.run/1", "run": facts.run, "command": list(facts.command),
           "start_ns": facts.start_ns, "end_ns": facts.end_ns, "exit_code": 0,
           "nodes": list(facts.nodes), "peak": peak}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    write_tables(folder, steps=steps, spans=spans, ranks=facts.ranks)
    del spans, steps
    result, wall, peak_bytes = _report(folder)
    assert [found["rank"] for found in result["stragglers"]] == [77], result["stragglers"]
    start = time.perf_counter()
    duckdb.sql(
        f"select kind, sum(duration_ns) from '{folder}/spans/*.parquet' group by kind"
    ).fetchall()
    duckdb.sql(
        f"select rank, avg(duration_ns) from '{folder}/steps/*.parquet' group by rank"
    ).fetchall()
    peer = time.perf_counter() - start
    what = f"report of {result['steps']:,} steps × {result['ranks']:,} ranks, {rows:,} spans"
    return [
        Row(what=what, measured=wall, unit="s", target="< 10",
            peer=f"DuckDB, two sums {peer:.2f} s", met=wall < 10),
        Row(what="its peak memory", measured=peak_bytes / 1e9, unit="GB", target="< 2",
            met=peak_bytes < 2e9),
    ]  # fmt: skip


def run() -> list[Row]:
    """Return all rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = reading(folder / "copies")
        return rows + thousand_ranks(folder / "tables")


def main() -> None:
    """Print the table."""
    print_table("Reading and reporting runs", run())

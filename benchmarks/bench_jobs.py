"""Job history: import and report of four million allocations, increments, a month's heat map.

The generated accounting has the mix that the Slurm lab produces for real (states, arrays,
requeues, cancelled while pending, names with delimiters) and the size mix of a published year of
a GPU cluster. The named peer of the import is pandas reading the same file into text columns,
which is the least any tool on pandas must do before it has typed a single value.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.table import Row, print_table

COLUMNS = (
    "JobIDRaw|JobID|Cluster|JobName|User|Account|Partition|QOS|State|ExitCode|Reason|Submit|"
    "Eligible|Start|End|ElapsedRaw|Suspended|TimelimitRaw|NNodes|NCPUS|ReqTRES|AllocTRES|NodeList"
)
START_S = 1_735_689_600  # 2025-01-01T00:00:00Z


def generate(path: Path, jobs: int, *, first: int = 1, start_s: int = START_S, seed: int = 7):
    """Write ``sacct -X --parsable2`` of that many allocations over a year; return the path."""
    rng = np.random.default_rng(seed)
    part = 500_000
    with path.open("wb") as file:
        file.write(COLUMNS.encode() + b"\n")
        for at in range(0, jobs, part):
            n = min(part, jobs - at)
            step = 365 * 86400 / max(jobs, 1)
            submit = start_s + ((at + np.arange(n)) * step).astype(np.int64)
            state = rng.choice(
                ["COMPLETED", "CANCELLED by 1003", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED",
                 "OUT_OF_MEMORY", "REQUEUED", "CANCELLED by 0"],
                n, p=[0.55, 0.17, 0.169, 0.06, 0.006, 0.01, 0.01, 0.005, 0.02],
            )  # fmt: skip
            nodes = rng.choice(
                [1, 2, 3, 4, 8, 12, 16, 32, 64, 96],
                n, p=[0.769, 0.05, 0.02, 0.025, 0.05, 0.023, 0.03, 0.022, 0.008, 0.003],
            )  # fmt: skip
            gpus = np.where((nodes == 1) & (rng.random(n) < 0.5), rng.integers(0, 8, n), nodes * 8)
            wait = rng.exponential(600, n).astype(np.int64)
            run = np.minimum(rng.lognormal(5.5, 2.0, n).astype(np.int64), 604800)
            pending = (state == "CANCELLED by 1003") & (rng.random(n) < 0.3)
            low = rng.integers(1, 101 - nodes, n)
            number = first + at + np.arange(n)
            task = rng.random(n) < 0.2
            frame = pl.DataFrame(
                {
                    "id": number, "task": task, "state": state, "nodes": nodes, "gpus": gpus,
                    "submit": submit, "start": submit + wait, "end": submit + wait + run,
                    "run": run, "pending": pending, "low": low, "high": low + nodes - 1,
                    "user": rng.integers(0, 300, n), "account": rng.integers(0, 40, n),
                    "odd": rng.random(n) < 1e-4,
                }
            )  # fmt: skip
            file.write(_lines(frame).encode())
    return path


def _lines(frame: pl.DataFrame) -> str:
    def stamp(column: str) -> pl.Expr:
        return pl.from_epoch(column, time_unit="s").dt.strftime("%Y-%m-%dT%H:%M:%S")

    def tres(cpus: pl.Expr) -> pl.Expr:
        return pl.format(
            "billing={},cpu={},gres/gpu:h100={},gres/gpu={},mem={}G,node={}",
            cpus, cpus, "gpus", "gpus", pl.col("nodes") * 250, "nodes",
        )  # fmt: skip

    pending = pl.col("pending")
    cpus = pl.col("nodes") * 112
    id_ = pl.col("id").cast(pl.String)
    printed = pl.when("task").then(pl.format("{}_{}", pl.col("id") // 50, pl.col("id") % 50))
    node = pl.when(pl.col("nodes") == 1).then(
        pl.format("c{}", pl.col("low").cast(pl.String).str.zfill(3))
    ).otherwise(pl.format("c[{}-{}]", pl.col("low").cast(pl.String).str.zfill(3),
                          pl.col("high").cast(pl.String).str.zfill(3)))  # fmt: skip
    columns = [
        id_,
        printed.otherwise(id_),
        pl.lit("bench"),
        pl.when("odd").then(pl.lit("odd|name")).otherwise(pl.format("train-{}", pl.col("id") % 97)),
        pl.format("user{}", "user"),
        pl.format("acct{}", "account"),
        pl.lit("train"),
        pl.lit("normal"),
        pl.col("state"),
        pl.when(pl.col("state") == "FAILED").then(pl.lit("1:0")).otherwise(pl.lit("0:0")),
        pl.lit("None"),
        stamp("submit"),
        stamp("submit"),
        pl.when(pending).then(pl.lit("None")).otherwise(stamp("start")),
        stamp("end"),
        pl.when(pending).then(pl.lit("0")).otherwise(pl.col("run").cast(pl.String)),
        pl.lit("00:00:00"),
        pl.lit("10080"),
        pl.col("nodes").cast(pl.String),
        cpus.cast(pl.String),
        tres(cpus),
        pl.when(pending).then(pl.lit("")).otherwise(tres(cpus)),
        pl.when(pending).then(pl.lit("None assigned")).otherwise(node),
    ]
    lines = frame.select(pl.concat_str(columns, separator="|"))
    return "\n".join(lines.to_series().to_list()) + "\n"


def _timed(code: str, *arguments: str) -> tuple[float, float, str]:
    """Run Python code in a process of its own; return seconds, peak GB and what it printed."""
    tail = "\nimport resource as r, sys"
    tail += "\nprint(r.getrusage(r.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    began = time.perf_counter()
    answer = subprocess.run(
        [sys.executable, "-c", code + tail, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "TZ": "UTC"},
    )  # fmt: skip
    took = time.perf_counter() - began
    if answer.returncode:
        raise RuntimeError(answer.stderr)
    return took, int(answer.stderr.split()[-1]) / 1e6, answer.stdout


IMPORT = """
import sys; from pathlib import Path
from kansoku.app.jobs import import_jobs
r = import_jobs([Path(sys.argv[1])], store=sys.argv[2], timezone='UTC')
print(r.jobs.new, r.jobs.updated, r.quarantined_count, r.repaired)
"""
REPORT = """
import sys, json
from kansoku.app.jobs import report, report_json
r = report_json(report(store=sys.argv[1]))
print(r['jobs'], len(r['sizes']))
"""
PANDAS = """
import sys, pandas
f = pandas.read_csv(sys.argv[1], sep='|', dtype=str, quoting=3, on_bad_lines='skip')
print(len(f))
"""


def main(jobs: int = 4_000_000) -> None:
    """Print the table."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="kbench-") as folder:
        base = Path(folder)
        file = generate(base / "year.txt", jobs)
        took, peak, said = _timed(IMPORT, str(file), str(base / "store"))
        new, _, bad, repaired = map(int, said.split())
        assert (new, bad) == (jobs, 0), said
        peer, what = None, "pandas.read_csv as text:"
        try:
            peer, peer_peak, _ = _timed(PANDAS, str(file))
            what += f" {peer:.1f} s, {peer_peak:.1f} GB, types nothing"
        except RuntimeError as error:
            what += f" failed, {str(error).strip()[-60:]}"
        file.unlink()
        reported, report_peak, said = _timed(REPORT, str(base / "store"))
        assert said.split()[0] == str(jobs), said
        more = generate(base / "more.txt", 1000, first=jobs + 1, start_s=START_S + 365 * 86400)
        code = IMPORT.replace("r = import", "import time; t=time.perf_counter()\nr = import")
        code += "print(time.perf_counter()-t)"
        whole, _, said = _timed(code, str(more), str(base / "store"))
        again = float(said.split()[-1])
        highest = max(peak, report_peak)
        rows += [
            Row(what=f"import {jobs:,} allocations, {repaired} torn rows mended", measured=took,
                unit="s", target="", peer=what),
            Row(what=f"report of {jobs:,} allocations", measured=reported, unit="s", target=""),
            Row(what="import and report together", measured=took + reported, unit="s",
                target="< 60", met=took + reported < 60),
            Row(what="largest resident set of the two", measured=highest, unit="GB", target="< 4",
                met=highest < 4),
            Row(what="import 1,000 new jobs into them", measured=again, unit="s", target="< 1",
                met=again < 1),
            Row(what="  with the start of the process", measured=whole, unit="s", target=""),
        ]  # fmt: skip
        rows += _heatmap_rows(base)
    print_table("Job history", rows)


HEATMAP = """
import sys, time, numpy as np
from pathlib import Path
from kansoku.jobs.heatmap import synthetic_month
from kansoku.app.jobs import heatmap_png, heatmap_view
from kansoku.view.html import render
matrix = synthetic_month()
t = time.perf_counter(); heatmap_png(matrix, Path(sys.argv[1])); a = time.perf_counter() - t
t = time.perf_counter(); page = render(heatmap_view(matrix)); b = time.perf_counter() - t
print(a, b, len(page))
"""


def _heatmap_rows(base: Path) -> list[Row]:
    _, peak, said = _timed(HEATMAP, str(base / "heat.png"))
    png, html, size = said.split()
    what = "heat map of 100 nodes × 8 GPUs × 30 days, 10-minute cells"
    return [
        Row(what=f"{what}: PNG", measured=float(png), unit="s", target="< 2", met=float(png) < 2),
        Row(what=f"  HTML page of {int(size) / 1e6:.1f} MB", measured=float(html), unit="s",
            target="< 2", met=float(html) < 2),
        Row(what="  largest resident set", measured=peak, unit="GB", target=""),
    ]  # fmt: skip


if __name__ == "__main__":
    main(int(json.loads(sys.argv[1])) if len(sys.argv) > 1 else 4_000_000)

# ruff: noqa: E501, UP031 - the layout of the generated file is one long literal
"""Kineto traces against HolisticTraceAnalysis: load, breakdown and overlap, in one run.

Each side runs in a process of its own, on compiled modules, as an installed program does; ours finds
its compiled reader of events, as the first large trace leaves it. Every
set gives four figures: wall seconds of the work alone (from after the imports to the answer), CPU
seconds and peak memory of the whole process with its workers and imports (sampled every 10 ms), and
wall seconds of the whole process, for which ours is the command itself. Small sets: medians of
several runs. ``KANSOKU_BENCH_SETS`` chooses among generated, corpus and big.
"""

import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.table import Row, print_table

RANKS = 8
EVENTS = int(os.environ.get("KANSOKU_BENCH_EVENTS", "1000000"))
BIG_BYTES = int(os.environ.get("KANSOKU_BENCH_BIG_BYTES", str(4 << 30)))
SETS = os.environ.get("KANSOKU_BENCH_SETS", "generated,corpus,big").split(",")
_REPEATS = 3
_NO_COMPILED = "PYTHONDONTWRITEBYTECODE"
_COMPILED = Path(tempfile.gettempdir()) / f"kansoku-bench-modules-{os.getuid()}"

_TIMER = """
import logging, sys, time
logging.disable(logging.WARNING)
"""
_OURS = (
    _TIMER
    + """
from kansoku.app.trace import breakdown
wall = time.perf_counter()
busy = sum(r["busy_us"] or 0 for r in breakdown(sys.argv[1:]).to_json()["ranks"])
print(time.perf_counter() - wall, busy)
"""
)
_BUILD_READER = "from kansoku.formats.kineto._compiled import library; library(1 << 40)"
_PEER = (
    _TIMER
    + """
from hta.trace_analysis import TraceAnalysis
wall = time.perf_counter()
files = {int(a.split("=")[0]): a.split("=")[1] for a in sys.argv[2:]}
analysis = TraceAnalysis(trace_files=files, trace_dir=sys.argv[1])
table = analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
busy = (table["compute_time(us)"] + table["non_compute_time(us)"]).sum()
print(time.perf_counter() - wall, busy)
"""
)


def write_rank(path: Path, events: int, rank: int, world: int) -> None:
    """Write one rank in Kineto's own layout: 8 events a launched kernel."""
    rng = random.Random(rank)
    with path.open("w") as file:
        file.write(
            '\n{\n  "schemaVersion": 1,\n  "distributedInfo": {"backend": "nccl", "rank": %d, '
            '"world_size": %d},\n  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": '
            '1711964646000000000,\n  "traceEvents": [' % (rank, world)
        )
        now = free = 4458676000000.0
        begin, step, out, separator = now, 0, [], ""
        per_step = max(events // 8 // 20, 1)
        for number in range(events // 8):
            corr = 1000 + number
            host = rng.uniform(8, 20)
            collective = number % 40 == 39
            work = rng.uniform(3, 25) * (10 if collective else 1)
            start = max(free, now + 8)
            stream = 40 if collective else 7
            name = (
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
                if collective
                else f"void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, {number % 200}ul> >(int)"
            )
            more = (
                f', "Collective name": "allreduce", "In msg nelems": 6637568, "Out msg nelems": 6637568, "Group size": {world}, "dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, ...]", "Seq": {number // 40}'
                if collective
                else ""
            )
            cpu = '"pid": 2910249, "tid": 2910249'
            gpu = f'"pid": {rank}, "tid": {stream}'
            out += [
                f'{{\n    "ph": "X", "cat": "cpu_op", "name": "aten::op{number % 40}", {cpu},\n    "ts": {now:.3f}, "dur": {host:.3f},\n    "args": {{\n      "External id": {corr},"Record function id": 0, "Concrete Inputs": ["", "", "1"], "Input type": ["float", "float", "Scalar"], "Input Strides": [[8192, 1], [1], []], "Input Dims": [[4096, 8192], [8192], []], "Ev Idx": {number}\n    }}\n  }}',
                f'{{\n    "ph": "X", "cat": "cpu_op", "name": "aten::inner{number % 60}", {cpu},\n    "ts": {now + 0.5:.3f}, "dur": {host - 1:.3f},\n    "args": {{\n      "External id": {corr},"Record function id": 0, "Sequence number": {number}, "Fwd thread id": 0, "Ev Idx": {number}\n    }}\n  }}',
                f'{{\n    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", {cpu},\n    "ts": {now + 2:.3f}, "dur": 4.100,\n    "args": {{\n      "External id": {corr}, "cbid": 211, "correlation": {corr}\n    }}\n  }}',
                f'{{\n    "ph": "s", "id": {corr}, {cpu}, "ts": {now + 2:.3f},\n    "cat": "ac2g", "name": "ac2g"\n  }}',
                f'{{\n    "ph": "X", "cat": "kernel", "name": "{name}", {gpu},\n    "ts": {start:.3f}, "dur": {work:.3f},\n    "args": {{\n      "External id": {corr},      "queued": 0, "device": {rank}, "context": 1,      "stream": {stream}, "correlation": {corr},      "registers per thread": 32,      "shared memory": 0,      "blocks per SM": 15.515152,      "warps per SM": 62.060608,      "grid": [2048, 1, 1],      "block": [128, 1, 1],      "est. achieved occupancy %": 97{more}\n    }}\n  }}',
                f'{{\n    "ph": "f", "id": {corr}, {gpu}, "ts": {start:.3f},\n    "cat": "ac2g", "name": "ac2g", "bp": "e"\n  }}',
                f'{{\n    "ph": "X", "cat": "python_function", "name": "torch/nn/modules/linear.py({number % 300}): forward", {cpu},\n    "ts": {now - 0.2:.3f}, "dur": {host + 0.4:.3f},\n    "args": {{\n      "Python parent id": {corr - 1}, "Python id": {corr}, "Ev Idx": {number}\n    }}\n  }}',
                f'{{\n    "ph": "X", "cat": "cuda_runtime", "name": "cudaStreamIsCapturing", {cpu},\n    "ts": {now + 1.2:.3f}, "dur": 0.300,\n    "args": {{\n      "External id": {corr}, "cbid": 317, "correlation": {10**7 + corr}\n    }}\n  }}',
            ]
            if not collective:
                free = start + work + 0.8
            now += host + rng.uniform(1, 6)
            if (number + 1) % per_step == 0:
                out.append(
                    f'{{\n    "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{10 + step}", {cpu},\n    "ts": {begin:.3f}, "dur": {now - begin - 0.1:.3f},\n    "args": {{\n      "External id": {corr},"Record function id": 0, "Ev Idx": {number}\n    }}\n  }}'
                )
                step, begin = step + 1, now
            if len(out) > 8000:
                file.write(separator + "\n  " + ",\n  ".join(out))
                out, separator = [], ","
        file.write(
            separator + "\n  " + ",\n  ".join(out) + '\n  ],\n  "traceName": "/tmp/x.json"\n}'
        )


def write_big(path: Path, seed: Path, size: int) -> int:
    """Repeat the events of a file until a size; return the bytes."""
    text = seed.read_bytes()
    begin = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    end = text.rindex(b"]", 0, text.rindex(b'"traceName"'))
    body = text[begin:end].strip()
    with path.open("wb") as file:
        file.write(text[:begin] + body)
        while file.tell() < size:
            file.write(b",\n  " + body)
        file.write(text[end:])
        return file.tell()


def environment() -> dict[str, str]:
    """Return an environment in which imports do not compile, whatever the caller's says."""
    found = {name: value for name, value in os.environ.items() if name != _NO_COMPILED}
    cache = {"KANSOKU_CACHE_DIR": str(_COMPILED / "kansoku")}
    return found | {"PYTHONPYCACHEPREFIX": str(_COMPILED)} | cache


def median_run(run: Callable[[], tuple[float, ...]], repeats: int) -> tuple[float, ...]:
    """Return the median of each figure over several runs."""
    return tuple(map(statistics.median, zip(*(run() for _ in range(repeats)), strict=True)))


def measure(command: list[str]) -> tuple[float, float, int, float]:
    """Return wall seconds of the work, CPU seconds of the process tree, its peak memory, and wall
    seconds from the start of the process to its end."""
    began = time.perf_counter()
    process = psutil.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    peak = 0
    spent: dict[int, float] = {}
    while process.poll() is None:
        peak = max(peak, _look(process, spent))
        time.sleep(0.01)
    whole = time.perf_counter() - began
    assert process.stdout is not None
    output = process.stdout.read().split()
    assert process.returncode == 0, command
    wall, busy = map(float, output[-2:])
    assert busy > 0
    return wall, sum(spent.values()), peak, whole


def from_shell(files: list[Path]) -> float:
    """Return wall seconds of the command itself, in a fresh process."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "kansoku", "trace", "breakdown", "--json", *map(str, files)]
    subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        env=environment(),
    )
    return time.perf_counter() - began


def _look(process: psutil.Process, spent: dict[int, float]) -> int:
    """Return resident bytes: all of the first process, what its children hold for themselves."""
    total = 0
    try:
        total += process.memory_info().rss
        for part in [process, *process.children(recursive=True)]:
            used = part.cpu_times()
            spent[part.pid] = used.user + used.system
            if part.pid != process.pid:
                memory = part.memory_info()
                total += memory.rss - memory.shared
    except psutil.Error:
        pass
    return total


def _pair(title: str, files: dict[int, Path], rows: list[Row], *, repeats: int = 1) -> None:
    ours_command = [sys.executable, "-c", _OURS, *map(str, files.values())]
    folder = next(iter(files.values())).parent
    arguments = [f"{rank}={path.name}" for rank, path in files.items()]
    peer_command = [sys.executable, "-c", _PEER, str(folder), *arguments]
    ours = median_run(lambda: measure(ours_command), repeats)
    peer = median_run(lambda: measure(peer_command), repeats)
    (shell,) = median_run(lambda: (from_shell(list(files.values())),), repeats)
    for what, theirs, mine, target in (
        ("wall of the work, imports done", peer[0], ours[0], 20),
        ("CPU of the process, imports and all", peer[1], ours[1], None),
        ("wall of the process (ours: the command)", peer[3], shell, None),
    ):
        ratio = theirs / mine
        rows.append(
            Row(
                what=f"{title}: {what}",
                measured=ratio,
                unit="times faster",
                target="" if target is None else f"≥ {target}",
                peer=f"HolisticTraceAnalysis {theirs:.2f} s, kansoku {mine:.3f} s",
                met=None if target is None else ratio >= target,
            )
        )
    ratio = ours[2] / peer[2]
    rows.append(
        Row(
            what=f"{title}: peak memory of the process",
            measured=ratio,
            unit="of the peer",
            target="≤ 0.2",
            peer=f"HolisticTraceAnalysis {peer[2] / 1e6:.0f} MB, kansoku {ours[2] / 1e6:.0f} MB",
            met=ratio <= 0.2,
        )
    )


def main() -> None:
    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="kansoku-bench-"))
    try:
        for module in ("kansoku.cli._main", "kansoku.app.trace", "hta.trace_analysis"):
            command = [sys.executable, "-c", f"import {module}"]
            subprocess.run(command, check=True, env=environment(), stderr=subprocess.DEVNULL)
        command = [sys.executable, "-c", _BUILD_READER]
        subprocess.run(command, check=True, env=environment())
        first = folder / "rank0.json"
        if "generated" in SETS:
            files = {rank: folder / f"rank{rank}.json" for rank in range(RANKS)}
            for rank, path in files.items():
                write_rank(path, EVENTS, rank, RANKS)
            _pair(f"{RANKS} ranks × {EVENTS:,} events", files, rows)
            for path in list(files.values())[1:]:
                path.unlink()
        corpus = os.environ.get("KANSOKU_CORPUS")
        if corpus and "corpus" in SETS:
            _corpus(Path(corpus), folder, rows)
        if BIG_BYTES and "big" in SETS:
            if not first.exists():
                write_rank(first, EVENTS, 0, RANKS)
            _big(folder / "big.json", first, rows)
    finally:
        shutil.rmtree(folder)
    print_table("Kineto traces: load, breakdown, overlap", rows)


def _big(big: Path, seed: Path, rows: list[Row]) -> None:
    size = write_big(big, seed, BIG_BYTES)
    small = measure([sys.executable, "-c", _OURS, str(seed)])
    whole = measure([sys.executable, "-c", _OURS, str(big)])
    rows += [
        Row(
            what=f"one file of {size / 1e9:.2f} GB: reading and breakdown",
            measured=size / whole[0] / 1e6,
            unit="MB/s",
            target="",
        ),
        Row(
            what="its peak memory, all processes",
            measured=whole[2] / 1e6,
            unit="MB",
            target="< 500",
            met=whole[2] < 500e6,
        ),
        Row(
            what="CPU time a byte, this file over one of 0.3 GB",
            measured=(whole[1] / size) / (small[1] / seed.stat().st_size),
            unit="times",
            target="about 1",
        ),
    ]


def _corpus(corpus: Path, folder: Path, rows: list[Row]) -> None:
    inside = folder / "corpus"
    inside.mkdir()
    with tarfile.open(corpus / "kineto" / "dlrm_8ranks.tar.gz") as archive:
        archive.extractall(inside, filter="data")
    files = {
        json.loads(path.read_text(), strict=False)["distributedInfo"]["rank"]: path
        for path in sorted(inside.rglob("*.json"))
    }
    _pair("corpus: dlrm, 8 ranks", files, rows, repeats=_REPEATS)
    for name in ("nccl_data", "ns_resolution"):
        one = folder / name
        one.mkdir()
        path = one / f"{name}.json"
        path.write_bytes(gzip.decompress((corpus / "kineto" / f"{name}.json.gz").read_bytes()))
        _pair(f"corpus: {name}", {0: path}, rows, repeats=_REPEATS)


if __name__ == "__main__":
    main()

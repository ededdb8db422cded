"""Ranks of the small GPT of ``capture_job`` that train until a file says stop, without kansoku.

Program of ``bench_attach``: ``python -m benchmarks.attach_job FOLDER RANKS LAYERS``. Who watches
comes and goes from outside, and the ranks do not hear of it: each notes when its steps ended and
its CPU time till then, and leaves both in ``FOLDER/RANK.json`` at its end. A flag is reduced each
step, so that all stop at the same one; the bare job has it too.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.capture_job import end_with, start_ranks, steps, training

LONGEST_S = 600


def rank_main(rank, folder, ranks, layers):
    model, optimizer, batches = training(rank, folder, ranks, layers)
    flag = torch.zeros(1)
    stop, began = folder / "stop", time.monotonic()
    steps(model, optimizer, batches, 10)
    (folder / f"{rank}.ready").touch()
    ends, cpu = [], []
    while not flag.item():
        steps(model, optimizer, batches, 1)
        ends.append(time.monotonic_ns())
        cpu.append(time.process_time_ns())
        flag[0] = stop.exists() or time.monotonic() - began > LONGEST_S
        dist.all_reduce(flag)
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps({"ends_ns": ends, "cpu_ns": cpu}))
    partial.rename(folder / f"{rank}.json")
    while len(list(folder.glob("?.json"))) < ranks:
        time.sleep(0.01)
    # Torch 2.13 may hang in order: the reducer's end joins Gloo's thread while holding the
    # interpreter's lock, for which that thread waits to drop the last flag's tensor.
    os._exit(0)


def main():
    folder, (ranks, layers) = Path(sys.argv[1]), (int(text) for text in sys.argv[2:])
    processes = start_ranks(rank_main, ranks, folder, ranks, layers)
    (folder / "pids").write_text(" ".join(str(process.pid) for process in processes))
    end_with(processes)


if __name__ == "__main__":
    main()

"""Ranks of the small GPT of ``capture_job`` that train until a file says stop, without kansoku.

Program of ``bench_attach``: ``python -m benchmarks.attach_job FOLDER RANKS LAYERS``. Who watches
comes and goes from outside, and the ranks do not hear of it: each notes when its steps ended and
its CPU time till then, and leaves both in ``FOLDER/RANK.json`` at its end. A flag is reduced each
step, so that all stop at the same one; the bare job has it too.
"""

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from benchmarks.capture_job import BATCH, SEQUENCE, VOCABULARY, build, steps

LONGEST_S = 600


def rank_main(rank, folder, ranks, layers):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # as launchers bind ranks
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    model = DistributedDataParallel(build(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randint(VOCABULARY, (64, SEQUENCE + 1))

    def forever():
        while True:
            yield from torch.utils.data.DataLoader(data, batch_size=BATCH)

    batches, flag = forever(), torch.zeros(1)
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
    importlib.import_module("torch._dynamo")  # once, not in every rank
    gc.freeze()
    context = multiprocessing.get_context("fork")
    folder, (ranks, layers) = Path(sys.argv[1]), (int(text) for text in sys.argv[2:])
    arguments = (folder, ranks, layers)
    processes = [context.Process(target=rank_main, args=(r, *arguments)) for r in range(ranks)]
    for process in processes:
        process.start()
    (folder / "pids").write_text(" ".join(str(process.pid) for process in processes))
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode for process in processes))


if __name__ == "__main__":
    main()

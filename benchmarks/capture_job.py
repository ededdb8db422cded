"""Four ranks of a small transformer over Gloo whose recording is switched while they run.

Program of ``bench_capture``: blocks of steps bare, recorded, and under torch.profiler follow each
other in turn; rank 0 writes the duration and the CPU time of every block. The recorder's switch
takes every wrapper and native kernel out, so a bare block is the job without kansoku.
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

RANKS, BLOCK, ROUNDS, WIDTH, LAYERS, SEQUENCE, BATCH = 4, 10, 12, 128, 4, 64, 3


def build():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.0)
    return DistributedDataParallel(nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False))


def steps(model, optimizer, batches, count):
    wall = []
    for _ in range(count):
        start = time.perf_counter()
        model(next(batches)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wall.append(time.perf_counter() - start)
    return wall


def rank_main(rank, folder):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    from _kansoku import hooks

    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(64, SEQUENCE, WIDTH)

    def forever():
        while True:
            yield from torch.utils.data.DataLoader(data, batch_size=BATCH)

    batches = forever()
    steps(model, optimizer, batches, 5)
    result = {"bare": [], "recorded": [], "profiler": []}
    orders = (("bare", "recorded"), ("recorded", "bare"))
    for number in range(ROUNDS):
        order = orders[number % 2]
        for mode in (*order, "profiler") if number % 4 == 0 else order:
            dist.barrier()
            hooks.switch(mode == "recorded")
            # A switch changes a class under every module: the interpreter specialises again.
            steps(model, optimizer, batches, 3)
            cpu = time.process_time()
            if mode == "profiler":
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                    wall = steps(model, optimizer, batches, BLOCK)
            else:
                wall = steps(model, optimizer, batches, BLOCK)
            cpu = time.process_time() - cpu
            result[mode].append((sorted(wall)[BLOCK // 2], cpu / BLOCK))
    hooks.switch(True)
    (Path(folder) / f"bench-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch._dynamo

    gc.freeze()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(r, sys.argv[1])) for r in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(process.exitcode for process in ranks))

"""Ranks of a small GPT over Gloo whose recording is switched while they run.

Program of ``bench_capture``: ``capture_job.py FOLDER RANKS ROUNDS PROFILED LAYERS DRAIN``. Blocks
of steps bare and recorded, and under torch.profiler in ``PROFILED`` of the rounds, follow each
other in turn; every rank writes the median step time and the CPU time a step of every block. The
recorder's switch takes every wrapper and native kernel out, and the drain, which reads the pipe
``DRAIN``, rests in a bare block: it is the job without kansoku. A switch changes a class under
every module and the interpreter specialises again: every block, bare or recorded, begins with a
switch to and fro, and the two steps after it, which cost 0.1 ms more where recorded, are left out.
Blocks are short: where ranks share cores, step times differ by 5 % from block to block, more than
from step to step in one.
"""

import gc
import importlib
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

BLOCK, SETTLING = 4, 2
VOCABULARY, WIDTH, HEADS, SEQUENCE, BATCH = 512, 128, 4, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(gelu(self.up(self.between(x))))


def build(layers):
    blocks = (Block() for _ in range(layers))
    head = nn.Linear(WIDTH, VOCABULARY)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.LayerNorm(WIDTH), head)


def steps(model, optimizer, batches, count):
    wall = []
    for _ in range(count):
        start = time.perf_counter()
        ids = next(batches)
        logits = model(ids[:, :-1])
        cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        wall.append(time.perf_counter() - start)
    return wall


def training(rank, folder, ranks, layers):
    """Join the ranks, bound to a core as launchers bind them; return model, optimizer, batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    model = DistributedDataParallel(build(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randint(VOCABULARY, (64, SEQUENCE + 1))
    # One epoch without end: the begin of another would fall into the same kind of block each time.
    order = itertools.cycle(range(len(data)))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=order)
    return model, optimizer, iter(loader)


def start_ranks(rank_main, ranks, *arguments):
    """Fork the ranks and return their processes."""
    importlib.import_module("torch._dynamo")  # once, not in every rank
    gc.freeze()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_main, args=(r, *arguments)) for r in range(ranks)]
    for process in processes:
        process.start()
    return processes


def end_with(processes):
    """Wait for the ranks and exit as the worst of them."""
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode for process in processes))


def rank_main(rank, folder, ranks, rounds, profiled, layers, drain):
    model, optimizer, batches = training(rank, folder, ranks, layers)
    from _kansoku import hooks

    steps(model, optimizer, batches, 20)  # the recorder has settled after sixteen updates
    result = {"bare": [], "recorded": [], "profiler": []}
    orders = (("bare", "recorded"), ("recorded", "bare"))
    for number in range(rounds):
        order = orders[number % 2]
        for mode in (*order, "profiler") if number < profiled else order:
            dist.barrier()
            if rank == 0:
                os.write(drain, b"+" if mode == "recorded" else b"-")
            hooks.switch(mode != "recorded")
            hooks.switch(mode == "recorded")
            steps(model, optimizer, batches, SETTLING)
            cpu = time.process_time()
            if mode == "profiler":
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                    wall = steps(model, optimizer, batches, BLOCK)
            else:
                wall = steps(model, optimizer, batches, BLOCK)
            cpu = time.process_time() - cpu
            result[mode].append((statistics.median(wall), cpu / BLOCK))
    hooks.switch(True)
    (Path(folder) / f"bench-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # torch's end may hang: Gloo's thread waits for the lock that its destructor holds


if __name__ == "__main__":
    given = (sys.argv[1], *(int(text) for text in sys.argv[2:]))
    end_with(start_ranks(rank_main, given[1], *given))

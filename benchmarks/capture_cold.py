"""What recording adds to each operation of a step when the caches are cold, in nanoseconds.

Program of ``bench_capture``: ``capture_cold.py FOLDER ROUNDS``. One rank on one core; 2 MB of other
data are touched before every operation, as the kernels of a training do. Bare, recorded and bare
again follow each other in a random order; the second bare shows how far to believe the first.
"""

import gc
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

OPERATIONS = ("data wait", "forward", "backward", "all-reduce", "optimizer and step")
SETTLING, BLOCK = 6, 12


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, ids):
        return (self.weight * ids.shape[0]).sum()


class Steps:
    def __init__(self):
        self.data, self.other = (np.random.default_rng(n).random(1 << 17) for n in (1, 2))
        self.model = Tiny()
        self.optimizer = torch.optim.SGD(self.model.parameters())
        self.ids = torch.zeros(4, 8, dtype=torch.long)
        self.gradient = torch.ones(1 << 10)
        self.loader = iter(torch.utils.data.DataLoader(torch.zeros(1 << 20, 8), batch_size=4))

    def run(self, count):
        """Return the fifth fastest of each operation: a busy machine disturbs the slower ones."""
        times = [self.one() for _ in range(count)]
        return [sorted(each)[4] for each in zip(*times, strict=True)]

    def one(self):
        return [
            self.timed(lambda: next(self.loader)),
            self.timed(self.forward),
            self.timed(self.backward),
            self.timed(lambda: dist.all_reduce(self.gradient)),
            self.timed(self.optimizer.step),
        ]

    def forward(self):
        self.loss = self.model(self.ids)

    def backward(self):
        self.loss.backward()

    def timed(self, operation):
        for _ in range(2):
            np.multiply(self.data, 1.0001, out=self.other)
            np.add(self.other, self.data, out=self.other)
        begin = time.perf_counter_ns()
        operation()
        return time.perf_counter_ns() - begin


def main():
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    dist.init_process_group("gloo", init_method=f"file://{folder}/cold", rank=0, world_size=1)
    from _kansoku import hooks

    steps = Steps()
    steps.run(30)
    gc.collect()
    gc.freeze()
    gc.disable()
    found = {"bare": [], "recorded": [], "bare again": []}
    for _ in range(rounds):
        for mode in random.sample(sorted(found), len(found)):
            hooks.switch(mode != "recorded")
            hooks.switch(mode == "recorded")
            steps.run(SETTLING)
            found[mode].append(steps.run(BLOCK))
    middle = {
        mode: [statistics.median(column) for column in zip(*rows, strict=True)]
        for mode, rows in found.items()
    }
    (folder / "cold.json").write_text(json.dumps(middle))
    hooks.switch(True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

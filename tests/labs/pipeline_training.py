"""A real training of two pipelines of two stages over Gloo; one worker's compute takes longer.

``pipeline_training.py FOLDER STEPS`` forks the ranks after one import. Compute is sleeping, so that
a busy machine changes little: 10 ms a forward and a backward, 40 ms on ``SLOW``.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

SLOW = 2
"""Data-parallel rank 1, stage 0."""
MICRO_BATCHES = 4


class Work(torch.autograd.Function):
    """Takes its time, forward and backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Stage(nn.Module):
    """One stage of the model."""

    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x):
        """Return the activations for the next stage."""
        return Work.apply(self.linear(x), self.seconds)


def train(folder, rank, steps):
    """Train one rank: a pipeline of two, gradients shared with the other pipeline."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    module = Stage(0.04 if rank == SLOW else 0.01)
    stage = pipelining.PipelineStage(
        module, rank % 2, 2, torch.device("cpu"), group=mesh.get_group("pp")
    )
    schedule = pipelining.Schedule1F1B(
        stage, MICRO_BATCHES, loss_fn=lambda out, target: (out - target).pow(2).mean()
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x = torch.ones(8, 8)
    for _ in range(steps):
        schedule.step(x) if rank % 2 == 0 else schedule.step(target=x)
        for weight in module.parameters():
            dist.all_reduce(weight.grad, group=mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def main():
    """Fork the ranks and wait for them."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    os.environ["KANSOKU_RUN_ID"] = "pipeline"
    children = []
    for rank in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                train(folder, rank, steps)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))


if __name__ == "__main__":
    main()

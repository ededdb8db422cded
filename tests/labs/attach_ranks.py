"""Trainings to be watched from outside: ranks over Gloo, forked after one import.

For each line ``CASE STEPS FOLDER`` on stdin it forks the ranks and prints their pids, later their exit
codes. Each rank waits for ``FOLDER/go`` before it joins the process group: so an observer can be
there before. With STEPS 0 they train until ``FOLDER/stop`` is there. What each rank computed is in
``FOLDER/RANK.json``.
"""

import atexit
import gc
import importlib
import itertools
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

RANKS = {"mesh": 4}  # otherwise two
PIPELINES = {
    "pipeline": ("Schedule1F1B", 1),
    "gpipe": ("ScheduleGPipe", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
}
"""Case → schedule, stages a rank."""


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit("nobody said go")
        time.sleep(0.005)


def model(case):
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    if case == "ddp":
        return nn.parallel.DistributedDataParallel(made)
    if case == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(made[0])
        fully_shard(made)
    elif case == "tensor":
        parallelize(made, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    elif case == "mesh":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize(made, mesh["tp"])
        fully_shard(made, mesh=mesh["dp"])
    return made


def parallelize(model, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def train_pipeline(case, rank, steps):
    """Two stages, four micro-batches; 1F1B, GPipe, or two stages a rank by turns."""
    from torch.distributed import pipelining

    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    name, parts = PIPELINES[case]
    stages = [
        pipelining.PipelineStage(
            nn.Linear(64, 64),
            rank + 2 * i,
            2 * parts,
            torch.device("cpu"),
            group=mesh.get_group("pp"),
        )
        for i in range(parts)
    ]
    schedule = getattr(pipelining, name)(
        stages if parts > 1 else stages[0],
        4,
        loss_fn=lambda out, target: (out - target).pow(2).mean(),
    )
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for x in itertools.islice(DataLoader(torch.randn(200_000, 64), batch_size=16), steps):
        schedule.step(x) if rank == 0 else schedule.step(target=x)
        optimizer.step()
        optimizer.zero_grad()
    return [weights[0].sum().item().hex()]


def update_inside(model):
    """Update each parameter as soon as the backward has its gradient; return nothing to step."""
    optimizers = {weight: torch.optim.SGD([weight], lr=0.01) for weight in model.parameters()}

    def update(weight):
        dist.all_reduce(weight.grad)
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in optimizers:
        weight.register_post_accumulate_grad_hook(update)


def train(case, rank, steps, folder):
    """Train; a flag is reduced each step, so all ranks stop at the same one."""
    trained = model(case)
    optimizer = None
    if case == "inside":
        update_inside(trained)
    else:
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    torch.manual_seed(7 + rank)
    loader = DataLoader(torch.randn(200_000, 64), batch_size=16)
    deadline = time.monotonic() + 90
    flag, losses, pair = torch.zeros(1), [], torch.ones(5)
    for step, x in enumerate(loader):
        loss = trained(x).pow(2).mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
        if case == "pairs":
            if rank == 0:
                dist.send(pair, 1)
                dist.recv(pair, 1)
            else:
                dist.recv(pair, 0)
                dist.send(pair, 0)
        leave = (folder / "stop").exists() or time.monotonic() > deadline
        flag[0] = step + 1 == steps or (not steps and leave)
        dist.all_reduce(flag)
        if flag.item():
            break
        if not steps:
            time.sleep(0.005)
    return losses


def rank_main(case, rank, steps, folder):
    torch.set_num_threads(1)
    wait_for(folder / "go")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS.get(case, 2),
    )
    if case in PIPELINES:
        losses = train_pipeline(case, rank, steps)
    else:
        losses = train(case, rank, steps, folder)
    (folder / f"{rank}.json").write_text(json.dumps({"losses": losses}))
    dist.destroy_process_group()


def fork_ranks(case, steps, folder):
    """Train one case on forked ranks; say their pids, then that they have ended."""
    os.environ["KANSOKU_RUN_ID"] = folder.name
    sys.stdout.flush()
    pids = []
    for rank in range(RANKS.get(case, 2)):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(case, rank, steps, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    print(*pids, flush=True)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)


def main():
    for name in (
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
    ):
        importlib.import_module(name)
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        case, steps, folder = line.split()
        fork_ranks(case, int(steps), Path(folder))


if __name__ == "__main__":
    main()

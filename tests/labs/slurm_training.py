"""A real data-parallel training for ``srun``: resumes from its checkpoint, writes every loss.

Arguments: folder. Every rank computes the same batches for the same step, whoever runs it, so the
losses of steps done twice must be the same.
"""

import os
import sys
import time
from pathlib import Path

STEPS, EVERY, PACE_S = 400, 10, 0.1


def main():
    import torch
    import torch.distributed as dist
    from torch import nn

    folder = Path(sys.argv[1])
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{attempt}", rank=rank, world_size=world
    )
    layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    # The newest one counts, as trainers do it: a broken one there ends the training.
    kept = sorted(folder.glob("step_*.pt"), key=lambda path: int(path.stem[5:]))
    first = 0
    if kept:
        state = torch.load(kept[-1], weights_only=True)
        layers.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    node = os.environ["SLURMD_NODENAME"]
    print(f"rank {rank} on {node} begins at step {first}", flush=True)
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            with (folder / "loss.csv").open("a") as file:
                file.write(f"{attempt},{step},{total.item() / world!r}\n")
            print(f"step {step} loss {total.item() / world:.4f}", flush=True)
            if (step + 1) % EVERY == 0:
                draft = folder / "step.tmp"
                torch.save(
                    {"model": layers.state_dict(), "optimizer": optimizer.state_dict(),
                     "step": step + 1}, draft,
                )  # fmt: skip
                draft.replace(folder / f"step_{step + 1}.pt")
            if (folder / "enough").exists():
                total.fill_(float("nan"))
        dist.broadcast(total, 0)
        if not torch.isfinite(total):
            break
        time.sleep(PACE_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A small DDP training over Gloo that knows nothing of kansoku; runs until told to stop.

``RANK=… WORLD_SIZE=… python plain_training.py FOLDER``: ranks meet by a file in FOLDER; training
ends when ``FOLDER/stop`` exists. Prints the number of steps and leaves its losses, bit by bit, in
``FOLDER/losses-RANK``.
"""

import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
    )
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 0
    losses = []
    stop = torch.zeros(1)
    while not stop.item():
        optimizer.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        steps += 1
        losses.append(loss.item().hex())
        # All stop at the same step.
        stop.fill_(float((folder / "stop").exists()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if steps == 1:
            (folder / f"started-{rank}").touch()
    print(steps, flush=True)
    (folder / f"losses-{rank}").write_text("\n".join(losses))
    if sys.argv[2:] == ["at-once"]:
        # Torch 2.13 may abort in order: Gloo's threads may outlive what joins them.
        (folder / f"through-{rank}").touch()
        while len(list(folder.glob("through-*"))) < world:
            time.sleep(0.01)
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

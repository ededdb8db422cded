"""A data-parallel training of two ranks, each in a network namespace: a megabyte of gradients a step.

burst_training.py NAMESPACE NAMESPACE FOLDER    starts one rank in each, on nodes ``a`` and ``b``
burst_training.py rank N FOLDER                 is one rank
"""

import os
import subprocess
import sys
import time
from pathlib import Path

STEPS, PAUSE_S = 10, 0.08
WIDTH = 512  # one layer: 512 × 512 × 4 bytes of gradients


def launch(namespaces: list[str], folder: str) -> int:
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, __file__, "rank", str(n), folder],
            env={**os.environ, "KANSOKU_NODE": node, "GLOO_SOCKET_IFNAME": "nic"},
        )
        for n, (namespace, node) in enumerate(zip(namespaces, "ab", strict=True))
    ]
    return max(abs(rank.wait()) for rank in ranks)


def rank(number: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    meeting = Path(folder) / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    model = nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        time.sleep(PAUSE_S)
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(launch(sys.argv[1:3], sys.argv[3]))

"""One rank of the collective sweep; started by torchrun, rank 0 prints one JSON line.

Every repetition starts from a barrier; a rank's time is its own, and the slowest rank's counts.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_WARM_UP = 3


def _operation(
    name: str, elements: int, group: Any, ranks: int, device: torch.device
) -> Callable[[], None]:
    me = dist.get_rank(group)
    full = torch.ones(elements, dtype=torch.float32, device=device)
    shard = torch.ones(elements // ranks, dtype=torch.float32, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(full, group=group)
    if name == "all_gather":
        parts = list(full.chunk(ranks))
        return lambda: dist.all_gather(parts, shard, group=group)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(shard, full, group=group)
    if name == "all_to_all":
        out = torch.empty_like(full)
        return lambda: dist.all_to_all_single(out, full, group=group)

    members = dist.get_process_group_ranks(group)

    def pair() -> None:
        # Rank 0 sends to the last rank of the group: the longest way in it.
        if me == 0:
            dist.send(full, members[-1], group=group)
        elif me == ranks - 1:
            dist.recv(full, members[0], group=group)

    return pair


def _time(deed: Callable[[], None], repetitions: int, group: Any, device: torch.device) -> Any:
    times = torch.zeros(repetitions, dtype=torch.float64)
    for number in range(-_WARM_UP, repetitions):
        dist.barrier(group)
        begin = time.perf_counter()
        deed()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 0:
            times[number] = time.perf_counter() - begin
    slowest = times.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.cpu()


def main() -> None:
    """Sweep and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--operations", required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--out", required=True)
    settings = parser.parse_args()
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    ranks, group = dist.get_world_size(), dist.group.WORLD
    rows = []
    for name in settings.operations.split(","):
        for size in map(int, settings.sizes.split(",")):
            elements = max(size // 4 // ranks, 1) * ranks
            deed = _operation(name, elements, group, ranks, device)
            times = _time(deed, settings.repetitions, group, device)
            rows.append(
                {
                    "operation": name,
                    "ranks": ranks,
                    "bytes": elements * 4,
                    "seconds": float(times.median()),
                    "p95_seconds": float(times.quantile(0.95)),
                    "repetitions": settings.repetitions,
                }
            )
    if dist.get_rank() == 0:
        with open(settings.out, "w", encoding="utf-8") as file:  # noqa: PTH123 - argparse text
            json.dump(
                {
                    "backend": dist.get_backend(),
                    "torch": torch.__version__,
                    "device": torch.cuda.get_device_name(device) if cuda else "cpu",
                    "nodes": ranks // max(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), 1),
                    "points": rows,
                },
                file,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

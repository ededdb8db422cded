"""A training that is a program of its own, to be watched from outside.

``python attach_program.py STEPS optimizer|by-hand``: imports torch, says so, waits for a line, trains
STEPS steps. With WORLD_SIZE in the environment it is one rank of several over Gloo, which reduce a
flag in a second group each step, and waits for no line.
"""

import os
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    steps, update = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 8)
    group = None
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        group = dist.new_group(list(range(dist.get_world_size())))
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        print("imported", flush=True)
        sys.stdin.readline()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(8, 64)).pow(2).mean().backward()
        if update == "optimizer":
            optimizer.step()
        else:
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.01 * weight.grad
        optimizer.zero_grad()
        if group is not None:
            dist.all_reduce(torch.ones(3), group=group)
        time.sleep(0.01)
    if group is not None:
        dist.barrier()
        time.sleep(0.2)
    os._exit(0)  # Gloo's threads may outlive what joins them


if __name__ == "__main__":
    main()

"""A small GPT, trained data-parallel with plain PyTorch: the demonstration's job.

Run it by itself or under ``torchrun``:

    torchrun --nproc-per-node 4 examples/train_gpt.py --steps 60

It knows nothing of any observer. ``SLOW_RANK`` and ``SLOW_PHASE`` (forward, data or optimizer) in
the environment make one rank slow on purpose, as a sick machine would: ``SLOW_MS`` of extra work a
step.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Tokens(Dataset):
    """Random token sequences, the same on every rank."""

    def __init__(self, count, context, vocabulary):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(vocabulary, (count, context + 1), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        if slow("data"):
            time.sleep(SLOW_MS / 1000 / BATCH)  # as a slow disk would make it
        row = self.tokens[index]
        return row[:-1], row[1:]


class Block(nn.Module):
    """Attention and MLP with residuals, norms first."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, context, width = x.shape
        shape = (batch, context, self.heads, width // self.heads)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a head."""

    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        if slow("forward"):
            spin(SLOW_MS)
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


RANK = int(os.environ.get("RANK", "0"))
SLOW_MS = float(os.environ.get("SLOW_MS", "60"))
BATCH = 4


def slow(phase):
    """Say whether this rank is to be slow in this phase."""
    return os.environ.get("SLOW_PHASE") == phase and os.environ.get("SLOW_RANK") == str(RANK)


def spin(milliseconds):
    """Compute for so much CPU time, as a throttled processor would need for the same work."""
    end = time.thread_time() + milliseconds / 1000
    work = torch.ones(64, 64)
    while time.thread_time() < end:
        work = work @ work / 64


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=512)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    world = dist.get_world_size() if distributed else 1
    model = GPT(args.vocabulary, args.context, args.width, 4, args.layers)
    trained = DistributedDataParallel(model) if distributed else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-4)
    if slow("optimizer"):
        optimizer.register_step_pre_hook(lambda *_: spin(SLOW_MS))
    data = Tokens(args.steps * BATCH * world, args.context, args.vocabulary)
    sampler = DistributedSampler(data) if distributed else None
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    for step, (tokens, targets) in enumerate(loader):
        if step == args.steps:
            break
        optimizer.zero_grad()
        logits = trained(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        if RANK == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

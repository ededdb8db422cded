"""Real trainings in small: ranks forked after one import of torch, a file rendezvous, Gloo.

Run as a program: ``python training_ranks.py OUT CASE…``. Every rank writes what the script itself
counted to ``OUT/CASE-RANK.json``; the rings, if kansoku is on the path, go to
``$KANSOKU_RING_DIR/CASE``. The script knows nothing of kansoku.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

VOCABULARY, WIDTH, SEQUENCE, BATCH, LAYERS = 64, 32, 16, 4, 2
STEPS = int(os.environ.get("STEPS", "5"))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, sequence, _ = x.shape
        q, k, v = (
            part(x).view(batch, sequence, -1, 8).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recompute = recompute

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Tokens(Dataset):
    def __init__(self, count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(VOCABULARY, (count, SEQUENCE), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]


def loader(workers=0, steps=STEPS):
    options = {"multiprocessing_context": "fork"} if workers else {}
    return DataLoader(Tokens(steps * BATCH), batch_size=BATCH, num_workers=workers, **options)


def loss_of(model, ids):
    logits = model(ids)
    return cross_entropy(logits.reshape(-1, VOCABULARY), ids.reshape(-1))


class Count(dict):
    """What the script itself counted."""

    def add(self, key, by=1):
        self[key] = self.get(key, 0) + by


def ddp_facts(model, count):
    """Return DDP's own account of its buckets (rebuilt after the first step)."""
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    count["buckets"] = len(sizes.split(",")) if sizes else 0
    count["gradient_bytes"] = sum(p.numel() * 4 for p in model.parameters())


def train(model, optimizers, batches, count, *, micro=1, no_sync=None):
    loss = torch.zeros(())
    for number, ids in enumerate(batches):
        count.add("loads")
        last = (number + 1) % micro == 0
        with contextlib.nullcontext() if last or no_sync is None else no_sync():
            loss = loss_of(model, ids)
            count.add("forwards")
            loss.backward()
            count.add("backwards")
        if last:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            count.add("steps")
    count["loss"] = float(loss.detach()).hex()
    return loss


def case_ddp(rank, count):
    model = DistributedDataParallel(GPT())
    train(model, [torch.optim.AdamW(model.parameters())], loader(), count)
    ddp_facts(model, count)


def case_accumulation(rank, count):
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, [optimizer], loader(steps=4 * STEPS), count, micro=4, no_sync=model.no_sync)
    ddp_facts(model, count)


def case_recompute(rank, count):
    model = DistributedDataParallel(GPT(recompute=True))
    train(model, [torch.optim.SGD(model.parameters(), lr=0.1)], loader(), count)


def case_workers(rank, count):
    model = DistributedDataParallel(GPT())
    train(model, [torch.optim.SGD(model.parameters(), lr=0.1)], loader(workers=2), count)


def case_two_optimizers(rank, count):
    model = DistributedDataParallel(GPT())
    parameters = list(model.parameters())
    half = len(parameters) // 2
    optimizers = [
        torch.optim.AdamW(parameters[:half]),
        torch.optim.SGD(parameters[half:], lr=0.1),
    ]
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # one that never steps
    train(model, optimizers, loader(), count)


def case_adversarial(rank, count):
    """Two models, two losses, two updates in one step, the second after its own forward."""
    first, second = GPT(), GPT()
    ones = torch.optim.SGD(first.parameters(), lr=0.1)
    twos = torch.optim.SGD(second.parameters(), lr=0.1)
    for ids in loader():
        for model, optimizer in ((first, ones), (second, twos)):
            loss_of(model, ids).backward()
            count.add("forwards")
            count.add("backwards")
            optimizer.step()
            optimizer.zero_grad()
        count.add("steps")


def case_evaluation(rank, count):
    import torch.distributed.checkpoint as dcp

    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = Path(os.environ["OUT"])
    for number, ids in enumerate(loader()):
        loss_of(model, ids).backward()
        count.add("forwards")
        optimizer.step()
        optimizer.zero_grad()
        count.add("steps")
        if number == 2:
            model.eval()
            with torch.no_grad():
                for held_out in loader(steps=3):
                    loss_of(model, held_out)
                    count.add("evaluations")
            model.train()
            torch.save(model.state_dict(), folder / f"evaluation-{rank}.pt")
            torch.load(folder / f"evaluation-{rank}.pt")
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
            count.add("checkpoints", 3)


def case_compile(rank, count):
    import torch._dynamo as dynamo

    model = torch.compile(GPT(), backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(DistributedDataParallel(model), [optimizer], loader(), count)
    count["graphs"] = dynamo.utils.counters["stats"]["unique_graphs"]
    count["graph_breaks"] = sum(dynamo.utils.counters["graph_break"].values())


class Dispatched(TorchDispatchMode):
    """Torch's own dispatch mode: counts the communication operators it is shown."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        space, _, operator = name.partition("::")
        if space in ("c10d", "_c10d_functional") and operator != "wait_tensor":
            self.count.setdefault("dispatched", {})
            seen = self.count["dispatched"]
            seen[operator] = seen.get(operator, 0) + 1
        return func(*args, **(kwargs or {}))


def case_fsdp(rank, count):
    from torch.distributed.fsdp import fully_shard

    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with Dispatched(count):
        train(model, [optimizer], loader(), count)


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for block in model.blocks:
        plan = {
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def case_tensor(rank, count):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = GPT()
    tensor_parallel(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with Dispatched(count):
        train(model, [optimizer], loader(), count)


def case_mesh(rank, count):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = GPT()
    tensor_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with Dispatched(count):
        train(model, [optimizer], loader(), count)


def case_pipeline(rank, count):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    micro = 4
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    whole = GPT()
    part = (
        nn.Sequential(whole.embedding, whole.blocks[0])
        if rank == 0
        else nn.Sequential(whole.blocks[1], whole.head)
    )
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))

    def loss(logits, ids):
        return cross_entropy(logits.reshape(-1, VOCABULARY), ids.reshape(-1))

    schedule = Schedule1F1B(stage, micro, loss_fn=loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for ids in loader():
        schedule.step(ids) if rank == 0 else schedule.step(target=ids)
        optimizer.step()
        optimizer.zero_grad()
        count.add("steps")
        count.add("micro_batches", micro)


def case_collectives(rank, count):
    """Every collective of the Python API once, bytes counted as nccl-tests does."""
    ranks = dist.get_world_size()
    x = torch.ones(6)
    parts = [torch.ones(3) for _ in range(ranks)]
    expected = {}

    def note(name, size):
        n, b = expected.get(name, (0, 0))
        expected[name] = (n + 1, b + size)

    dist.all_reduce(x)
    note("all_reduce", 24)
    dist.all_reduce(x.to(torch.bfloat16), async_op=True).wait()
    note("all_reduce", 12)
    dist.broadcast(x, 0)
    note("broadcast", 24)
    dist.reduce(x, 1)
    note("reduce", 24)
    dist.all_gather(parts, torch.ones(3))
    note("all_gather", 12 * ranks)
    dist.all_gather_into_tensor(torch.empty(3 * ranks), torch.ones(3))
    note("all_gather", 12 * ranks)
    dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * ranks))
    note("reduce_scatter", 12 * ranks)
    dist.all_to_all_single(torch.empty(ranks * 2), torch.ones(ranks * 2))
    note("all_to_all", 8 * ranks)
    dist.gather(torch.ones(3), parts if rank == 0 else None, dst=0)
    note("gather", 12 * ranks)
    dist.scatter(torch.ones(3), parts if rank == 0 else None, src=0)
    note("scatter", 12 * ranks)
    if rank == 0:
        dist.send(torch.ones(5), 1)
        dist.isend(torch.ones(2), 1).wait()
        note("send", 20)
        note("send", 8)
    else:
        dist.recv(torch.ones(5), 0)
        dist.irecv(torch.ones(2), 0).wait()
        note("recv", 20)
        note("recv", 8)
    dist.barrier()
    note("barrier", 0)
    count["expected"] = expected


def case_long(rank, count):
    """Many short steps; with a small ring it wraps many times."""
    steps = int(os.environ.get("LONG_STEPS", "5000"))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, flag = torch.ones(2, 4), torch.ones(3)
    for number in range(steps):
        model(x).sum().backward()
        optimizer.step()
        count.add("steps")
        if number % 2 == 0:
            dist.all_reduce(flag)
            count.add("collectives")
            count.add("bytes", 12)
    count["loss"] = float(model(x).sum()).hex()


def case_hang(rank, count):
    """Rank 1 never comes to the last all_reduce; the others wait for it."""
    model = DistributedDataParallel(GPT())
    train(model, [torch.optim.SGD(model.parameters(), lr=0.1)], loader(steps=3), count)
    marker = Path(os.environ["OUT"]) / f"hanging-{rank}"
    if rank == 1:
        marker.touch()
        time.sleep(600)
    marker.touch()
    dist.all_reduce(torch.ones(7))


FOUR_RANKS = {"mesh"}


def run_rank(case, rank, ranks, folder):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{case}.rendezvous", rank=rank, world_size=ranks
    )
    count = Count()
    globals()[f"case_{case}"](rank, count)
    (folder / f"{case}-{rank}.json").write_text(json.dumps(count))
    dist.destroy_process_group()


def main():
    folder = Path(sys.argv[1])
    os.environ["OUT"] = str(folder)
    # What the ranks would import each for itself costs seconds: once, before they are forked.
    for name in (
        "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
        "torch.distributed.pipelining", "torch.distributed.checkpoint", "torch._functorch.aot_autograd",
    ):  # fmt: skip
        importlib.import_module(name)
    gc.freeze()
    context = multiprocessing.get_context("fork")
    status = 0
    for case in sys.argv[2:]:
        os.environ["KANSOKU_RUN_ID"] = case
        ranks = 4 if case in FOUR_RANKS else 2
        (folder / f"{case}.rendezvous").unlink(missing_ok=True)
        processes = [
            context.Process(target=run_rank, args=(case, rank, ranks, folder))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        (folder / f"{case}.pids").write_text(" ".join(str(p.pid) for p in processes))
        for process in processes:
            process.join()
        status |= any(process.exitcode for process in processes)
    sys.exit(status)


if __name__ == "__main__":
    main()

"""Trainings whose products a recorder may miss or count twice: ranks forked after one import.

Run as a program: ``python product_ranks.py OUT CASE…``, or ``… OUT --alone CASE`` in the process
itself, without a process group. Every rank writes its losses and what torch's own FlopCounterMode
says of the whole model's forward to ``OUT/CASE-RANK.json``. The script knows nothing of kansoku.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

VOCABULARY, WIDTH, SEQUENCE, BATCH, LAYERS, HEADS = 64, 32, 16, 4, 2, 4
STEPS = 4


class Block(nn.Module):
    """Attention by torch's function, in a module whose name does not say so."""

    def __init__(self, recompute):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.recompute = recompute

    def forward(self, x):
        if self.recompute is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.recompute)

    def mix(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def body(self, x):
        h = self.norm(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        x = x + self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class ByHand(Block):
    """Attention written out: products that pass by every module."""

    def mix(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


class GPT(nn.Module):
    def __init__(self, block=Block, recompute=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block(recompute) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    """Torch's own attention, with ids as (batch, sequence) or (sequence, batch)."""

    def __init__(self, *, batch_first):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0, batch_first=batch_first
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids)))


class Experts(nn.Module):
    """Products with parameters: tied embedding, batched experts, a recurrent and a conv layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, ids):
        x = self.embedding(ids)
        routed = torch.bmm(x.reshape(4, -1, WIDTH), self.experts)
        x = x + routed.reshape(x.shape)
        x = x + self.recurrent(x)[0]
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return x @ self.embedding.weight.T


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator) for _ in range(STEPS)]


def train(model, rank, count, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    for ids in batches(rank):
        logits = model(ids)
        loss = functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids.reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count.setdefault("losses", []).append(float(loss).hex())


def whole_forward(model):
    """Return the FLOPs of a forward by torch's counter, which knows attention as its products."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(batches(0)[0])
    return counter.get_total_flops()


def case_function(rank, count):
    train(GPT(), rank, count)


def case_by_hand(rank, count):
    train(GPT(ByHand), rank, count)


def case_recompute(rank, count):
    train(GPT(recompute=False), rank, count)


def case_reentrant(rank, count):
    train(GPT(recompute=True), rank, count)


def case_broken(rank, count):
    """The first forward fails half way, as one that runs out of memory, and is tried again."""
    model = GPT()
    head, model.head = model.head, None
    try:
        model(batches(rank)[0])
    except TypeError:
        model.head = head
    train(model, rank, count)


class MultipliesBack(torch.autograd.Function):
    """Products in the backward only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ x


class Penalty(GPT):
    """A backward inside the forward, as penalties on gradients do."""

    def forward(self, ids):
        x = torch.ones(8, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(MultipliesBack.apply(x).sum(), x)
        return super().forward(ids) + 0 * slope.sum()


def case_penalty(rank, count):
    train(Penalty(), rank, count)


def case_batch_first(rank, count):
    train(Encoder(batch_first=True), rank, count)


def case_sequence_first(rank, count):
    train(Encoder(batch_first=False), rank, count)


def case_experts(rank, count):
    train(Experts(), rank, count)


def case_compiled(rank, count):
    import torch._dynamo as dynamo

    model = torch.compile(GPT(), backend="aot_eager", fullgraph=True)
    train(model, rank, count)
    count["graphs"] = dynamo.utils.counters["stats"]["unique_graphs"]


def case_compiled_blocks(rank, count):
    import torch._dynamo as dynamo

    model = GPT()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    train(model, rank, count)
    count["graphs"] = dynamo.utils.counters["stats"]["unique_graphs"]


def case_inductor(rank, count):
    train(torch.compile(GPT()), rank, count)


def mesh_of(shape, names):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def split(model, mesh, parts):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if parts == "all":
        plan |= {name: ColwiseParallel() for name in "qkv"} | {"out": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def case_split_mlp(rank, count):
    """Attention and head are whole on both ranks: each of their products is done twice."""
    model = GPT()
    split(model, mesh_of((2,), ("tp",)), "mlp")
    train(model, 0, count, foreach=False)


def case_split_all(rank, count):
    """Attention by the local heads, on plain tensors; the head is whole."""
    model = GPT()
    split(model, mesh_of((2,), ("tp",)), "all")
    train(model, 0, count, foreach=False)


def case_split_sequence(rank, count):
    """Sequence parallel: between the products each rank has a part of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = mesh_of((2,), ("tp",))
    model = GPT()
    whole = {"input_layouts": Shard(1)}
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for number in range(LAYERS):
        of = f"blocks.{number}."
        plan[of + "norm"] = SequenceParallel()
        plan |= {of + name: ColwiseParallel(**whole) for name in ("q", "k", "v", "up")}
        plan |= {of + name: RowwiseParallel(output_layouts=Shard(1)) for name in ("out", "down")}
        # The norm gives a DTensor; plain tensors of a part of the sequence go round it.
        plan[of[:-1]] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True
        )
    parallelize_module(model, mesh, plan)
    train(model, 0, count, foreach=False)


def case_split_data(rank, count):
    """Two by two: tensor parallelism under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = GPT()
    split(model, mesh["tp"], "mlp")
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    train(model, mesh["dp"].get_local_rank(), count, foreach=False)


def case_sharded(rank, count):
    """FSDP2 alone, with linear layers of their own and data on every rank."""
    from torch.distributed.fsdp import fully_shard

    model = GPT()
    for block in model.blocks:
        fully_shard(block.up)
        fully_shard(block)
    fully_shard(model)
    train(model, rank, count)


RANKS = {"split_mlp": 2, "split_all": 2, "split_sequence": 2, "sharded": 2, "split_data": 4}


def run_case(case, rank, folder):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    count = {}
    globals()[f"case_{case}"](rank, count)
    if rank == 0 and os.environ.get("PEER"):
        models = {
            "batch_first": lambda: Encoder(batch_first=True),
            "sequence_first": lambda: Encoder(batch_first=False),
            "by_hand": lambda: GPT(ByHand),
        }
        if case != "experts":  # the counter knows no recurrent layer
            count["whole_forward"] = whole_forward(models.get(case, GPT)())
    (folder / f"{case}-{rank}.json").write_text(json.dumps(count))


def run_rank(case, rank, ranks, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{case}.rendezvous", rank=rank, world_size=ranks
    )
    run_case(case, rank, folder)
    dist.destroy_process_group()


def main():
    folder = Path(sys.argv[1])
    if sys.argv[2] == "--alone":
        os.environ["KANSOKU_RUN_ID"] = sys.argv[3] + "_alone"
        run_case(sys.argv[3], 0, folder)
        return
    # What the ranks would import each for itself costs seconds: once, before they are forked.
    for name in (
        "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
        "torch._functorch.aot_autograd",
    ):  # fmt: skip
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    status = 0
    for case in sys.argv[2:]:
        os.environ["KANSOKU_RUN_ID"] = case
        (folder / f"{case}.rendezvous").unlink(missing_ok=True)
        ranks = RANKS.get(case, 1)
        processes = [
            context.Process(target=run_rank, args=(case, rank, ranks, folder))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        status |= any(process.exitcode for process in processes)
    sys.exit(status)


if __name__ == "__main__":
    main()

"""The reference pre-training: plain PyTorch, no word of any observer.

GPT or Llama shapes; data parallel (DDP), sharded (FSDP2), tensor and sequence parallel, pipeline
(1F1B), and their products over a device mesh ``pp × dp × tp``. It trains to a target loss as MLPerf
does and writes MLLOG lines. Started by torchrun:

    torchrun --nproc-per-node 4 pretrain.py --tp 2 --strategy fsdp --target-loss 3.0 --mllog log.txt

Data are either a file of 16-bit tokens (``--tokens FILE``) or made up: every token follows from the
one before by a fixed random table most of the time, so that there is something to learn.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from kansoku.bench.edge.pretrain_flags import pretrain_parser, pretrain_problem

_REPEATS = 0.9
"""Chance that a made-up token is the successor of the one before."""


class RMSNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by the inverse root mean square."""
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Attention(nn.Module):
    """Causal attention with grouped key and value heads; rotary positions for Llama."""

    def __init__(self, width: int, heads: int, kv_heads: int, *, rotary: bool) -> None:
        super().__init__()
        self.head = width // heads
        self.rotary = rotary
        self.q = nn.Linear(width, heads * self.head, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head, bias=False)
        self.out = nn.Linear(heads * self.head, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend; head counts follow from the widths, so shards of them work as well."""
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, self.head).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        if self.rotary:
            q, k = _rotate(q), _rotate(k)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x: torch.Tensor) -> torch.Tensor:
    length, half = x.shape[-2], x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class FeedForward(nn.Module):
    """GELU, or SwiGLU for Llama."""

    def __init__(self, width: int, inner: int, *, gated: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Widen, bend, narrow."""
        if self.gate is None:
            return self.down(functional.gelu(self.up(x)))
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: argparse.Namespace) -> None:
        super().__init__()
        llama = shape.family == "llama"
        norm = RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(shape.hidden), norm(shape.hidden)
        self.attention = Attention(shape.hidden, shape.heads, shape.kv_heads, rotary=llama)
        self.feed = FeedForward(shape.hidden, shape.ffn, gated=llama)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then feed forward, both with residuals."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Model(nn.Module):
    """The layers ``first`` to ``last`` of a model, with embedding and head at its ends."""

    def __init__(self, shape: argparse.Namespace, first: int, last: int) -> None:
        super().__init__()
        begins, ends = first == 0, last == shape.layers
        self.token = nn.Embedding(shape.vocab, shape.hidden) if begins else None
        learned = begins and shape.family == "gpt"
        self.position = nn.Embedding(shape.seq, shape.hidden) if learned else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(first, last))
        norm = RMSNorm if shape.family == "llama" else nn.LayerNorm
        self.norm = norm(shape.hidden) if ends else None
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False) if ends else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, or the activations between two stages."""
        if self.token is not None:
            tokens = x
            x = self.token(tokens)
            if self.position is not None:
                x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Data:
    """Batches of token sequences, by step and replica, the same in every restart."""

    def __init__(self, settings: argparse.Namespace, replica: int, replicas: int) -> None:
        self.settings, self.replica, self.replicas = settings, replica, replicas
        self.tokens = None
        if settings.tokens:
            raw = torch.frombuffer(
                bytearray(Path(settings.tokens).read_bytes()), dtype=torch.uint16
            )
            self.tokens = raw.to(torch.int64)
        generator = torch.Generator().manual_seed(17)
        self.successor = torch.randperm(settings.vocab, generator=generator)

    def batch(self, step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, ``(count, seq)`` each."""
        seq, vocab = self.settings.seq, self.settings.vocab
        seed = (self.settings.seed, step, self.replica)
        generator = torch.Generator().manual_seed(hash(seed) & 0x7FFFFFFF)
        if self.tokens is not None:
            starts = torch.randint(len(self.tokens) - seq - 1, (count,), generator=generator)
            rows = torch.stack([self.tokens[s : s + seq + 1] for s in starts.tolist()])
        else:
            rows = torch.randint(vocab, (count, seq + 1), generator=generator)
            follow = torch.rand(count, seq + 1, generator=generator) < _REPEATS
            for at in range(1, seq + 1):
                rows[:, at] = torch.where(
                    follow[:, at], self.successor[rows[:, at - 1]], rows[:, at]
                )
        return rows[:, :-1], rows[:, 1:]


class Log:
    """MLLOG lines of rank 0."""

    def __init__(self, path: str | None, *, active: bool) -> None:
        self.file = open(path, "a", encoding="utf-8") if path and active else None  # noqa: PTH123, SIM115

    def event(
        self, key: str, value: object = None, kind: str = "POINT_IN_TIME", **meta: object
    ) -> None:
        """Write one event."""
        if self.file is None:
            return
        body = {
            "namespace": "", "time_ms": int(time.time() * 1000), "event_type": kind, "key": key,
            "value": value, "metadata": meta,
        }  # fmt: skip
        self.file.write(f":::MLLOG {json.dumps(body)}\n")
        self.file.flush()


def _tensor_parallel(model: Model, mesh: Any, *, sequence: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    names = ["attention.q", "attention.k", "attention.v", "feed.up"]
    for block in model.blocks:
        layout = Shard(1) if sequence else Replicate()
        gate = ["feed.gate"] if block.feed.gate is not None else []
        plan: dict[str, Any] = {name: ColwiseParallel() for name in (*names, *gate)}
        plan["attention.out"] = RowwiseParallel(output_layouts=layout)
        plan["feed.down"] = RowwiseParallel(output_layouts=layout)
        if sequence:
            for norm in ("norm1", "norm2"):
                plan[norm] = SequenceParallel()
            for part in ("attention", "feed"):
                plan[part] = PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                )
        parallelize_module(block, mesh, plan)


class SequenceShards(nn.Module):
    """Split activations along the sequence before the blocks and join them after."""

    def __init__(self, model: Model, mesh: Any) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the whole model with sharded activations between the blocks' matrix products."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        model = self.model
        if model.token is not None:
            tokens = x
            x = model.token(tokens)
            if model.position is not None:
                x = x + model.position(torch.arange(tokens.shape[1], device=tokens.device))
        shards = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(self.mesh, [Shard(1)])
        y = shards.to_local()
        for block in model.blocks:
            y = block(y)
        joined = DTensor.from_local(y, self.mesh, [Shard(1)]).redistribute(self.mesh, [Replicate()])
        z = joined.to_local()
        return model.head(model.norm(z)) if model.norm is not None and model.head is not None else z


def _shard(model: Model, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Trainer:
    """One rank's training: model part, optimizer, schedule."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = s = settings
        world = dist.get_world_size()
        dp = world // (s.tp * s.pp)
        if problem := pretrain_problem(s, world):
            raise SystemExit(problem)
        cuda = torch.cuda.is_available()
        self.device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        )
        mesh = dist.device_mesh.init_device_mesh(
            self.device.type, (s.pp, dp, s.tp), mesh_dim_names=("pp", "dp", "tp")
        )
        self.dp, self.mesh = dp, mesh
        self.stage = mesh.get_local_rank("pp")
        self.data = Data(s, mesh.get_local_rank("dp"), dp)
        per = s.layers // s.pp
        torch.manual_seed(s.seed)
        part = Model(s, self.stage * per, (self.stage + 1) * per).to(self.device)
        if s.tp > 1:
            _tensor_parallel(part, mesh["tp"], sequence=s.sequence_parallel)
        self.module: nn.Module = part
        if s.tp > 1 and s.sequence_parallel:
            self.module = SequenceShards(part, mesh["tp"])
        if s.strategy == "fsdp" and dp > 1:
            _shard(part, mesh["dp"])
        elif dp > 1:
            self.module = nn.parallel.DistributedDataParallel(
                self.module, process_group=mesh["dp"].get_group()
            )
        self.optimizer = torch.optim.AdamW(part.parameters(), lr=s.lr, betas=(0.9, 0.95))
        self.part = part
        self.schedule = self._pipeline() if s.pp > 1 else None

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on one replica."""
        return int(self.settings.global_batch // (self.dp * self.settings.micro_batch))

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return bool(self.stage == self.settings.pp - 1)

    def _pipeline(self) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stage = PipelineStage(
            self.module,
            self.stage,
            self.settings.pp,
            self.device,
            group=self.mesh["pp"].get_group(),
        )
        return Schedule1F1B(stage, n_microbatches=self.micro_batches, loss_fn=_loss)

    def _forward_backward(self, step: int) -> float | None:
        """Run every micro-batch of a step; return the mean loss on stages that know it."""
        rows = self.micro_batches * self.settings.micro_batch
        inputs, targets = (t.to(self.device) for t in self.data.batch(step, rows))
        if self.schedule is not None:
            losses: list[torch.Tensor] = []
            if self.stage == 0:
                self.schedule.step(inputs)
            elif self.is_last:
                self.schedule.step(target=targets, losses=losses)
            else:
                self.schedule.step()
            return float(torch.stack(losses).detach().mean()) if losses else None
        total = 0.0
        parts = list(
            zip(
                inputs.split(self.settings.micro_batch),
                targets.split(self.settings.micro_batch),
                strict=True,
            )
        )
        for number, (x, y) in enumerate(parts):
            last = number == len(parts) - 1
            if isinstance(self.module, nn.parallel.DistributedDataParallel):
                self.module.require_backward_grad_sync = last
            loss = _loss(self.module(x), y) / len(parts)
            loss.backward()
            total += float(loss.detach())
        return total

    def step(self, step: int) -> float | None:
        """Train one step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * min(1.0, (step + 1) / max(self.settings.warm_up, 1))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._forward_backward(step)
        self.optimizer.step()
        return loss

    def evaluate(self) -> float:
        """Return the loss over held-out batches, the same on every rank."""
        total = torch.zeros(2, device=self.device)
        model = (
            self.module.module
            if isinstance(self.module, nn.parallel.DistributedDataParallel)
            else self.module
        )
        model.eval()
        with torch.no_grad():
            for number in range(self.settings.eval_batches):
                rows = self.micro_batches * self.settings.micro_batch
                inputs, targets = (t.to(self.device) for t in self.data.batch(-1 - number, rows))
                if self.schedule is None:
                    loss = _loss(model(inputs), targets)
                    total += torch.stack([loss, torch.ones_like(loss)])
                    continue
                losses: list[torch.Tensor] = []
                if self.stage == 0:
                    self.schedule.eval(inputs)
                elif self.is_last:
                    self.schedule.eval(target=targets, losses=losses)
                else:
                    self.schedule.eval()
                if losses:
                    mean = torch.stack(losses).mean()
                    total += torch.stack([mean, torch.ones_like(mean)])
        model.train()
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def checkpoint(self, step: int) -> None:
        """Write model and optimizer, each stage beside the others."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.part, self.optimizer)
        state = {f"stage{self.stage}": {"model": model, "optimizer": optimizer}}
        dcp.save(state, checkpoint_id=str(Path(self.settings.checkpoint) / f"step_{step}"))
        if dist.get_rank() == 0:
            latest = Path(self.settings.checkpoint) / "latest"
            draft = latest.with_suffix(".tmp")
            draft.write_text(str(step), encoding="utf-8")
            draft.replace(latest)

    def resume(self) -> int:
        """Load the last whole checkpoint; return the step to go on with."""
        latest = Path(self.settings.checkpoint) / "latest"
        if not latest.exists():
            return 0
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        text = latest.read_text(encoding="utf-8")
        if not text.isdigit() or not (latest.parent / f"step_{text}" / ".metadata").is_file():
            raise SystemExit(
                f"{latest}: names {text[:40]!r}, which is no whole checkpoint (write the number of "
                "another step_… folder into it, or remove it to start anew)"
            )
        step = int(text)
        model, optimizer = get_state_dict(self.part, self.optimizer)
        key = f"stage{self.stage}"
        state = {key: {"model": model, "optimizer": optimizer}}
        dcp.load(state, checkpoint_id=str(latest.parent / f"step_{step}"))
        set_state_dict(
            self.part, self.optimizer, model_state_dict=state[key]["model"],
            optim_state_dict=state[key]["optimizer"],
        )  # fmt: skip
        return step


def _settings() -> argparse.Namespace:
    settings = pretrain_parser(__doc__).parse_args()
    settings.kv_heads = settings.kv_heads or settings.heads
    # Two thirds of four widths for three matrices, rounded so that shards stay whole.
    gated = -(-8 * settings.hidden // 3 // 32) * 32
    inner = gated if settings.family == "llama" else 4 * settings.hidden
    settings.ffn = settings.ffn or inner
    return settings


def _announce(log: Log, s: argparse.Namespace) -> None:
    log.event("cache_clear", True)  # noqa: FBT003 - the log's value
    for key, value in (
        ("submission_benchmark", "kansoku_pretrain"), ("submission_division", "open"),
        ("submission_org", "unverified"), ("global_batch_size", s.global_batch),
        ("max_sequence_length", s.seq), ("seed", s.seed), ("opt_name", "adamw"),
        ("opt_base_learning_rate", s.lr), ("opt_learning_rate_warmup_steps", s.warm_up),
        ("target_accuracy", s.target_loss), ("num_layers", s.layers), ("hidden_size", s.hidden),
    ):  # fmt: skip
        log.event(key, value)


def _evaluations(trainer: Trainer, log: Log, begin: int) -> Iterator[tuple[int, float]]:
    """Train on and yield the loss of every evaluation with its step."""
    s = trainer.settings
    for step in range(begin, s.steps):
        started = time.perf_counter()
        trainer.step(step)
        seconds = time.perf_counter() - started
        samples = (step + 1) * s.global_batch
        log.event("tracked_stats", {"train_step_timing in s": seconds}, step=samples)
        if s.checkpoint and s.checkpoint_every and (step + 1) % s.checkpoint_every == 0:
            trainer.checkpoint(step + 1)
        if (step + 1) % s.eval_every == 0 or step + 1 == s.steps:
            log.event("eval_start", kind="INTERVAL_START", samples_count=samples)
            loss = trainer.evaluate()
            log.event("eval_accuracy", loss, samples_count=samples)
            log.event("eval_stop", kind="INTERVAL_END", samples_count=samples)
            yield step + 1, loss


def main() -> None:
    """Train to the target loss or the last step."""
    settings = _settings()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    log = Log(settings.mllog, active=dist.get_rank() == 0)
    log.event("init_start", kind="INTERVAL_START")
    _announce(log, settings)
    trainer = Trainer(settings)
    begin = trainer.resume() if settings.checkpoint else 0
    log.event("init_stop", kind="INTERVAL_END")
    dist.barrier()
    log.event("run_start", kind="INTERVAL_START")
    log.event("block_start", kind="INTERVAL_START", first_epoch_num=begin * settings.global_batch)
    status, loss = "aborted", math.nan
    for step, loss in _evaluations(trainer, log, begin):
        if dist.get_rank() == 0:
            sys.stderr.write(f"step {step} evaluation loss {loss:.4f}\n")
        if loss <= settings.target_loss:
            status = "success"
            break
    if settings.target_loss == 0 and math.isfinite(loss):
        status = "success"
    log.event("block_stop", kind="INTERVAL_END")
    log.event("run_stop", kind="INTERVAL_END", status=status)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

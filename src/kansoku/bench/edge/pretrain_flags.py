"""Flags of the reference pre-training, and what is wrong with them; read without PyTorch.

The launcher checks them before it starts ranks: what is wrong is one line, not one traceback a
rank.
"""

import argparse
from pathlib import Path

__all__ = ["pretrain_parser", "pretrain_problem"]

_MOST = 2**31 - 1
_WHOLE = {
    "layers": 4, "hidden": 128, "heads": 4, "kv-heads": 0, "ffn": 0, "seq": 64, "vocab": 512,
    "tp": 1, "pp": 1, "global-batch": 16, "micro-batch": 4, "steps": 40, "warm-up": 5,
    "eval-every": 10, "eval-batches": 1, "checkpoint-every": 0, "seed": 1,
}  # fmt: skip
_MAY_BE_ZERO = frozenset({"kv-heads", "ffn", "warm-up", "checkpoint-every", "seed"})
_TOKEN_BYTES = 2


def pretrain_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of every flag."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, default in _WHOLE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--family", choices=("gpt", "llama"), default="gpt")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--target-loss", type=float, default=0.0)
    parser.add_argument("--tokens")
    parser.add_argument("--checkpoint")
    parser.add_argument("--mllog")
    return parser


def _range_problem(s: argparse.Namespace) -> str | None:
    for name in _WHOLE:
        value, least = getattr(s, name.replace("-", "_")), 0 if name in _MAY_BE_ZERO else 1
        if not least <= value <= _MOST:
            return f"--{name} {value} is not {least} to {_MOST:,}"
    if not 0 < s.lr < float("inf"):
        return f"--lr {s.lr} is no learning rate"
    if not 0 <= s.target_loss < float("inf"):
        return f"--target-loss {s.target_loss} is no loss"
    return None


def _file_problem(s: argparse.Namespace) -> str | None:
    if s.checkpoint_every and not s.checkpoint:
        return "--checkpoint-every needs --checkpoint DIR"
    if s.tokens is None:
        return None
    if not Path(s.tokens).is_file():
        return f"--tokens {s.tokens}: no such file"
    size = Path(s.tokens).stat().st_size
    if size % _TOKEN_BYTES or size < _TOKEN_BYTES * (s.seq + 2):
        return f"--tokens {s.tokens}: {size:,} bytes are not {s.seq + 2} or more tokens of 16 bits"
    return None


def pretrain_problem(s: argparse.Namespace, ranks: int) -> str | None:
    """Return what keeps the flags from running on ``ranks`` ranks, in a line; None if nothing."""
    if problem := _range_problem(s):
        return problem
    dp, kv_heads = ranks // (s.tp * s.pp), s.kv_heads or s.heads
    ffn = s.ffn or s.tp
    for wrong, problem in (
        (ranks % (s.tp * s.pp) != 0, f"--pp {s.pp} x --tp {s.tp} does not divide {ranks} ranks"),
        (s.layers % s.pp != 0, f"--pp {s.pp} does not divide {s.layers} layers"),
        (s.hidden % s.heads != 0, f"{s.heads} heads do not divide --hidden {s.hidden}"),
        (
            s.family == "llama" and (s.hidden // s.heads) % 2 != 0,
            f"heads of {s.hidden // s.heads} are odd: rotary embedding turns pairs",
        ),
        (s.heads % kv_heads != 0, f"--kv-heads {kv_heads} does not divide {s.heads} heads"),
        (
            s.heads % s.tp != 0 or kv_heads % s.tp != 0 or ffn % s.tp != 0,
            f"--tp {s.tp} does not divide {s.heads} heads, {kv_heads} key/value heads and ffn",
        ),
        (
            s.sequence_parallel and s.seq % s.tp != 0,
            f"--sequence-parallel: --tp {s.tp} does not divide --seq {s.seq}",
        ),
    ):
        if wrong:
            return problem
    if s.global_batch % (dp * s.micro_batch):
        return (
            f"global batch {s.global_batch} does not divide by {dp} replicas x --micro-batch "
            f"{s.micro_batch}"
        )
    return _file_problem(s)

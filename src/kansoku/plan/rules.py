"""Which layouts are possible, and why the others are not."""

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.models import ModelShape
from kansoku.plan.layout import LayoutColumns, Training
from kansoku.plan.stages import even_chunks

__all__ = ["DOES_NOT_FIT", "SELECTIVE", "reject", "split_reasons"]

DOES_NOT_FIT = "does not fit in GPU memory"
SELECTIVE = "selective recomputation gains nothing with flash attention"


def split_reasons(
    shape: ModelShape, training: Training, columns: LayoutColumns, domain: int | None
) -> list[tuple[str, NDArray[np.bool_]]]:
    """Return reasons that depend on the sizes of the groups alone."""
    c = columns
    replicas = c.dp * c.cp
    widths = {shape.ffn if shape.moe_layers < shape.layers else shape.expert_ffn}
    widths |= {shape.expert_ffn} if shape.experts else set()
    kv_heads = shape.heads if shape.latent else shape.kv_heads
    return [
        (
            "tensor-parallel groups would straddle nodes",
            np.zeros(len(c), dtype=np.bool_)
            if domain is None
            else (domain % c.tp != 0) & (c.tp % domain != 0),
        ),
        ("tp does not divide the attention heads", shape.heads % c.tp != 0),
        (
            "tp and the key/value heads do not divide each other",
            (kv_heads % c.tp != 0) & (c.tp % kv_heads != 0),
        ),
        (
            "tp does not divide the feed-forward width",
            np.any([width % c.tp != 0 for width in widths], axis=0),
        ),
        ("more pipeline stages than layers", c.pp > shape.layers),
        (
            "the sequence does not divide into 2 x cp parts",
            (c.cp > 1) & (training.seq % (2 * c.cp) != 0),
        ),
        ("expert parallelism without experts", (c.ep > 1) & (shape.experts == 0)),
        ("ep does not divide the experts", (shape.experts > 0) & (shape.experts % c.ep != 0)),
        ("ep does not divide dp x cp", replicas % c.ep != 0),
    ]


def _schedule_reasons(
    shape: ModelShape, training: Training, columns: LayoutColumns
) -> list[tuple[str, NDArray[np.bool_]]]:
    """Return reasons that depend on chunks, micro-batches, recomputation and ZeRO."""
    c = columns
    batch = training.global_batch
    m = c.micro_batches(batch)
    flash = training.attention == "flash"
    return [
        (
            "dp x micro-batch does not divide the global batch",
            batch % (c.dp * c.micro_batch) != 0,
        ),
        ("interleaving needs a pipeline", (c.vp > 1) & (c.pp == 1)),
        (
            "the layers do not divide into pp x vp chunks",
            ~even_chunks(shape.layers, c) | (c.pp * c.vp > shape.layers + 2),
        ),
        ("interleaving needs micro-batches in multiples of pp", (c.vp > 1) & (m % c.pp != 0)),
        (
            "a zero-bubble schedule is not interleaved",
            np.full(len(c), training.schedule == "zero_bubble") & (c.vp > 1),
        ),
        ("ZeRO needs more than one replica", (c.zero > 0) & (c.dp * c.cp == 1)),
        (
            SELECTIVE,
            np.full(len(c), flash) & (c.recompute == 1),
        ),
    ]


def reject(
    shape: ModelShape,
    training: Training,
    columns: LayoutColumns,
    *,
    domain: int | None,
    searching: bool = True,
) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Return which layouts are valid, and how many fall to each reason (the first that applies).

    ``domain`` is the number of GPUs joined by NVLink, None where no machine is given. With
    ``searching`` false, layouts that are merely pointless are let through.
    """
    good = np.ones(len(columns), dtype=np.bool_)
    counts: dict[str, int] = {}
    reasons = split_reasons(shape, training, columns, domain)
    reasons += _schedule_reasons(shape, training, columns)
    for reason, bad in reasons:
        if not searching and reason.startswith(("selective", "ZeRO")):
            continue
        hit = good & bad
        if number := int(hit.sum()):
            counts[reason] = number
        good &= ~bad
    return good, counts

"""FLOPs of a training step under named conventions, and MFU/HFU.

A multiply and an add are two FLOPs; backward is twice forward. ``tokens`` are those of the
global batch. The conventions:

``6nd``
    6 x active parameters x tokens (Kaplan, arXiv 2001.08361).
``full_attention``
    Matrix products of every layer and the logits, attention scores counted in full
    (Megatron-LM, arXiv 2104.04473 eq. 3 and 2205.05198 eq. 7, without recomputation). The default.
``causal_attention``
    The same with half the attention scores, which a causal kernel does not compute.
``palm``
    6 x active parameters + 12 x layers x heads x head width x sequence (arXiv 2204.02311 app. B).
``hardware``
    ``full_attention`` and what the chosen recomputation adds: one more forward pass of the layers
    (full) or of the attention core (selective).
``hardware_korthikanti``
    As arXiv 2205.05198 eq. 8 counts selective recomputation: the attention core twice over.
"""

import math
from dataclasses import dataclass

from kansoku.catalog.models import ModelShape
from kansoku.errors import InputError
from kansoku.model import Mfu, StepWindow
from kansoku.plan.parameters import ParameterCounts, count_parameters

__all__ = ["CONVENTIONS", "StepFlops", "step_flops", "utilisation"]

CONVENTIONS = (
    "6nd",
    "full_attention",
    "causal_attention",
    "palm",
    "hardware",
    "hardware_korthikanti",
)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of one step of the whole job."""

    tokens: int
    matrices: float
    """Products with the layers' weights, forward and backward."""
    attention: float
    """Attention scores and their product with the values, counted in full."""
    logits: float
    conventions: dict[str, float]
    """Convention to FLOPs."""


def _matmul_parameters(shape: ModelShape, counts: ParameterCounts) -> float:
    """Weights of the layers that multiply one token (active experts alone)."""
    active = counts.experts_per_token * counts.expert + counts.shared_expert + counts.router
    dense = (shape.layers - shape.moe_layers) * counts.dense_ffn
    return float(shape.layers * counts.attention + dense + shape.moe_layers * active)


def step_flops(
    shape: ModelShape, *, global_batch: int, recompute: str = "none", seq: int | None = None
) -> StepFlops:
    """Return the FLOPs of a step over ``global_batch`` sequences, by convention."""
    if global_batch < 1:
        raise InputError(f"global batch must be at least 1, not {global_batch}")
    if recompute not in RECOMPUTE:
        raise InputError(
            f"unknown recomputation {recompute!r}", remedy=f"one of {', '.join(RECOMPUTE)}"
        )
    length = seq or shape.seq
    tokens = global_batch * length
    counts = count_parameters(shape)
    matrices = 6.0 * tokens * _matmul_parameters(shape, counts)
    widths = shape.heads * (shape.qk_dim + shape.v_dim)
    attention = 6.0 * tokens * shape.layers * length * widths
    logits = 6.0 * tokens * shape.hidden * shape.vocab
    full = matrices + attention + logits
    again = {"none": 0.0, "selective": attention / 3, "full": (matrices + attention) / 3}
    korthikanti = {"none": 0.0, "selective": attention, "full": (matrices + attention) / 3}
    return StepFlops(
        tokens=tokens,
        matrices=matrices,
        attention=attention,
        logits=logits,
        conventions={
            "6nd": 6.0 * tokens * counts.active,
            "full_attention": full,
            "causal_attention": full - attention / 2,
            "palm": 6.0 * tokens * counts.active + attention,
            "hardware": full + again[recompute],
            "hardware_korthikanti": full + korthikanti[recompute],
        },
    )


def utilisation(
    flops: StepFlops,
    *,
    step_s: float,
    peak_flops: float,
    peak_source: str,
    convention: str = "full_attention",
    window: StepWindow | None = None,
) -> Mfu:
    """Return MFU (or HFU under a ``hardware`` convention) of a step of ``step_s`` seconds.

    ``peak_flops`` is the dense peak of all GPUs together. Above 100 % raises InputError.
    """
    if convention not in flops.conventions:
        raise InputError(
            f"unknown FLOPs convention {convention!r}", remedy=f"one of {', '.join(CONVENTIONS)}"
        )
    if not (math.isfinite(step_s) and step_s > 0):
        raise InputError(f"a step must take more than 0 s, not {step_s}", remedy="seconds")
    if not (math.isfinite(peak_flops) and peak_flops > 0):
        raise InputError(
            f"a peak must be above 0 FLOP/s, not {peak_flops:g}", remedy="the dense peak of a GPU"
        )
    return Mfu(
        value=flops.conventions[convention] / step_s / peak_flops,
        convention=convention,
        peak_flops=peak_flops,
        peak_source=peak_source,
        window=window or StepWindow(from_step=1, to_step=1),
    )

"""Seconds of one layer and of the ends of the model on one GPU, forward and backward.

A matrix product takes its FLOPs at the reached share of the peak and its operands' bytes at the
reached memory rate, half overlapped (root of the sum of squares: the sum and the larger of the two
both fit the published step times worse), plus one kernel gap: small products come out inefficient
by themselves.
Elementwise kernels take their bytes. Bytes are counted tensor by tensor (16-bit values, one-byte
masks, fp32 weight gradients), not fitted.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.calibration import Calibration
from kansoku.catalog.models import ModelShape
from kansoku.plan.hardware import Hardware
from kansoku.plan.layout import LayoutColumns, Training

__all__ = ["Costs", "Engine", "Passes"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds by what limits them."""

    gemm: Array
    attention: Array
    elementwise: Array
    gaps: Array

    @property
    def total(self) -> Array:
        """Sum of the parts."""
        return self.gemm + self.attention + self.elementwise + self.gaps

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(
            gemm=self.gemm + other.gemm,
            attention=self.attention + other.attention,
            elementwise=self.elementwise + other.elementwise,
            gaps=self.gaps + other.gaps,
        )

    def times(self, factor: Array | float) -> "Costs":
        """Scale every part."""
        return Costs(
            gemm=self.gemm * factor,
            attention=self.attention * factor,
            elementwise=self.elementwise * factor,
            gaps=self.gaps * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Forward, backward for the inputs (with that of the weights), and the weights' share."""

    forward: Costs
    backward: Costs
    weight_gradient_s: Array
    """Of ``backward``: what a zero-bubble schedule may move."""


class Engine:
    """Compute times of a shape on one kind of GPU, for many layouts at once."""

    def __init__(
        self, shape: ModelShape, training: Training, hardware: Hardware, calibration: Calibration
    ) -> None:
        self._shape, self._training, self._calibration = shape, training, calibration
        gpu = hardware.accelerator
        wide = "fp16" if training.precision == "fp16" else "bf16"
        self._peak16 = gpu.peak(wide)
        self._fp8 = training.precision == "fp8"
        self._rate16 = self._peak16 * calibration.gemm_efficiency
        self._rate = (
            gpu.peak("fp8") * calibration.gemm_fp8_efficiency if self._fp8 else self._rate16
        )
        self._memory = gpu.memory_bytes_per_s * calibration.memory_efficiency

    def _product(
        self, m: Array, k: Array, n: Array, *, copies: Array | float = 1.0, wide: bool = False
    ) -> tuple[Array, Array, Array]:
        """Seconds of forward, input gradient and weight gradient of ``copies`` products."""
        low = self._fp8 and not wide
        rate, size = (self._rate, 1) if low else (self._rate16, 2)
        work = 2.0 * m * k * n * copies / rate
        memory = self._memory / copies
        forward = np.hypot(work, (size * (m * k + k * n) + 2 * m * n) / memory)
        inputs = np.hypot(work, (size * (m * n + k * n) + 2 * m * k) / memory)
        # The weight gradient is added to the buffer: read and written.
        buffer = 2 * self._training.grad_bytes * k * n
        weights = np.hypot(work, (size * (m * k + m * n) + buffer) / memory)
        return forward, inputs, weights

    def _products(self, columns: LayoutColumns, *, moe: bool) -> tuple[Array, Array, Array, int]:
        """Sum the layer's matrix products: forward, inputs, weights, kernels forward."""
        shape, tp = self._shape, columns.tp
        m = columns.micro_batch * self._training.seq / columns.cp
        hidden = np.full(len(columns), float(shape.hidden))
        if shape.latent:
            queries = shape.heads * shape.qk_dim / tp
            latent = np.full(len(columns), float(shape.kv_lora_rank + shape.qk_rope_dim))
            expand = shape.heads * (shape.qk_nope_dim + shape.v_dim) / tp
            sizes: list[tuple[Array, Array, Array, Array | float]] = [
                (m, hidden, latent, 1.0),
                (m, latent, expand, 1.0),
            ]
            if shape.q_lora_rank:
                rank = np.full(len(columns), float(shape.q_lora_rank))
                sizes += [(m, hidden, rank, 1.0), (m, rank, queries, 1.0)]
            else:
                sizes.append((m, hidden, queries, 1.0))
        else:
            qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
            sizes = [(m, hidden, qkv / tp, 1.0)]
        sizes.append((m, shape.heads * shape.v_dim / tp, hidden, 1.0))
        widths = 2 if shape.gated else 1
        if moe:
            # Every expert sees the tokens of all ranks of its expert-parallel group.
            local = shape.experts / columns.ep
            each = m * columns.ep * shape.experts_per_token / shape.experts
            width = shape.expert_ffn / tp
            for k, n in ((hidden, widths * width), (width, hidden)):
                sizes.append((each, k, n, local))
            sizes.append((m / tp, hidden, np.full(len(columns), float(shape.experts)), 1.0))
            if shape.shared_expert_ffn:
                width = shape.shared_expert_ffn / tp
                sizes += [(m, hidden, widths * width, 1.0), (m, width, hidden, 1.0)]
        else:
            sizes += [(m, hidden, widths * shape.ffn / tp, 1.0), (m, shape.ffn / tp, hidden, 1.0)]
        passes = [self._product(m_, k, n, copies=copies) for m_, k, n, copies in sizes]
        forward, inputs, weights = (np.sum([p[i] for p in passes], axis=0) for i in range(3))
        return forward, inputs, weights, len(sizes)

    def _attention(self, columns: LayoutColumns) -> tuple[Array, Array, Array, Array]:
        """Attention core: forward, backward (seconds), and their elementwise bytes."""
        shape, training = self._shape, self._training
        tokens = columns.micro_batch * training.seq / columns.cp
        heads = shape.heads / columns.tp
        full = 2.0 * tokens * training.seq * heads * (shape.qk_dim + shape.v_dim)
        rate = self._peak16 * self._calibration.attention_efficiency
        if training.attention == "flash":
            # Half for the causal mask; backward recomputes the scores: five products for two.
            work = full / 2 / rate
            return work, 2.5 * work, 0 * work, 0 * work
        scores = tokens * training.seq * heads
        # Scores written, softmax read and written, dropout read and written with its mask, read.
        return full / rate, 2 * full / rate, 11 * scores, 14 * scores

    def _elementwise(self, columns: LayoutColumns, *, moe: bool) -> tuple[Array, Array]:
        """Bytes of norms, residuals, activation, rotary embedding, FP8 casts."""
        shape, tp = self._shape, columns.tp
        tokens = columns.micro_batch * self._training.seq / columns.cp
        shared = tp if self._training.sequence_parallel else np.ones_like(tp)
        mask = 2 if shape.dropout else 0
        wide = tokens * shape.hidden / shared
        # Two norms (read, write), two residual sums (two reads, a write).
        forward, backward = (20 + mask) * wide, (22 + mask) * wide
        if moe:
            width = shape.experts_per_token * shape.expert_ffn + shape.shared_expert_ffn
            # Permuting tokens to experts and back, weighting and summing them.
            moved = 8 * shape.experts_per_token * wide
            forward, backward = forward + moved, backward + moved
        else:
            width = shape.ffn
        inner = tokens * width / tp
        heads = tokens * (shape.heads * shape.qk_dim + shape.kv_heads * shape.qk_dim) / tp
        rotary = 0 if shape.positions else 4
        forward = forward + (6 if shape.gated else 4) * inner + rotary * heads
        backward = backward + (10 if shape.gated else 6) * inner + rotary * heads
        if self._fp8:
            # Casts that no norm absorbs: read two bytes, write the value and its transpose.
            out = tokens * shape.heads * shape.v_dim / tp
            forward = forward + 4 * (out + inner)
            gradients = wide * 2 + heads + (2 if shape.gated else 1) * inner
            backward = backward + 4 * gradients
        return forward, backward

    def layer(self, columns: LayoutColumns, *, moe: bool = False) -> Passes:
        """Return one layer and micro-batch, recomputation included in backward."""
        forward, inputs, weights, products = self._products(columns, moe=moe)
        core, core_back, core_bytes, core_back_bytes = self._attention(columns)
        bytes_forward, bytes_backward = self._elementwise(columns, moe=moe)
        kernels = products + 6 + (1 if self._training.attention == "flash" else 5)
        kernels += (6 if moe else 0) + (products if self._fp8 else 0)
        gap = self._calibration.kernel_gap_s
        zero = np.zeros(len(columns))
        ahead = Costs(
            gemm=forward,
            attention=core + core_bytes / self._memory,
            elementwise=bytes_forward / self._memory,
            gaps=zero + kernels * gap,
        )
        back = Costs(
            gemm=inputs + weights,
            attention=core_back + core_back_bytes / self._memory,
            elementwise=bytes_backward / self._memory,
            gaps=zero + 2 * kernels * gap,
        )
        full = (columns.recompute == 2).astype(np.float64)
        selective = (columns.recompute == 1).astype(np.float64)
        again = Costs(gemm=zero, attention=ahead.attention, elementwise=zero, gaps=zero + gap)
        back = back + ahead.times(full) + again.times(selective)
        return Passes(forward=ahead, backward=back, weight_gradient_s=weights)

    def ends(self, columns: LayoutColumns) -> Passes:
        """Return logits and loss of one micro-batch on the last stage."""
        m = columns.micro_batch * self._training.seq / columns.cp
        hidden = np.full(len(columns), float(self._shape.hidden))
        width = self._shape.vocab / columns.tp
        forward, inputs, weights = self._product(m, hidden, width, wide=True)
        # fp32 logits: written, read for the maximum, the sum and the gradient, written back.
        loss = m * width / self._memory
        gap = np.full(len(columns), self._calibration.kernel_gap_s)
        zero = 0 * gap
        return Passes(
            forward=Costs(gemm=forward, attention=zero, elementwise=14 * loss, gaps=6 * gap),
            backward=Costs(
                gemm=inputs + weights, attention=zero, elementwise=8 * loss, gaps=6 * gap
            ),
            weight_gradient_s=weights,
        )

    def optimizer(self, local: Array, owned: Array) -> Array:
        """Seconds of the optimizer: ``local`` gradients read and cleared, ``owned`` states."""
        grad = self._training.grad_bytes
        # Norm and clearing of the gradients; read gradient, three fp32 states in and out, weight.
        return np.asarray((2 * grad * local + (grad + 26) * owned) / self._memory)

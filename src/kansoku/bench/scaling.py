"""Scaling: node counts side by side, and where the lost efficiency went.

With n GPUs, time T = tokens to converge / (n × tokens per second and GPU). Against the smallest
size, efficiency = (T0 / T) / (n / n0) = (rate / rate0) × (tokens0 / tokens): the first factor is
slower steps, the second more tokens to the same quality.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kansoku.errors import InputError

__all__ = ["Consistency", "Measurement", "ScalingRow", "check_published", "scaling_rows"]

# Published figures are rounded; two that agree differ by no more.
_AGREE_RATIO = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One size of the job. What was not measured or published is None."""

    nodes: int | None
    gpus: int
    minutes: float
    tokens: float | None = None
    """Tokens trained to reach the quality."""
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    label: str = "unverified"
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One size beside the smallest."""

    at: Measurement
    speedup: float
    ideal: float
    efficiency: float
    """Speed-up over ideal speed-up."""
    step_factor: float | None
    """Share of the efficiency kept by the steps: rate over the smallest size's rate."""
    convergence_factor: float | None
    """Share kept by convergence: the smallest size's tokens over this one's."""
    reason: str | None
    """Why the split is not known."""

    @property
    def lost(self) -> float:
        """Efficiency lost, 0-1."""
        return 1 - self.efficiency

    @property
    def lost_to_steps(self) -> float | None:
        """Part of the loss that slower steps caused, in proportion to the logarithms."""
        return self._share(self.step_factor)

    @property
    def lost_to_convergence(self) -> float | None:
        """Part of the loss that more tokens caused."""
        return self._share(self.convergence_factor)

    def _share(self, factor: float | None) -> float | None:
        if factor is None or self.efficiency <= 0:
            return None
        whole = math.log(self.efficiency)
        return 0.0 if whole == 0 else self.lost * math.log(factor) / whole


def _row(at: Measurement, base: Measurement) -> ScalingRow:
    speedup = base.minutes / at.minutes
    ideal = at.gpus / base.gpus
    efficiency = speedup / ideal
    step = convergence = None
    reason = None
    if at.tokens and base.tokens:
        convergence = base.tokens / at.tokens
        step = efficiency / convergence
    elif at.tokens_per_s_per_gpu and base.tokens_per_s_per_gpu:
        step = at.tokens_per_s_per_gpu / base.tokens_per_s_per_gpu
        convergence = efficiency / step
        reason = "tokens to converge follow from time and rate; they were not published"
    else:
        reason = "neither tokens to converge nor the rate of both sizes is known"
    return ScalingRow(
        at=at, speedup=speedup, ideal=ideal, efficiency=efficiency, step_factor=step,
        convergence_factor=convergence, reason=reason,
    )  # fmt: skip


def scaling_rows(measurements: Sequence[Measurement]) -> list[ScalingRow]:
    """Lay sizes beside the smallest, smallest first; raise InputError for fewer than two."""
    sizes = sorted(measurements, key=lambda m: m.gpus)
    if len({m.gpus for m in sizes}) < 2:
        raise InputError("scaling needs two sizes of the job at least")
    for one in sizes:
        if one.minutes <= 0 or one.gpus < 1:
            raise InputError(f"{one.gpus} GPUs in {one.minutes} min is no measurement")
    return [_row(one, sizes[0]) for one in sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistency:
    """What published figures say about each other."""

    implied_peak_tflops: float | None
    """TFLOP/s a GPU over MFU."""
    peak_name: str | None
    """The precision whose dense peak that is."""
    flops_per_token: float | None
    """TFLOP/s a GPU over tokens/s a GPU."""
    nearest_convention: str | None
    deviation: float | None
    """Of flops_per_token from the nearest convention, ratio."""
    implied_tokens: float | None
    """Tokens that time, GPUs and rate imply."""


def check_published(
    at: Measurement, peaks: dict[str, float], conventions: dict[str, float]
) -> Consistency:
    """Compare a published row with itself.

    ``peaks`` maps precision to dense FLOP/s of one GPU, ``conventions`` FLOPs convention to FLOPs
    per token. A name is given only where the figures agree within 2 %.
    """
    implied = at.tflops_per_gpu / at.mfu if at.tflops_per_gpu and at.mfu else None
    peak_name = None
    if implied is not None:
        name, peak = min(peaks.items(), key=lambda item: abs(item[1] / 1e12 - implied))
        peak_name = name if abs(peak / 1e12 / implied - 1) < _AGREE_RATIO else None
    per_token = nearest = deviation = None
    if at.tflops_per_gpu and at.tokens_per_s_per_gpu:
        per_token = at.tflops_per_gpu * 1e12 / at.tokens_per_s_per_gpu
        nearest, value = min(conventions.items(), key=lambda item: abs(item[1] - per_token))
        deviation = per_token / value - 1
    tokens = (
        at.tokens_per_s_per_gpu * at.gpus * at.minutes * 60 if at.tokens_per_s_per_gpu else None
    )
    return Consistency(
        implied_peak_tflops=implied, peak_name=peak_name, flops_per_token=per_token,
        nearest_convention=nearest, deviation=deviation, implied_tokens=tokens,
    )  # fmt: skip

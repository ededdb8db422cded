"""Time to train, GPU-hours, energy, evaluation and checkpoint time for a token budget."""

from dataclasses import dataclass

from kansoku.catalog.models import ModelShape
from kansoku.plan.hardware import Hardware
from kansoku.plan.layout import Layout, Training
from kansoku.plan.memory import OPTIMIZER_BYTES
from kansoku.plan.parameters import count_parameters

__all__ = ["Budget", "Cadence", "train_budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often a training run stops to evaluate and to save; None is never."""

    evaluate_every: int | None = None
    """Steps between evaluations."""
    evaluation_sequences: int | None = None
    checkpoint_every: int | None = None
    """Steps between checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a whole training costs; None with a reason in ``missing`` where it cannot be told."""

    tokens: float
    steps: float
    training_s: float
    """Steps alone."""
    evaluation_s: float
    checkpoint_bytes: float
    checkpoint_s: float | None
    """All synchronous saves together."""
    total_s: float
    gpu_hours: float
    energy_kwh: float | None
    """At the stated maximum of the nodes (or GPUs): an upper bound."""
    power_source: str | None
    missing: tuple[str, ...]


def train_budget(
    shape: ModelShape,
    training: Training,
    layout: Layout,
    hardware: Hardware,
    *,
    step_s: float,
    forward_share: float,
    tokens: float,
    cadence: Cadence | None = None,
) -> Budget:
    """Return what ``tokens`` cost at ``step_s`` a step.

    ``forward_share`` of a step is forward work: an evaluation sequence costs that much of a
    training sequence. Checkpoints hold 16-bit weights and the fp32 states.
    """
    cadence = cadence or Cadence()
    missing = []
    steps = tokens / training.tokens
    training_s = steps * step_s
    evaluation_s = 0.0
    if cadence.evaluate_every and cadence.evaluation_sequences:
        rounds = steps / cadence.evaluate_every
        each = step_s * forward_share * cadence.evaluation_sequences / training.global_batch
        evaluation_s = rounds * each
    size = float(count_parameters(shape).total) * (2 + OPTIMIZER_BYTES)
    checkpoint_s: float | None = 0.0
    if cadence.checkpoint_every:
        if hardware.storage_bytes_per_s is None:
            checkpoint_s = None
            missing.append(f"checkpoint time: the storage bandwidth of {hardware.name} is unknown")
        else:
            saves = steps / cadence.checkpoint_every
            checkpoint_s = saves * size / hardware.storage_bytes_per_s
    total = training_s + evaluation_s + (checkpoint_s or 0.0)
    nodes = -(-layout.gpus // hardware.gpus_per_node)
    watts, power_source = None, None
    if hardware.node_power_watts is not None:
        watts = nodes * hardware.node_power_watts
        power_source = f"{nodes} nodes at their maximum of {hardware.node_power_watts:.0f} W"
    elif hardware.gpu_power_watts is not None:
        watts = layout.gpus * hardware.gpu_power_watts
        power_source = (
            f"{layout.gpus} GPUs at their limit of {hardware.gpu_power_watts:.0f} W, without CPUs, "
            "fans and network"
        )
    else:
        missing.append(f"energy: the power of {hardware.name} is unknown")
    return Budget(
        tokens=tokens,
        steps=steps,
        training_s=training_s,
        evaluation_s=evaluation_s,
        checkpoint_bytes=size,
        checkpoint_s=checkpoint_s,
        total_s=total,
        gpu_hours=total / 3600 * layout.gpus,
        energy_kwh=None if watts is None else watts * total / 3.6e6,
        power_source=power_source,
        missing=tuple(missing),
    )

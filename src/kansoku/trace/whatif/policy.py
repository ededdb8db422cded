"""Thresholds of the what-if verdict."""

from dataclasses import dataclass

__all__ = ["WhatIfPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPolicy:
    """When a job is slow, and when one part is to blame."""

    slowdown: float = 1.03
    """Least slowdown worth an explanation (the method's own threshold)."""
    majority_share: float = 0.5
    """Least share of the loss that goes away with the culprit (the paper's M_W, M_S ≥ 50 %)."""
    worker_ratio: float = 0.03
    """Share of workers, rounded up, that M_W replaces: the slowest ones."""
    always_slow: float = 1.1
    """Least ratio of a worker's mean compute time to its stage's median that marks it as slow when
    the slowest 3 % do not explain the loss."""
    most_slow_ratio: float = 0.25
    """More slow workers than this share of all are no individuals any more."""
    fewest_steps: int = 2
    """Steps needed to blame an operation type."""
    cause_share: float = 0.1
    """Least share of the loss for a cause to be named."""
    correlated: float = 0.9
    """Least correlation of a micro-batch's forward and backward times that speaks for sequences of
    unequal length (section 5.3)."""
    exact_work: int = 3_000_000_000
    """Most node × column × worker products to replay every worker exactly (about 8 s a core);
    above it only the slowest ones are."""
    exact_workers: int = 32
    """How many workers are replayed exactly when there are too many for all."""
    batch_bytes: int = 8 << 20
    """Size of one node's times over all scenarios of a batch; keeps them in the cache."""

"""Causes behind the culprit: sequences of unequal length, workers that are always slow."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kansoku.trace.whatif.program import BACKWARD, FORWARD
from kansoku.trace.whatif.record import Operations

__all__ = ["Imbalance", "imbalance_of"]

Floats = npt.NDArray[np.float64]
_FEWEST_PAIRS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """Where compute times differ: between a worker's own micro-batches, or between workers."""

    correlation: float | None
    """Median over workers of the correlation of a micro-batch's forward and backward times; near 1
    when its length sets both. None: too few micro-batches."""
    varying_share: float | None
    """Part of the loss that goes away when every worker keeps its own mean compute times: what
    micro-batches and steps, not places, cause."""
    coefficient_of_variation: float | None
    """Spread of a worker's forward times over their mean, median over workers."""
    worker_ratios: Floats
    """``(dp, stages)``: mean compute time of a worker over the median of its stage."""
    stage_ratios: tuple[float | None, ...]
    """Per stage: median compute time of its workers over the median of the others'."""

    @property
    def last_stage_ratio(self) -> float | None:
        """Ratio of the last stage."""
        return self.stage_ratios[-1]


def imbalance_of(
    operations: Operations,
    times: Floats,
    replay: Callable[[Floats], Floats],
    actual_s: float,
    ideal_s: float,
) -> Imbalance:
    """Tell variation within workers from variation between them.

    ``times`` are ``(nodes, columns)``, ``replay`` gives step times for such times.
    """
    nodes = operations.nodes
    steps, dp_size, stages = len(operations.steps), operations.dp_size, operations.stages
    steady = times.copy()
    correlations, spreads = [], []
    means = np.full((dp_size, stages), np.nan)
    for stage in range(stages):
        rows = {
            kind: {
                (n.micro_batch if n.micro_batch >= 0 else n.sequence, n.chunk): i
                for i, n in enumerate(nodes)
                if n.kind == kind and n.stage == stage
            }
            for kind in (FORWARD, BACKWARD)
        }
        total = np.zeros((dp_size,))
        for found in rows.values():
            if not found:
                continue
            block = times[list(found.values())].reshape(len(found), steps, dp_size)
            mean = block.mean(axis=(0, 1))
            total += block.sum(axis=0).mean(axis=0)
            for i in found.values():
                steady[i] = np.tile(mean, steps)
        means[:, stage] = total
        both = [key for key in rows[FORWARD] if key in rows[BACKWARD]]
        if len(both) * steps < _FEWEST_PAIRS:
            continue
        pairs = [
            times[[rows[kind][key] for key in both]].reshape(-1, dp_size)
            for kind in (FORWARD, BACKWARD)
        ]
        for dp in range(dp_size):
            forward, backward = (block[:, dp] for block in pairs)
            if forward.mean() > 0:
                spreads.append(float(forward.std() / forward.mean()))
            if forward.std() > 0 and backward.std() > 0:
                correlations.append(float(np.corrcoef(forward, backward)[0, 1]))
    loss = actual_s - ideal_s
    share = None
    if loss > 1e-12 * actual_s:
        share = (actual_s - float(replay(steady).mean())) / loss
    peers = np.median(means, axis=0)
    ratios = means / np.where(peers > 0, peers, np.nan)
    return Imbalance(
        correlation=float(np.median(correlations)) if correlations else None,
        varying_share=share,
        coefficient_of_variation=float(np.median(spreads)) if spreads else None,
        worker_ratios=ratios,
        stage_ratios=tuple(_stage_ratio(means, stage) for stage in range(stages)),
    )


def _stage_ratio(means: Floats, stage: int) -> float | None:
    others = np.delete(means, stage, axis=1)
    if not others.size or np.median(others) <= 0:
        return None
    return float(np.median(means[:, stage]) / np.median(others))

"""Collective benchmarks: bandwidths as nccl-tests defines them, and the α–β fit.

Algorithm bandwidth is bytes over time. Bus bandwidth scales it by what the operation must move per
rank, so that it can be held against the hardware: all-reduce 2(n−1)/n, all-gather, reduce-scatter
and all-to-all (n−1)/n, send/recv 1. Bytes are those of the full (unsharded) buffer. Source:
NVIDIA/nccl-tests doc/PERFORMANCE.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kansoku.errors import InputError

__all__ = ["OPERATIONS", "CollectivePoint", "LinkFit", "bus_factor", "fit_link"]

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def bus_factor(operation: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth for a group of ``ranks``."""
    if ranks < 2:
        raise InputError(f"a collective needs two ranks at least, not {ranks}")
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in {"all_gather", "reduce_scatter", "all_to_all"}:
        return (ranks - 1) / ranks
    if operation == "send_recv":
        return 1.0
    raise InputError(f"unknown operation {operation!r}", remedy=f"one of {', '.join(OPERATIONS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePoint:
    """One operation at one size in one group."""

    operation: str
    ranks: int
    bytes: int
    """Of the full buffer."""
    seconds: float
    """Median over the repetitions of the slowest rank."""
    p95_seconds: float
    repetitions: int

    @property
    def algbw(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bytes per second that a link must have carried."""
        return self.algbw * bus_factor(self.operation, self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Time of one hop = α + bytes / β, fitted over all sizes of one operation."""

    operation: str
    ranks: int
    alpha_s: float
    """Latency of one step of the ring, seconds."""
    beta_bytes_per_s: float
    relative_error: float
    """Median of |fit / measured − 1|."""


def _steps(operation: str, ranks: int) -> int:
    """Return the latency steps of a ring algorithm."""
    if operation == "all_reduce":
        return 2 * (ranks - 1)
    return 1 if operation == "send_recv" else ranks - 1


def fit_link(points: Sequence[CollectivePoint]) -> LinkFit:
    """Fit α and β to points of one operation and group, relative errors weighing equally.

    Raises InputError for fewer than three sizes: two parameters need more than two points.
    """
    if len({point.bytes for point in points}) < 3:
        raise InputError("α and β need three sizes at least", remedy="sweep more sizes")
    operation, ranks = points[0].operation, points[0].ranks
    moved = np.array([p.bytes * bus_factor(operation, ranks) for p in points])
    seconds = np.array([p.seconds for p in points])
    design = np.stack([np.full(len(points), _steps(operation, ranks), float), moved], axis=1)
    # Dividing by the measured time weighs microseconds and seconds alike.
    solution, *_ = np.linalg.lstsq(design / seconds[:, None], np.ones(len(points)), rcond=None)
    alpha, inverse = float(max(solution[0], 0.0)), float(solution[1])
    if inverse <= 0:
        raise InputError(
            "time does not grow with size: no bandwidth can be fitted",
            remedy="sweep larger sizes",
        )
    fitted = design @ np.array([alpha, inverse])
    return LinkFit(
        operation=operation,
        ranks=ranks,
        alpha_s=alpha,
        beta_bytes_per_s=1 / inverse,
        relative_error=float(np.median(np.abs(fitted / seconds - 1))),
    )

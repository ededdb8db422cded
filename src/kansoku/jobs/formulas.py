"""Published formulas of reliability, exact: failure rates, ETTR, checkpoint intervals."""

import math

from kansoku.errors import InputError

__all__ = [
    "checkpoint_interval_daly",
    "checkpoint_interval_daly_higher_order",
    "checkpoint_interval_young",
    "expected_ettr",
    "mttf_from_rate_h",
    "rate_per_1000_node_days",
]


def rate_per_1000_node_days(failures: int, node_hours: float) -> float | None:
    """Return failures per 1,000 node-days; None without exposure."""
    return failures / node_hours * 24_000 if node_hours > 0 else None


def mttf_from_rate_h(rate: float, gpus: int, *, gpus_per_node: int = 8) -> float | None:
    """Project the mean time to failure of a job, hours, from failures per 1,000 node-days.

    Nodes fail independently, so the rate of a job is that of its nodes added up (Kokolis et al.
    2024, "Revisiting Reliability in Large-Scale Machine Learning Research Clusters").
    """
    nodes = math.ceil(gpus / gpus_per_node)
    return None if rate <= 0 or nodes <= 0 else 24_000 / (rate * nodes)


def expected_ettr(
    mttf_s: float, interval_s: float, *, restart_s: float, write_s: float = 0.0
) -> float:
    """Return the expected effective training time ratio, 0-1.

    1 - (u₀ + Δt/2) / MTTF (Kokolis et al. 2024, first order: every failure costs the restart
    u₀ and half a checkpoint interval), times the share Δt/(Δt + w) left beside writing
    checkpoints that block for w.
    """
    if mttf_s <= 0 or interval_s <= 0 or restart_s < 0 or write_s < 0:
        raise InputError(
            f"no ETTR for MTTF {mttf_s} s, interval {interval_s} s, restart {restart_s} s, "
            f"write {write_s} s"
        )
    kept = max(1 - (restart_s + interval_s / 2) / mttf_s, 0.0)
    return kept * interval_s / (interval_s + write_s)


def checkpoint_interval_young(mttf_s: float, write_s: float) -> float:
    """Return √(2 w M), Young 1974, seconds of work between checkpoints."""
    _check(mttf_s, write_s)
    return math.sqrt(2 * write_s * mttf_s)


def checkpoint_interval_daly(mttf_s: float, write_s: float) -> float:
    """Return √(2 w M) - w, Daly 2003, or M where writing takes half of M and more."""
    _check(mttf_s, write_s)
    return math.sqrt(2 * write_s * mttf_s) - write_s if write_s < mttf_s / 2 else mttf_s


def checkpoint_interval_daly_higher_order(mttf_s: float, write_s: float) -> float:
    """Return Daly's higher-order estimate (2006, eq. 37), seconds; M where w ≥ 2 M."""
    _check(mttf_s, write_s)
    if write_s >= 2 * mttf_s:
        return mttf_s
    ratio = write_s / (2 * mttf_s)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * write_s * mttf_s) * series - write_s


def _check(mttf_s: float, write_s: float) -> None:
    if mttf_s <= 0 or write_s <= 0:
        raise InputError(
            f"no checkpoint interval for an MTTF of {mttf_s} s and a write time of {write_s} s"
        )

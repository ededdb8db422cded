"""The rows of ``trace breakdown --json``, by rank: times in µs, rates in GB/s."""

from collections.abc import Sequence
from typing import Any

from kansoku.trace.kineto.breakdown import Figures
from kansoku.trace.kineto.report import RankBreakdown
from kansoku.trace.kineto.tables import CallCost

__all__ = [
    "FIELDS",
    "collective_rows",
    "copy_rows",
    "cost_row",
    "figures_us",
    "idle_rows",
    "kernel_rows",
    "launch_rows",
    "queue_rows",
    "step_rows",
    "us",
]

Each = Sequence[tuple[int | None, RankBreakdown]]
"""Ranks with what was found of each."""

FIELDS = {
    "span": "span_ns",
    "busy": "busy_ns",
    "idle": "idle_ns",
    "compute": "compute_ns",
    "comm": "communication_ns",
    "memory": "memory_ns",
    "overlap": "overlap_ns",
    "exposed_comm": "exposed_communication_ns",
}


def us(value: float | None) -> float | None:
    """Return microseconds of nanoseconds."""
    return None if value is None else value / 1000


def figures_us(figures: Figures) -> dict[str, float | None]:
    """Return the figures of a window by their names in the answer."""
    return {f"{name}_us": us(getattr(figures, field)) for name, field in FIELDS.items()}


def _giga(value: float | None) -> float | None:
    """Return a rate in units of 10^9."""
    return None if value is None else value / 1e9


def cost_row(rank: int | None, row: CallCost) -> dict[str, Any]:
    """Return what a module or an annotation cost."""
    return {
        "rank": rank,
        "name": row.name,
        "calls": row.calls,
        "host_us": us(row.host_ns),
        "device_us": us(row.device_ns),
        "device_rows": row.device_rows,
    }


def step_rows(each: Each) -> list[dict[str, Any]]:
    """Return the figures of each rank's steps."""
    return [
        {
            "rank": rank,
            "step": step.step,
            "source": step.source,
            "start_ns": part.base_ns + step.start_ns,
            **figures_us(step.figures),
            "span_us": us(step.end_ns - step.start_ns),
        }
        for rank, part in each
        for step in part.steps
    ]


def kernel_rows(each: Each) -> list[dict[str, Any]]:
    """Return each rank's kernels by name."""
    return [
        {
            "rank": rank,
            "name": row.name,
            "kind": row.kind,
            "family": row.family,
            "calls": row.calls,
            "total_us": us(row.total_ns),
            "mean_us": us(row.mean_ns),
            "median_us": us(row.median_ns),
            "min_us": us(row.min_ns),
            "max_us": us(row.max_ns),
        }
        for rank, part in each
        for row in part.kernels
    ]


def collective_rows(each: Each) -> list[dict[str, Any]]:
    """Return each collective kernel."""
    return [
        {
            "rank": rank,
            "op": row.operation,
            "group": row.group,
            "group_size": row.group_size,
            "seq": row.sequence,
            "stream": row.stream,
            "start_ns": part.base_ns + row.start_ns,
            "duration_us": us(row.duration_ns),
            "dtype": row.dtype,
            "bytes": row.bytes,
            "algbw_gb_per_s": _giga(row.algorithm_bytes_per_s),
            "busbw_gb_per_s": _giga(row.bus_bytes_per_s),
        }
        for rank, part in each
        for row in part.collectives
    ]


def idle_rows(each: Each) -> list[dict[str, Any]]:
    """Return why each rank's device was idle."""
    return [
        {
            "rank": rank,
            "host_bound_us": us(part.idle.host_bound_ns),
            "kernel_wait_us": us(part.idle.kernel_wait_ns),
            "other_us": us(part.idle.other_ns),
        }
        for rank, part in each
        if part.idle is not None
    ]


def launch_rows(each: Each) -> list[dict[str, Any]]:
    """Return how kernels were launched, by rank."""
    return [
        {
            "rank": rank,
            "calls": part.launches.calls,
            "rows": part.launches.rows,
            "graph_calls": part.launches.graph_calls,
            "graph_rows": part.launches.graph_rows,
            "delay_median_us": us(part.launches.delay_median_ns),
            "delay_p99_us": us(part.launches.delay_p99_ns),
            "delay_max_us": us(part.launches.delay_max_ns),
            "slow_delays": part.launches.slow_delays,
            "short_rows": part.launches.short_rows,
            "longer_than_work": part.launches.longer_than_work,
            "unmatched_rows": part.launches.unmatched_rows,
        }
        for rank, part in each
        if part.launches is not None
    ]


def queue_rows(each: Each) -> list[dict[str, Any]]:
    """Return how full each stream's queue was."""
    return [
        {
            "rank": rank,
            "stream": row.stream,
            "max_length": row.max_length,
            "mean_length": row.mean_length,
            "busy_ratio": row.busy_ratio,
        }
        for rank, part in each
        for row in part.queues
    ]


def copy_rows(each: Each) -> list[dict[str, Any]]:
    """Return copies and fills, by rank and name."""
    return [
        {
            "rank": rank,
            "name": row.name,
            "calls": row.calls,
            "bytes": row.bytes,
            "total_us": us(row.total_ns),
            "gb_per_s": _giga(row.bytes_per_s),
        }
        for rank, part in each
        for row in part.copies
    ]

"""What changed between two sets of traces, and whether more than chance.

Kernels and collectives are compared by the durations of their calls (Mann-Whitney, tie-corrected
normal approximation), operators and phases by their means (Welch). All p-values of one comparison
are adjusted together (Benjamini-Hochberg). A change counts when it is significant and not small.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import erfc, sqrt

import numpy as np
from numpy.typing import NDArray

from kansoku.formats.kineto import KinetoTrace
from kansoku.trace.kineto.breakdown import Figures, figures, find_steps, unions
from kansoku.trace.kineto.rows import device_rows
from kansoku.trace.kineto.tables import collectives

__all__ = ["Change", "ComparePolicy", "Profile", "compare_profiles", "profile", "summary"]

_SAMPLE = 2048
"""Durations kept of one kernel name and file: evenly spaced order statistics."""

_PHASES = {
    "span": "span_ns",
    "busy": "busy_ns",
    "idle": "idle_ns",
    "compute": "compute_ns",
    "communication": "communication_ns",
    "exposed communication": "exposed_communication_ns",
    "overlap": "overlap_ns",
    "memory": "memory_ns",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePolicy:
    """Thresholds, kept with the result."""

    false_discovery_ratio: float = 0.05
    min_change_ratio: float = 0.02
    """Smaller changes of the mean are not worth a reader's time."""
    min_calls: int = 4
    """Fewer calls on a side cannot be judged: significance is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a comparison needs of one file."""

    file: str
    steps: int
    kernels: Mapping[str, tuple[int, int, NDArray[np.int64]]]
    """Name to (calls, total ns, sorted durations)."""
    collectives: Mapping[str, tuple[int, int, NDArray[np.int64]]]
    operators: Mapping[str, tuple[int, int, float]]
    phases: Mapping[str, tuple[int, ...]]
    """Phase to ns of each step; a trace's phases are figures of its device, a run's the host's."""
    incomplete: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One name on both sides; A is the reference."""

    what: str
    """``kernel``, ``collective``, ``operator`` or ``phase``."""
    name: str
    calls_a: float
    """Per step and rank."""
    calls_b: float
    total_a_ns: float
    """Per step and rank."""
    total_b_ns: float
    mean_a_ns: float | None
    """Per call; None where there is none."""
    mean_b_ns: float | None
    p_value: float | None
    """Adjusted; None where it cannot be judged."""
    significant: bool | None
    reason: str
    """``slower``, ``faster``, ``only in A``, ``only in B``, ``more calls``, ``fewer calls``,
    ``same`` or ``too few calls``."""

    @property
    def difference_ns(self) -> float:
        """Time per step and rank that B spends more."""
        return self.total_b_ns - self.total_a_ns


def profile(trace: KinetoTrace, named_rank: int | None) -> Profile:
    """Take from one trace what a comparison needs."""
    del named_rank
    rows = device_rows(trace)
    sets = unions(rows)
    steps = find_steps(trace, rows, sets)
    by_name: dict[str, NDArray[np.int64]] = {}
    order = np.lexsort((rows.duration, rows.name))
    names, durations = rows.name[order], rows.duration[order]
    edges = np.flatnonzero(np.diff(names, prepend=-1, append=-1)).tolist()
    for begin, end in pairwise(edges):
        by_name[trace.names[int(names[begin])]] = durations[begin:end]
    grouped: dict[str, list[int]] = defaultdict(list)
    for row in collectives(trace, rows):
        size = "" if row.bytes is None else f" {row.bytes} B"
        members = "" if row.group_size is None else f" of {row.group_size} ranks"
        grouped[f"{row.operation}{size}{members}"].append(row.duration_ns)
    whole = figures(sets, rows)
    return Profile(
        file=trace.file,
        steps=max(len(steps), 1),
        kernels={name: summary(values) for name, values in by_name.items()},
        collectives={
            name: summary(np.sort(np.array(values, np.int64))) for name, values in grouped.items()
        },
        operators=dict(trace.operators),
        phases=_phases([step.figures for step in steps] or [whole]),
        incomplete=tuple(trace.problems),
    )


def _phases(windows: Sequence[Figures]) -> dict[str, tuple[int, ...]]:
    return {
        phase: tuple(value for window in windows if (value := getattr(window, field)) is not None)
        for phase, field in _PHASES.items()
    }


def summary(values: NDArray[np.int64]) -> tuple[int, int, NDArray[np.int64]]:
    """Return calls, total and at most _SAMPLE order statistics of sorted durations."""
    sample = values
    if len(values) > _SAMPLE:
        sample = values[np.linspace(0, len(values) - 1, _SAMPLE).astype(np.int64)]
    return len(values), int(values.sum()), sample


def compare_profiles(
    a: Sequence[Profile], b: Sequence[Profile], policy: ComparePolicy | None = None
) -> list[Change]:
    """Return every name of either side, largest difference first."""
    policy = policy or ComparePolicy()
    steps_a, steps_b = (sum(part.steps for part in side) for side in (a, b))
    found: list[Change] = []
    for what in ("kernel", "collective"):
        left, right = (_pool(side, what) for side in (a, b))
        for name in sorted(left.keys() | right.keys()):
            one = left.get(name, (0, 0, np.empty(0, np.int64)))
            other = right.get(name, (0, 0, np.empty(0, np.int64)))
            p_value = None
            if min(one[0], other[0]) >= policy.min_calls:
                p_value = mann_whitney(one[2], other[2])
            found.append(_change(what, name, one[:2], other[:2], (steps_a, steps_b), p_value))
    found += _operators(a, b, (steps_a, steps_b), policy)
    found += _phase_changes(a, b, policy)
    return sorted(_judge(found, policy), key=lambda c: (c.what, -abs(c.difference_ns), c.name))


def _pool(side: Sequence[Profile], what: str) -> dict[str, tuple[int, int, NDArray[np.int64]]]:
    out: dict[str, tuple[int, int, list[NDArray[np.int64]]]] = {}
    for part in side:
        table = part.kernels if what == "kernel" else part.collectives
        for name, (calls, total, values) in table.items():
            before = out.get(name, (0, 0, []))
            out[name] = (before[0] + calls, before[1] + total, [*before[2], values])
    return {
        name: (calls, total, np.concatenate(values)) for name, (calls, total, values) in out.items()
    }


def _operators(
    a: Sequence[Profile], b: Sequence[Profile], steps: tuple[int, int], policy: ComparePolicy
) -> list[Change]:
    def pool(side: Sequence[Profile]) -> dict[str, tuple[int, int, float]]:
        out: dict[str, tuple[int, int, float]] = {}
        for part in side:
            for name, (calls, total, squares) in part.operators.items():
                before = out.get(name, (0, 0, 0.0))
                out[name] = (before[0] + calls, before[1] + total, before[2] + squares)
        return out

    left, right = pool(a), pool(b)
    found = []
    for name in sorted(left.keys() | right.keys()):
        one, other = left.get(name, (0, 0, 0.0)), right.get(name, (0, 0, 0.0))
        p_value = None
        if min(one[0], other[0]) >= policy.min_calls:
            p_value = welch(one, other)
        found.append(_change("operator", name, one[:2], other[:2], steps, p_value))
    return found


def _phase_changes(
    a: Sequence[Profile], b: Sequence[Profile], policy: ComparePolicy
) -> list[Change]:
    found = []
    for name in dict.fromkeys(name for part in (*a, *b) for name in part.phases):
        left = [value for part in a for value in part.phases.get(name, ())]
        right = [value for part in b for value in part.phases.get(name, ())]
        if not left and not right:
            continue
        p_value = None
        if min(len(left), len(right)) >= policy.min_calls:
            p_value = welch(_moments(left), _moments(right))
        found.append(
            _change(
                "phase",
                name,
                (len(left), sum(left)),
                (len(right), sum(right)),
                (max(len(left), 1), max(len(right), 1)),
                p_value,
            )
        )
    return found


def _moments(values: Sequence[int]) -> tuple[int, int, float]:
    return len(values), sum(values), float(sum(float(value) ** 2 for value in values))


def _change(
    what: str,
    name: str,
    one: tuple[int, int],
    other: tuple[int, int],
    steps: tuple[int, int],
    p_value: float | None,
) -> Change:
    return Change(
        what=what,
        name=name,
        calls_a=one[0] / steps[0],
        calls_b=other[0] / steps[1],
        total_a_ns=one[1] / steps[0],
        total_b_ns=other[1] / steps[1],
        mean_a_ns=one[1] / one[0] if one[0] else None,
        mean_b_ns=other[1] / other[0] if other[0] else None,
        p_value=p_value,
        significant=None,
        reason="",
    )


def _judge(changes: Sequence[Change], policy: ComparePolicy) -> list[Change]:
    adjusted = _benjamini_hochberg([change.p_value for change in changes])
    return [
        _verdict(change, p_value, policy) for change, p_value in zip(changes, adjusted, strict=True)
    ]


def _verdict(change: Change, p_value: float | None, policy: ComparePolicy) -> Change:
    significant: bool | None = None
    if change.mean_a_ns is None or change.mean_b_ns is None:
        reason = "only in A" if change.mean_b_ns is None else "only in B"
        significant = True
    elif p_value is None:
        reason = "too few calls"
    else:
        ratio = change.mean_b_ns / change.mean_a_ns if change.mean_a_ns else float("inf")
        small = abs(ratio - 1) < policy.min_change_ratio
        significant = p_value <= policy.false_discovery_ratio and not small
        reason = ("slower" if ratio > 1 else "faster") if significant else "same"
        calls = change.calls_b / change.calls_a
        if not significant and abs(calls - 1) >= policy.min_change_ratio:
            reason = "more calls" if calls > 1 else "fewer calls"
    return Change(
        what=change.what,
        name=change.name,
        calls_a=change.calls_a,
        calls_b=change.calls_b,
        total_a_ns=change.total_a_ns,
        total_b_ns=change.total_b_ns,
        mean_a_ns=change.mean_a_ns,
        mean_b_ns=change.mean_b_ns,
        p_value=p_value,
        significant=significant,
        reason=reason,
    )


def mann_whitney(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Return the two-sided p-value of the rank-sum test, normal approximation with ties."""
    joined = np.concatenate((a, b))
    _, inverse, counts = np.unique(joined, return_inverse=True, return_counts=True)
    upper = np.cumsum(counts)
    ranks = (upper - (counts - 1) / 2)[inverse]
    n, m = len(a), len(b)
    size = n + m
    statistic = float(ranks[:n].sum()) - n * (n + 1) / 2
    ties = float((counts.astype(np.float64) ** 3 - counts).sum())
    variance = n * m / 12 * (size + 1 - ties / (size * (size - 1)))
    if variance <= 0:
        return 1.0
    z = max(abs(statistic - n * m / 2) - 0.5, 0.0) / sqrt(variance)
    return erfc(z / sqrt(2))


def welch(one: tuple[int, int, float], other: tuple[int, int, float]) -> float:
    """Return the two-sided p-value of equal means from (count, sum, sum of squares).

    Normal tails with the variance widened for few values (Student's 2nd moment, df > 2).
    """
    means, errors = [], []
    for count, total, squares in (one, other):
        mean = total / count
        means.append(mean)
        variance = max(squares - count * mean * mean, 0.0) / (count - 1)
        widened = variance * (count - 1) / max(count - 3, 0.5)
        errors.append(widened / count)
    spread = sqrt(sum(errors))
    if spread == 0:
        return 1.0 if means[0] == means[1] else 0.0
    return erfc(abs(means[0] - means[1]) / spread / sqrt(2))


def _benjamini_hochberg(values: Sequence[float | None]) -> list[float | None]:
    known = sorted((value, place) for place, value in enumerate(values) if value is not None)
    out: list[float | None] = [None] * len(values)
    lowest = 1.0
    for rank in range(len(known), 0, -1):
        value, place = known[rank - 1]
        lowest = min(lowest, value * len(known) / rank)
        out[place] = lowest
    return out

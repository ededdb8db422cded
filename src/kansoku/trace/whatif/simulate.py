"""Replay the step with other durations: all steps, dp ranks and scenarios at once."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kansoku.errors import InputError
from kansoku.trace.whatif.program import Program

__all__ = ["Schedule", "schedule", "step_times", "transfer_times"]

Floats = npt.NDArray[np.float64]
# Below this a transfer that ends before its last member starts is a clock error.
_CLOCK_ERROR_S = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An order in which nodes can be replayed."""

    units: tuple[tuple[int, ...], ...]
    """Nodes that end together; every node's predecessors are in earlier units."""
    last_use: tuple[tuple[int, ...], ...]
    """Per unit, nodes whose end nobody needs afterwards."""


def schedule(program: Program) -> Schedule:
    """Order the nodes; raises InputError if some wait for each other in a circle."""
    units = _units(program)
    unit_of = {node: number for number, unit in enumerate(units) for node in unit}
    next_of: list[set[int]] = [set() for _ in units]
    for node, earlier in enumerate(program.before):
        for one in earlier:
            a, b = unit_of[one], unit_of[node]
            if a == b:
                raise InputError("an operation waits for one that it meets")
            next_of[a].add(b)
    order = _topological(next_of)
    if len(order) < len(units):
        raise InputError(
            f"{len(units) - len(order)} operations wait for each other in a circle",
            remedy="the stamps of send and receive operations contradict the schedule",
        )
    last: dict[int, int] = {}
    for place, unit in enumerate(order):
        for node in units[unit]:
            last[node] = place
            for one in program.before[node]:
                last[one] = place
    freed: list[list[int]] = [[] for _ in order]
    for node, place in last.items():
        freed[place].append(node)
    return Schedule(
        units=tuple(units[unit] for unit in order), last_use=tuple(tuple(one) for one in freed)
    )


def _units(program: Program) -> list[tuple[int, ...]]:
    meeting = {node for group in program.meetings for node in group}
    alone = set(range(len(program.before))) - meeting - set(program.unmodelled)
    return [*program.meetings, *((node,) for node in sorted(alone))]


def _topological(next_of: Sequence[set[int]]) -> list[int]:
    """Return the units that wait for nobody first; those in a circle are left out."""
    degree = [0] * len(next_of)
    for following in next_of:
        for unit in following:
            degree[unit] += 1
    ready = deque(unit for unit, count in enumerate(degree) if count == 0)
    order = []
    while ready:
        unit = ready.popleft()
        order.append(unit)
        for other in sorted(next_of[unit]):
            degree[other] -= 1
            if degree[other] == 0:
                ready.append(other)
    return order


def step_times(
    program: Program,
    plan: Schedule,
    times: Callable[[int], Floats],
    *,
    scenarios: int,
    steps: int,
    dp_size: int,
) -> Floats:
    """Return ``(scenarios, steps)``: seconds from the step's start to the end of its last node.

    ``times(node)`` gives the node's duration, or transfer time if it meets others, as
    ``(scenarios, steps × dp)`` or broadcastable to it. Ends are dropped as soon as nobody needs
    them, so memory is a few nodes' worth.
    """
    shape = (scenarios, steps * dp_size)
    ends: dict[int, Floats] = {}
    latest = np.zeros(shape)
    for unit, freed in zip(plan.units, plan.last_use, strict=True):
        start: Floats | None = None
        for node in unit:
            for one in program.before[node]:
                if start is None:
                    start = ends[one].copy()
                else:
                    np.maximum(start, ends[one], out=start)
        if start is None:
            start = np.zeros(shape)
        if unit[0] in program.across_dp:
            by_step = start.reshape(scenarios, steps, dp_size)
            by_step[:] = by_step.max(axis=2, keepdims=True)
        for node in unit:
            ends[node] = start + times(node)
            np.maximum(latest, ends[node], out=latest)
        for node in freed:
            del ends[node]
    found: Floats = latest.reshape(scenarios, steps, dp_size).max(axis=2)
    return found


def transfer_times(
    start_s: Floats, end_s: Floats, program: Program, *, dp_size: int
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return ``(nodes, columns)`` times without waiting, and which nodes meet others.

    A node that meets others takes from the last start to its own end; others take their duration.
    """
    times = end_s - start_s
    meets = np.zeros(len(times), np.bool_)
    for group in program.meetings:
        first = start_s[list(group)].max(axis=0)
        if group[0] in program.across_dp:
            by_step = first.reshape(-1, dp_size)
            first = np.repeat(by_step.max(axis=1), dp_size)
        for node in group:
            own = end_s[node] - first
            times[node] = np.where(own <= -_CLOCK_ERROR_S, 0.0, own)
            meets[node] = True
    return times, meets

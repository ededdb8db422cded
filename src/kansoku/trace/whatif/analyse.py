"""The slowdown of a job, and what of it goes away with each worker, stage and operation type."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kansoku.trace.whatif.imbalance import Imbalance, imbalance_of
from kansoku.trace.whatif.judge import Cause, Culprit, Evidence, Part, Swap, judge
from kansoku.trace.whatif.policy import WhatIfPolicy
from kansoku.trace.whatif.program import COMMUNICATION, Program
from kansoku.trace.whatif.record import Operations
from kansoku.trace.whatif.simulate import Schedule, schedule, step_times, transfer_times

__all__ = ["WhatIf", "what_if"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_MERGED = {
    "forward-recv": "forward-pp-comm",
    "forward-send": "forward-pp-comm",
    "backward-recv": "backward-pp-comm",
    "backward-send": "backward-pp-comm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The answer. Times are means over steps, seconds."""

    measured_s: float
    """As recorded, host delays included."""
    actual_s: float
    """Replayed with the recorded durations (t_ori)."""
    ideal_s: float
    """Replayed with every operation at its type's mean or median (t_ideal)."""
    steps: tuple[int, ...]
    step_actual_s: tuple[float, ...]
    workers: tuple[Part, ...]
    """Largest share first."""
    stages: tuple[Part, ...]
    dp_ranks: tuple[Part, ...]
    operations: tuple[Part, ...]
    slow_workers: Swap | None
    """The slowest 3 % of the workers (M_W)."""
    last_stage: Swap | None
    """M_S."""
    suspects: tuple[tuple[int, int], ...]
    """The workers of ``slow_workers``, (dp, pp)."""
    imbalance: Imbalance
    verdict: str
    """``found``, ``none`` or ``unknown``."""
    reason: str
    culprit: Culprit | None
    causes: tuple[Cause, ...]
    missing: tuple[str, ...]
    policy: WhatIfPolicy

    @property
    def slowdown(self) -> float:
        """Return actual over ideal step time."""
        return self.actual_s / self.ideal_s if self.ideal_s > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scenario:
    """Where the operations differ from the scenario's base: worker in ``workers`` and kind."""

    workers: Bools
    """``(dp, stages)``."""
    kind: str | None = None
    add: bool = False
    """Base is the ideal and these are as recorded; else the other way round."""


class _Replay:
    """The job, ready to be replayed with some operations ideal."""

    def __init__(
        self,
        operations: Operations,
        program: Program,
        policy: WhatIfPolicy,
        common: frozenset[str],
        progress: Callable[[int, int], None] | None,
    ):
        self.operations, self.program, self.policy = operations, program, policy
        self.plan: Schedule = schedule(program)
        self.kinds = [_MERGED.get(node.kind, node.kind) for node in operations.nodes]
        self.stage = [node.stage for node in operations.nodes]
        self.actual, self.meets = transfer_times(
            operations.start_s, operations.end_s, program, dp_size=operations.dp_size
        )
        self.ideal = self._ideal_times(common)
        # Dp ranks, stages and types are replayed both ways, workers one way, two sets both ways.
        parts = operations.dp_size + operations.stages + len(set(self.kinds))
        self._total = 2 * parts + len(self.exact_workers()) + 4
        self._done, self._progress = 0, progress

    def exact_workers(self) -> range:
        """Return the places, slowest first, of the workers that are replayed one by one."""
        workers = self.operations.dp_size * self.operations.stages
        size = len(self.operations.nodes) * self.operations.columns * workers
        limit = workers if size <= self.policy.exact_work else self.policy.exact_workers
        return range(min(workers, limit))

    def _ideal_times(self, common: frozenset[str]) -> Floats:
        """Per node: the mean of its type over all workers and steps; median if it communicates."""
        ideal = np.zeros(len(self.actual))
        kinds = np.array([node.kind for node in self.operations.nodes])
        for kind in dict.fromkeys(kinds.tolist()):
            rows = kinds == kind
            pick = np.median if kind in common else np.mean
            ideal[rows] = float(pick(self.actual[rows]))
        return ideal

    def mean_steps(self, times: Floats) -> Floats:
        """Return each step's time with these ``(nodes, columns)`` or ``(nodes, 1)`` times."""
        found: Floats = step_times(
            self.program,
            self.plan,
            lambda node: times[node][None, :],
            scenarios=1,
            steps=len(self.operations.steps),
            dp_size=self.operations.dp_size,
        )[0]
        return found

    def run(self, scenarios: Sequence[_Scenario]) -> list[float]:
        """Return the mean step time of each scenario."""
        per = self.operations.columns * 8
        size = max(1, self.policy.batch_bytes // per)
        found: list[float] = []
        for first in range(0, len(scenarios), size):
            batch = scenarios[first : first + size]
            found += self._batch(batch)
            self._done += len(batch)
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)
        return found

    def _batch(self, scenarios: Sequence[_Scenario]) -> list[float]:
        operations = self.operations
        steps = len(operations.steps)
        # (scenarios, stages, steps × dp): is the worker one of the scenario's?
        workers = np.stack([np.tile(one.workers.T, (1, steps)) for one in scenarios])
        add = np.array([one.add for one in scenarios])[:, None]

        def times(node: int) -> Floats:
            of_kind = np.array(
                [one.kind is None or one.kind == self.kinds[node] for one in scenarios]
            )
            chosen = workers[:, self.stage[node]] & of_kind[:, None]
            actual = chosen == add
            mixed: Floats = np.where(actual, self.actual[node][None, :], self.ideal[node])
            return mixed

        result = step_times(
            self.program,
            self.plan,
            times,
            scenarios=len(scenarios),
            steps=steps,
            dp_size=operations.dp_size,
        )
        return [float(one) for one in result.mean(axis=1)]


def what_if(
    operations: Operations,
    program: Program,
    *,
    policy: WhatIfPolicy | None = None,
    communication: frozenset[str] = COMMUNICATION,
    missing: tuple[str, ...] = (),
    measured_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WhatIf:
    """Replay the job as it was, ideally, and with each part ideal or as slow as it was.

    ``communication`` names the types whose ideal is the median; ``measured_s`` is the mean
    step time where the operations' own stamps do not tell it. ``progress`` gets the replays done
    and those to do in all. Source: arXiv 2505.05713, sections 3 to 5.
    """
    policy = policy or WhatIfPolicy()
    replay = _Replay(operations, program, policy, communication, progress)
    by_step = replay.mean_steps(replay.actual)
    actual = float(by_step.mean())
    ideal = float(replay.mean_steps(replay.ideal[:, None]).mean())
    parts = _Parts(replay, actual, ideal)
    workers, suspects, slow = parts.workers()
    stages = parts.stages
    last = parts.swap(parts.at(pp=operations.stages - 1))
    kinds = parts.kinds()
    imbalance = imbalance_of(operations, replay.actual, replay.mean_steps, actual, ideal)
    always, always_swap = _always_slow(parts, imbalance, slow)
    judged = judge(
        Evidence(
            actual_s=actual,
            ideal_s=ideal,
            shape=parts.shape,
            workers=workers,
            suspects=suspects,
            slow_workers=slow,
            always_slow=always,
            always_slow_swap=always_swap,
            stages=stages,
            last_stage=last,
            operations=kinds,
            imbalance=imbalance,
            steps=len(operations.steps),
        ),
        policy,
    )
    if program.unmodelled:
        names = sorted({operations.nodes[i].kind for i in program.unmodelled})
        missing = (*missing, f"operations without a known place were left out: {', '.join(names)}")
    return WhatIf(
        measured_s=_measured(operations) if measured_s is None else measured_s,
        actual_s=actual,
        ideal_s=ideal,
        steps=operations.steps,
        step_actual_s=tuple(float(one) for one in by_step),
        workers=workers,
        stages=stages,
        dp_ranks=parts.dp_ranks,
        operations=kinds,
        slow_workers=slow,
        last_stage=last,
        suspects=suspects,
        imbalance=imbalance,
        verdict=judged.verdict,
        reason=judged.reason,
        culprit=judged.culprit,
        causes=judged.causes,
        missing=(*missing, *operations.missing),
        policy=policy,
    )


def _always_slow(
    parts: "_Parts", imbalance: Imbalance, slow: Swap | None
) -> tuple[tuple[tuple[int, int], ...], Swap | None]:
    """Return workers whose compute is slow in every step, where the slowest 3 % are too few."""
    policy = parts.replay.policy
    if slow is None or slow.removed_share >= policy.majority_share:
        return (), None
    ratios = imbalance.worker_ratios
    found = tuple(
        (int(dp), int(pp)) for dp, pp in np.argwhere(np.nan_to_num(ratios) >= policy.always_slow)
    )
    if not found or len(found) > policy.most_slow_ratio * ratios.size:
        return (), None
    mask = np.zeros(parts.shape, np.bool_)
    for cell in found:
        mask[cell] = True
    return found, parts.swap(mask)


def _measured(operations: Operations) -> float:
    shape = (len(operations.nodes), len(operations.steps), operations.dp_size)
    start = operations.start_s.reshape(shape).min(axis=(0, 2))
    end = operations.end_s.reshape(shape).max(axis=(0, 2))
    return float((end - start).mean())


class _Parts:
    """Shares and slowdowns of workers, stages, data-parallel ranks and types."""

    def __init__(self, replay: _Replay, actual: float, ideal: float):
        self.replay, self.actual, self.ideal = replay, actual, ideal
        self.loss = actual - ideal
        self.shape = (replay.operations.dp_size, replay.operations.stages)
        self.dp_ranks = self._sorted(
            Part(share=share, slowdown=slow, dp=dp)
            for dp, (share, slow) in enumerate(
                self._both([_Scenario(workers=self.at(dp=dp)) for dp in range(self.shape[0])])
            )
        )
        self.stages = self._sorted(
            Part(share=share, slowdown=slow, pp=pp)
            for pp, (share, slow) in enumerate(
                self._both([_Scenario(workers=self.at(pp=pp)) for pp in range(self.shape[1])])
            )
        )

    def at(self, *, dp: int | None = None, pp: int | None = None) -> Bools:
        """Return the mask of one dp rank, one stage, one worker or all."""
        mask = np.zeros(self.shape, np.bool_)
        mask[slice(None) if dp is None else dp, slice(None) if pp is None else pp] = True
        return mask

    def share(self, removed_s: float) -> float | None:
        """Return the part of the loss that has gone; None if there is none to share."""
        if abs(self.loss) <= 1e-12 * max(self.actual, 1e-12):
            return None
        return (self.actual - removed_s) / self.loss

    def _both(self, removed: Sequence[_Scenario]) -> list[tuple[float | None, float]]:
        added = [_Scenario(workers=one.workers, kind=one.kind, add=True) for one in removed]
        times = self.replay.run([*removed, *added])
        count = len(removed)
        return [
            (self.share(rem), add / self.ideal if self.ideal > 0 else 1.0)
            for rem, add in zip(times[:count], times[count:], strict=True)
        ]

    @staticmethod
    def _sorted(parts: Iterable[Part]) -> tuple[Part, ...]:
        return tuple(
            sorted(parts, key=lambda part: (part.share is None, -(part.share or 0), -part.slowdown))
        )

    def kinds(self) -> tuple[Part, ...]:
        """Return one part per operation type; sends and receives of a direction are one."""
        names = list(dict.fromkeys(self.replay.kinds))
        both = self._both([_Scenario(workers=self.at(), kind=name) for name in names])
        return self._sorted(
            [
                Part(share=share, slowdown=slow, kind=name)
                for name, (share, slow) in zip(names, both, strict=True)
            ]
        )

    def swap(self, workers: Bools) -> Swap | None:
        """Return both effects of one set of workers."""
        removed, added = self.replay.run(
            [_Scenario(workers=workers), _Scenario(workers=workers, add=True)]
        )
        share = self.share(removed)
        if share is None:
            return None
        return Swap(
            removed_s=removed,
            added_s=added,
            removed_share=share,
            added_share=(added - self.ideal) / self.loss,
        )

    def workers(self) -> tuple[tuple[Part, ...], tuple[tuple[int, int], ...], Swap | None]:
        """Return one part per worker, the slowest ones, and their swap.

        A worker's slowdown is the smaller of its dp rank's and its stage's, as the paper
        approximates it.
        """
        replay, policy = self.replay, self.replay.policy
        stage_slow = {part.pp: part.slowdown for part in self.stages}
        dp_slow = {part.dp: part.slowdown for part in self.dp_ranks}
        ranks = replay.operations.ranks
        cells = [(dp, pp) for dp in range(self.shape[0]) for pp in range(self.shape[1])]
        scores = {cell: min(dp_slow[cell[0]], stage_slow[cell[1]]) for cell in cells}
        ordered = sorted(cells, key=lambda cell: (-scores[cell], int(ranks[cell]), cell))
        count = -(-len(cells) * round(policy.worker_ratio * 100) // 100)
        suspects = tuple(ordered[:count])
        mask = np.zeros(self.shape, np.bool_)
        for cell in suspects:
            mask[cell] = True
        exact = [ordered[place] for place in replay.exact_workers()]
        removed = replay.run([_Scenario(workers=self.at(dp=dp, pp=pp)) for dp, pp in exact])
        shares = dict(zip(exact, map(self.share, removed), strict=True))
        return (
            self._sorted(
                [
                    Part(
                        share=shares.get((dp, pp)),
                        slowdown=scores[dp, pp],
                        dp=dp,
                        pp=pp,
                        rank=None if ranks[dp, pp] < 0 else int(ranks[dp, pp]),
                    )
                    for dp, pp in cells
                ]
            ),
            suspects,
            self.swap(mask),
        )

"""Whom to blame for the loss, and for what."""

from collections.abc import Sequence
from dataclasses import dataclass

from kansoku.trace.whatif.imbalance import Imbalance
from kansoku.trace.whatif.policy import WhatIfPolicy

__all__ = ["Cause", "Culprit", "Evidence", "Judgement", "Part", "Swap", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one part of the job costs."""

    share: float | None
    """Part of the loss that goes away when only this part runs ideally; may exceed 1 or be
    negative, since stages hide each other. None: not replayed."""
    slowdown: float
    """Step time over ideal step time when only this part is as slow as it was (S_w, S_t)."""
    dp: int | None = None
    pp: int | None = None
    rank: int | None = None
    kind: str | None = None
    """Operation type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """One set of operations swapped, both ways (``explain`` of the method). Seconds."""

    removed_s: float
    """Step time with only these ideal (t_rem)."""
    added_s: float
    """Step time with all but these ideal (t_add)."""
    removed_share: float
    added_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Who is to blame for most of the loss."""

    kind: str
    """``worker``, ``stage`` or ``operation``."""
    share: float
    dp: int | None = None
    pp: int | None = None
    type: str | None = None
    workers: tuple[tuple[int, int], ...] = ()
    """All blamed workers, (dp, pp)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason for the loss; several may hold."""

    cause: str
    """``slow_worker``, ``last_stage``, ``slow_stage``, ``sequence_length``, ``varying_compute`` or
    ``communication``."""
    share: float
    """Part of the loss that goes away without it; shares of several causes overlap."""
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything the verdict rests on."""

    actual_s: float
    ideal_s: float
    shape: tuple[int, int]
    """(dp size, stages)."""
    workers: tuple[Part, ...]
    suspects: tuple[tuple[int, int], ...]
    slow_workers: Swap | None
    always_slow: tuple[tuple[int, int], ...]
    always_slow_swap: Swap | None
    stages: tuple[Part, ...]
    last_stage: Swap | None
    operations: tuple[Part, ...]
    imbalance: Imbalance
    steps: int
    """How many steps were replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Verdict ``found``, ``none`` or ``unknown``, and why."""

    verdict: str
    reason: str
    culprit: Culprit | None = None
    causes: tuple[Cause, ...] = ()


def judge(evidence: Evidence, policy: WhatIfPolicy) -> Judgement:
    """Blame the smallest part whose repair wins back most of the loss: workers before stages.

    One worker a stage (dp size 1) is the stage: then the stage is blamed.
    """
    if evidence.slow_workers is None or evidence.ideal_s <= 0:
        return Judgement(verdict="none", reason="nothing is lost to stragglers")
    slowdown = evidence.actual_s / evidence.ideal_s
    if slowdown < policy.slowdown:
        text = f"the job is within {policy.slowdown - 1:.0%} of its ideal step time"
        return Judgement(verdict="none", reason=text)
    causes = _causes(evidence, policy)
    culprit, reason = (
        _worker(evidence, policy) or _stage(evidence, policy) or _operation(evidence, policy)
    ) or (None, "no worker, stage or operation type causes most of the loss")
    return Judgement(
        verdict="unknown" if culprit is None else "found",
        reason=reason,
        culprit=culprit,
        causes=causes,
    )


def _workers_swap(
    evidence: Evidence, policy: WhatIfPolicy
) -> tuple[tuple[tuple[int, int], ...], float] | None:
    candidates = [(evidence.suspects, evidence.slow_workers)]
    if evidence.always_slow:
        candidates.append((evidence.always_slow, evidence.always_slow_swap))
    for cells, swap in candidates:
        if swap is not None and swap.removed_share >= policy.majority_share:
            return cells, swap.removed_share
    return None


def _worker(evidence: Evidence, policy: WhatIfPolicy) -> tuple[Culprit, str] | None:
    if evidence.shape[0] == 1:
        return None
    found = _workers_swap(evidence, policy)
    if found is None:
        return None
    cells, share = found
    top = next((part for part in evidence.workers if (part.dp, part.pp) in cells), None)
    if top is None:
        return None
    count = evidence.shape[0] * evidence.shape[1]
    who = f"{len(cells)} of {count} workers"
    if len(cells) == 1:
        who = f"one worker of {count} (dp {top.dp}, pp {top.pp})"
    return (
        Culprit(kind="worker", share=share, dp=top.dp, pp=top.pp, workers=cells),
        f"{who} cause{'s' if len(cells) == 1 else ''} {share:.0%} of the loss",
    )


def _stage(evidence: Evidence, policy: WhatIfPolicy) -> tuple[Culprit, str] | None:
    best = evidence.stages[0]
    if evidence.shape[1] == 1 or best.share is None or best.share < policy.majority_share:
        return None
    if _varies_everywhere(evidence, policy, best.pp or 0):
        return None
    where = "the last stage" if best.pp == evidence.shape[1] - 1 else f"stage {best.pp}"
    return (
        Culprit(kind="stage", share=best.share, pp=best.pp),
        f"{where} causes {best.share:.0%} of the loss",
    )


def _varies_everywhere(evidence: Evidence, policy: WhatIfPolicy, stage: int) -> bool:
    """Return whether the stage computes no longer than others and all vary: no fault of its."""
    ratio = evidence.imbalance.stage_ratios[stage]
    varying = evidence.imbalance.varying_share
    return (
        ratio is not None
        and varying is not None
        and ratio < policy.always_slow
        and varying >= policy.majority_share
    )


def _operation(evidence: Evidence, policy: WhatIfPolicy) -> tuple[Culprit, str] | None:
    best = evidence.operations[0]
    if best.share is None or best.share < policy.majority_share:
        return None
    if evidence.steps < policy.fewest_steps:
        return None  # one step cannot tell a type that varies from a worker or a phase that is slow
    return (
        Culprit(kind="operation", share=best.share, type=best.kind),
        f"unequal {best.kind} times cause {best.share:.0%} of the loss, not one worker or stage",
    )


def _causes(evidence: Evidence, policy: WhatIfPolicy) -> tuple[Cause, ...]:
    found: list[Cause] = []
    if evidence.shape[0] > 1 and (slow := _workers_swap(evidence, policy)) is not None:
        names = ", ".join(f"dp {dp} pp {pp}" for dp, pp in slow[0][:4])
        found.append(
            Cause(cause="slow_worker", share=slow[1], evidence=f"slow in every step: {names}")
        )
    elif (stage := _slow_stage(evidence, policy)) is not None:
        found.append(stage)
    found += _varying(evidence, policy)
    lost = sum(part.share or 0 for part in evidence.operations if _communicates(part))
    if lost >= policy.cause_share:
        found.append(
            Cause(
                cause="communication",
                share=lost,
                evidence="transfers themselves take unequal times, waiting excluded",
            )
        )
    return tuple(sorted(found, key=lambda cause: -cause.share))


def _slow_stage(evidence: Evidence, policy: WhatIfPolicy) -> Cause | None:
    part = evidence.stages[0]
    if evidence.shape[1] == 1 or part.share is None or part.share < policy.cause_share:
        return None
    if _varies_everywhere(evidence, policy, part.pp or 0):
        return None
    last = part.pp == evidence.shape[1] - 1
    ratio = evidence.imbalance.last_stage_ratio
    text = f"stage {part.pp} on all dp ranks"
    if last and ratio is not None:
        text = f"the last stage computes {ratio:.2f} times as long as the others"
    return Cause(cause="last_stage" if last else "slow_stage", share=part.share, evidence=text)


def _communicates(part: Part) -> bool:
    name = part.kind or ""
    return any(word in name for word in ("comm", "reduce", "gather", "clip", "collective"))


def _varying(evidence: Evidence, policy: WhatIfPolicy) -> Sequence[Cause]:
    """Return unequal sequences where a micro-batch is slow forward and backward alike."""
    imbalance = evidence.imbalance
    share, correlation = imbalance.varying_share, imbalance.correlation
    if share is None or share < policy.cause_share:
        return []
    spread = imbalance.coefficient_of_variation or 0.0
    if correlation is not None and correlation >= policy.correlated:
        return [
            Cause(
                cause="sequence_length",
                share=share,
                evidence=f"a micro-batch's forward and backward times rise and fall together "
                f"(correlation {correlation:.2f}) and vary by {spread:.0%} on each worker",
            )
        ]
    return [
        Cause(
            cause="varying_compute",
            share=share,
            evidence=f"compute times vary by {spread:.0%} on each worker, forward and backward "
            "not together",
        )
    ]

"""Lay a plan beside a measured run: phases, and bytes and time of every process group."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.app.report import report
from kansoku.model import PHASES, RunFacts
from kansoku.plan.layout import Training
from kansoku.plan.placement import Placement
from kansoku.plan.search import Candidate
from kansoku.plan.timing import TrafficColumns
from kansoku.trace.collectives import CollectiveSummary, bus_factor
from kansoku.view import Block, Column, Heading, Sentence, Table, Tone

__all__ = [
    "GroupComparison",
    "PhaseComparison",
    "RunComparison",
    "compare_groups",
    "compare_phases",
    "compare_run",
    "comparison_blocks",
]

# Names that frameworks give their groups and mesh axes.
_NAMES = (
    ("tp", r"\btp\b|tensor"),
    ("cp", r"\bcp\b|context"),
    ("ep", r"\bep\b|expert"),
    ("pp", r"\bpp\b|pipe"),
    ("dp", r"\bdp\b|data|shard|replicate|fsdp|ddp"),
)


# What a step is made of: broadcasts and barriers belong to set-up, a receive is its sender's.
_STEADY = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseComparison:
    """One phase of a step, planned and measured; None where the run does not say."""

    phase: str
    predicted_s: float
    observed_s: float | None
    lost_s: float | None
    """Observed less predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupComparison:
    """The process groups of one axis, planned and measured, per rank and step."""

    axis: str
    groups: tuple[str, ...]
    """Measured groups taken for this axis."""
    predicted_bytes: float | None
    observed_bytes: float | None
    """Sent by one member: payload times the bus factor of its operation."""
    predicted_s: float | None
    observed_s: float | None
    """From the last arrival to the end, summed over the step."""
    observed_wait_s: float | None
    """Waiting for the last member, mean of the members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """A plan beside a run."""

    run: str
    steps: int
    predicted_step_s: float
    observed_step_s: float | None
    ratio: float | None
    """Observed over predicted."""
    phases: tuple[PhaseComparison, ...]
    groups: tuple[GroupComparison, ...]
    largest_loss: str | None
    """Phase that loses most against the plan."""
    reason: str | None
    """Why something could not be compared."""

    def to_json(self) -> dict[str, Any]:
        """Return the ``run`` object of ``plan explain --json``."""
        return asdict(self)


def compare_phases(
    candidate: Candidate,
    traffic: TrafficColumns,
    observed_step_s: float | None,
    shares: Mapping[str, float] | None,
) -> tuple[PhaseComparison, ...]:
    """Set the plan's phases beside the run's shares (0-1 by phase) of its median step.

    The pipeline bubble counts as collective: a stage that waits for its neighbour is blocked in a
    receive.
    """
    spent = candidate.breakdown
    exposed = sum(spent[axis] for axis in ("tp", "cp", "ep", "pp", "dp"))
    planned = dict.fromkeys((phase.value for phase in PHASES), 0.0) | {
        "forward": float(traffic.forward_s[0]),
        "backward": float(traffic.backward_s[0]),
        "optimizer": spent["optimizer"],
        "collective": exposed + spent["bubble"],
    }
    rows = []
    for phase, predicted in planned.items():
        known = observed_step_s is not None and shares is not None and phase in shares
        observed = shares[phase] * observed_step_s if known and shares and observed_step_s else None
        rows.append(
            PhaseComparison(
                phase=phase,
                predicted_s=predicted,
                observed_s=observed,
                lost_s=None if observed is None else observed - predicted,
            )
        )
    return tuple(rows)


def _axis(
    name: str, description: str | None, members: int, facts: RunFacts, placement: Placement
) -> str | None:
    text = f"{description or ''} {name}".lower()
    for axis, pattern in _NAMES:
        if re.search(pattern, text):
            return axis
    plain = name.split("[", 1)[0]
    lists = {g.ranks for r in facts.ranks for g in r.groups if g.name == plain}
    for group in placement.groups:
        if group.size == 1 or group.size != members:
            continue
        expected = tuple(range(0, group.size * group.stride, group.stride))
        starts = {tuple(rank - ranks[0] for rank in ranks) for ranks in lists if ranks}
        if not lists or expected in starts:
            return group.axis
    return None


def compare_groups(
    candidate: Candidate,
    traffic: TrafficColumns,
    collectives: Iterable[CollectiveSummary],
    facts: RunFacts,
    steps: int,
) -> tuple[GroupComparison, ...]:
    """Set planned bytes and seconds of each axis beside the measured groups of that axis."""
    placement = candidate.placement
    counts = {g.axis: g.count for g in placement.groups}
    found: dict[str, list[CollectiveSummary]] = {}
    for summary in collectives:
        if summary.op not in _STEADY:
            continue
        axis = _axis(summary.group, summary.description, summary.members, facts, placement)
        found.setdefault(axis or "other", []).append(summary)
    sizes = {g.axis: g.size for g in placement.groups}
    rows = []
    for axis in (*[a for a, size in sizes.items() if size > 1], "other"):
        measured = found.pop(axis, [])
        if axis == "other":
            measured += [s for rest in found.values() for s in rest]
            if not measured:
                continue
        # Sub-groups of an axis run side by side: a rank sees one of them.
        seen = len({s.group for s in measured})
        beside = max(1, min(counts.get(axis, 1), seen))
        known = [s for s in measured if s.bytes is not None]
        timed = [s for s in measured if s.transfer_ns is not None]
        per = max(steps, 1) * beside
        rows.append(
            GroupComparison(
                axis=axis,
                groups=tuple(sorted({s.group for s in measured})),
                predicted_bytes=None
                if axis == "other"
                else float(getattr(traffic, f"{axis}_bytes")[0]),
                observed_bytes=sum((s.bytes or 0) * bus_factor(s.op, s.members) for s in known)
                / per
                if known
                else None,
                predicted_s=None if axis == "other" else float(getattr(traffic, f"{axis}_s")[0]),
                observed_s=sum(s.transfer_ns or 0 for s in timed) / per / 1e9 if timed else None,
                observed_wait_s=sum((s.wait_ns or 0) / s.members for s in timed) / per / 1e9
                if timed
                else None,
            )
        )
    return tuple(rows)


def _steps_and_tokens(steps: pl.DataFrame, candidate: Candidate) -> tuple[int, float | None]:
    """Return how many steps every rank ended, and the median tokens of one for the whole job."""
    ended = (
        steps.filter(pl.col("complete"))
        .group_by("step")
        .agg(tokens=pl.col("tokens").sum(), known=pl.col("tokens").is_not_null().all())
    )
    # Ranks of a tensor or pipeline group count the same tokens.
    copies = candidate.layout.tp * candidate.layout.pp
    known = ended.filter(pl.col("known") & (pl.col("tokens") > 0))["tokens"]
    median = known.median()
    return ended.height, float(median) / copies if isinstance(median, float) else None


def compare_run(
    path: Path, candidate: Candidate, traffic: TrafficColumns, training: Training
) -> RunComparison:
    """Read a recorded run and set the plan beside it; raises InputError where it is no run."""
    answer = report(path)
    throughput = answer.throughput
    median = throughput.median_step_ns
    observed = None if median is None else median / 1e9
    shares = None
    if throughput.breakdown is not None:
        shares = {phase.value: share for phase, share in throughput.breakdown.items()}
    phases = compare_phases(candidate, traffic, observed, shares)
    lost = [p for p in phases if p.lost_s is not None and p.lost_s > 0]
    reasons = []
    if observed is None:
        reasons.append("the run holds no complete step")
    ranks = answer.run.layout.world
    if ranks != candidate.layout.gpus:
        reasons.append(f"the run has {ranks} ranks, the plan {candidate.layout.gpus}")
    steps, seen = _steps_and_tokens(answer.run.steps, candidate)
    if seen is not None and abs(seen - training.tokens) > 0.02 * training.tokens:
        reasons.append(f"the run took {seen:,.0f} tokens a step, the plan {training.tokens:,}")
    return RunComparison(
        run=answer.run.facts.run,
        steps=steps,
        predicted_step_s=candidate.step_s,
        observed_step_s=observed,
        ratio=None if observed is None else observed / candidate.step_s,
        phases=phases,
        groups=compare_groups(candidate, traffic, answer.collectives, answer.run.facts, steps),
        largest_loss=max(lost, key=lambda p: p.lost_s or 0).phase if lost else None,
        reason="; ".join(reasons) or None,
    )


def _number(value: float | None, scale: float = 1.0, digits: int = 4) -> str | None:
    return None if value is None else f"{value / scale:.{digits}f}"


def _phase_row(phase: PhaseComparison) -> tuple[str | None, ...]:
    seconds = (phase.predicted_s, phase.observed_s, phase.lost_s)
    return (phase.phase, *(_number(value, 1e-3, 3) for value in seconds))


def comparison_blocks(comparison: RunComparison) -> list[Block]:
    """Draw a plan beside a run."""
    blocks: list[Block] = [Heading(text=f"Beside run {comparison.run}")]
    if comparison.observed_step_s is not None:
        blocks.append(
            Sentence(
                text=f"Observed {1e3 * comparison.observed_step_s:,.1f} ms a step, "
                f"{comparison.ratio:.2f} times the plan's "
                f"{1e3 * comparison.predicted_step_s:,.1f} ms",
                detail=None
                if comparison.largest_loss is None
                else f"most is lost in {comparison.largest_loss.replace('_', ' ')}",
            )
        )
    if comparison.reason:
        blocks.append(Sentence(text=comparison.reason, tone=Tone.NOTICE))
    blocks.append(
        Table(
            title="Phases of a step, ms",
            columns=[
                Column(title="phase"),
                Column(title="predicted", numeric=True),
                Column(title="observed", numeric=True),
                Column(title="lost", numeric=True),
            ],
            rows=[_phase_row(p) for p in comparison.phases],
        )
    )
    blocks.append(
        Table(
            title="Process groups, per rank and step",
            columns=[
                Column(title="axis"),
                Column(title="predicted MB", numeric=True),
                Column(title="observed MB", numeric=True),
                Column(title="predicted ms", numeric=True),
                Column(title="observed ms", numeric=True),
                Column(title="waiting ms", numeric=True),
                Column(title="groups"),
            ],
            rows=[
                (
                    g.axis,
                    _number(g.predicted_bytes, 1e6, 2),
                    _number(g.observed_bytes, 1e6, 2),
                    _number(g.predicted_s, 1e-3, 3),
                    _number(g.observed_s, 1e-3, 3),
                    _number(g.observed_wait_s, 1e-3, 3),
                    ", ".join(g.groups) or None,
                )
                for g in comparison.groups
            ],
        )
    )
    return blocks

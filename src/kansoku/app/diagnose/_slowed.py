"""What a run's own step times say: since when all ranks together are slower, and in which phase."""

import polars as pl

from kansoku.app.report import Report
from kansoku.diagnose.observation import Observation
from kansoku.model import PHASES, Domain, Phase

__all__ = ["slowed"]

_LEAST_STEPS = 10
# CPUs that a job shares with others make its steps wander: less, or shorter, is no trouble there.
_LEAST_CPU_RATIO = 1.2
_LEAST_CPU_NS = 5_000_000_000
# A phase that grew by this share of what steps lost, on every rank, is where they lost it.
_LEAST_SHARE = 0.5
# What a phase that grew on every rank alike speaks of; work that grew so may have many reasons.
_TELLING = {
    Phase.DATA_WAIT: (Domain.STORAGE, "data loading"),
    Phase.CHECKPOINT: (Domain.STORAGE, "checkpoint"),
    Phase.COLLECTIVE: (Domain.NETWORK, "collectives"),
}


def _grown(steps: pl.DataFrame, first: int, lost_ns: float) -> dict[Phase, float]:
    """Return by how much of the loss each phase grew on every rank: the least of the ranks'."""
    columns = [f"{phase.value}_ns" for phase in PHASES]
    after = pl.col("step") >= first
    medians = steps.group_by("rank").agg(
        (pl.col(name).filter(after).median() - pl.col(name).filter(~after).median())
        for name in columns
    )
    least = medians.select(pl.col(name).min() for name in columns).row(0)
    return {
        phase: float(grown) / lost_ns
        for phase, grown in zip(PHASES, least, strict=True)
        if grown is not None
    }


def slowed(answer: Report) -> list[Observation]:
    """Return the lasting slow-down that the report found, as an observation.

    A slow rank is told apart by its own finding; here the whole job is what became slower.
    """
    change, window = answer.throughput.change, answer.throughput.window
    if change is None or window is None or change.after <= change.before:
        return []
    whole = answer.run.steps.filter(
        pl.col("complete") & pl.col("step").is_between(window.from_step, window.to_step)
    )
    numbers = whole["step"].unique().sort()
    first = int(numbers[min(change.index, len(numbers) - 1)])
    slow = whole.filter(pl.col("step") >= first)
    began, ended = slow["start_ns"].min(), (slow["start_ns"] + slow["duration_ns"]).max()
    if not isinstance(began, int) or not isinstance(ended, int):
        return []
    on_cpus = all((r.device or "cpu") == "cpu" for r in answer.run.facts.ranks)
    if slow["step"].n_unique() < _LEAST_STEPS or (
        on_cpus
        and (ended - began < _LEAST_CPU_NS or change.after < _LEAST_CPU_RATIO * change.before)
    ):
        return []
    grown = _grown(whole, first, change.after - change.before)
    phase = max(grown, key=lambda p: grown[p]) if grown else None
    text = (
        f"steps take {change.after / 1e6:.1f} ms from step {first} on where they took "
        f"{change.before / 1e6:.1f} ms"
    )
    domain, component = Domain.FRAMEWORK, "step time"
    if phase is not None and grown[phase] >= _LEAST_SHARE:
        text += (
            f"; {min(grown[phase], 1):.0%} of it is {phase.value.replace('_', ' ')} on every rank"
        )
        domain, component = _TELLING.get(phase, (domain, component))
    known = component != "step time"
    return [
        Observation(
            rule="finding.slow",
            text=text,
            source=f"steps {window.from_step}-{window.to_step}",
            kind="trace",
            domain=domain,
            component=component,
            role="either" if known else "symptom",
            strength=0.5 if known else 0.4,
            meaning="",
            action="",
            time_ns=began,
            last_ns=ended,
        )
    ]

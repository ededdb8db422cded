"""Who is slow in synchronous training: the one the others wait for.

All ranks show the same step time, so a rank's *own work* is looked at: its step less the time it
was blocked in collectives and less the time its thread stood in the run queue of a busy CPU, where
the recorder saw that. A rank is a straggler when

1. its own work exceeds the median of its peers (ranks of the same role: the same pipeline stage)
   by a share of the step that matters,
2. in nearly every window of the run, not in one of them,
3. by far more than the peers differ among themselves and than chance over the steps allows,
4. and, where collectives were matched, its peers do wait for it.

A delay that moves from rank to rank fails 2 and 3 and is nobody's fault; it is named as such.
CPU taken from outside shows as run-queue time (or as wall time without CPU time) that the peers
do not have, and is reported as the host's doing. On a busy machine whoever computes queues, while
those that wait for it sleep: queueing in proportion to a rank's own CPU time is not from outside.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.model.phase import PHASES, Phase
from kansoku.model.subject import Verdict
from kansoku.stats.robust import median_absolute_deviation

__all__ = ["Straggler", "StragglerPolicy", "StragglerReport", "find_stragglers"]

Floats = npt.NDArray[np.float64]
_OWN: tuple[Phase, ...] = tuple(phase for phase in PHASES if phase is not Phase.COLLECTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """Thresholds; results carry the policy they were found with."""

    min_steps: int = 10
    """Fewer usable steps give the verdict unknown."""
    warmup_ratio: float = 0.1
    """Share of the steps left out at the start (allocation, bucket rebuilding, compilation)."""
    windows: int = 5
    persistence: float = 0.8
    """Share of windows in which the rank must stand out."""
    min_excess: float = 0.06
    """Own work above the peers' median, as a share of the step time."""
    min_ratio: float = 1.08
    """Own work over the peers' median."""
    min_score: float = 4.0
    """Excess in standard errors over the steps."""
    peer_spread: float = 4.0
    """Excess in spreads of the peers' own excesses."""
    min_gc_excess: float = 0.03
    """Garbage collection above the peers' median, as a share of the step time."""
    min_gc_pauses: int = 3
    min_contention: float = 0.25
    """Run-queue time above the peers' median, as a share of the step time."""
    min_rotation: float = 0.10
    """Time lost to changing ranks, as a share of the step time, worth a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One rank that the others wait for."""

    rank: int
    phase: Phase
    """The phase that made it late."""
    cause: str
    """``work``, ``garbage_collection`` or ``cpu_contention``."""
    ratio: float
    """Own work over the median of its peers."""
    cost_ratio: float
    """Step time that would be saved without it, as a share of the step time."""
    confidence: float
    excess_ns: float
    """Own work above the peers' median, per step."""
    phase_excess_ns: Mapping[Phase, float]
    """Less run-queue time, where recorded."""
    cpu_share: float | None
    """Share of the excess that was CPU time of the rank itself; None where not recorded."""
    queue_excess_ns: float | None
    """Run-queue time above the peers' median, per step; None where not recorded."""
    blame_share: float | None
    """Share it caused of all waiting in its process groups; None where nothing matched."""
    persistence: float
    """Share of windows in which it stood out."""
    from_step: int
    to_step: int
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerReport:
    """The verdict with its reason, also where nobody is to blame."""

    verdict: Verdict
    reason: str
    stragglers: tuple[Straggler, ...]
    policy: StragglerPolicy
    rotating_ratio: float | None = None
    """Share of the step time lost to delays that change from rank to rank."""
    steps_used: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Role:
    """Aligned figures of ranks with one role, ``(steps, ranks)`` ns."""

    ranks: tuple[int, ...]
    steps: npt.NDArray[np.int64]
    duration: Floats
    own: Floats
    """Step less exposed collectives less run-queue time."""
    queue: Floats | None
    """Run-queue time, where recorded."""
    cpu: Floats | None
    gc: Floats
    phases: Mapping[Phase, Floats] = field(default_factory=dict)


def find_stragglers(
    steps: pl.DataFrame,
    roles: Mapping[int, tuple[int, ...]],
    *,
    gc: pl.DataFrame | None = None,
    queue: pl.DataFrame | None = None,
    matched: pl.DataFrame | None = None,
    policy: StragglerPolicy | None = None,
) -> StragglerReport:
    """Name the ranks the others wait for, or say that there is none, or that one cannot tell.

    ``steps`` are step rows with ``run_delay_ns``; ``roles`` maps a role to its ranks; ``gc``,
    ``queue`` and ``matched`` come from :func:`~kansoku.trace.steps.gc_rows`,
    :func:`~kansoku.trace.steps.queue_rows` and :func:`~kansoku.trace.collectives.arrivals`.
    """
    policy = policy or StragglerPolicy()
    usable = steps.filter(pl.col("complete"))
    if usable["rank"].n_unique() < 2:
        alone = "one rank has no peers to compare with"
        return _unknown("no rank completed a step" if usable.is_empty() else alone, policy)
    blame, waits = _blame(matched), _waits(matched)
    found: list[Straggler] = []
    rotating: list[float] = []
    notes: list[str] = []
    used = 0
    compared = False
    for name, ranks in roles.items():
        if len(ranks) < 2:
            notes.append(f"rank {ranks[0]} is alone in pipeline stage {name}: no peers")
            continue
        role = _role(usable, ranks, gc, queue, policy)
        if role is None:
            continue
        compared = True
        used = max(used, len(role.steps))
        here = _in_role(role, blame, waits, policy)
        found += here
        if not here:
            rotating.append(_rotating(role))
    if not compared:
        if notes and len(notes) == len(roles):
            return _unknown("no rank has a peer of the same role", policy, tuple(notes))
        return _unknown(
            f"fewer than {policy.min_steps} steps complete on all ranks after warm-up", policy
        )
    found.sort(key=lambda s: (-s.cost_ratio, -s.excess_ns))
    lost = max(rotating, default=None)
    if found:
        reason = f"{len(found)} of {sum(len(r) for r in roles.values())} ranks hold their peers up"
        verdict = Verdict.FOUND
    else:
        verdict = Verdict.NONE
        reason = f"over {used} steps no rank's own work stands out from its peers persistently"
        if lost is not None and lost >= policy.min_rotation:
            reason += "; what is lost moves from rank to rank"
    return StragglerReport(
        verdict=verdict,
        reason=reason,
        stragglers=tuple(found),
        policy=policy,
        rotating_ratio=lost,
        steps_used=used,
        notes=tuple(notes),
    )


def _unknown(reason: str, policy: StragglerPolicy, notes: tuple[str, ...] = ()) -> StragglerReport:
    return StragglerReport(
        verdict=Verdict.UNKNOWN, reason=reason, stragglers=(), policy=policy, notes=notes
    )


def _blame(matched: pl.DataFrame | None) -> dict[int, float]:
    """Return rank to the share it caused of all waiting in its process groups.

    The waiting in one collective is the fault of the member that came last.
    """
    if matched is None or matched.is_empty():
        return {}
    keys = ["group", "sequence"]
    one = matched.group_by(keys).agg(
        waited=pl.col("wait_ns").sum(), last=pl.col("rank").sort_by("arrival_ns").last()
    )
    caused = one.group_by("group", pl.col("last").alias("rank")).agg(caused=pl.col("waited").sum())
    total = one.group_by("group").agg(total=pl.col("waited").sum())
    members = matched.select("group", "rank").unique()
    shares = (
        members.join(total, on="group")
        .join(caused, on=["group", "rank"], how="left")
        .group_by("rank")
        .agg(pl.col("caused").fill_null(0).sum() / pl.col("total").sum())
    )
    return {rank: share for rank, share in shares.iter_rows() if share == share}  # noqa: PLR0124


def _waits(matched: pl.DataFrame | None) -> dict[int, float]:
    """Return rank to the time it waited for the last member, per matched collective."""
    if matched is None or matched.is_empty():
        return {}
    return dict(matched.group_by("rank").agg(pl.col("wait_ns").mean()).iter_rows())


def _role(
    steps: pl.DataFrame,
    ranks: tuple[int, ...],
    gc: pl.DataFrame | None,
    queued: pl.DataFrame | None,
    policy: StragglerPolicy,
) -> _Role | None:
    mine = steps.filter(pl.col("rank").is_in(list(ranks)))
    present = tuple(sorted(mine["rank"].unique().to_list()))
    if len(present) < 2:
        return None
    mine = mine.filter(pl.len().over("step") == len(present)).sort("step", "rank")
    numbers = mine["step"].unique().sort().to_numpy()
    skip = max(1, int(len(numbers) * policy.warmup_ratio))
    if len(numbers) - skip < policy.min_steps:
        return None
    mine = mine.filter(pl.col("step") >= int(numbers[skip]))
    shape = (len(numbers) - skip, len(present))

    def column(name: str) -> Floats | None:
        values = mine[name]
        if values.null_count():
            return None
        return values.to_numpy().astype(np.float64).reshape(shape)

    def joined(table: pl.DataFrame | None, name: str) -> Floats:
        if table is None or table.is_empty():
            return np.zeros(shape)
        keyed = table.select(pl.col("rank", "step").cast(pl.Int32), name)
        both = mine.select("rank", "step").join(
            keyed, on=["rank", "step"], how="left", maintain_order="left"
        )
        return both[name].fill_null(0).to_numpy().astype(np.float64).reshape(shape)

    gc_ns = joined(gc, "gc_ns")
    phases = {
        phase: mine[f"{phase.value}_ns"].to_numpy().astype(np.float64).reshape(shape)
        for phase in PHASES
    }
    if queued is not None:
        for phase in _OWN:
            part = joined(queued.filter(pl.col("kind") == phase.value), "queue_ns")
            phases[phase] = np.maximum(phases[phase] - part, 0)
    duration = mine["duration_ns"].to_numpy().astype(np.float64).reshape(shape)
    queue = column("run_delay_ns") if "run_delay_ns" in mine.columns else None
    own = duration - phases[Phase.COLLECTIVE]
    if queue is not None:
        # Part of the queueing falls into collectives (woken late); never below nothing.
        queue = np.minimum(queue, own)
        own = own - queue
    return _Role(
        ranks=present,
        steps=numbers[skip:],
        duration=duration,
        own=own,
        queue=queue,
        cpu=column("cpu_ns"),
        gc=gc_ns,
        phases=phases,
    )


def _peer_median(values: Floats, column: int) -> Floats:
    """Return the median of the other columns, per row."""
    return np.asarray(np.median(np.delete(values, column, axis=-1), axis=-1))


def _windowed(values: Floats, windows: int) -> Floats:
    """Return window means, ``(windows, ranks)``; each window has several steps."""
    parts = min(windows, max(len(values) // 4, 2))
    return np.array([part.mean(axis=0) for part in np.array_split(values, parts)])


def _stands_out(
    values: Floats, step_ns: float, column: int, threshold: float, policy: StragglerPolicy
) -> tuple[float, float, float] | None:
    """Return excess (ns a step), persistence and score of one rank, or None.

    Windows are compared by their means, so that a delay every few steps counts in full.
    """
    means = _windowed(values, policy.windows)
    excess = means[:, column] - _peer_median(means, column)
    persistence = float((excess > threshold * step_ns).mean())
    overall = float(values[:, column].mean() - np.median(np.delete(values.mean(axis=0), column)))
    if persistence < policy.persistence or overall < threshold * step_ns:
        return None
    if overall < policy.peer_spread * _peer_spread(np.delete(values.mean(axis=0), column)):
        return None
    per_step = values[:, column] - np.median(np.delete(values, column, axis=1), axis=1)
    # Neighbouring steps share their noise: blocks of steps, not steps, are the sample.
    blocks = _windowed(per_step[:, None], max(8, policy.windows))[:, 0]
    error = max(float(blocks.std(ddof=1)) / np.sqrt(len(blocks)), 1e-3 * step_ns)
    score = overall / error
    return (overall, persistence, score) if score >= policy.min_score else None


def _peer_spread(means: Floats) -> float:
    """Return how far apart the peers are; the farthest is left out, it may be slow as well."""
    deviations = np.sort(np.abs(means - np.median(means)))
    if len(deviations) < 3:
        return 0.0
    if len(deviations) < 8:
        return float(deviations[-2])
    return median_absolute_deviation(means)


def _in_role(
    role: _Role, blame: Mapping[int, float], waits: Mapping[int, float], policy: StragglerPolicy
) -> list[Straggler]:
    step_ns = float(np.median(role.duration.max(axis=1)))
    found = []
    for column in _worth_a_look(role, step_ns, policy):
        rank = role.ranks[column]
        seen = _judge(role, column, step_ns, policy)
        if seen is None:
            continue
        cause, excess, persistence, score, ratio = seen
        share = blame.get(rank)
        chance = 1 / len(role.ranks)
        peer_waits = [waits[peer] for peer in role.ranks if peer != rank and peer in waits]
        if cause == "work" and rank in waits and waits[rank] > float(np.median(peer_waits)):
            # It waits more than its peers do: what looked like own work was hidden waiting.
            continue
        phase_excess: dict[Phase, float] = {
            phase: float(
                role.phases[phase][:, column].mean()
                - np.median(np.delete(role.phases[phase].mean(axis=0), column))
            )
            for phase in _OWN
        }
        phase: Phase = max(phase_excess, key=lambda p: phase_excess[p])
        if cause == "garbage_collection":
            phase = _gc_phase(role, column)
        cpu_share = None
        if role.cpu is not None:
            cpu_excess = float(
                role.cpu[:, column].mean() - np.median(np.delete(role.cpu.mean(axis=0), column))
            )
            cpu_share = float(np.clip(cpu_excess / excess, 0, 1))
        found.append(
            Straggler(
                rank=rank,
                phase=phase,
                cause=cause,
                ratio=ratio,
                cost_ratio=0.0,
                confidence=_confidence(persistence, score, share, chance),
                excess_ns=excess,
                phase_excess_ns=phase_excess,
                cpu_share=cpu_share,
                queue_excess_ns=None
                if role.queue is None
                else float(
                    role.queue[:, column].mean()
                    - np.median(np.delete(role.queue.mean(axis=0), column))
                ),
                blame_share=share,
                persistence=persistence,
                from_step=int(role.steps[0]),
                to_step=int(role.steps[-1]),
                peers=tuple(r for r in role.ranks if r != rank),
            )
        )
    return _costed(role, found)


def _worth_a_look(role: _Role, step_ns: float, policy: StragglerPolicy) -> list[int]:
    """Screen by means, so that a thousand healthy ranks cost nothing."""
    seen: set[int] = set()
    for values, threshold in (
        (role.own, policy.min_excess),
        (role.gc, policy.min_gc_excess),
        (role.queue, policy.min_contention),
    ):
        if values is None:
            continue
        means = values.mean(axis=0)
        # Of two the other is the base; of more, the median of all, which a slow one moves little.
        base = means[::-1] if len(means) == 2 else np.median(means)
        seen |= set(np.flatnonzero(means - base > 0.4 * threshold * step_ns).tolist())
    return sorted(seen)


def _judge(
    role: _Role, column: int, step_ns: float, policy: StragglerPolicy
) -> tuple[str, float, float, float, float] | None:
    """Return cause, excess, persistence, score and ratio of a rank that stands out."""
    own = role.own
    base = float(np.median(np.delete(own.mean(axis=0), column)))
    ratio = float(own[:, column].mean()) / base if base > 0 else float("inf")
    gc = _stands_out(role.gc, step_ns, column, policy.min_gc_excess, _for_gc(policy))
    pauses = int((role.gc[:, column] > 0).sum())
    if gc is not None and pauses >= policy.min_gc_pauses:
        whole = float(own[:, column].mean()) - base
        # Collections explain the delay: at least half of what the rank does longer.
        if gc[0] >= 0.5 * whole:
            return ("garbage_collection", *gc, max(ratio, 1 + gc[0] / max(base, 1.0)))
    work = _stands_out(own, step_ns, column, policy.min_excess, policy)
    queue = None
    if role.queue is not None:
        queue = _stands_out(
            _queue_from_outside(role, column), step_ns, column, policy.min_contention, policy
        )
    # A rank without its CPU loses a little everywhere; what it waits for the CPU says why.
    if role.queue is not None and queue is not None and (work is None or queue[0] > work[0]):
        wall = own + role.queue
        peers = float(np.median(np.delete(wall.mean(axis=0), column)))
        return ("cpu_contention", *queue, float(wall[:, column].mean()) / max(peers, 1.0))
    if work is not None and ratio >= policy.min_ratio:
        return ("work", *work, ratio)
    return None


def _queue_from_outside(role: _Role, column: int) -> Floats:
    """Return run-queue time less what the rank's own further CPU time explains.

    A thread that computes twice as long on the same busy machine queues about twice as long.
    """
    queue = np.zeros_like(role.own) if role.queue is None else role.queue.copy()
    if role.cpu is None:
        return queue
    peers_cpu = float(np.median(np.delete(role.cpu.mean(axis=0), column)))
    peers_queue = float(np.median(np.delete(queue.mean(axis=0), column)))
    more = float(role.cpu[:, column].mean()) - peers_cpu
    if more <= 0 or peers_cpu <= 0:
        return queue
    explained = peers_queue / peers_cpu * more
    queue[:, column] = np.maximum(queue[:, column] - explained, 0)
    return queue


def _for_gc(policy: StragglerPolicy) -> StragglerPolicy:
    """Loosen the tests: collections come every few steps, so their spread says little."""
    return StragglerPolicy(
        windows=min(policy.windows, 4), persistence=0.75, min_score=2.0, peer_spread=2.0
    )


def _gc_phase(role: _Role, column: int) -> Phase:
    """Return the phase that grows in the steps with collections."""
    with_gc = role.gc[:, column] > 0
    if with_gc.all() or not with_gc.any():
        return Phase.OTHER
    growth = {
        phase: float(
            role.phases[phase][with_gc, column].mean()
            - np.median(role.phases[phase][~with_gc, column])
        )
        for phase in _OWN
    }
    return max(growth, key=lambda p: growth[p])


def _confidence(persistence: float, score: float, share: float | None, chance: float) -> float:
    """Return 0.5-0.99: persistence, distance from chance, and whether the peers wait for it."""
    certainty = 1 - 1 / (1 + score / 4)
    value = 0.5 + 0.45 * persistence * certainty
    if share is not None:
        value += 0.1 * min(max((share - chance) / (1 - chance), 0.0), 1.0)
    return float(min(value, 0.99))


def _costed(role: _Role, found: list[Straggler]) -> list[Straggler]:
    """Fill in the step time saved if this rank, and the slower ones with it, kept pace."""
    wall = role.own if role.queue is None else role.own + role.queue
    step = float(role.duration.mean())
    slow = {s.rank for s in found}
    rest = [n for n, rank in enumerate(role.ranks) if rank not in slow]
    floor = wall[:, rest].max(axis=1) if rest else np.median(wall, axis=1)
    costed = []
    for straggler in found:
        column = role.ranks.index(straggler.rank)
        # Against the next slowest healthy rank, and its typical rather than its worst step.
        saved = np.maximum(wall[:, column] - floor, 0).mean() / step if step else 0.0
        costed.append(
            Straggler(
                **{
                    name: getattr(straggler, name)
                    for name in Straggler.__slots__
                    if name != "cost_ratio"
                },
                cost_ratio=float(min(saved, 1.0)),
            )
        )
    return costed


def _rotating(role: _Role) -> float:
    """Return the share of the step time lost to whoever happens to be last."""
    lost = role.own.max(axis=1) - np.median(role.own, axis=1)
    return float(lost.mean() / max(role.duration.mean(), 1.0))

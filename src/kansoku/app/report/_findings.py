"""What a report says in sentences: findings with evidence, most severe first."""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from kansoku.app._few_ranks import few_ranks
from kansoku.app.report._ends import FirstEnd, first_end
from kansoku.app.report._load import LoadedRun
from kansoku.app.report._states import BlackBox, RankState
from kansoku.model import Domain, Evidence, Finding, Phase, Severity, Subject, Verdict
from kansoku.trace.blackbox import BlockedCollective
from kansoku.trace.stragglers import Straggler, StragglerReport
from kansoku.trace.throughput import Throughput

__all__ = ["ReportPolicy", "build_findings"]

_SOURCE = "trace"
_ORDER = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPolicy:
    """From which share of the step time on something is worth a sentence."""

    data_wait: float = 0.10
    collective: float = 0.30
    checkpoint: float = 0.10
    gc: float = 0.03
    tail: float = 1.5
    """p95 of the step time over its median."""
    clock_ns: float = 100_000.0


def build_findings(
    run: LoadedRun,
    throughput: Throughput,
    stragglers: StragglerReport,
    box: BlackBox,
    policy: ReportPolicy,
) -> tuple[Finding, ...]:
    """Return the findings of a run."""
    found = [_straggler(run, straggler) for straggler in stragglers.stragglers]
    found += _rotating(run, stragglers)
    found += _black_box(run, box)
    found += _shares(run, throughput, policy, slow=bool(stragglers.stragglers))
    found += _changes(run, throughput, policy)
    found += _collections(run, throughput, policy)
    found += _clocks(run, policy)
    return tuple(sorted(found, key=lambda f: (_ORDER[f.severity], -f.confidence)))


def _job(run: LoadedRun) -> Subject:
    return Subject(kind="job", name=run.facts.slurm_job or run.facts.run)


def _ms(value_ns: float) -> str:
    milliseconds = value_ns / 1e6
    return f"{milliseconds:.1f} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"


_PHASE_WORDS = {
    Phase.DATA_WAIT: "waiting for data",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "the optimizer",
    Phase.CHECKPOINT: "checkpointing",
    Phase.OTHER: "code outside the phases",
    Phase.COLLECTIVE: "collectives",
}
_DOMAINS = {
    "work": None,
    "garbage_collection": Domain.APPLICATION,
    "cpu_contention": Domain.HOST,
}


def _straggler(run: LoadedRun, s: Straggler) -> Finding:
    source = f"steps {s.from_step}-{s.to_step} of {run.facts.run}"
    where = _PHASE_WORDS[s.phase]
    peers = "the other rank waits" if len(s.peers) == 1 else f"{len(s.peers)} peers wait"
    beside = f"{'that' if len(s.peers) == 1 else 'the median'} of {few_ranks(s.peers)}"
    cost = f"without it a step would take {s.cost_ratio:.0%} less"
    if s.cause == "garbage_collection":
        sentence = (
            f"Rank {s.rank} pauses for Python garbage collection more than its peers, "
            f"{_ms(s.excess_ns)} a step on average; {peers} for it, {cost}."
        )
    elif s.cause == "cpu_contention":
        sentence = (
            f"Something outside the training takes CPU from rank {s.rank}: it stands "
            f"{_ms(s.excess_ns)} a step longer in the run queue than its peers and is slow in "
            f"{where}; {peers} for it, {cost}."
        )
    else:
        sentence = (
            f"Rank {s.rank} is slow in {where}: its own work takes {s.ratio:.2f}× its peers', "
            f"{_ms(s.excess_ns)} more a step; {peers} for it, {cost}."
        )
    evidence = [
        Evidence(
            sentence=f"own work {s.ratio:.2f}× {beside} over steps {s.from_step}-{s.to_step}, "
            f"standing out in {s.persistence:.0%} of the windows",
            source=source,
        ),
        Evidence(
            sentence="more than the peers a step: "
            + ", ".join(
                f"{p.value} {value / 1e6:+.1f} ms"
                for p, value in sorted(s.phase_excess_ns.items(), key=lambda kv: -abs(kv[1]))[:3]
            ),
            source=source,
        ),
    ]
    if s.blame_share is not None:
        evidence.append(
            Evidence(
                sentence=f"came last where its groups waited: {s.blame_share:.0%} of all waiting "
                "in their collectives is for this rank",
                source="matched collectives",
            )
        )
    if s.cpu_share is not None:
        evidence.append(
            Evidence(
                sentence=f"{s.cpu_share:.0%} of the extra time is CPU time of its main thread"
                + (
                    "" if s.cpu_share >= 0.5 else "; the rest it slept, waited, or stood in a queue"
                ),
                source=source,
            )
        )
    if s.cause == "work" and (s.queue_excess_ns or 0) > 0.25 * s.excess_ns:
        evidence.append(
            Evidence(
                sentence=f"and {_ms(s.queue_excess_ns or 0)} a step more in the run queue, in "
                "proportion to its own CPU time: the machine is busy",
                source=source,
            )
        )
    return Finding(
        id=f"straggler.{s.cause if s.cause != 'work' else s.phase.value}",
        subject=Subject(kind="rank", name=str(s.rank)),
        domain=_DOMAINS[s.cause],
        verdict=Verdict.FOUND,
        severity=Severity.WARNING,
        confidence=s.confidence,
        sentence=sentence,
        evidence=tuple(evidence),
        source=_SOURCE,
        onset_ns=_step_start(run, s.rank, s.from_step),
    )


def _step_start(run: LoadedRun, rank: int, step: int) -> int | None:
    rows = run.steps.filter((pl.col("rank") == rank) & (pl.col("step") == step))
    return int(rows["start_ns"][0]) if len(rows) else None


def _rotating(run: LoadedRun, report: StragglerReport) -> list[Finding]:
    lost = report.rotating_ratio
    if report.stragglers or lost is None or lost < report.policy.min_rotation:
        return []
    return [
        Finding(
            id="delay.rotating",
            subject=_job(run),
            domain=None,
            verdict=Verdict.FOUND,
            severity=Severity.INFO,
            confidence=0.7,
            sentence=(
                f"About {lost:.0%} of the step time is lost to whichever rank comes last, but the "
                "rank changes: no single rank is at fault. Uneven batches, shared CPUs or storage "
                "look like this."
            ),
            evidence=(Evidence(sentence=report.reason, source=f"{report.steps_used} steps"),),
            source=_SOURCE,
        )
    ]


def _doing(rank: RankState) -> str:
    state = rank.state
    if state.kind is None:
        text = "between phases"
    elif state.kind == "collective":
        text = f"in {state.name or 'a collective'} {state.sequence} of group {state.group}"
    else:
        text = f"in {state.kind.replace('_', ' ')}"
    if state.step is not None:
        text += f" of step {state.step}"
    if rank.duration_ns is not None:
        text += f" for {rank.duration_ns / 1e9:.1f} s"
    return text


def _ended_first(first: FirstEnd) -> Finding:
    return Finding(
        id="rank.ended_first",
        subject=Subject(kind="rank", name=str(first.rank.rank)),
        domain=None,
        verdict=Verdict.FOUND,
        severity=Severity.CRITICAL if first.rank.failed else Severity.WARNING,
        confidence=0.97 if first.sure else 0.6,
        sentence=first.sentence,
        evidence=(
            Evidence(
                sentence=first.evidence,
                source=f"end of pid {first.rank.pid}",
                time_ns=first.ended_ns,
            ),
        ),
        source=_SOURCE,
        onset_ns=first.ended_ns,
    )


def _gone(rank: RankState, first: FirstEnd | None) -> Finding:
    """Return that a rank's process ended without closing its record."""
    after = first is not None and rank.rank in first.after
    how = "as after SIGKILL or a crash"
    if first is not None and after:
        what = f"rank {first.rank.rank}" if rank.end else f"the record of rank {first.rank.rank}"
        how = f"after {what} had ended, as where a launcher ends who is left"
    elif rank.end is not None:
        how = "by a signal"
    return Finding(
        id="rank.ended_after" if after else "rank.gone",
        subject=Subject(kind="rank", name=str(rank.rank)),
        domain=None,
        verdict=Verdict.FOUND,
        severity=Severity.WARNING if after else Severity.CRITICAL,
        confidence=0.95,
        sentence=f"Rank {rank.rank} (pid {rank.pid} on {rank.node}) ended without closing "
        f"its record, {how}; it was {_doing(rank)}.",
        evidence=(
            Evidence(
                sentence="its record was open and the process is not there",
                source=f"ring of pid {rank.pid}",
                time_ns=rank.alive_ns,
            ),
        ),
        source=_SOURCE,
        onset_ns=rank.alive_ns,
    )


def _blocked_sentence(blocked: BlockedCollective, status: Mapping[int, RankState]) -> str:
    """Return who waits in a collective, and for whom."""
    if not blocked.missing:
        return (
            f"All members entered {blocked.op} {blocked.sequence} of group {blocked.group}, "
            f"and {few_ranks(blocked.waiting)} never left it: a transfer that hangs or a "
            "peer that died inside."
        )
    missing = ", ".join(
        f"rank {rank} ({_doing(status[rank]) if rank in status else 'no record'}"
        f"{', process gone' if rank in status and status[rank].process == 'gone' else ''})"
        for rank in blocked.missing[:8]
    )
    waits = "waits" if len(blocked.waiting) == 1 else "wait"
    return (
        f"{few_ranks(blocked.waiting).capitalize()} {waits} "
        f"in {blocked.op} {blocked.sequence} of group {blocked.group} for {missing}."
    )


def _blocked(
    run: LoadedRun, blocked: BlockedCollective, status: Mapping[int, RankState]
) -> Finding:
    """Return that ranks wait in a collective; ``status`` is by rank."""
    return Finding(
        id="collective.blocked",
        subject=Subject(kind="rank", name=str(blocked.missing[0]))
        if len(blocked.missing) == 1
        else _job(run),
        domain=None,
        verdict=Verdict.FOUND,
        severity=Severity.CRITICAL,
        confidence=0.9 if blocked.missing else 0.6,
        sentence=_blocked_sentence(blocked, status),
        evidence=tuple(
            Evidence(
                sentence=f"rank {rank} entered it",
                source="open span",
                time_ns=status[rank].state.since_ns if rank in status else None,
            )
            for rank in blocked.waiting[:16]
        ),
        source=_SOURCE,
        onset_ns=blocked.entered_ns,
    )


def _failed(run: LoadedRun, code: int) -> Finding:
    """Return that the job ended with another exit code than 0."""
    what = f"signal {code - 128}" if code > 128 else f"exit code {code}"
    return Finding(
        id="job.failed",
        subject=_job(run),
        domain=None,
        verdict=Verdict.FOUND,
        severity=Severity.WARNING,
        confidence=1.0,
        sentence=f"The job ended with {what}.",
        evidence=(Evidence(sentence=f"the launcher saw {what}", source="run.json"),),
        source=_SOURCE,
        onset_ns=run.facts.end_ns,
    )


def _black_box(run: LoadedRun, box: BlackBox) -> list[Finding]:
    if not box.stopped:
        return []
    gone = [rank for rank in box.ranks if rank.process == "gone"]
    status = {rank.rank: rank for rank in box.ranks}
    first = first_end(box, run.facts.exit_code)
    found = [] if first is None else [_ended_first(first)]
    found += [_gone(rank, first) for rank in gone[:8]]
    found += [_blocked(run, blocked, status) for blocked in box.blocked[:8]]
    code = run.facts.exit_code
    return found if code in (0, None) else [*found, _failed(run, code)]


def _finding(
    run: LoadedRun,
    name: str,
    sentence: str,
    evidence: str,
    *,
    domain: Domain | None = None,
    severity: Severity = Severity.INFO,
    confidence: float = 0.8,
) -> Finding:
    return Finding(
        id=name,
        subject=_job(run),
        domain=domain,
        verdict=Verdict.FOUND,
        severity=severity,
        confidence=confidence,
        sentence=sentence,
        evidence=(Evidence(sentence=evidence, source=f"steps of {run.facts.run}"),),
        source=_SOURCE,
    )


def _shares(
    run: LoadedRun, throughput: Throughput, policy: ReportPolicy, *, slow: bool
) -> list[Finding]:
    shares = throughput.breakdown
    if shares is None:
        return []
    found = []
    for phase, limit, name, advice, domain in (
        (
            Phase.DATA_WAIT,
            policy.data_wait,
            "input.bound",
            "More loader processes, prefetching or faster storage would help.",
            None,
        ),
        (
            Phase.COLLECTIVE,
            policy.collective,
            "communication.exposed",
            "Communication is not hidden behind computation."
            if not slow
            else "Most of it may be waiting for the straggler.",
            None,
        ),
        (
            Phase.CHECKPOINT,
            policy.checkpoint,
            "checkpoint.cost",
            "Asynchronous or rarer checkpoints would give it back.",
            Domain.STORAGE,
        ),
    ):
        if shares[phase] < limit:
            continue
        found.append(
            _finding(
                run,
                name,
                f"{shares[phase]:.0%} of the ranks' time goes to {_PHASE_WORDS[phase]}. {advice}",
                f"{phase.value} is {shares[phase]:.1%} of the step, limit {limit:.0%}",
                domain=domain,
            )
        )
    return found


def _changes(run: LoadedRun, throughput: Throughput, policy: ReportPolicy) -> list[Finding]:
    found = []
    change, window = throughput.change, throughput.window
    if change is not None and window is not None:
        step = window.from_step + change.index
        word = "slower" if change.after > change.before else "faster"
        found.append(
            _finding(
                run,
                "step_time.changed",
                f"From step {step} on the job is {word}: a step takes {_ms(change.after)} instead "
                f"of {_ms(change.before)}.",
                f"change point at step {step}, {change.score:.0f} standard errors",
                severity=Severity.WARNING if change.after > 1.2 * change.before else Severity.INFO,
            )
        )
    median, p95 = throughput.median_step_ns, throughput.p95_step_ns
    if median and p95 and p95 > policy.tail * median:
        found.append(
            _finding(
                run,
                "step_time.tail",
                f"One step in twenty takes {p95 / median:.1f}× the median or longer "
                f"({_ms(p95)} against {_ms(median)}).",
                f"p95 {_ms(p95)}, median {_ms(median)}",
            )
        )
    return found


def _collections(run: LoadedRun, throughput: Throughput, policy: ReportPolicy) -> list[Finding]:
    # As every other figure, of the window: imports and the first steps' allocations are left out.
    window = throughput.window
    if window is None:
        return []
    inside = pl.col("step").is_between(window.from_step, window.to_step)
    pauses = run.spans.filter((pl.col("kind") == "gc") & pl.col("duration_ns").is_not_null())
    pauses = pauses.filter(inside)
    total = float(run.steps.filter(inside)["duration_ns"].sum())
    if pauses.is_empty() or not total:
        return []
    share = float(pauses["duration_ns"].sum()) / total
    if share < policy.gc:
        return []
    return [
        _finding(
            run,
            "gc.cost",
            f"Python garbage collection takes {share:.0%} of the ranks' time in {len(pauses)} "
            "pauses. Collect at fixed steps on all ranks together, or freeze what lives long.",
            f"{_ms(float(pauses['duration_ns'].sum()))} in {len(pauses)} pauses, steps "
            f"{window.from_step}-{window.to_step}",
            domain=Domain.APPLICATION,
        )
    ]


def _clocks(run: LoadedRun, policy: ReportPolicy) -> list[Finding]:
    clocks = run.clocks
    if not clocks.applied:
        return []
    worst = max(clocks.offsets, key=lambda o: abs(o.offset_ns))
    if abs(worst.offset_ns) < policy.clock_ns:
        return []
    return [
        _finding(
            run,
            "clock.offset",
            f"Clocks differ by up to {abs(worst.offset_ns) / 1e6:.2f} ms (rank {worst.rank} "
            f"against rank {clocks.reference}); times across ranks are corrected.",
            f"{worst.matches} matched collectives, residual {(worst.residual_ns or 0) / 1e3:.0f} "
            f"µs, drift {worst.drift_ppm:+.1f} ppm; {clocks.reason}",
            domain=Domain.HOST,
        )
    ]

"""Scores of MLPerf Training logs: time to train, olympic mean, convergence against the reference.

Time to train runs from the first ``run_start`` to the last ``run_stop``. The score is the olympic
mean of the runs in minutes: the fastest and the slowest are dropped, a run that did not converge
counts as infinitely slow, and the mean of the rest is multiplied by the review committee's scaling
factor where there is one. Source: MLCommons training policies and mlcommons/logging.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from scipy.special import stdtrit

from kansoku.catalog.mlperf import BenchmarkRule, ReferencePoint
from kansoku.formats.mllog import MlEvent, MlLog

__all__ = ["RcpCheck", "RunScore", "check_convergence", "olympic_mean", "score_run"]

_MS_PER_MINUTE = 60_000.0
_MOST_MINUTES = 366 * 24 * 60.0
"""A benchmark run of more than a year is a broken clock."""
_SIGNIFICANCE = 0.05
_MOST_WHOLE = 2.0**53
"""Whole numbers beyond it are not what a log means, and no JSON reader keeps them."""
_STEP_TIME_KEYS = ("train_step_timing in s", "train_step_time", "step_time")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScore:
    """One run of a benchmark, as its log tells it."""

    file: str
    benchmark: str | None
    status: str
    """``success``, ``aborted`` or ``incomplete``."""
    minutes: float | None
    """run_start to run_stop; None where either is missing."""
    samples: float | None
    """Convergence position of the last evaluation, in ``unit``."""
    unit: str
    tokens: float | None
    """The same in tokens, where the sequence length is known."""
    global_batch_size: int | None
    sequence_length: int | None
    evaluations: int
    evaluation_share: float | None
    """Ratio of the run spent between eval_start and eval_stop; None where neither is logged."""
    step_s: float | None
    """Median of the step times logged by the run."""
    tokens_per_s: float | None
    """Over the whole run, evaluation included."""
    tokens_per_s_in_steps: float | None
    """Over the logged steps alone."""
    seed: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RcpCheck:
    """Mean convergence of a submission beside the reference convergence points."""

    verdict: str
    """``pass``, ``fail`` or ``unknown``."""
    reason: str
    ruleset: str | None
    submission_mean: float | None
    reference_mean: float | None
    min_acceptable_mean: float | None
    normalisation: float
    """Factor that the score is to be multiplied by; above 1 where the runs converged faster."""


def _number(event: MlEvent | None) -> float | None:
    if event is None:
        return None
    try:
        value = float(event.value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _whole(log: MlLog, key: str, notes: list[str]) -> int | None:
    """Return a positive whole number of the log; what is none is said and left out."""
    event = log.first(key)
    if event is None:
        return None
    value = _number(event)
    if value is None or not 1 <= value < _MOST_WHOLE:
        notes.append(f"row {event.row}: {key} {str(event.value)[:40]!r} is no positive number")
        return None
    return int(value)


def _second_run(log: MlLog) -> MlEvent | None:
    """Return the run_start of a second run; ranks that log the same start all start before."""
    ended = min((e.time_ms for e in log.of("run_stop")), default=math.inf)
    return next((e for e in log.of("run_start") if e.time_ms > ended), None)


def _position(event: MlEvent, rule: BenchmarkRule) -> float | None:
    # Submitters differ in the key; the rule's own comes first.
    for key in (rule.position, "samples_count", "epoch_num", "step_num"):
        value = event.metadata.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _interval_ms(log: MlLog, start: str, stop: str) -> float | None:
    """Sum the intervals; a second start before a stop is another rank logging the same."""
    total, open_since, seen = 0.0, None, False
    for event in log.events:
        if event.key == start and open_since is None:
            open_since = event.time_ms
        elif event.key == stop and open_since is not None:
            total += event.time_ms - open_since
            open_since, seen = None, True
    return total if seen else None


def _step_times_s(log: MlLog) -> list[float]:
    found = []
    for event in log.of("tracked_stats"):
        if isinstance(event.value, Mapping):
            for key in _STEP_TIME_KEYS:
                value = event.value.get(key)
                if isinstance(value, int | float) and value > 0:
                    found.append(float(value))
                    break
    return found


def _tokens(
    samples: float | None, rule: BenchmarkRule | None, sequence: int | None
) -> float | None:
    if samples is None or rule is None:
        return None
    if rule.unit == "tokens":
        return samples
    return samples * sequence if rule.unit == "sequences" and sequence else None


def _trained_tokens(
    log: MlLog, rule: BenchmarkRule | None, sequence: int | None, samples: float | None
) -> float | None:
    """Return tokens trained inside the run: ``samples`` counts from a checkpoint's position."""
    first = next(
        (e for e in log.events if e.key in {"block_start", "epoch_start"} and e.metadata), None
    )
    begin = 0.0
    if first is not None:
        value = first.metadata.get("first_epoch_num", first.metadata.get("epoch_num", 0))
        begin = float(value) if isinstance(value, int | float) else 0.0
    total = _tokens(samples, rule, sequence)
    offset = _tokens(begin, rule, sequence)
    return None if total is None or offset is None else total - offset


def score_run(log: MlLog, rule: BenchmarkRule | None) -> RunScore:
    """Read one run's figures from its log; nothing missing is made up."""
    notes: list[str] = []
    if log.quarantined:
        first = log.quarantined[0]
        notes.append(
            f"{len(log.quarantined)} damaged log lines set aside, "
            f"the first at row {first.row}: {first.reason}"
        )
    start, stop = log.first("run_start"), log.last("run_stop")
    status = "incomplete"
    minutes = None
    if not log.events:
        notes.append(f"no :::MLLOG line in {log.lines:,} lines: this is no MLPerf log")
    elif (second := _second_run(log)) is not None:
        notes.append(
            f"row {second.row}: another run starts after run_stop: two runs in one file have no "
            "time to train; split the file"
        )
    elif start is None:
        notes.append("no run_start: the run never began")
    elif stop is None:
        notes.append("no run_stop: the run did not end, or its log is cut off")
    else:
        minutes = (stop.time_ms - start.time_ms) / _MS_PER_MINUTE
        status = str(stop.metadata.get("status", "incomplete"))
        if "status" not in stop.metadata:
            notes.append("run_stop says no status; counted as not converged")
        if not 0 < minutes <= _MOST_MINUTES:
            notes.append(
                f"row {stop.row}: run_stop is not after run_start, or years after it: clocks of "
                "two hosts, or a mixed file"
            )
            minutes, status = None, "incomplete"
    benchmark = log.first("submission_benchmark")
    batch = _whole(log, "global_batch_size", notes)
    sequence = _whole(log, "max_sequence_length", notes)
    sequence = sequence or (rule.sequence_length if rule else None)
    evaluations = [e for key in ("eval_accuracy", "eval_error") for e in log.of(key)]
    samples = _position(evaluations[-1], rule) if evaluations and rule else None
    seconds = minutes * 60 if minutes else None
    trained = _trained_tokens(log, rule, sequence, samples)
    evaluation_ms = _interval_ms(log, "eval_start", "eval_stop")
    steps = _step_times_s(log)
    step_s = median(steps) if steps else None
    seed = _number(log.first("seed"))
    return RunScore(
        file=log.file,
        benchmark=str(benchmark.value) if benchmark else None,
        status=status,
        minutes=minutes,
        samples=samples,
        unit=rule.unit if rule else "unknown",
        tokens=_tokens(samples, rule, sequence),
        global_batch_size=batch,
        sequence_length=sequence,
        evaluations=len(evaluations),
        evaluation_share=(
            evaluation_ms / (minutes * _MS_PER_MINUTE)
            if evaluation_ms is not None and minutes
            else None
        ),
        step_s=step_s,
        tokens_per_s=trained / seconds if trained and seconds else None,
        tokens_per_s_in_steps=batch * sequence / step_s if batch and sequence and step_s else None,
        seed=int(seed) if seed is not None and abs(seed) < _MOST_WHOLE else None,
        notes=tuple(notes),
    )


def olympic_mean(values: Sequence[float], dropped: int) -> float | None:
    """Drop the ``dropped`` smallest and largest and average the rest; None if nothing remains.

    A run that did not converge is passed as infinity. More of them than are dropped leave no score.
    """
    kept = sorted(values)[dropped : len(values) - dropped]
    if not kept or math.isinf(kept[-1]):
        return None
    return fmean(kept)


def _min_acceptable(mean: float, deviation: float, references: int, submissions: int) -> float:
    """Return the mean at which a one-sided t-test of equal variances reaches 5 %.

    ``references`` and ``submissions`` are the counts left after dropping.
    """
    freedom = references + submissions - 2
    if deviation == 0 or freedom < 1:
        return mean
    quantile = float(stdtrit(freedom, 1 - _SIGNIFICANCE))
    spread = deviation * math.sqrt(1 / references + 1 / submissions)
    return max(mean - quantile * spread, 0.0)


def _mean(point: ReferencePoint, rule: BenchmarkRule) -> float:
    return fmean(point.convergence[rule.dropped : -rule.dropped])


def _pruned(points: Sequence[ReferencePoint], rule: BenchmarkRule) -> list[ReferencePoint]:
    """Leave out references that converge slower than their neighbours suggest.

    First every batch below the fastest one, then each point above the line between the points
    beside it, as the official checker prunes them.
    """
    fastest = min(points, key=lambda p: _mean(p, rule))
    kept = [p for p in points if p.global_batch_size >= fastest.global_batch_size]
    at = 1
    while at < len(kept) - 1:
        low, point, high = kept[at - 1], kept[at], kept[at + 1]
        line = np.interp(
            point.global_batch_size,
            [low.global_batch_size, high.global_batch_size],
            [_mean(low, rule), _mean(high, rule)],
        )
        if _mean(point, rule) > line:
            del kept[at]
        else:
            at += 1
    return kept


def _reference(
    batch: int, points: Sequence[ReferencePoint], rule: BenchmarkRule
) -> tuple[float, float, str] | None:
    """Return reference mean, minimum acceptable mean and where they come from."""
    points = _pruned(points, rule)
    means = [_mean(p, rule) for p in points]
    for point, mean in zip(points, means, strict=True):
        if point.global_batch_size == batch:
            return mean, point.min_acceptable_mean, f"reference at batch {batch}"
    sizes = [p.global_batch_size for p in points]
    if batch < sizes[0]:
        # Smaller batches converge in fewer samples; the smallest reference is the stricter one.
        return means[0], points[0].min_acceptable_mean, f"smallest reference, batch {sizes[0]}"
    if batch > sizes[-1]:
        return None
    deviations = [float(np.std(p.convergence)) for p in points]
    mean = float(np.interp(batch, sizes, means))
    deviation = float(np.interp(batch, sizes, deviations))
    low = _min_acceptable(mean, deviation, 2 * rule.runs, rule.runs - 2 * rule.dropped)
    return mean, low, f"interpolated to batch {batch}"


def check_convergence(
    runs: Sequence[RunScore],
    rule: BenchmarkRule,
    points: Sequence[ReferencePoint],
    ruleset: str | None,
) -> RcpCheck:
    """Compare the runs' olympic mean convergence with the reference convergence points."""

    def unknown(reason: str) -> RcpCheck:
        return RcpCheck(
            verdict="unknown",
            reason=reason,
            ruleset=ruleset,
            submission_mean=None,
            reference_mean=None,
            min_acceptable_mean=None,
            normalisation=1.0,
        )

    if not points:
        return unknown(f"no reference convergence points on file for {rule.name}")
    batches = {run.global_batch_size for run in runs}
    if len(batches) != 1 or None in batches:
        return unknown("the runs log no common global_batch_size")
    converged = [
        run.samples if run.status == "success" and run.samples is not None else math.inf
        for run in runs
    ]
    mean = olympic_mean(converged, rule.dropped)
    if mean is None:
        return unknown(f"{len(runs)} runs with too few converged for an olympic mean")
    reference = _reference(batches.pop() or 0, points, rule)
    if reference is None:
        return unknown("the batch is larger than every reference: MLCommons asks for a new one")
    reference_mean, low, origin = reference
    passed = mean >= low
    return RcpCheck(
        verdict="pass" if passed else "fail",
        reason=f"{origin}: mean convergence {mean:,.0f} against at least {low:,.0f} {rule.unit}",
        ruleset=ruleset,
        submission_mean=mean,
        reference_mean=reference_mean,
        min_acceptable_mean=low,
        normalisation=max(reference_mean / mean, 1.0),
    )

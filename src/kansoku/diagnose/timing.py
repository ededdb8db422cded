"""When the trouble began, and how the time of an observation counts."""

from collections.abc import Iterable, Sequence

from kansoku.diagnose.context import Context
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.policy import Policy

__all__ = ["came_with", "onset_of", "slow_since", "time_weight"]

# Smaller "times" are step numbers.
_LEAST_DATE_NS = 10**17


def _complaints(seen: Iterable[Observation]) -> list[Observation]:
    wanted = {"root", "either", "symptom", "cascade"}
    return [o for o in seen if o.role in wanted and o.time_ns is not None and o.kind != "metric"]


def slow_since(seen: Iterable[Observation]) -> int | None:
    """Return when steps became slower, where a dated change was seen."""
    times = [
        o.time_ns
        for o in seen
        if o.rule in {"metric:step time", "finding.slow"} and (o.time_ns or 0) >= _LEAST_DATE_NS
    ]
    return min((t for t in times if t is not None), default=None)


def came_with(seen: Observation, slow_ns: int | None, policy: Policy) -> bool:
    """Say whether it began about when the steps became slower: the job goes on, but slower."""
    if slow_ns is None or seen.time_ns is None:
        return False
    return -policy.before_slow_ns <= seen.time_ns - slow_ns <= policy.after_slow_ns


def onset_of(seen: Sequence[Observation], context: Context, policy: Policy) -> int | None:
    """Return the first complaint of the last cluster, preferring what the job itself said.

    What the job survived is not the begin of its end.
    """
    timed = _complaints(seen)
    own = [o for o in timed if o.kind in {"job", "trace"} and o.strength > 0.3]
    times = sorted(o.time_ns or 0 for o in own or timed)
    slow_ns = slow_since(seen)
    if slow_ns is not None:
        # Mere symptoms after steps became slower tell of the same, and what came with it.
        later = [o for o in own or timed if (o.time_ns or 0) > slow_ns - policy.clock_slack_ns]
        if all(o.role == "symptom" or (not own and came_with(o, slow_ns, policy)) for o in later):
            return slow_ns
    if not times:
        return None
    progress = context.progress.latest_ns
    if progress is not None:
        times = [t for t in times if t >= progress - policy.survived_ns] or times
    onset = times[-1]
    for time_ns in reversed(times):
        if onset - time_ns > policy.cluster_gap_ns:
            break
        onset = time_ns
    return onset


def _was_over(seen: Observation, onset_ns: int | None, policy: Policy) -> bool:
    """Say whether it had healed before the trouble began, or came apart from it and healed."""
    if seen.healed_ns is None or seen.repeats >= policy.flaps:
        return False
    return (
        onset_ns is None
        or onset_ns - seen.healed_ns > policy.healed_gap_ns
        or (seen.time_ns or 0) - onset_ns > policy.clock_slack_ns
    )


def _counts_fully(seen: Observation, last_ns: int, onset_ns: int, policy: Policy) -> bool:
    """Say whether its time cannot count against it."""
    time_ns = seen.time_ns or 0
    if seen.kind == "metric" and time_ns < onset_ns:
        return True  # it lasts: numbers are compared over the whole time
    if seen.rule == "node-lost" and 0 <= time_ns - onset_ns < policy.survived_ns * 5:
        return True  # schedulers notice after minutes
    return seen.programs >= policy.other_programs and onset_ns - last_ns <= policy.old_ns


def time_weight(
    seen: Observation,
    onset_ns: int | None,
    context: Context,
    policy: Policy,
    slow_ns: int | None = None,
) -> tuple[float, str | None]:
    """Return how an observation's time counts, and why if it counts against it."""
    if _was_over(seen, onset_ns, policy):
        return policy.healed_weight, "it was well again before the trouble"
    if seen.time_ns is None or onset_ns is None or seen.time_ns < _LEAST_DATE_NS:
        return 0.8, None
    last = seen.last_ns or seen.time_ns
    if _counts_fully(seen, last, onset_ns, policy) or came_with(seen, slow_ns, policy):
        return 1.0, None
    progress = context.progress.latest_ns
    if onset_ns - last > policy.old_ns:
        return policy.old_weight, "it came long before the trouble"
    if (
        progress is not None
        and progress - last > policy.survived_ns
        and seen.kind not in {"metric", "trace"}
    ):
        return policy.survived_weight, "the job went on long after it"
    if seen.time_ns - onset_ns > policy.clock_slack_ns:
        return policy.late_weight, "it came after the first complaint"
    return 1.0, None

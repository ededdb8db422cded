"""What happened: stop, hang, slow or wrong numbers; and since when ranks were stuck."""

import re
from collections.abc import Iterable, Sequence

from kansoku.diagnose.observation import Observation
from kansoku.diagnose.policy import Policy

__all__ = ["NUMERICS", "SET_UP", "SLOW_TOLD", "kind_of", "stuck_since", "survived"]

# Smaller "times" are step numbers.
_LEAST_DATE_NS = 10**17
NUMERICS = {"app-nan-loss", "app-nan-tensor", "app-loss-spike", "fw-rerun-transient",
            "fw-rerun-persistent", "fw-rerun-app", "num-repeated",
            "metric:loss or gradient norm"}  # fmt: skip
"""Rules that tell of wrong numbers."""
SET_UP = {"net-ibv-open", "net-sockets-fallback", "net-no-gdr"}
"""What a job's libraries say of how they were set up: it may be why a job is slow or did not start,
and is no trouble of its own."""
SLOW_TOLD = "app-slow-told"
"""The job itself says that it is slower than it should be."""
_TIMEOUTS = {"fw-watchdog", "fw-watchdog-work", "fw-heartbeat", "fw-nvrx-hb", "fw-desync"}
_SLOW = {"finding.straggler", "finding.slow", "fw-straggler-report", SLOW_TOLD}
_RAN_FOR = re.compile(r"\bran for (\d{1,12}) milliseconds")


def survived(one: Observation, progress_ns: int | None, policy: Policy) -> bool:
    """Say whether steps went on long after it: then nothing died of it.

    ``progress_ns`` is the time of the last step; None where no step is known.
    """
    last_ns = one.last_ns or one.time_ns
    return (
        progress_ns is not None
        and last_ns is not None
        and progress_ns - last_ns > policy.survived_ns
    )


def kind_of(
    seen: Sequence[Observation],
    lead: Observation | None,
    *,
    progress_ns: int | None,
    ended: bool | None,
    policy: Policy,
) -> str:
    """Return what happened; ``lead`` is the first cause, ``progress_ns`` the time of the last step.

    ``ended`` says whether the job is over; None where nobody knows.
    """
    rules = {o.rule for o in seen}
    mine = [
        o
        for o in seen
        if o.kind == "job"
        and not o.handled
        and o.rule not in SET_UP
        and not survived(o, progress_ns, policy)
    ]
    deaths = [o for o in mine if o.role in {"root", "either"} and o.rule not in _TIMEOUTS]
    died = bool(deaths) or any(o.role == "cascade" and o.rule not in _TIMEOUTS for o in mine)
    if lead is not None and lead.component in {"silent corruption", "numerics"}:
        return "numerics"
    if rules & NUMERICS and (lead is None or lead.rule in NUMERICS or not died):
        return "numerics"
    if any(rule.startswith("hang.") for rule in rules) and not deaths:
        return "hang"
    if rules & _TIMEOUTS and not deaths:
        return "hang"
    if rules - SET_UP == {SLOW_TOLD} or (lead is not None and not died and _is_slow(lead, rules)):
        return "slow"  # also where that is all that is said: too little to name a cause
    if lead is not None and not died and lead.rule == "stack.outlier":
        return "hang"
    if not died and (ended is False or rules & {"metric:step time", "finding.slow"}):
        return "slow"
    return "stop"


def _is_slow(lead: Observation, rules: set[str]) -> bool:
    """Say whether the first cause, or numbers beside it, tell of a slow job."""
    return bool(
        (lead.kind == "metric" and lead.rule != "silence.node")
        or lead.rule in _SLOW
        or rules & _SLOW
        or any(rule.startswith("metric:") for rule in rules)
    )


def stuck_since(seen: Iterable[Observation], begin_ns: int) -> int:
    """Return when a hang began: a watchdog speaks late, and says how long it has waited."""
    waits = [(o.time_ns, _RAN_FOR.search(o.text)) for o in seen if o.rule in _TIMEOUTS]
    began = [t - int(ran[1]) * 1_000_000 for t, ran in waits if ran and t and t > _LEAST_DATE_NS]
    return min([begin_ns, *began])

"""Move a node on in its life: repaired, validated, returned."""

from dataclasses import dataclass
from typing import Any

from kansoku.app.respond import Driver
from kansoku.diagnose.life import NodeLife, Stage, lives_of, refusal
from kansoku.errors import InputError, PlatformError

__all__ = ["Marked", "mark", "stage_named"]

_MARKS = (Stage.REPAIRED, Stage.VALIDATED, Stage.RETURNED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """What was done, or would be."""

    sentence: str
    refusal: str | None
    """Why it was not, or would not be."""


def stage_named(text: str) -> Stage:
    """Return the stage that a person named; raise InputError with those there are."""
    if text not in list(_MARKS):
        raise InputError(f"{text!r} is no stage", where="--mark", remedy=f"{', '.join(_MARKS)}")
    return Stage(text)


_SENTENCES = {
    Stage.REPAIRED: "note that {node} was repaired: {reason}",
    Stage.VALIDATED: "run the node check on {node}",
    Stage.RETURNED: "return {node} to service",
}


def mark(driver: Driver, node: str, stage: Stage, reason: str, *, dry_run: bool) -> Marked:
    """Move a node to a stage: its check is run for ``validated``, Slurm told for ``returned``.

    Every try is in the audit log; what was reached is in the node's life.
    """
    sentence = _SENTENCES[stage].format(node=node, reason=reason)
    if dry_run:
        return Marked(sentence=sentence, refusal=_refusal(driver, node, stage))
    with driver.journal.owned():
        failure = _refusal(driver, node, stage)
        if failure is None:
            failure = _done(driver, node, stage)
        now = driver.now_ns()
        record: dict[str, Any] = {"time_ns": now, "node": node, "reason": reason}
        driver.journal.audit(
            record | {"deed": str(stage), "sentence": sentence, "outcome": failure or "done"}
        )
        if failure is None:
            driver.journal.life(record | {"event": str(stage)})
    return Marked(sentence=sentence, refusal=failure)


def _refusal(driver: Driver, node: str, stage: Stage) -> str | None:
    policy = driver.policy
    life = lives_of(driver.journal.lives()).get(node) or NodeLife(node=node, events=())
    return refusal(
        life, stage, limit=policy.lemon_incidents, days=policy.lemon_days, now_ns=driver.now_ns()
    )


def _done(driver: Driver, node: str, stage: Stage) -> str | None:
    """Do what a stage asks of the cluster; return why it failed."""
    try:
        if stage is Stage.VALIDATED:
            return driver.control.validate(node)
        if stage is Stage.RETURNED:
            driver.control.give_back(node)
    except PlatformError as error:
        return str(error)
    return None

"""What ``kansoku respond`` does with a driver; each draws and returns the exit code."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kansoku.app.respond import (
    Driver,
    Target,
    clear_breaker,
    respond_json,
    respond_view,
    target_of_incident,
)
from kansoku.cli._output import emit
from kansoku.diagnose.life import lives_of
from kansoku.diagnose.response import Response, State
from kansoku.errors import InputError
from kansoku.view import Facts, Sentence, Tone, View

__all__ = ["act", "evidence", "mark", "resume", "say", "status", "target"]


def say(text: str) -> None:
    """Tell a deed as it begins."""
    print(text, file=sys.stderr)


def _answer(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"not JSON: {error}", where=str(path), remedy="give the output of diagnose --json"
        ) from None


def target(incident: Path | None, node: str | None, job: str | None, reason: str) -> Target:
    """Return what to respond to; an incident file wins over a name."""
    if incident is not None:
        return target_of_incident(_answer(incident), job=job, where=str(incident))
    if node is not None:
        return Target(incident="operator", node=node, job=job, reason=reason)
    raise InputError("nothing to respond to", remedy="give --incident FILE or --node NAME")


def act(driver: Driver, target: Target, *, dry_run: bool, as_json: bool) -> int:
    """Respond, or say what would be done."""
    checkpoint = driver.checkpoint_state()
    if dry_run:
        lines, refusal = driver.dry_run(target)
        emit(
            respond_json([], plan_lines=lines, refusal=refusal, checkpoint=checkpoint),
            respond_view([], plan_lines=lines, refusal=refusal, checkpoint=checkpoint),
            as_json=as_json,
        )
        return int(refusal is not None)
    done = [driver.begin(target)]
    emit(
        respond_json(done, checkpoint=checkpoint),
        respond_view(done, checkpoint=checkpoint),
        as_json=as_json,
    )
    return int(done[0].state is State.ESCALATED)


def resume(driver: Driver, driver_of: Callable[[Response], Driver], *, as_json: bool) -> int:
    """Take up what was interrupted, each by the ways that it was begun with."""
    done = driver.resume(driver_of)
    emit(respond_json(done), respond_view(done), as_json=as_json)
    return int(any(response.state is State.ESCALATED for response in done))


def status(driver: Driver, *, clear: bool, as_json: bool) -> int:
    """Show responses, breakers and lives; close the breaker first where asked."""
    journal = driver.journal
    if clear:
        clear_breaker(journal, time.time_ns())
    refusal, known = journal.breaker().open_reason, journal.responses()
    lives = lives_of(journal.lives())
    emit(
        respond_json(known, refusal=refusal, lives=lives),
        respond_view(known, refusal=refusal, lives=lives),
        as_json=as_json,
    )
    return 0


def _named(node: str | None, flag: str) -> str:
    if node is None:
        raise InputError(f"{flag} of which node?", remedy="give --node NAME")
    return node


def mark(
    driver: Driver, node: str | None, stage: str, reason: str, *, dry_run: bool, as_json: bool
) -> int:
    """Move a node on in its life."""
    from kansoku.app.respond_life import mark as move
    from kansoku.app.respond_life import stage_named

    name = _named(node, "--mark")
    done = move(driver, name, stage_named(stage), reason, dry_run=dry_run)
    lives = {n: life for n, life in lives_of(driver.journal.lives()).items() if n == name}
    lines = [done.sentence] if dry_run else None
    view = respond_view([], plan_lines=lines, lives=lives)
    if done.refusal:
        text = f"{'It would be refused' if dry_run else 'Refused'}: {done.refusal}"
        view = View(title=view.title, blocks=[*view.blocks, Sentence(text=text, tone=Tone.BAD)])
    emit(
        respond_json([], plan_lines=lines, refusal=done.refusal, lives=lives), view, as_json=as_json
    )
    return int(done.refusal is not None)


def evidence(
    driver: Driver,
    node: str | None,
    incident: Path | None,
    bundle: Path,
    logs: Path | None,
    store: str | None,
    *,
    as_json: bool,
) -> int:
    """Write the bundle for the vendor."""
    from kansoku.app.respond_evidence import pack_evidence
    from kansoku.app.store import default_store, open_store

    told = (_answer(incident).get("incidents") or [None])[0] if incident is not None else None
    if node is None and incident is not None:
        node = target(incident, None, None, "").node
    there = store is not None or default_store().exists()
    opened = open_store(store) if there else None
    try:
        packed = pack_evidence(
            driver, _named(node, "--evidence"), bundle, incident=told, logs=logs, store=opened
        )
    finally:
        if opened is not None:
            opened.close()
    facts = Facts(items=[("bundle", str(bundle)), *((k, str(v)) for k, v in packed.counts.items())])
    notes = [Sentence(text=text, tone=Tone.MUTED) for text in packed.missing]
    answer = {
        "schema": "kansoku.evidence/1",
        "bundle": str(bundle),
        "counts": dict(packed.counts),
        "missing": list(packed.missing),
    }
    emit(answer, View(title="Evidence", blocks=[facts, *notes]), as_json=as_json)
    return 0

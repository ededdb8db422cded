"""What works on this machine, what does not, why, and what to do about it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from kansoku.app._doctor_checks import CHECKS, Check, Situation
from kansoku.view import Block, Column, Sentence, Table, Tone, View

__all__ = ["Check", "Situation", "doctor", "doctor_answer"]

_TONES = {
    "ok": Tone.GOOD,
    "absent": Tone.MUTED,
    "limited": Tone.NOTICE,
    "broken": Tone.BAD,
}
_MARKS = {"ok": "✓", "absent": "–", "limited": "!", "broken": "✗"}
_AREAS = {
    "training": "Training",
    "capture": "Recording jobs",
    "node": "This node",
    "network": "Network",
    "slurm": "Slurm",
    "store": "Store and server",
    "packages": "Optional packages",
    "fleet": "Fleet back ends",
}


def doctor(
    situation: Situation | None = None,
    *,
    checks: Sequence[Callable[[Situation], Iterable[Check]]] = CHECKS,
) -> list[Check]:
    """Run every check; one that fails itself is a ``broken`` line, never an exception."""
    situation = situation or Situation()
    found: list[Check] = []
    for check in checks:
        try:
            found.extend(check(situation))
        except Exception as error:  # noqa: BLE001 - the doctor must not fall ill
            name = check.__name__.removeprefix("check_")
            found.append(
                Check(
                    name=name,
                    area="node",
                    state="broken",
                    found=f"the check failed: {type(error).__name__}: {error}",
                    remedy="please report it with this text",
                )
            )
    return found


def doctor_answer(checks: Sequence[Check]) -> tuple[dict[str, Any], View]:
    """Return the JSON answer and the View; ``verdict`` is ``found`` where something is broken."""
    broken = [c for c in checks if c.state == "broken"]
    counts = {state: sum(c.state == state for c in checks) for state in _TONES}
    answer = {
        "schema": "kansoku.doctor/1",
        "verdict": "found" if broken else "none",
        "reason": f"{len(broken)} of {len(checks)} checks are broken",
        "counts": counts,
        "checks": [asdict(check) for check in checks],
    }
    return answer, _view(checks, counts)


def _view(checks: Sequence[Check], counts: dict[str, int]) -> View:
    blocks: list[Block] = []
    for area, title in _AREAS.items():
        rows = [c for c in checks if c.area == area]
        if rows:
            blocks.append(
                Table(
                    title=title,
                    columns=[
                        Column(title=""),
                        Column(title="what"),
                        Column(title="found"),
                        Column(title="remedy"),
                    ],
                    rows=[(_MARKS[c.state], c.name, c.found, c.remedy or "") for c in rows],
                    tones=[_TONES[c.state] for c in rows],
                )
            )
    broken = counts["broken"]
    blocks.append(
        Sentence(
            text=f"{counts['ok']} fine, {counts['limited']} limited, {counts['absent']} not here, "
            f"{broken} broken",
            tone=Tone.BAD if broken else Tone.GOOD,
        )
    )
    return View(title="kansoku doctor", blocks=blocks)

"""The answer of a diagnosis: record, JSON and view."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kansoku.app.checkpoints import checkpoint_json
from kansoku.diagnose.checkpoints import CheckpointState, checkpoint_sentences
from kansoku.diagnose.policy import Policy
from kansoku.model import Evidence, Hypothesis, Incident, Verdict
from kansoku.view import Facts, Heading, Sentence, Tone, View

__all__ = ["Diagnosis", "diagnosis_json", "diagnosis_view", "incident_json"]

SCHEMA = "kansoku.diagnose/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer, with what was read and what was missing."""

    incidents: tuple[Incident, ...]
    read: tuple[str, ...]
    missing: tuple[str, ...]
    policy: Policy
    checkpoint: CheckpointState | None = None
    """What the job can resume from; None where nothing tells of a checkpoint."""


def _evidence_json(items: Sequence[Evidence]) -> list[dict[str, object]]:
    return [{"sentence": e.sentence, "source": e.source, "time_ns": e.time_ns} for e in items]


def _hypothesis_json(one: Hypothesis) -> dict[str, object]:
    return {
        "domain": str(one.domain),
        "component": one.component,
        "subject": None if one.subject is None else str(one.subject),
        "confidence": one.confidence,
        "evidence_for": _evidence_json(one.evidence_for),
        "evidence_against": _evidence_json(one.evidence_against),
        "actions": [{"sentence": a.sentence, "command": a.command} for a in one.actions],
    }


def incident_json(one: Incident) -> dict[str, object]:
    """Return one incident as the answer holds it."""
    return {
        "id": one.id,
        "onset_ns": one.onset_ns,
        "kind": one.kind,
        "verdict": str(one.verdict),
        "subject": None if one.subject is None else str(one.subject),
        "hypotheses": [_hypothesis_json(h) for h in one.hypotheses],
        "cascades": _evidence_json(one.cascades),
    }


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, object]:
    """Return the versioned answer."""
    incidents = [incident_json(one) for one in diagnosis.incidents]
    found = [one for one in diagnosis.incidents if one.verdict is Verdict.FOUND]
    if not diagnosis.incidents:
        verdict, why = Verdict.NONE, "nothing that was read speaks of trouble"
    elif found:
        verdict, why = Verdict.FOUND, "see the first hypothesis of each incident"
    else:
        verdict, why = Verdict.UNKNOWN, "there is trouble, but too little evidence for a cause"
    return {
        "schema": SCHEMA,
        "verdict": str(verdict),
        "reason": why,
        "incidents": incidents,
        "checkpoint": checkpoint_json(diagnosis.checkpoint),
        "inputs": {"read": list(diagnosis.read), "missing": list(diagnosis.missing)},
    }


def diagnosis_view(diagnosis: Diagnosis) -> View:
    """Return what a person reads: the cause first, then evidence, doubts, actions, cascades."""
    blocks: list[Facts | Heading | Sentence] = []
    if not diagnosis.incidents:
        blocks.append(Sentence(text="Nothing that was read speaks of trouble.", tone=Tone.GOOD))
    for incident in diagnosis.incidents:
        blocks += _incident_blocks(incident)
    if diagnosis.checkpoint is not None:
        blocks += [Sentence(text=text) for text in checkpoint_sentences(diagnosis.checkpoint)]
    blocks.append(Heading(text="Read and missing"))
    blocks.append(Sentence(text=f"{len(diagnosis.read)} files read.", tone=Tone.MUTED))
    blocks += [Sentence(text=text, tone=Tone.MUTED) for text in diagnosis.missing[:12]]
    return View(title="Diagnosis", blocks=blocks)


def _when(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _incident_blocks(incident: Incident) -> list[Facts | Heading | Sentence]:
    blocks: list[Facts | Heading | Sentence] = [
        Facts(
            items=[
                ("incident", incident.kind),
                ("onset", _when(incident.onset_ns) if incident.onset_ns else "unknown"),
                ("subject", str(incident.subject or "the job")),
            ]
        )
    ]
    if not incident.hypotheses:
        blocks.append(
            Sentence(text="Unknown: too little evidence to name a cause.", tone=Tone.NOTICE)
        )
    for number, one in enumerate(incident.hypotheses, start=1):
        blocks.append(
            Sentence(
                text=f"{number}. {one.domain}: {one.component} on {one.subject or 'the job'} "
                f"(confidence {one.confidence:.2f})",
                tone=Tone.BAD if number == 1 else Tone.PLAIN,
            )
        )
        shown = 3 if number == 1 else 1
        blocks += [
            Sentence(text=f"   for: {e.sentence}", detail=f"   {e.source}")
            for e in one.evidence_for[:shown]
        ]
        blocks += [
            Sentence(text=f"   against: {e.sentence}", detail=f"   {e.source}", tone=Tone.MUTED)
            for e in one.evidence_against[:1]
        ]
        if number == 1:
            blocks += [Sentence(text=f"   do: {a.sentence}", detail=a.command) for a in one.actions]
    if incident.cascades:
        blocks.append(
            Sentence(
                text=f"{len(incident.cascades)} kinds of consequences set aside", tone=Tone.MUTED
            )
        )
    return blocks

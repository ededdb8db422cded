"""Tell others of incidents: a webhook, Alertmanager (API v2), any OTLP receiver."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kansoku.diagnose.live import Change
from kansoku.errors import InputError, PlatformError
from kansoku.model import Verdict

__all__ = ["alerts", "post_json", "webhook_body"]

_TIMEOUT_S = 5.0


def _stamp(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _summary(change: Change) -> str:
    incident = change.incident
    subject = incident.subject or "the job"
    if incident.verdict is not Verdict.FOUND or not incident.hypotheses:
        return f"{incident.kind}: cause unknown, {subject}"
    first = incident.hypotheses[0]
    return f"{incident.kind}: {first.domain} ({first.component}), {subject}"


def alerts(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Return changes as Alertmanager's ``POST /api/v2/alerts`` takes them.

    Labels name the incident and never change, so that a later version updates the same alert; a
    closed incident has ``endsAt``.
    """
    found = []
    for change in changes:
        incident = change.incident
        first = incident.hypotheses[0] if incident.hypotheses else None
        labels = {
            "alertname": "KansokuIncident",
            "incident": incident.id,
            "kind": incident.kind,
            "severity": "warning" if incident.kind == "slow" else "critical",
        }
        if change.run:
            labels["run"] = change.run
        evidence = [e.sentence for e in first.evidence_for[:3]] if first else []
        if not evidence:
            evidence = [o.text for o in change.observations[:3]]
        annotations = {
            "summary": _summary(change),
            "description": "; ".join(evidence)[:2000],
            "domain": str(first.domain) if first else "unknown",
            "subject": str(incident.subject or ""),
            "confidence": f"{first.confidence:.2f}" if first else "0",
        }
        if first and first.actions:
            annotations["action"] = first.actions[0].sentence
        alert: dict[str, Any] = {
            "labels": labels,
            "annotations": annotations,
            "startsAt": _stamp(incident.onset_ns),
        }
        if incident.state == "closed":
            alert["endsAt"] = _stamp(change.time_ns)
        found.append(alert)
    return found


def webhook_body(change: Change, incident: dict[str, Any]) -> dict[str, Any]:
    """Return what a webhook gets: the incident as ``kansoku diagnose --json`` writes it."""
    return {
        "schema": "kansoku.incident/1",
        "state": change.incident.state,
        "time_ns": change.time_ns,
        "run": change.run,
        "summary": _summary(change),
        "incident": incident,
    }


def post_json(url: str, body: object) -> None:
    """POST JSON; raise PlatformError where nobody takes it."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is not an http:// or https:// address")
    request = urllib.request.Request(  # noqa: S310 - scheme checked above
        url,
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the same
            answer.read(4096)
    except (urllib.error.URLError, OSError) as error:
        raise PlatformError(f"{error}", where=url) from None

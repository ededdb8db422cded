"""Tell others of incidents: a webhook, Alertmanager (API v2), any OTLP receiver."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kansoku.diagnose.live import Change
from kansoku.errors import ConfigurationError, InputError, PlatformError
from kansoku.model import Verdict

__all__ = ["alerts", "check_address", "post_json", "webhook_body"]

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


def check_address(url: str, flag: str) -> None:
    """Raise ConfigurationError naming the flag for an address nothing can be posted to.

    A path or query may be the secret of a webhook; a user and password would stand in every list of
    processes and are not sent. The address is not repeated: errors stand in logs.
    """
    problem = "is no http:// or https:// address with a host"
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            problem = "has a user or password" if "@" in parts.netloc else ""
    except ValueError:
        pass
    if any(character.isspace() or not character.isprintable() for character in url):
        problem = "has a space or control character in it"
    if problem:
        raise ConfigurationError(
            f"the address {problem}", where=flag, remedy="such as https://HOST:PORT/PATH"
        )


def _shown(url: str) -> str:
    """Return an address without its path: many webhooks keep their secret there."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def post_json(url: str, body: object) -> None:
    """POST JSON; raise PlatformError where nobody takes it, naming the host and no more."""
    if not url.startswith(("http://", "https://")):
        raise InputError("not an http:// or https:// address")
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
        raise PlatformError(f"{error}", where=_shown(url)) from None

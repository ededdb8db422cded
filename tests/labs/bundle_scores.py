"""Score the diagnoses of bundles whose cause is known."""

import time
from dataclasses import dataclass

from tests.labs.bundle_scene import Case

from kansoku.app.diagnose import Diagnosis, diagnose_folder


@dataclass(frozen=True, kw_only=True)
class Score:
    """One bundle."""

    name: str
    domain: bool
    component: bool | None
    """None where the case has no part to name."""
    forbidden_first: bool
    seconds: float
    said: str


def _is_right(case: Case, answer: Diagnosis) -> bool:
    found = [h for incident in answer.incidents for h in incident.hypotheses]
    if case.domain == "none":
        return not answer.incidents
    if case.domain == "unknown":
        return bool(answer.incidents) and not found
    return bool(found) and str(found[0].domain) == case.domain


def score(case: Case) -> Score:
    """Diagnose one bundle and compare with what an experienced operator says."""
    begin = time.perf_counter()
    answer = diagnose_folder(case.folder)
    seconds = time.perf_counter() - begin
    found = [h for incident in answer.incidents for h in incident.hypotheses]
    told = " ".join(
        f"{h.component} {h.subject} " + " ".join(e.sentence for e in h.evidence_for)
        for h in found[:3]
    ).lower()
    words = case.component_words if case.domain not in {"none", "unknown"} else ()
    first = found[0] if found else None
    return Score(
        name=case.name,
        domain=_is_right(case, answer),
        component=any(word in told for word in words) if words else None,
        forbidden_first=first is not None and str(first.domain) in case.forbidden,
        seconds=seconds,
        said=f"{first.domain}: {first.component} on {first.subject}" if first else "nothing",
    )

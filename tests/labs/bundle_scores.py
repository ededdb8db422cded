"""Score diagnoses of bundles with a known cause: ``NAME/expected.json`` beside the files.

``domain`` (one or several that are right), ``component`` (words, one of which should be in one of
the first three hypotheses), ``subject``, ``forbidden`` (domains that must never stand first);
``"domain": null`` is a healthy job.
"""

import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kansoku.app.diagnose import diagnose_folder

ROOT = Path(__file__).parents[1] / "data" / "bundles"


@dataclass(frozen=True, kw_only=True)
class Score:
    """One bundle."""

    name: str
    domain: bool
    component: bool | None
    subject: bool | None
    forbidden_first: bool
    seconds: float
    said: str


def _several(value):
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def bundles():
    """Return the folders that have an expectation."""
    return sorted(p.parent for p in ROOT.glob("*/expected.json"))


def score(folder):
    """Diagnose a copy without the expectation and compare."""
    wanted = json.loads((folder / "expected.json").read_text())
    with tempfile.TemporaryDirectory(prefix="bundle-") as copy:
        target = Path(copy) / "job"
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("expected.json", "README*"))
        begin = time.perf_counter()
        answer = diagnose_folder(target)
        seconds = time.perf_counter() - begin
    found = [h for incident in answer.incidents for h in incident.hypotheses]
    domains = _several(wanted.get("domain", wanted.get("domains")))
    forbidden = _several(wanted.get("forbidden", wanted.get("forbidden_domains")))
    words = _several(wanted.get("component", wanted.get("component_words")))
    subject = wanted.get("subject")
    first = found[0] if found else None
    told = " ".join(
        f"{h.component} {h.subject} " + " ".join(e.sentence for e in h.evidence_for)
        for h in found[:3]
    ).lower()
    right = (str(first.domain) in domains) if first and domains else (not domains and not found)
    return Score(
        name=folder.name,
        domain=right,
        component=any(w.lower() in told for w in words) if words else None,
        subject=str(subject).lower() in told if subject else None,
        forbidden_first=first is not None and str(first.domain) in forbidden,
        seconds=seconds,
        said=f"{first.domain}: {first.component} on {first.subject}" if first else "nothing",
    )

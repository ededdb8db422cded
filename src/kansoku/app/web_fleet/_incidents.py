"""Incidents: the list, and one with hypotheses, evidence for and against, cascades, actions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from kansoku.app.web_fleet._window import stamp
from kansoku.app.web_page import (
    Card,
    Cards,
    Choice,
    Choices,
    Missing,
    MissingError,
    Page,
    Parameter,
    Screen,
    ScreenBlock,
    domain_words,
)
from kansoku.app.web_reading import Reading
from kansoku.model import Domain
from kansoku.view import Column, Facts, Heading, Sentence, Table, Tone

__all__ = ["INCIDENT", "INCIDENTS"]

_STATES = {"all": "all", "now": "not closed", "closed": "closed"}
_DOMAINS = {"all": "all", **{str(d): domain_words(str(d)) for d in Domain}}
_AROUND_NS = 300 * 10**9


def _list(reading: Reading, values: Mapping[str, str]) -> Screen:
    frame = reading.query("incidents").with_columns(state=pl.col("state").fill_null("open"))
    every = frame
    if values["state"] != "all":
        closed = pl.col("state") == "closed"
        frame = frame.filter(closed if values["state"] == "closed" else ~closed)
    if values["domain"] != "all":
        frame = frame.filter(pl.col("domain") == values["domain"])
    open_ = every.filter(pl.col("state") != "closed")
    blocks: list[ScreenBlock] = [
        Cards(
            cards=(
                Card(
                    label="Not closed", value=str(len(open_)),
                    tone=Tone.BAD if len(open_) else Tone.GOOD,
                ),
                Card(label="In all", value=str(len(every))),
            )
        ),
        Choices(
            choices=(
                Choice(name="state", label="State", value=values["state"],
                       options=list(_STATES.items())),
                Choice(name="domain", label="Domain", value=values["domain"],
                       options=list(_DOMAINS.items())),
            )
        ),
    ]  # fmt: skip
    if len(frame):
        rows = [
            [r["id"], r["kind"], r["subject"], domain_words(r["domain"]), r["verdict"],
             _percent(r["confidence"]), stamp(r["onset_ns"]), stamp(r["time_ns"]), r["state"]]
            for r in frame.head(500).iter_rows(named=True)
        ]  # fmt: skip
        blocks.append(
            Table(
                title="Incidents",
                columns=[
                    Column(title="incident", link="/incidents/{}"), Column(title="kind"),
                    Column(title="subject"), Column(title="domain"), Column(title="verdict"),
                    Column(title="confidence", numeric=True), Column(title="onset"),
                    Column(title="last change"), Column(title="state"),
                ],
                rows=rows,
                tones=[Tone.MUTED if r[8] == "closed" else Tone.BAD for r in rows],
            )
        )  # fmt: skip
    elif len(every):
        blocks.append(Sentence(text="No incident of this kind.", tone=Tone.MUTED))
    else:
        blocks.append(
            Missing(
                text="No incident is known.",
                remedy="Diagnosis makes them from what arrives; a folder of files is read by:",
                command="kansoku diagnose FOLDER",
            )
        )
    findings = reading.query("findings").head(200)
    if len(findings):
        blocks.append(_findings(findings))
    return Screen(
        title="Incidents",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.incidents/1",
            "incidents": [_incident_json(r) for r in frame.iter_rows(named=True)],
            "findings": findings.to_dicts(),
        },
        live=("incidents", "findings"),
    )


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def _findings(findings: pl.DataFrame) -> Table:
    rows = [
        [stamp(r["time_ns"]), r["sentence"], r["subject"], domain_words(r["domain"]), r["source"],
         _percent(r["confidence"]), r["severity"]]
        for r in findings.iter_rows(named=True)
    ]  # fmt: skip
    tones = {"critical": Tone.BAD, "warning": Tone.NOTICE}
    return Table(
        title="Findings",
        columns=[
            Column(title="time"), Column(title="finding"), Column(title="subject"),
            Column(title="domain"), Column(title="found by"),
            Column(title="confidence", numeric=True), Column(title="severity"),
        ],
        rows=rows,
        tones=[tones.get(str(r[6]), Tone.PLAIN) for r in rows],
    )  # fmt: skip


def _parsed(text: str | None) -> list[dict[str, Any]]:
    """Return a JSON list of objects; what is not one is left out."""
    try:
        found = json.loads(text or "[]")
    except ValueError:
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _incident_json(row: Mapping[str, Any]) -> dict[str, object]:
    return {
        **row,
        "hypotheses": _parsed(row["hypotheses"]),
        "evidence": _parsed(row["evidence"]),
        "actions": _parsed(row["actions"]),
    }


def _one(reading: Reading, values: Mapping[str, str]) -> Screen:
    versions = reading.table("incidents", filters={"id": values["incident"]})
    if versions.is_empty():
        raise MissingError(
            f"no incident {values['incident']!r}", remedy="see the list of incidents"
        )
    row = versions.row(-1, named=True)
    hypotheses = _parsed(row["hypotheses"])
    blocks: list[ScreenBlock] = [
        Facts(
            items=[
                ("Kind", row["kind"] or "unknown"),
                ("Subject", row["subject"] or "–"),
                ("Domain", domain_words(row["domain"])),
                ("Verdict", row["verdict"] or "unknown"),
                ("Onset", stamp(row["onset_ns"]) or "unknown"),
                ("State", f"{row['state'] or 'open'}, since {stamp(row['time_ns'])}"),
            ]
        )
    ]
    if not hypotheses:
        blocks.append(
            Sentence(text="Unknown: too little evidence to name a cause.", tone=Tone.NOTICE)
        )
    for number, one in enumerate(hypotheses, start=1):
        blocks += _hypothesis(one, number)
    cascades = _parsed(row["evidence"])
    if cascades:
        blocks.append(Heading(text="Evidence and consequences"))
        blocks.append(_evidence("What was seen", cascades))
    actions = _parsed(row["actions"])
    if actions:
        blocks.append(Heading(text="Actions"))
        blocks.append(_actions(actions))
    blocks.append(_versions(versions))
    blocks.append(_around(reading, row))
    return Screen(
        title=f"Incident {row['id']}",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.incident/1",
            "incident": _incident_json(row),
            "versions": [
                {"time": stamp(r["time_ns"]), "state": r["state"], "domain": r["domain"]}
                for r in versions.iter_rows(named=True)
            ],
        },
        trail=(("Incidents", "/incidents"),),
        live=("incidents",) if (row["state"] or "open") != "closed" else (),
    )


def _hypothesis(one: Mapping[str, Any], number: int) -> list[ScreenBlock]:
    confidence = one.get("confidence")
    sure = f" ({confidence:.0%})" if isinstance(confidence, int | float) else ""
    domain = domain_words(one.get("domain"))
    component = str(one.get("component") or "").replace("_", " ")
    subject = one.get("subject")
    named = " · ".join(str(part) for part in (component, subject) if part)
    blocks: list[ScreenBlock] = [
        Sentence(
            text=f"{number}. {domain}: {named}{sure}" if named else f"{number}. {domain}{sure}",
            tone=Tone.BAD if number == 1 else Tone.PLAIN,
        )
    ]
    for key, title in (("evidence_for", "Speaks for it"), ("evidence_against", "Against it")):
        listed = one.get(key)
        if isinstance(listed, list) and listed:
            blocks.append(_evidence(title, [e for e in listed if isinstance(e, dict)]))
    listed = one.get("actions")
    if isinstance(listed, list) and listed:
        blocks.append(_actions([a for a in listed if isinstance(a, dict)]))
    return blocks


def _evidence(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        title=title,
        columns=[Column(title="time"), Column(title="fact"), Column(title="seen in")],
        rows=[
            [stamp(e["time_ns"]) if isinstance(e.get("time_ns"), int) else None,
             _text(e.get("sentence")), _text(e.get("source"))]
            for e in rows[:200]
        ],
    )  # fmt: skip


def _actions(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        title="What to do",
        columns=[Column(title="action"), Column(title="command"), Column(title="state")],
        rows=[
            [_text(a.get("sentence")), _text(a.get("command")), _text(a.get("state"))]
            for a in rows[:100]
        ],
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _versions(versions: pl.DataFrame) -> ScreenBlock:
    return Table(
        title="How it went",
        columns=[Column(title="time"), Column(title="state"), Column(title="domain"),
                 Column(title="confidence", numeric=True)],
        rows=[
            [stamp(r["time_ns"]), r["state"], domain_words(r["domain"]), _percent(r["confidence"])]
            for r in versions.tail(50).iter_rows(named=True)
        ],
    )  # fmt: skip


def _around(reading: Reading, row: Mapping[str, Any]) -> ScreenBlock:
    onset = row["onset_ns"]
    if onset is None:
        return Sentence(text="Its onset is unknown.", tone=Tone.MUTED)
    events = reading.table("events", onset - _AROUND_NS, onset + _AROUND_NS, limit=100)
    if events.is_empty():
        return Sentence(text="No event within five minutes of its onset.", tone=Tone.MUTED)
    return Table(
        title="Events within five minutes of its onset",
        columns=[Column(title="time"), Column(title="severity"), Column(title="kind"),
                 Column(title="subject"), Column(title="text")],
        rows=[
            [stamp(e["time_ns"]), e["severity"], e["kind"], e["subject"], e["body"]]
            for e in events.iter_rows(named=True)
        ],
    )  # fmt: skip


INCIDENTS = Page(
    path="/incidents",
    title="Incidents",
    build=_list,
    parameters=(
        Parameter(name="state", meaning="which states", default="all", choices=tuple(_STATES)),
        Parameter(name="domain", meaning="which domain", default="all", choices=tuple(_DOMAINS)),
    ),
    navigation=50,
)
INCIDENT = Page(
    path="/incidents/{incident}",
    title="Incident",
    build=_one,
    parameters=(
        Parameter(name="incident", meaning="id of the incident", in_path=True,
                  pattern=r"[^\x00/]{1,300}"),
    ),
)  # fmt: skip

"""Bring Slurm's accounting into the job history, from files or a live Slurm."""

import json
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kansoku.app.jobs._context import NS, Clock, check_zone, cluster_name, open_history
from kansoku.errors import InputError, PlatformError
from kansoku.formats.slurm import (
    Parsed,
    Quarantined,
    read_node_events,
    read_sacct_json,
    read_sacct_text,
)
from kansoku.jobs.edge.history import History, Merged, ParquetHistory
from kansoku.jobs.edge.slurm import LiveSlurm
from kansoku.view import Column, Facts, Sentence, Table, Tone, View

__all__ = [
    "IMPORT_SCHEMA",
    "LIVE_COLUMNS",
    "ImportResult",
    "collect",
    "import_jobs",
    "import_json",
    "import_view",
    "kept_quarantined",
]

IMPORT_SCHEMA = "kansoku.jobs.import/1"
LIVE_COLUMNS = [
    "JobIDRaw",
    "JobID",
    "Cluster",
    "JobName",
    "User",
    "UID",
    "Account",
    "Partition",
    "QOS",
    "State",
    "ExitCode",
    "DerivedExitCode",
    "Reason",
    "Submit",
    "Eligible",
    "Start",
    "End",
    "ElapsedRaw",
    "Suspended",
    "TimelimitRaw",
    "NNodes",
    "ReqNodes",
    "NCPUS",
    "NTasks",
    "ReqTRES",
    "AllocTRES",
    "NodeList",
    "FailedNode",
    "Flags",
    "Reservation",
    "Comment",
    "AdminComment",
    "SubmitLine",
    "TotalCPU",
    "MaxRSS",
    "MaxRSSNode",
    "TRESUsageInAve",
]
"""What the live import asks for: text, because the JSON of 22.05 loses exit codes."""
# Jobs are written to slurmdbd late when the controller is busy: look back this far each time.
_OVERLAP_S = 900
_SLICE_S = 7 * 86_400
_FIRST_LOOK_S = 30 * 86_400
_KEEP_QUARANTINED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """What an import did."""

    jobs: Merged
    steps: Merged
    node_events: Merged
    repaired: int
    """Rows that names with newlines or delimiters had torn apart, put together again."""
    quarantined: tuple[Quarantined, ...]
    """At most 1,000; ``quarantined_count`` counts all."""
    quarantined_count: int
    files: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


class _Tally:
    def __init__(self) -> None:
        self.jobs = self.steps = self.events = Merged()
        self.repaired = self.quarantined_count = 0
        self.quarantined: list[Quarantined] = []
        self.notes: dict[str, None] = {}
        self.files: list[str] = []

    def add(self, history: ParquetHistory, parsed: Parsed) -> None:
        if not parsed.jobs.is_empty():
            self.jobs += history.merge("jobs", parsed.jobs)
        if not parsed.steps.is_empty():
            self.steps += history.merge("steps", parsed.steps)
        self.repaired += parsed.repaired
        self.quarantined_count += len(parsed.quarantined)
        room = _KEEP_QUARANTINED - len(self.quarantined)
        self.quarantined += parsed.quarantined[:room]
        self.notes.update(dict.fromkeys(parsed.notes))

    def result(self) -> ImportResult:
        return ImportResult(
            jobs=self.jobs,
            steps=self.steps,
            node_events=self.events,
            repaired=self.repaired,
            quarantined=tuple(self.quarantined),
            quarantined_count=self.quarantined_count,
            files=tuple(self.files),
            notes=tuple(self.notes),
        )


def import_jobs(
    files: Sequence[Path] = (),
    *,
    live: bool = False,
    store: str | Path | None = None,
    cluster: str | None = None,
    timezone: str | None = None,
    delimiter: str | None = None,
    slurm: LiveSlurm | None = None,
    now: Clock = time.time_ns,
) -> ImportResult:
    """Import saved outputs, or what a live Slurm accounted since the last import.

    Files: ``sacct --json`` or ``--parsable2`` of any columns, Open XDMoD logs, ``sacctmgr show
    event``. ``timezone`` is the zone of naive local times (default this machine's), ``cluster``
    names rows of files without a Cluster column. Importing the same again changes nothing.
    """
    if not live and not files:
        raise InputError("nothing to import", remedy="give files or --live")
    history = open_history(store)
    tally = _Tally()
    name = cluster_name(cluster)
    zone = check_zone(timezone)
    for path in files:
        tally.files.append(str(path))
        for parsed in _read(path, zone, name, delimiter, tally, history):
            tally.add(history, parsed)
    if live:
        _import_live(history, slurm or LiveSlurm(cluster=name), tally, now)
    _keep_quarantined(history, tally.quarantined)
    return tally.result()


def _quarantined_rows(history: History) -> tuple[Quarantined, ...]:
    """Return the rows that imports so far could not take, at most 1,000."""
    kept = json.loads(history.note("quarantined") or "[]")
    return tuple(Quarantined(**row) for row in kept)


def kept_quarantined(store: str | Path | None = None) -> tuple[Quarantined, ...]:
    """Return the rows that imports into this history could not take, at most 1,000."""
    return _quarantined_rows(open_history(store))


def _keep_quarantined(history: History, rows: Sequence[Quarantined]) -> None:
    """Remember what stayed out, once per file and row, so that reports can say so."""
    if not rows:
        return
    known = {(q.file, q.row): q for q in _quarantined_rows(history)}
    known |= {(q.file, q.row): q for q in rows}
    latest = list(known.values())[-_KEEP_QUARANTINED:]
    history.remember("quarantined", json.dumps([q.to_json() for q in latest]))


def _read(
    path: Path,
    zone: str,
    cluster: str | None,
    delimiter: str | None,
    tally: _Tally,
    history: ParquetHistory,
) -> Iterator[Parsed]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(error.strerror or "cannot be read", where=str(path)) from None
    with file:
        head = file.read(4096)
        if not head:
            raise InputError("the file is empty", where=str(path))
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            first = head.lstrip()[:1]
            if first == b"{":
                yield read_sacct_json(data[:], file=str(path), cluster=cluster)
            elif b"NodeName" in head.split(b"\n", 1)[0]:
                events = read_node_events(data[:], zone=zone, file=str(path))
                tally.events += history.merge("node_events", events)
            else:
                with memoryview(data) as view:
                    yield from read_sacct_text(
                        view, file=str(path), zone=zone, cluster=cluster, delimiter=delimiter
                    )


def _import_live(history: ParquetHistory, slurm: LiveSlurm, tally: _Tally, now: Clock) -> None:
    """Ask for the time since the last import, a week at a time, each window once."""
    until_s = now() // NS
    columns = slurm.known_columns(LIVE_COLUMNS)
    position = history.note("live_until_s")
    since_s = int(position) - _OVERLAP_S if position else until_s - _FIRST_LOOK_S
    start = since_s
    while since_s < until_s:
        end_s = min(since_s + _SLICE_S, until_s)
        text = slurm.sacct_text(since_s, end_s, columns)
        for parsed in read_sacct_text(text, file="sacct", zone="UTC", delimiter="\x1f"):
            tally.add(history, parsed)
        history.remember("live_until_s", str(end_s))
        since_s = end_s
    try:
        events = read_node_events(slurm.node_events(start), zone="UTC", file="sacctmgr")
    except (PlatformError, InputError) as error:
        tally.notes[f"no node events: {error}"] = None
    else:
        if not events.is_empty():
            tally.events += history.merge("node_events", events)
    tally.files.append("live Slurm")


def collect(
    *,
    every_s: float,
    store: str | Path | None = None,
    cluster: str | None = None,
    slurm: LiveSlurm | None = None,
    stop: threading.Event | None = None,
    rounds: int | None = None,
    patience: float = 10.0,
    now: Clock = time.time_ns,
) -> Iterator[ImportResult | PlatformError]:
    """Keep the history current; yield each round's result or why it failed.

    It never asks again before ``every_s``, nor before ``patience`` times what the last answer
    took, and after a failure it waits twice as long each time (at most an hour).
    """
    stop = stop or threading.Event()
    wait = every_s
    done = 0
    while not stop.is_set():
        started = time.monotonic()
        try:
            answer: ImportResult | PlatformError = import_jobs(
                live=True, store=store, cluster=cluster, slurm=slurm, now=now
            )
            wait = max(every_s, patience * (time.monotonic() - started))
        except PlatformError as error:
            answer = error
            wait = min(max(wait, every_s) * 2, 3600)
        yield answer
        done += 1
        if rounds is not None and done >= rounds:
            return
        stop.wait(wait)


def import_json(result: ImportResult) -> dict[str, object]:
    """Return the answer of ``jobs import --json``."""

    def counts(merged: Merged) -> dict[str, int]:
        return {
            "new": merged.new,
            "updated": merged.updated,
            "unchanged": merged.unchanged,
        }

    return {
        "schema": IMPORT_SCHEMA,
        "files": list(result.files),
        "jobs": counts(result.jobs),
        "steps": counts(result.steps),
        "node_events": counts(result.node_events),
        "repaired": result.repaired,
        "quarantined_count": result.quarantined_count,
        "quarantined": [entry.to_json() for entry in result.quarantined],
        "notes": list(result.notes),
    }


def import_view(result: ImportResult) -> View:
    """Return the screen of ``jobs import``."""
    facts = [
        (name, f"{m.new:,} new, {m.updated:,} updated, {m.unchanged:,} unchanged")
        for name, m in (
            ("Jobs", result.jobs),
            ("Steps", result.steps),
            ("Node events", result.node_events),
        )
    ]
    if result.repaired:
        facts.append(("Repaired", f"{result.repaired:,} rows with newlines or delimiters in names"))
    blocks: list[Facts | Sentence | Table] = [Facts(items=facts)]
    blocks += [Sentence(text=note, tone=Tone.NOTICE) for note in result.notes]
    if result.quarantined_count:
        blocks.append(
            Table(
                title=f"Quarantined: {result.quarantined_count:,} rows not taken",
                columns=[Column(title="File"), Column(title="Row", numeric=True),
                         Column(title="Reason")],
                rows=[[q.file, q.row, q.reason] for q in result.quarantined[:20]],
                note="The first 20; --json lists up to 1,000."
                if result.quarantined_count > 20
                else None,
            )
        )  # fmt: skip
    return View(title="Job history: import", blocks=blocks)

"""Live diagnosis beside the store: rows arrive, incidents open, change, close and are published."""

import contextlib
import json
import logging
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.app.diagnose._answer import incident_json
from kansoku.app.diagnose._runs import observe_dumps, observe_run
from kansoku.diagnose.edge.dumps import fetch_dump
from kansoku.diagnose.edge.publish import alerts, check_address, post_json, webhook_body
from kansoku.diagnose.live import Change, Detector, LivePolicy
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.stacks import Stack, outliers, stacks_of_text
from kansoku.errors import DependencyError, KansokuError
from kansoku.formats.run_directory import read_run
from kansoku.model import Incident, table_schema
from kansoku.node.edge.profiles import find_py_spy
from kansoku.store import Store
from kansoku.telemetry import encode

__all__ = ["LiveWatch", "WatchSettings", "collect_run", "incident_rows"]

_log = logging.getLogger(__name__)
_TABLES = ("steps", "events", "findings", "metrics")
_REPEAT_S = 60.0
"""Open alerts are sent again: Alertmanager forgets those it hears nothing of."""
_STACKS_AT_ONCE = 16
_SPY_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What to watch for and whom to tell."""

    policy: LivePolicy = field(default_factory=LivePolicy)
    tick_s: float = 1.0
    webhook: str | None = None
    alertmanager: str | None = None
    """Base address; ``/api/v2/alerts`` is added."""
    otlp: str | None = None
    """OTLP receiver over HTTP; ``/v1/logs`` is added."""
    ring_folder: Path | None = Path("/dev/shm/kansoku")  # noqa: S108 - the rings' documented home
    """Where runs of this machine are looked at from outside when they hang; None: not at all."""
    collections: Path | None = None
    """Where the dumps and stacks collected from outside are kept."""

    def check(self) -> None:
        """Raise ConfigurationError for an address that nobody can be told at."""
        for flag in ("webhook", "alertmanager", "otlp"):
            url: str | None = getattr(self, flag)
            if url is not None:
                check_address(url, f"--{flag}")


def incident_rows(changes: Sequence[Change]) -> pl.DataFrame:
    """Return changes as rows of the ``incidents`` table."""
    rows = []
    for change in changes:
        incident: Incident = change.incident
        whole = incident_json(incident)
        first = incident.hypotheses[0] if incident.hypotheses else None
        rows.append(
            {
                "id": incident.id,
                "onset_ns": incident.onset_ns,
                "time_ns": change.time_ns,
                "kind": incident.kind,
                "subject": str(incident.subject) if incident.subject else None,
                "domain": str(first.domain) if first else None,
                "verdict": str(incident.verdict),
                "confidence": first.confidence if first else None,
                "hypotheses": json.dumps(whole["hypotheses"]),
                "evidence": json.dumps([o.text for o in change.observations[:12]]),
                "actions": json.dumps([a.sentence for a in first.actions] if first else []),
                "state": incident.state,
            }
        )
    schema = {k: v for k, v in table_schema("incidents").items() if rows and k in rows[0]}
    return pl.DataFrame(rows, schema=schema)


def _py_spy(pid: int) -> str | None:
    """Return one process's stacks, or None; never longer than a few seconds."""
    try:
        done = subprocess.run(
            [find_py_spy(), "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_SPY_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (subprocess.TimeoutExpired, OSError, DependencyError):
        return None
    return done.stdout if done.returncode == 0 and done.stdout else None


def collect_run(run: str, ring_folder: Path, *, keep: Path | None = None) -> list[Observation]:
    """Look at a run of this machine from outside: rings, Flight Recorders, stacks.

    Raises InputError where the run is not here.
    """
    path = ring_folder / run
    seen, _, nodes, _ = observe_run(path, planned=True)
    processes = read_run(path).processes[:_STACKS_AT_ONCE]
    with tempfile.TemporaryDirectory() as passing:
        folder = keep or Path(passing)
        dumps = [d for p in processes if (d := fetch_dump(p.pid, p.rank, folder)) is not None]
        seen += observe_dumps(dumps)[0] if dumps else []
    stacks: list[Stack] = []
    for process in processes:
        text = _py_spy(process.pid) if Path(f"/proc/{process.pid}").exists() else None
        if text is None:
            continue
        name = f"pyspy_rank{process.rank}.txt"
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / name).write_text(text, encoding="utf-8")
        stacks += stacks_of_text(
            text.splitlines(), name=name, node=nodes.get(process.rank), rank=process.rank
        )
    return [*seen, *outliers(stacks)]


class LiveWatch:
    """A thread that reads the store's subscription and keeps incidents."""

    def __init__(
        self,
        store: Store,
        settings: WatchSettings | None = None,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Subscribe; :meth:`start` begins to read."""
        self.settings = settings or WatchSettings()
        self._store = store
        self._clock_ns = clock_ns
        self.detector = Detector(policy=self.settings.policy)
        self._subscription = store.subscribe(_TABLES, capacity=4096)
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._open: dict[str, Change] = {}
        self._repeated = time.monotonic()
        self.counts = {"batches": 0, "changes": 0, "publish_failed": 0, "collected": 0}

    def start(self) -> None:
        """Read until :meth:`stop`."""
        self._thread = threading.Thread(target=self._run, name="live-diagnosis", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._subscription.close()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                item = self._subscription.get(max(0.05, due - time.monotonic()))
                if item is not None:
                    self.take(*item)
                if time.monotonic() >= due:
                    due = time.monotonic() + self.settings.tick_s
                    self.tick()
            except Exception:  # noqa: BLE001
                # A server outlives any row; the next one is read.
                _log.exception("live diagnosis")

    def take(self, table: str, rows: pl.DataFrame) -> None:
        """Take a batch of rows."""
        self.counts["batches"] += 1
        now = self._clock_ns()
        read = {
            "steps": self.detector.steps,
            "events": self.detector.events,
            "findings": self.detector.findings,
            "metrics": self.detector.signs_of_life,
        }[table]
        self._publish(read(rows, now))

    def tick(self) -> None:
        """Look at what did not arrive; look at hanging runs from outside; repeat open alerts."""
        self._publish(self.detector.tick(self._clock_ns()))
        if self._open and time.monotonic() - self._repeated > _REPEAT_S:
            self._repeated = time.monotonic()
            if self.settings.alertmanager:
                self._tell(self.settings.alertmanager, "/api/v2/alerts", list(self._open.values()))

    def _publish(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        self.counts["changes"] += len(changes)
        rows = incident_rows(changes)
        self._store.append("incidents", rows)
        for change in changes:
            if change.incident.state == "closed":
                self._open.pop(change.incident.id, None)
            else:
                self._open[change.incident.id] = change
        settings = self.settings
        if settings.alertmanager:
            self._tell(settings.alertmanager, "/api/v2/alerts", changes)
        if settings.webhook:
            for change in changes:
                self._post(settings.webhook, webhook_body(change, incident_json(change.incident)))
        if settings.otlp:
            self._send_otlp(settings.otlp, rows)
        for change in changes:
            if change.hang and change.run and settings.ring_folder is not None:
                self._collect(change, settings.ring_folder)

    def _collect(self, change: Change, folder: Path) -> None:
        run = change.run or ""
        keep = self.settings.collections
        try:
            seen = collect_run(run, folder, keep=keep / change.incident.id if keep else None)
        except (KansokuError, OSError) as error:
            _log.info("run %s cannot be looked at from here: %s", run, error)
            return
        self.counts["collected"] += 1
        self._publish(self.detector.more(run, seen, self._clock_ns()))

    def _tell(self, base: str, path: str, changes: Sequence[Change]) -> None:
        self._post(base.rstrip("/") + path, alerts(changes))

    def _post(self, url: str, body: Any) -> None:
        try:
            post_json(url, body)
        except KansokuError as error:
            self.counts["publish_failed"] += 1
            _log.warning("incident not published: %s", error)

    def _send_otlp(self, base: str, rows: pl.DataFrame) -> None:
        import httpx

        for signal, message in encode(
            {"incidents": rows}, resource={"service.name": "kansoku"}
        ).items():
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(
                    f"{base.rstrip('/')}/v1/{signal}",
                    content=message.SerializeToString(),
                    headers={"content-type": "application/x-protobuf"},
                    timeout=5,
                ).raise_for_status()
                continue
            self.counts["publish_failed"] += 1

"""What `kansoku top` shows: the newest steps of a run, or what a server's store holds, each second.

A source gives one :class:`TopSnapshot` a call. It reads only what is new and recent, so that a
long run costs no more than a short one.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from kansoku.app._top_jobs import JobLine, about_job, job_lines
from kansoku.app._top_ranks import (
    RECENT_STEPS,
    RankLine,
    mfu_of,
    middle_ms,
    rank_lines,
    tokens_per_s,
)
from kansoku.app._top_window import STEP_COLUMNS, RecentSteps
from kansoku.app.peak import run_peak
from kansoku.errors import InputError
from kansoku.formats.run_directory import RunData, read_run
from kansoku.model import RunFacts
from kansoku.store import LocalStore, Store
from kansoku.trace.steps import step_rows

__all__ = [
    "DeviceLine",
    "JobLine",
    "RankLine",
    "RunSource",
    "StoreSource",
    "TopSnapshot",
    "TopSource",
    "rank_lines",
    "top",
]

_WINDOW_NS = 60 * 1_000_000_000
_JOBS_NS = 10 * 1_000_000_000
_DEVICES_NS = 4 * 1_000_000_000
"""Agents send samples every ten seconds; thousands of series are not asked for each second."""
_OVERLAP_NS = 15 * 1_000_000_000
"""Steps may arrive that late; what comes later is seen when the window is read whole again."""
_BACK_NS = 5 * 1_000_000_000
"""That often steps that came out of order are looked for; else only those that each rank lacks."""
_WHOLE_NS = 30 * 1_000_000_000
_LINES_NS = 3 * 1_000_000_000
"""Inside a job the others are looked at that often."""
_MOST_INCIDENTS = 200
_FEWEST_RECORDS = 1024
"""Records of each lane of a ring: sixty steps of most jobs. More are read where they are not."""
_MOST_RECORDS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLine:
    """One GPU or NIC."""

    node: str
    name: str
    kind: str
    """``gpu`` or ``nic``."""
    watts: float | None = None
    utilization: float | None = None
    """Ratio 0-1."""
    memory: float | None = None
    """Ratio 0-1."""
    celsius: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSnapshot:
    """Everything on the screen at one moment."""

    title: str
    time_ns: int
    jobs: tuple[JobLine, ...] = ()
    """Where several are watched; then ``ranks`` are those of none."""
    job: JobLine | None = None
    """The one that is shown."""
    ranks: tuple[RankLine, ...] = ()
    devices: tuple[DeviceLine, ...] = ()
    incidents: tuple[str, ...] = ()
    step_ms: float | None = None
    tokens_per_s: float | None = None
    mfu_ratio: float | None = None
    """Model FLOPs of the newest steps over the peak of all devices; None where unknown."""
    note: str | None = None
    """What to do where there is nothing to show."""


class TopSource(Protocol):
    """Where snapshots come from."""

    def snapshot(self) -> TopSnapshot:
        """Return what is to be shown now."""

    def job(self, key: str) -> TopSnapshot:
        """Return one of the jobs that a snapshot lists."""

    def close(self) -> None:
        """Let go."""


@lru_cache(maxsize=65_536)
def _labels(text: str) -> Mapping[str, Any]:
    """Return the labels of a series: thousands, the same every second."""
    found: dict[str, Any] = json.loads(text)
    return found


def _on(nodes: Sequence[str] | None) -> dict[str, list[str]] | None:
    """Return the matcher of some nodes' series, None for those of all."""
    return None if nodes is None else {"host.name": list(nodes)}


def _incident_text(row: Mapping[str, Any]) -> str:
    parts = (row["state"], row["kind"], row["domain"] or "unknown cause", row["subject"] or "")
    return " · ".join(part for part in parts if part)


@dataclass(kw_only=True)
class RunSource:
    """A run folder: its rings while it runs, its records when it is over."""

    path: Path
    now_ns: Callable[[], int] = time.time_ns
    _peak: Mapping[str, Any] = field(default_factory=dict)
    """What was measured of the CPUs when the run began."""
    _records: int = _FEWEST_RECORDS

    def _newest(self) -> tuple[RunData, bool]:
        """Read the rings in place while they are there: they hold the newest records only."""
        run_json = self.path / "run.json"
        running = False
        ring_dir = None
        if run_json.is_file():
            try:
                facts = json.loads(run_json.read_text(encoding="utf-8"))
            except ValueError:
                facts = {}
            running = facts.get("end_ns") is None
            self._peak = peak if isinstance(peak := facts.get("peak"), dict) else {}
            ring_dir = Path(facts["ring_dir"]) if facts.get("ring_dir") else None
        live = running and ring_dir is not None and any(ring_dir.glob("*.ring"))
        if not live or ring_dir is None:
            return read_run(self.path), running
        data = read_run(ring_dir, newest=self._records)
        # The rings stand alone; what run.json says was read above.
        told = tuple(text for text in data.missing if not text.startswith("run.json is missing"))
        return replace(data, missing=told), running

    def _look_further(self, data: RunData, lines: tuple[RankLine, ...]) -> None:
        """Read more of each ring next time where its newest records were too few steps."""
        steps = min((len(line.trend) for line in lines), default=0)
        if steps >= RECENT_STEPS // 2 or data.spans.is_empty():
            return
        most = int(data.spans["rank"].value_counts()["count"].to_numpy().max())
        if self._records <= most < _MOST_RECORDS:
            self._records *= 4

    def _peak_flops(self, facts: RunFacts) -> float | None:
        # CPUs that were not measured when the run began are not measured now, beside it.
        if "flops" not in self._peak and any(rank.device == "cpu" for rank in facts.ranks):
            return None
        return run_peak(facts, self._peak)[0]

    def snapshot(self) -> TopSnapshot:
        """Return the newest steps of every rank."""
        if not self.path.exists():
            raise InputError("no such run", where=str(self.path), remedy="name the --out folder")
        data, running = self._newest()
        nodes = data.facts.node_of_rank
        spans = data.spans
        if not spans.is_empty():
            last = spans.select(pl.col("step").max()).item()
            if last is not None:
                spans = spans.filter(
                    pl.col("step").is_null() | (pl.col("step") >= last - RECENT_STEPS)
                )
        steps = step_rows(spans, facts=data.facts, resources=data.resources)
        lines = rank_lines(steps, nodes)
        self._look_further(data, lines)
        state = "running" if running else "over"
        return TopSnapshot(
            title=f"{data.facts.run} · {state}",
            time_ns=self.now_ns(),
            ranks=lines,
            step_ms=middle_ms(lines),
            tokens_per_s=tokens_per_s(steps, lines),
            mfu_ratio=mfu_of(steps, lines, self._peak_flops(data.facts)),
            incidents=tuple(data.missing[:3]),
            note=None if lines else "no finished step yet",
        )

    def job(self, key: str) -> TopSnapshot:
        """Raise InputError: a folder holds one run."""
        raise InputError(f"a run folder has no job {key} to look into", where=str(self.path))

    def close(self) -> None:
        """Nothing is held."""


@dataclass(kw_only=True)
class StoreSource:
    """A store or a running server: jobs, steps, GPUs, NICs and incidents of the last minute."""

    store: Store
    title: str
    now_ns: Callable[[], int] = time.time_ns
    _learnt_ns: int | None = None
    _jobs: pl.DataFrame = field(default_factory=pl.DataFrame)
    _job_of: dict[str, str] = field(default_factory=dict)
    _strays: set[str] = field(default_factory=set)
    """Runs of no job."""
    _devices: tuple[int, tuple[str, ...] | None, tuple[DeviceLine, ...]] = (0, None, ())
    """When they were asked for, of which nodes, the answer."""
    _steps: RecentSteps = field(default_factory=RecentSteps)
    _steps_of: str | None = None
    _whole_ns: int = 0
    _back_ns: int = 0
    _reading: threading.Lock = field(default_factory=threading.Lock)
    """One answer at a time: what is kept between them is changed in place."""
    _listed: tuple[int, tuple[JobLine, ...]] = (0, ())
    """When every job was last looked at, and what was found."""

    def _value(
        self, metric: str, nodes: Sequence[str] | None = None
    ) -> dict[tuple[str, str], float]:
        """Return the latest value by (node, device); the general task where a metric has tasks."""
        found: dict[tuple[str, str], float] = {}
        for row in self.store.latest(metric, _on(nodes)).iter_rows(named=True):
            labels = _labels(row["labels"])
            if labels.get("hw.gpu.task", "general") != "general":
                continue
            if labels.get("hw.sensor_location", "core") not in {"core", "gpu"}:
                continue
            node = str(labels.get("host.name", ""))
            found[node, str(labels.get("hw.name") or labels.get("hw.id", ""))] = row["value"]
        return found

    def _gpus(self, nodes: Sequence[str] | None = None) -> list[DeviceLine]:
        watts = self._value("hw.power", nodes)
        use = self._value("hw.gpu.utilization", nodes)
        memory = self._value("hw.gpu.memory.utilization", nodes)
        heat = self._value("hw.temperature", nodes)
        keys = sorted(set(watts) | set(use) | set(memory))
        return [
            DeviceLine(
                node=node,
                name=name,
                kind="gpu",
                watts=watts.get((node, name)),
                utilization=use.get((node, name)),
                memory=memory.get((node, name)),
                celsius=heat.get((node, name)),
            )
            for node, name in keys
        ]

    def _nics(self, now: int, nodes: Sequence[str] | None = None) -> list[DeviceLine]:
        rows = self.store.metric_range(
            "hw.network.io", _on(nodes), start_ns=now - _WINDOW_NS, end_ns=now, step_ns=_WINDOW_NS,
            aggregate="rate",
        )  # fmt: skip
        sums: dict[tuple[str, str], float] = {}
        for row in rows.iter_rows(named=True):
            labels = _labels(row["labels"])
            key = (str(labels.get("host.name", "")), str(labels.get("hw.name", "")))
            if row["value"] is not None:
                sums[key] = sums.get(key, 0.0) + row["value"]
        return [
            DeviceLine(node=node, name=name, kind="nic", bytes_per_s=value)
            for (node, name), value in sorted(sums.items())
        ]

    def _learn(self, now: int) -> None:
        """Read jobs and whose run is whose: they change seldom, and cost more than samples."""
        if self._learnt_ns is not None and now - self._learnt_ns < _JOBS_NS:
            return
        if isinstance(self.store, LocalStore):
            from kansoku.app.web_reading import Reading  # loads the server: seldom needed here

            known = Reading(store=self.store).jobs()
            self._jobs = known.filter(pl.col("state") == "RUNNING")
        else:
            self._jobs = self.store.query("jobs", state="RUNNING")
        owners = self.store.query("run_jobs", since_ns=now - _WINDOW_NS)
        self._job_of |= dict(owners.select("run", "job").iter_rows())
        self._learnt_ns = now

    def _lines(self, now: int, incidents: list[dict[str, Any]]) -> tuple[JobLine, ...]:
        self._learn(now)
        ranks = self.store.query("rank_phases", since_ns=now - _WINDOW_NS)
        if set(ranks["run"].to_list()) - set(self._job_of) - self._strays:
            self._learnt_ns = None  # a run nobody spoke of yet: whose is it?
            self._learn(now)
            self._strays = set(ranks["run"].to_list()) - set(self._job_of)
        lines = job_lines(self._jobs, ranks, self._job_of, incidents)
        self._listed = (now, lines)
        return lines

    def _incidents(self) -> list[dict[str, Any]]:
        rows = self.store.query("incidents").filter(pl.col("state") != "closed")
        return rows.head(_MOST_INCIDENTS).to_dicts()

    def _devices_of(self, now: int, nodes: tuple[str, ...] | None = None) -> tuple[DeviceLine, ...]:
        asked_ns, whose, found = self._devices
        if whose != nodes or not found or not 0 <= now - asked_ns < _DEVICES_NS:
            found = (*self._gpus(nodes), *self._nics(now, nodes))
            self._devices = (now, nodes, found)
        return found

    def _read_steps(self, run: str, now: int) -> None:
        """Read the steps of the last minute that were not read before."""
        newest = self._steps.newest_ns() if run == self._steps_of else None
        if newest is None or not 0 <= now - self._whole_ns < _WHOLE_NS:
            self._steps.replace(self._steps_since(run, now - _WINDOW_NS, now), now - _WINDOW_NS)
            self._steps_of, self._whole_ns = run, now
            return
        back = newest - _OVERLAP_NS
        since = self._steps.missing_from_ns(_OVERLAP_NS)
        lately = 0 <= now - self._back_ns < _BACK_NS
        if lately and since is not None and self._add_steps(run, since, now):
            return
        # Also where rows did not fit: a rank that was not there may have sent several at once.
        self._back_ns = now
        self._add_steps(run, back, now)

    def _add_steps(self, run: str, since: int, now: int) -> bool:
        since = min(max(since, now - _WINDOW_NS), now - 1)
        return self._steps.add(self._steps_since(run, since, now), since, from_ns=now - _WINDOW_NS)

    def _steps_since(self, run: str, since: int, now: int) -> pl.DataFrame:
        return self.store.table("steps", since, now, {"run": run}).select(STEP_COLUMNS)

    def _of_run(self, run: str, nodes: dict[int, str], now: int) -> TopSnapshot:
        self._read_steps(run, now)
        lines = self._steps.lines(nodes)
        return TopSnapshot(
            title=self.title,
            time_ns=now,
            ranks=lines,
            step_ms=middle_ms(lines),
            tokens_per_s=self._steps.tokens_per_s(lines),
        )

    def snapshot(self) -> TopSnapshot:
        """Return what arrived within the last minute: jobs, or the ranks of the only run."""
        with self._reading:
            return self._snapshot()

    def _snapshot(self) -> TopSnapshot:
        now = self.now_ns()
        incidents = self._incidents()
        lines = self._lines(now, incidents)
        devices = self._devices_of(now)
        empty = not lines and not devices
        found = TopSnapshot(title=self.title, time_ns=now)
        if len(lines) == 1 and lines[0].state == "run" and lines[0].run is not None:
            found, lines = self._of_run(lines[0].run, {}, now), ()
        return replace(
            found,
            jobs=lines,
            devices=devices,
            incidents=tuple(_incident_text(row) for row in incidents),
            note="nothing arrives: start kansoku agent on the nodes" if empty else None,
        )

    def job(self, key: str) -> TopSnapshot:
        """Return one job: its ranks, its nodes' devices, its incidents.

        Raises InputError for a job that is not there any more.
        """
        with self._reading:
            return self._job(key)

    def _job(self, key: str) -> TopSnapshot:
        now = self.now_ns()
        incidents = self._incidents()
        listed_ns, lines = self._listed
        if not 0 <= now - listed_ns < _LINES_NS:
            lines = self._lines(now, incidents)
        line = next((one for one in lines if one.key == key), None)
        if line is None:
            raise InputError(f"job {key} runs no more", remedy="escape leads back to the jobs")
        found = TopSnapshot(title=self.title, time_ns=now)
        if line.run is not None:
            found = self._of_run(line.run, {}, now)
        every = self._devices_of(now, line.nodes) if line.nodes else ()
        return replace(
            found,
            title=" · ".join(part for part in (f"job {key}", line.name, line.user, line.state)
                             if part),
            job=line,
            devices=every,
            incidents=tuple(_incident_text(r) for r in incidents if about_job(line, r)),
            mfu_ratio=line.mfu_ratio,
            note=None if found.ranks else "its training is not recorded: kansoku run, or attach",
        )  # fmt: skip

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def top(target: str | Path | None = None) -> TopSource:
    """Return the source for a run folder, a store folder or a server's URL."""
    from kansoku.app.store import open_store

    text = str(target or "")
    path = Path(text)
    if text and not text.startswith("http"):
        is_run = (path / "run.json").is_file() or any(path.glob("*.ring"))
        if is_run or not path.exists():
            return RunSource(path=path)
    return StoreSource(store=open_store(target), title=text or "local store")

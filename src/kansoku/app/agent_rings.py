"""Follow the capture rings of jobs on this node: step rows, sampled spans, losses.

The centre needs one row a rank and step. Full spans travel for every hundredth step and for
steps that took twice their rank's median; the rest stays in the ring and the run's own folder.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import polars as pl

from kansoku.app._processes import still_runs
from kansoku.app.agent_resources import NodeSampling, claims_of
from kansoku.errors import KansokuError
from kansoku.model import RunFacts, table_schema
from kansoku.node import Sample, labels

if TYPE_CHECKING:
    from kansoku.formats.run_directory import RunData

__all__ = ["FromRings", "RingFollower", "with_nodes"]

_log = logging.getLogger(__name__)
_SLOW = 2.0
_MEMORY_STEPS = 50
_MAX_RUNS = 64
_MAX_SLOW = 20
"""Slow steps of one run in one look whose spans travel: a noisy job must not flood the centre."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromRings:
    """What one look at the rings gave."""

    tables: dict[str, pl.DataFrame] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class _Rank:
    last_step: int = -1
    durations: deque[int] = field(default_factory=lambda: deque(maxlen=_MEMORY_STEPS))


@dataclass(slots=True, kw_only=True)
class _Look:
    """What one look collects."""

    fresh: list[tuple[RunFacts, pl.DataFrame]] = field(default_factory=list)
    spans: list[pl.DataFrame] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    held: list[tuple[RunFacts, int | None]] = field(default_factory=list)
    """Jobs seen and when their processes ended; None while they run."""


class RingFollower:
    """Remembers how far each rank was read."""

    def __init__(
        self, folder: Path, *, sample_every: int = 100, sampling: NodeSampling | None = None
    ) -> None:
        """Follow the run folders under ``folder``; ``sampling`` tells what their steps used."""
        self._folder = folder
        self._sampling = sampling
        self._sample_every = max(sample_every, 1)
        self._ranks: dict[tuple[str, int], _Rank] = {}
        self._seen: dict[Path, tuple[int, ...]] = {}
        self._running: list[tuple[str, int, int]] = []

    def running(self) -> list[tuple[str, int, int]]:
        """Return (run, rank, pid) of processes whose rings say that they record."""
        return list(self._running)

    def read(self) -> FromRings:
        """Return the steps that ended since the last call."""
        try:
            runs = sorted(p for p in self._folder.iterdir() if p.is_dir())[:_MAX_RUNS]
        except OSError:
            runs = []
        look = _Look()
        self._running = []
        for path in runs:
            try:
                self._read_run(path, look)
            except (KansokuError, OSError, ValueError) as error:
                _log.debug("rings in %s: %s", path, error)
        self._forget({path.name for path in runs})
        steps = [rows for _, rows in look.fresh]
        if self._sampling is not None:
            # The last reading is taken after the last step was seen, so it covers them all.
            self._sampling.watch(job_runs=bool(self._running))
            uuids = self._sampling.uuids()
            claims = [c for job, end in look.held for c in claims_of(job, uuids=uuids, end_ns=end)]
            steps = self._sampling.join(look.fresh, claims)
            look.samples += self._sampling.own_samples()
        tables: dict[str, pl.DataFrame] = {}
        if steps:
            tables["steps"] = pl.concat(steps)
        if look.spans:
            tables["spans"] = pl.concat(look.spans)
        return FromRings(tables=tables, samples=look.samples)

    def _read_run(self, path: Path, look: _Look) -> None:
        # Imported when a job is recorded here: most rounds of most nodes need none of it.
        from kansoku.formats.run_directory import read_run
        from kansoku.trace.steps import step_rows

        data = read_run(path)
        run = data.facts.run
        live = [
            p
            for p in data.processes
            if p.state == "recording" and still_runs(p.pid, p.process_start)
        ]
        self._running += [(run, p.rank, p.pid) for p in live]
        who = labels(("kansoku.run", run))
        count = float(data.counters["count"].sum() or 0)
        look.samples.append(Sample("kansoku.run.ring.records", who, count))
        lost = float(sum(p.lost for p in data.processes))
        look.samples.append(Sample("kansoku.run.ring.lost", who, lost))
        rows = step_rows(data.spans, facts=data.facts, resources=data.resources)
        rows = rows.filter(pl.col("complete")).select(list(table_schema("steps")))
        if self._sampling is not None:
            rows = self._settled(rows, data, look, self._sampling, lives=bool(live))
        fresh = self._fresh(run, rows)
        if fresh.is_empty():
            return
        look.fresh.append((data.facts, fresh))
        wanted = self._wanted(run, fresh)
        if not wanted.is_empty():
            chosen = data.spans.join(wanted, on=["rank", "step"], how="semi")
            chosen = with_nodes(chosen, {r.rank: r.node for r in data.facts.ranks})
            look.spans.append(chosen.select(list(table_schema("spans"))))

    def _settled(
        self,
        rows: pl.DataFrame,
        data: "RunData",
        look: _Look,
        sampling: NodeSampling,
        *,
        lives: bool,
    ) -> pl.DataFrame:
        """Note what the job holds; return the steps that the samples can tell all about."""
        ends = [p.alive_ns for p in data.processes if p.alive_ns]
        end_ns = None if lives else max(ends, default=data.facts.start_ns)
        look.held.append((data.facts, end_ns))
        until_ns = sampling.settled_ns(time.time_ns()) if lives else None
        if until_ns is None:
            return rows
        return rows.filter(pl.col("start_ns") + pl.col("duration_ns") <= until_ns)

    def _fresh(self, run: str, rows: pl.DataFrame) -> pl.DataFrame:
        kept = [
            frame.filter(
                pl.col("step") > self._ranks.setdefault((run, int(rank)), _Rank()).last_step
            )
            for (rank,), frame in rows.group_by("rank", maintain_order=True)
        ]
        return pl.concat(kept) if kept else rows.clear()

    def _wanted(self, run: str, fresh: pl.DataFrame) -> pl.DataFrame:
        chosen: list[tuple[int, int]] = []
        slow_steps = 0
        for rank, step, duration in fresh.select("rank", "step", "duration_ns").iter_rows():
            state = self._ranks[run, rank]
            usual = median(state.durations) if len(state.durations) >= 5 else None
            slow = bool(usual) and duration > _SLOW * (usual or 0)
            if step % self._sample_every == 0 or (slow and slow_steps < _MAX_SLOW):
                chosen.append((rank, step))
                slow_steps += slow
            state.durations.append(duration)
            state.last_step = max(state.last_step, step)
        schema = {"rank": pl.Int32, "step": pl.Int32}
        return pl.DataFrame(chosen, schema=schema, orient="row")

    def _forget(self, present: set[str]) -> None:
        """Forget runs whose folder is gone; a long-lived agent sees thousands of jobs."""
        if len(self._ranks) > 10_000:
            self._ranks = {k: v for k, v in self._ranks.items() if k[0] in present}


def with_nodes(spans: pl.DataFrame, nodes: Mapping[int | None, str]) -> pl.DataFrame:
    """Return spans whose steps say in their attributes on which node the rank runs.

    Step rows have no column for it; the spans of one step in so many travel with them.
    """
    texts = {rank: json.dumps(node) for rank, node in nodes.items() if rank is not None and node}
    node = pl.col("rank").replace_strict(texts, default=None, return_dtype=pl.String)
    others = "," + pl.col("attributes").str.slice(1)
    text = '{"node":' + node + others.fill_null("}")
    is_told = (pl.col("kind") == "step") & node.is_not_null()
    return spans.with_columns(
        attributes=pl.when(is_told).then(text).otherwise(pl.col("attributes"))
    )

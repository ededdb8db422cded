"""Fast samples of this node while a recorded job runs on it: the agent's own, joined by the agent.

The samples stay in a folder of the agent's, bounded by age and size: a folder of the job would be
written by root into a place that its user chose. The CPU time they take has a budget of its own,
kept by reading less often, and is exported.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from kansoku.app.resources import gpu_of, places_of
from kansoku.model import RunFacts
from kansoku.node import Sample
from kansoku.node.edge.fast import FastSampler
from kansoku.node.resources import SAMPLES_SCHEMA, gpu_uuids, join_steps
from kansoku.node.sharing import NODE, OTHER_RANKS, Claim, other_ranks

__all__ = ["NodeSampling", "SamplingPolicy", "claims_of"]

_log = logging.getLogger(__name__)
_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPolicy:
    """How often, how much of a core, and how much disk."""

    interval_s: float = 0.05
    longest_interval_s: float = 1.0
    """Further than this the budget does not stretch the time between samples."""
    cpu_ratio: float = 0.02
    """Of one core, for reading and joining; the collectors have their own."""
    keep_s: float = 600.0
    """Age of the oldest samples: longer steps get no joules."""
    keep_bytes: int = 64 << 20
    settle_s: float = 0.3
    """Steps that ended less than this ago wait: a GPU renews its energy counter each 20-100 ms."""


class NodeSampling:
    """Samples while a job runs, and joins what it sampled with the job's steps."""

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        policy: SamplingPolicy | None = None,
        start: Callable[..., FastSampler] = FastSampler,
    ) -> None:
        """Keep samples of ``node`` under ``folder``; nothing runs yet."""
        self._folder = folder
        self._node = node
        self._policy = policy or SamplingPolicy()
        self._start = start
        self._sampler: FastSampler | None = None
        self._interval_s = self._policy.interval_s
        self._uuids: Mapping[str, str] = {}
        self._ended_cpu_s = 0.0
        self._join_cpu_s = 0.0
        self._late = 0
        self._judged = (time.monotonic(), 0.0)
        self.errors = 0
        """Times that sampling failed: steps had no joules then."""

    @property
    def running(self) -> bool:
        """Whether it samples now."""
        return self._sampler is not None

    @property
    def cpu_s(self) -> float:
        """CPU time of reading and joining since the start."""
        return self._ended_cpu_s + self._join_cpu_s + (self._sampler.cpu_s if self._sampler else 0)

    def watch(self, *, job_runs: bool) -> None:
        """Start with the first job, end with the last; keep the budget. Raises nothing."""
        try:
            if job_runs and self._sampler is None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._sampler = self._start(
                    self._folder, node=self._node, interval_s=self._interval_s
                )
                self._sampler.start()
                self._uuids = self._sampler.uuids
                self._judged = (time.monotonic(), self.cpu_s)
            elif not job_runs and self._sampler is not None:
                self.close()
            self._keep_budget()
            self._prune()
        except Exception:  # noqa: BLE001 - the agent goes on, and counts
            self.errors += 1
            _log.exception("no fast samples of this node")

    def _keep_budget(self) -> None:
        now, used = time.monotonic(), self.cpu_s
        (before, used_before), self._judged = self._judged, (now, used)
        if self._sampler is None or now <= before:
            return
        policy = self._policy
        wanted = self._interval_s * (used - used_before) / (now - before) / policy.cpu_ratio
        # Half of the way at a time, so that one slow join does not thin out the samples at once.
        self._interval_s = min(
            max((self._interval_s + wanted) / 2, policy.interval_s), policy.longest_interval_s
        )
        self._sampler.interval_s = self._interval_s

    def _prune(self) -> None:
        if not self._folder.is_dir():
            return
        files = sorted(
            ((p.stat().st_mtime, p.stat().st_size, p) for p in self._files()), reverse=True
        )
        kept, oldest = 0, time.time() - self._policy.keep_s
        for written, size, file in files:
            kept += size
            if written < oldest or kept > self._policy.keep_bytes:
                file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return list(self._folder.glob("resources-*.parquet"))

    def settled_ns(self, now_ns: int) -> int | None:
        """Return up to when the samples tell all; None where they do already: no job runs."""
        return now_ns - round(self._policy.settle_s * _S) if self.running else None

    def samples(self, since_ns: int) -> pl.DataFrame:
        """Return the samples of files that reach past ``since_ns``, those of this moment too."""
        if self._sampler is not None:
            self._sampler.read_once()
            self._sampler.flush()
        frames = []
        for file in self._files():
            try:
                if file.stat().st_mtime_ns >= since_ns:
                    frames.append(pl.read_parquet(file, columns=list(SAMPLES_SCHEMA)))
            except (OSError, pl.exceptions.PolarsError):
                continue  # a file cut by a full disk or a crash
        return pl.concat(frames) if frames else pl.DataFrame(schema=SAMPLES_SCHEMA)

    def uuids(self) -> Mapping[str, str]:
        """Return UUID to device of the GPUs that it samples, or sampled last."""
        return self._uuids

    def join(
        self, fresh: Sequence[tuple[RunFacts, pl.DataFrame]], claims: Sequence[Claim]
    ) -> list[pl.DataFrame]:
        """Return the steps of each job with what they used; as they were where that fails."""
        begin = time.thread_time()
        given = [steps for _, steps in fresh]
        try:
            return self._join(fresh, claims)
        except Exception:  # noqa: BLE001 - the agent goes on, and counts
            self.errors += 1
            _log.exception("steps go without what they used")
            return given
        finally:
            self._join_cpu_s += time.thread_time() - begin

    def _join(
        self, fresh: Sequence[tuple[RunFacts, pl.DataFrame]], claims: Sequence[Claim]
    ) -> list[pl.DataFrame]:
        starts = [int(steps["start_ns"].to_numpy().min()) for _, steps in fresh if len(steps)]
        if not starts:
            return [steps for _, steps in fresh]
        samples = self.samples(min(starts) - 2 * _S)
        if samples.is_empty():
            return [steps for _, steps in fresh]
        uuids = gpu_uuids(samples)
        devices = {NODE, *uuids.get(self._node, {}).values(), *(c.device for c in claims)}
        joined = []
        for facts, steps in fresh:
            rows = other_ranks(claims, run=facts.run, devices=sorted(devices))
            others = pl.DataFrame(
                [(self._node, d, OTHER_RANKS, at, n) for d, at, n in rows],
                schema=SAMPLES_SCHEMA,
                orient="row",
            )
            places = places_of(here(facts, self._node), uuids=uuids, whole_node=True)
            used = join_steps(steps, pl.concat([samples, others]), places)
            joined.append(used.select(steps.columns))
        return joined

    def own_samples(self) -> list[Sample]:
        """Return what it costs."""
        late = self._late + (self._sampler.late if self._sampler is not None else 0)
        try:
            disk = sum(file.stat().st_size for file in self._files())
        except OSError:
            disk = 0
        return [
            Sample("kansoku.agent.sampling.cpu.time", (), self.cpu_s),
            Sample("kansoku.agent.sampling.interval", (), self._interval_s if self.running else 0),
            Sample("kansoku.agent.sampling.late", (), float(late)),
            Sample("kansoku.agent.sampling.failures", (), float(self.errors)),
            Sample("kansoku.agent.sampling.disk.usage", (), float(disk)),
        ]

    def close(self) -> None:
        """Take a last reading and end."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.close()
            self._ended_cpu_s += sampler.cpu_s
            self._late += sampler.late


def here(facts: RunFacts, node: str) -> RunFacts:
    """Return the facts with all ranks on ``node``: rings are local, whatever the job calls it."""
    return replace(facts, ranks=tuple(replace(rank, node=node) for rank in facts.ranks))


def claims_of(facts: RunFacts, *, uuids: Mapping[str, str], end_ns: int | None) -> list[Claim]:
    """Return what a job holds of this node, and since when; ``end_ns`` None while it runs."""
    ranks = {rank.rank: rank for rank in facts.ranks if rank.rank is not None}
    found: dict[str, int] = {NODE: len(ranks)} if ranks else {}
    for one in ranks.values():
        # The device is known from the first update on: until then its place on a GPU is kept.
        rank = replace(one, device=one.device or "not known yet")
        device, note = gpu_of(rank, uuids=uuids, whole_node=True)
        name = device or ("gpu" if note else None)
        if name is not None:
            found[name] = found.get(name, 0) + 1
    return [
        Claim(run=facts.run, device=name, ranks=count, start_ns=facts.start_ns, end_ns=end_ns)
        for name, count in found.items()
    ]

"""What `kansoku top` shows: the newest steps of a run, or what a server's store holds, each second.

A source gives one :class:`TopSnapshot` a call. It reads only what is new and recent, so that a
long run costs no more than a short one.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from kansoku.app._late_rank import late_rank
from kansoku.app.peak import run_peak
from kansoku.errors import InputError
from kansoku.formats.run_directory import RunData, read_run
from kansoku.model import PHASES, Phase, RunFacts
from kansoku.store import Store
from kansoku.trace.steps import step_rows

__all__ = [
    "DeviceLine",
    "RankLine",
    "RunSource",
    "StoreSource",
    "TopSnapshot",
    "TopSource",
    "rank_lines",
    "top",
]

_RECENT_STEPS = 60
_WINDOW_NS = 60 * 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """One rank over its newest steps."""

    rank: int
    node: str
    step: int
    step_ms: float
    """Median of the newest steps."""
    phases: dict[Phase, float]
    """Share of each phase in the newest steps; they sum to 1."""
    trend: tuple[float, ...]
    """Duration of the newest steps, ms, oldest first."""
    late: bool = False
    """The others wait for it."""


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

    def close(self) -> None:
        """Let go."""


def rank_lines(steps: pl.DataFrame, nodes: dict[int, str]) -> tuple[RankLine, ...]:
    """Sum up each rank's newest complete steps; ``steps`` follow the steps table."""
    done = steps.filter(pl.col("complete") & pl.col("rank").is_not_null())
    if done.is_empty():
        return ()
    newest = done.sort("rank", "step").group_by("rank", maintain_order=True).tail(_RECENT_STEPS)
    lines, waits = [], {}
    for (rank,), rows in newest.group_by("rank", maintain_order=True):
        total = int(rows["duration_ns"].sum())
        shares = {p: int(rows[f"{p.value}_ns"].sum()) / total if total else 0.0 for p in PHASES}
        number = int(str(rank))
        waits[number] = shares[Phase.COLLECTIVE]
        lines.append(
            RankLine(
                rank=number,
                node=nodes.get(number, ""),
                step=int(rows["step"].to_list()[-1]),
                step_ms=float(rows["duration_ns"].cast(pl.Float64).median() or 0.0) / 1e6,  # type: ignore[arg-type]
                phases=shares,
                trend=tuple(float(v) / 1e6 for v in rows["duration_ns"].to_list()),
            )
        )
    late = late_rank(waits)
    return tuple(replace(line, late=True) if line.rank == late else line for line in lines)


def _tokens_per_s(steps: pl.DataFrame, lines: tuple[RankLine, ...]) -> float | None:
    known = steps.filter(pl.col("tokens").is_not_null())
    if known.is_empty() or not lines:
        return None
    newest = known.sort("step").group_by("rank").agg(pl.col("tokens").last())
    slowest_ms = max(line.step_ms for line in lines)
    return float(newest["tokens"].sum()) / (slowest_ms / 1e3) if slowest_ms else None


def _mfu(steps: pl.DataFrame, lines: tuple[RankLine, ...], peak: float | None) -> float | None:
    known = steps.filter(pl.col("flops").is_not_null())
    newest = known.sort("step").group_by("rank").agg(pl.col("flops").last())
    # A sum over some of the ranks only would be too low.
    if not lines or not peak or len(newest) < len(lines):
        return None
    slowest_ms = max(line.step_ms for line in lines)
    return float(newest["flops"].sum()) / (slowest_ms / 1e3) / peak if slowest_ms else None


def _middle_ms(lines: tuple[RankLine, ...]) -> float | None:
    times = sorted(line.step_ms for line in lines)
    return times[len(times) // 2] if times else None


@dataclass(kw_only=True)
class RunSource:
    """A run folder: its rings while it runs, its records when it is over."""

    path: Path
    now_ns: Callable[[], int] = time.time_ns
    _peak: Mapping[str, Any] = field(default_factory=dict)
    """What was measured of the CPUs when the run began."""

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
        return read_run(ring_dir if live and ring_dir is not None else self.path), running

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
        nodes = {rank.rank: rank.node for rank in data.facts.ranks if rank.rank is not None}
        spans = data.spans
        if not spans.is_empty():
            last = spans.select(pl.col("step").max()).item()
            if last is not None:
                spans = spans.filter(
                    pl.col("step").is_null() | (pl.col("step") >= last - _RECENT_STEPS)
                )
        steps = step_rows(spans, facts=data.facts, resources=data.resources)
        lines = rank_lines(steps, nodes)
        state = "running" if running else "over"
        return TopSnapshot(
            title=f"{data.facts.run} · {state}",
            time_ns=self.now_ns(),
            ranks=lines,
            step_ms=_middle_ms(lines),
            tokens_per_s=_tokens_per_s(steps, lines),
            mfu_ratio=_mfu(steps, lines, self._peak_flops(data.facts)),
            incidents=tuple(data.missing[:3]),
            note=None if lines else "no finished step yet",
        )

    def close(self) -> None:
        """Nothing is held."""


@dataclass(kw_only=True)
class StoreSource:
    """A store or a running server: steps, GPUs, NICs and incidents of the last minute."""

    store: Store
    title: str
    now_ns: Callable[[], int] = time.time_ns

    def _value(self, metric: str) -> dict[tuple[str, str], float]:
        """Return the latest value by (node, device); the general task where a metric has tasks."""
        found: dict[tuple[str, str], float] = {}
        for row in self.store.latest(metric).iter_rows(named=True):
            labels = json.loads(row["labels"])
            if labels.get("hw.gpu.task", "general") != "general":
                continue
            if labels.get("hw.sensor_location", "core") not in {"core", "gpu"}:
                continue
            node = str(labels.get("host.name", ""))
            found[node, str(labels.get("hw.name") or labels.get("hw.id", ""))] = row["value"]
        return found

    def _gpus(self) -> list[DeviceLine]:
        watts = self._value("hw.power")
        use = self._value("hw.gpu.utilization")
        memory = self._value("hw.gpu.memory.utilization")
        heat = self._value("hw.temperature")
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

    def _nics(self, now: int) -> list[DeviceLine]:
        rows = self.store.metric_range(
            "hw.network.io", start_ns=now - _WINDOW_NS, end_ns=now, step_ns=_WINDOW_NS,
            aggregate="rate",
        )  # fmt: skip
        sums: dict[tuple[str, str], float] = {}
        for row in rows.iter_rows(named=True):
            labels = json.loads(row["labels"])
            key = (str(labels.get("host.name", "")), str(labels.get("hw.name", "")))
            if row["value"] is not None:
                sums[key] = sums.get(key, 0.0) + row["value"]
        return [
            DeviceLine(node=node, name=name, kind="nic", bytes_per_s=value)
            for (node, name), value in sorted(sums.items())
        ]

    def snapshot(self) -> TopSnapshot:
        """Return what arrived within the last minute."""
        now = self.now_ns()
        steps = self.store.table("steps", now - _WINDOW_NS, now)
        lines = rank_lines(steps, {})
        incidents = self.store.table("incidents", limit=20)
        newest = (
            incidents.sort("time_ns").group_by("id", maintain_order=True).last()
            if not incidents.is_empty()
            else incidents
        )
        texts = [
            " · ".join(
                (row["state"], row["kind"], row["domain"] or "unknown", row["subject"] or "")
            )
            for row in newest.iter_rows(named=True)
            if row["state"] != "closed"
        ]
        devices = (*self._gpus(), *self._nics(now))
        empty = not lines and not devices
        return TopSnapshot(
            title=self.title,
            time_ns=now,
            ranks=lines,
            devices=devices,
            incidents=tuple(texts),
            step_ms=_middle_ms(lines),
            tokens_per_s=_tokens_per_s(steps, lines),
            note="nothing arrives: start kansoku agent on the nodes" if empty else None,
        )

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

"""The report as a record: figures, verdict, findings, JSON and View."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.app._few_ranks import few_ranks
from kansoku.app.peak import run_peak
from kansoku.app.report._findings import ReportPolicy, build_findings
from kansoku.app.report._load import LoadedRun, load_run
from kansoku.app.report._states import BlackBox, read_black_box
from kansoku.model import Finding, Mfu, RunFacts
from kansoku.trace.clocks import MIN_MATCHES, ClockModel, ClockOffset
from kansoku.trace.collectives import CollectiveSummary, summarise
from kansoku.trace.steps import cut_steps, gc_rows, queue_rows
from kansoku.trace.stragglers import StragglerReport, find_stragglers
from kansoku.trace.throughput import Throughput, measure, model_utilisation
from kansoku.view import View

__all__ = ["Report", "report"]

_DEFAULT_CONVENTION = "matrix products of the modules seen, forward and backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a report says."""

    run: LoadedRun
    throughput: Throughput
    mfu: Mfu | None
    mfu_reason: str | None
    """Why there is no MFU."""
    collectives: tuple[CollectiveSummary, ...]
    collectives_lost: str | None
    """How many of them were not kept, as a sentence; None where all were."""
    stragglers: StragglerReport
    box: BlackBox
    findings: tuple[Finding, ...]
    missing: tuple[str, ...]
    """What could not be seen or computed, in sentences."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer in schema ``kansoku.report/1``."""
        t = self.throughput
        known = t.median_step_ns is not None and t.p95_step_ns is not None
        return {
            "schema": "kansoku.report/1",
            "job": _job(self),
            "ranks": self.run.layout.world,
            "layout": self.run.layout.to_json(),
            "steps": t.complete_steps,
            "step_time_ms": {
                "median": t.median_step_ns / 1e6 if known and t.median_step_ns else None,
                "p95": t.p95_step_ns / 1e6 if known and t.p95_step_ns else None,
            },
            "tokens_per_s": t.tokens_per_s,
            "tokens_per_s_per_gpu": t.tokens_per_s_per_gpu,
            "model_flops_per_step": t.flops_per_step,
            "mfu": None if self.mfu is None else self.mfu.to_json(),
            "breakdown": None
            if t.breakdown is None
            else {phase.value: share for phase, share in t.breakdown.items()},
            "collectives": [
                {
                    "group": c.group,
                    "op": c.op,
                    "count": c.count,
                    "bytes": c.bytes,
                    "busbw_bytes_per_s": c.busbw_bytes_per_s,
                    "wait_ratio": c.wait_ratio,
                }
                for c in self.collectives
            ],
            "verdict": self.stragglers.verdict.value,
            "reason": self.stragglers.reason,
            "stragglers": [
                {
                    "rank": s.rank,
                    "phase": s.phase.value,
                    "ratio": s.ratio,
                    "cost_ratio": s.cost_ratio,
                    "confidence": s.confidence,
                }
                for s in self.stragglers.stragglers
            ],
            "findings": [
                {
                    "id": f.id,
                    "severity": f.severity.value,
                    "sentence": f.sentence,
                    "evidence": [
                        {"sentence": e.sentence, "source": e.source, "time_ns": e.time_ns}
                        for e in f.evidence
                    ],
                }
                for f in self.findings
            ],
            "missing": list(self.missing),
        }

    def view(self) -> View:
        """Return what the terminal, the HTML page and the web show."""
        from kansoku.app.report._view import build_view

        return build_view(self)


def _one(values: list[Any]) -> Any:
    distinct = list(dict.fromkeys(value for value in values if value is not None))
    return distinct[0] if len(distinct) == 1 else distinct or None


def _clock(o: ClockOffset) -> dict[str, Any]:
    return {
        "offset_us": o.offset_ns / 1e3,
        "drift_ppm": o.drift_ppm,
        "uncertainty_us": None if o.uncertainty_ns is None else o.uncertainty_ns / 1e3,
        "residual_us": None if o.residual_ns is None else o.residual_ns / 1e3,
        "matches": o.matches,
    }


def _host_clocks(clocks: ClockModel, nodes: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return one clock a host: its ranks share it."""
    found: dict[str, list[ClockOffset]] = {}
    for o in clocks.offsets:
        found.setdefault(nodes.get(o.rank, f"rank {o.rank}"), []).append(o)
    return [
        {"host": host, "ranks": [o.rank for o in offsets], **_clock(offsets[0])}
        for host, offsets in found.items()
    ]


def _job(answer: Report) -> dict[str, Any]:
    facts: RunFacts = answer.run.facts
    clocks = answer.run.clocks
    ranks = facts.ranks
    return {
        "run": facts.run,
        "command": list(facts.command),
        "slurm_job": facts.slurm_job,
        "start_ns": facts.start_ns,
        "end_ns": facts.end_ns,
        "exit_code": facts.exit_code,
        "nodes": list(facts.nodes),
        "device": _one([rank.device for rank in ranks]),
        "torch": _one([rank.torch_version for rank in ranks]),
        "python": _one([rank.python_version for rank in ranks]),
        "recorder": _one([rank.recorder for rank in ranks]),
        "steps_begun": answer.throughput.steps,
        "ranks_seen": answer.throughput.ranks_seen,
        "model": {
            "parameters": max((r.parameters for r in ranks if r.parameters), default=None),
            "layers": max((r.layers for r in ranks if r.layers), default=None),
            "hidden": max((r.hidden for r in ranks if r.hidden), default=None),
        },
        "clocks": {
            "applied": clocks.applied,
            "reason": clocks.reason,
            "reference_rank": clocks.reference,
            "spread_us": None if clocks.spread_ns is None else clocks.spread_ns / 1e3,
            "offsets": [{"rank": o.rank, **_clock(o)} for o in clocks.offsets],
            "hosts": _host_clocks(clocks, facts.node_of_rank),
        },
        "last_states": [
            {
                "rank": r.rank,
                "node": r.node,
                "pid": r.pid,
                "process": r.process,
                "exit_code": None if r.end is None else r.end.exit_code,
                "ended_ns": None if r.end is None else r.end.ended_ns,
                "step": r.state.step,
                "in": r.state.kind,
                "name": r.state.name,
                "group": r.state.group,
                "sequence": r.state.sequence,
                "since_ns": r.state.since_ns,
                "for_s": None if r.duration_ns is None else r.duration_ns / 1e9,
            }
            for r in answer.box.ranks
        ]
        if answer.box.stopped
        else [],
        "waiting": [
            {
                "group": b.group,
                "op": b.op,
                "sequence": b.sequence,
                "waiting": list(b.waiting),
                "missing": list(b.missing),
            }
            for b in answer.box.blocked
        ],
    }


def _with_counters(run: LoadedRun, throughput: Throughput) -> Throughput:
    """Count complete steps as the processes did: that survives a ring too small for its run.

    They counted what they closed, also a step that the end of the recording cut off.
    """
    if run.counters is None or run.counters.is_empty():
        return throughput
    closed = dict(run.counters.filter(pl.col("kind") == "step").select("rank", "count").iter_rows())
    begun = max(closed.values(), default=0)
    for rank, cut in cut_steps(run.spans).group_by("rank").len().iter_rows():
        closed[rank] = closed.get(rank, cut) - cut
    counted = min(closed.values(), default=0)
    if counted <= throughput.complete_steps:
        return throughput
    return replace(throughput, complete_steps=counted, steps=max(throughput.steps, begun))


def _collectives_lost(run: LoadedRun) -> str | None:
    """Say what the collectives' table lacks: the processes counted each, whatever was kept."""
    if run.counters is None:
        return None
    told = run.counters.filter(pl.col("kind") == "collective")
    counted, moved = int(told["count"].sum()), int(told["bytes"].sum())
    kept = run.collectives.filter(pl.col("end_ns").is_not_null())
    if counted <= len(kept):
        return None
    return (
        f"of {counted:,} collectives ({moved:,} bytes) that the ranks counted, {len(kept):,} "
        f"({int(kept['bytes'].sum()):,} bytes) were kept: counts and bytes by group are those"
    )


def _unseen(run: LoadedRun, throughput: Throughput) -> str | None:
    """Return whose work the totals lack; None where every rank was seen."""
    world, seen = run.layout.world, throughput.ranks_seen
    if not 0 < seen < world:
        return None
    known = set(run.steps.filter(pl.col("complete"))["rank"].unique().to_list())
    lacking = [rank for rank in range(world) if rank not in known]
    names = ", ".join(map(str, lacking[:16])) + (" …" if len(lacking) > 16 else "")
    recorded = {rank.rank for rank in run.facts.ranks}
    what = "no step" if any(rank in recorded for rank in lacking) else "no record"
    return (
        f"{what} of rank{'s' if len(lacking) > 1 else ''} {names}: tokens/s and model FLOPs are "
        f"those of {seen} of {world} ranks"
    )


def _unnumbered(run: LoadedRun) -> list[str]:
    """Say which ranks have spans and are in no step."""
    ranks = run.spans.filter(pl.col("rank").is_not_null())["rank"].unique()
    lacking = sorted(set(ranks.to_list()) - set(run.steps["rank"].unique().to_list()))
    if not lacking or run.steps.is_empty():
        return []
    them = "it" if len(lacking) == 1 else "them"
    return [
        f"{few_ranks(lacking)}: spans, but none in a numbered step; the steps' figures lack {them}"
    ]


def report(run: Path | str | LoadedRun, *, policy: ReportPolicy | None = None) -> Report:
    """Analyse a run directory and return its report; raise InputError where there is no run."""
    if not isinstance(run, LoadedRun):
        run = load_run(run)
    facts = run.facts
    throughput = _with_counters(run, measure(run.steps, facts, run.layout, run.clocks))
    unseen = _unseen(run, throughput)
    conventions = {r.extra.get("flops_convention", "") for r in facts.ranks} - {""}
    convention = conventions.pop() if len(conventions) == 1 else _DEFAULT_CONVENTION
    peak, peak_source = (None, "the model FLOPs of a step are not known")
    if throughput.flops_per_step is not None:
        peak, peak_source = run_peak(facts, run.peak)
        if unseen is not None and {rank.device for rank in facts.ranks} == {"cpu"}:
            # The peak is that of all CPUs of a node; GPUs are counted by the ranks seen.
            seen = f"{throughput.ranks_seen} of {run.layout.world} ranks"
            peak, peak_source = None, f"the FLOPs are those of {seen}, the CPUs' peak that of all"
    mfu, reason = model_utilisation(
        throughput, convention=convention, peak_flops=peak, peak_source=peak_source
    )
    stragglers = find_stragglers(
        run.steps,
        run.layout.roles(),
        gc=gc_rows(run.spans),
        queue=None if run.resources is None else queue_rows(run.resources),
        matched=run.arrivals,
    )
    box = read_black_box(run)
    missing = list(run.missing) + ([] if unseen is None else [unseen])
    missing += _unnumbered(run)
    if reason is not None:
        missing.append(f"no MFU: {reason}")
    if throughput.tokens_per_s is None:
        missing.append("no tokens/s: the tokens of a step are not known on every rank")
    if not len(run.collectives) and run.layout.world > 1:
        missing.append("no collective was recorded")
    lost = _collectives_lost(run)
    missing += [] if lost is None else [lost]
    missing += run.layout.notes
    missing += stragglers.notes
    if run.clocks.unmatched:
        missing.append(
            f"{few_ranks(run.clocks.unmatched)}: fewer than {MIN_MATCHES} collectives shared with "
            f"the host of rank {run.clocks.reference}, clocks not aligned"
        )
    missing += run.clocks.notes
    return Report(
        run=run,
        throughput=throughput,
        mfu=mfu,
        mfu_reason=reason,
        collectives=summarise(run.collectives, run.arrivals, facts),
        collectives_lost=lost,
        stragglers=stragglers,
        box=box,
        findings=build_findings(run, throughput, stragglers, box, policy or ReportPolicy()),
        missing=tuple(dict.fromkeys(missing)),
    )

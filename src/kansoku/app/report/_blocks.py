"""Parts of the report's View: collectives, clocks, and the timeline of one step."""

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from kansoku.trace.collectives import CollectiveSummary
from kansoku.trace.throughput import job_steps
from kansoku.view import Block, Column, Sentence, Span, Table, Timeline, Tone
from kansoku.view.units import in_bytes

if TYPE_CHECKING:
    from kansoku.app.report._report import Report

__all__ = ["clock_blocks", "collective_blocks", "scaled", "timeline_blocks"]

_MAX_ROWS = 16
_MAX_LANES = 64
_MAX_SPANS = 20_000


def scaled(value: float | None, unit: str, *, digits: int = 3) -> str:
    if value is None:
        return "unknown"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g} {prefix}{unit}"
    return f"{value:.{digits}g} {unit}"


def _folded(summaries: tuple[CollectiveSummary, ...]) -> list[CollectiveSummary]:
    """Fold the groups of one axis where there are many: their figures are alike."""
    if len(summaries) <= _MAX_ROWS:
        return list(summaries)
    parts: dict[tuple[str, str], list[CollectiveSummary]] = {}
    for summary in summaries:
        parts.setdefault((summary.description or "other", summary.op), []).append(summary)
    folded = []
    for (description, op), group in parts.items():
        known = [s.busbw_bytes_per_s for s in group if s.busbw_bytes_per_s is not None]
        alg = [s.algbw_bytes_per_s for s in group if s.algbw_bytes_per_s is not None]
        waits = [s.wait_ratio for s in group if s.wait_ratio is not None]
        folded.append(
            CollectiveSummary(
                group=f"{description} ({len(group)} groups)",
                description=description,
                op=op,
                members=group[0].members,
                count=sum(s.count for s in group),
                bytes=sum(s.bytes or 0 for s in group),
                transfer_ns=sum(s.transfer_ns or 0 for s in group),
                wait_ns=sum(s.wait_ns or 0 for s in group),
                algbw_bytes_per_s=float(np.median(alg)) if alg else None,
                busbw_bytes_per_s=float(np.median(known)) if known else None,
                wait_ratio=float(np.median(waits)) if waits else None,
            )
        )
    return folded


def collective_blocks(report: "Report") -> list[Block]:
    if not report.collectives:
        return []
    return [
        Table(
            title="Collectives by process group",
            columns=[
                Column(title="group"),
                Column(title="operation"),
                Column(title="ranks", numeric=True),
                Column(title="count", numeric=True),
                Column(title="bytes", numeric=True),
                Column(title="alg. bandwidth", numeric=True),
                Column(title="bus bandwidth", numeric=True),
                Column(title="wait", numeric=True),
                Column(title="transfer", numeric=True),
            ],
            rows=[
                [
                    c.group
                    if not c.description or c.description in c.group
                    else f"{c.group} ({c.description})",
                    c.op,
                    c.members,
                    c.count,
                    in_bytes(c.bytes),
                    None if c.algbw_bytes_per_s is None else scaled(c.algbw_bytes_per_s, "B/s"),
                    None if c.busbw_bytes_per_s is None else scaled(c.busbw_bytes_per_s, "B/s"),
                    None if c.wait_ratio is None else f"{c.wait_ratio:.0%}",
                    None if c.wait_ratio is None else f"{1 - c.wait_ratio:.0%}",
                ]
                for c in _folded(report.collectives)[:_MAX_ROWS]
            ],
            note="Wait: share of the members' time inside that they waited for the last one. "
            "Bandwidths as nccl-tests defines them, from the last arrival on."
            + (f" Not all: {report.collectives_lost}." if report.collectives_lost else ""),
        )
    ]


def clock_blocks(report: "Report") -> list[Block]:
    clocks = report.run.clocks
    if len(clocks.offsets) < 2:
        return []
    if not clocks.applied:
        text = f"Clocks: {clocks.reason}"
        if clocks.spread_ns is not None:
            text += f"; its ranks leave a collective {clocks.spread_ns / 1e3:.0f} µs apart"
        return [Sentence(text=f"{text}.", tone=Tone.MUTED)]
    shown = sorted(clocks.offsets, key=lambda o: -abs(o.offset_ns))[:_MAX_ROWS]
    return [
        Table(
            title=f"Clock offsets against rank {clocks.reference}",
            columns=[
                Column(title="rank", numeric=True),
                Column(title="offset", numeric=True),
                Column(title="drift", numeric=True),
                Column(title="known to", numeric=True),
                Column(title="residual", numeric=True),
                Column(title="collectives", numeric=True),
            ],
            rows=[
                [
                    o.rank,
                    f"{o.offset_ns / 1e6:+.3f} ms",
                    f"{o.drift_ppm:+.2f} ppm",
                    None if o.uncertainty_ns is None else f"±{o.uncertainty_ns / 1e3:.0f} µs",
                    None if o.residual_ns is None else f"{o.residual_ns / 1e3:.0f} µs",
                    o.matches,
                ]
                for o in shown
            ],
            note=f"From the ends of matched collectives; {clocks.reason}.",
        )
    ]


def timeline_blocks(report: "Report") -> list[Block]:
    """Return the spans of one typical step, of up to ``_MAX_LANES`` ranks, on one clock."""
    window, spans = report.throughput.window, report.run.spans
    if window is None or report.throughput.median_step_ns is None:
        return []
    kept = spans.filter((pl.col("kind") == "step") & pl.col("duration_ns").is_not_null())
    kept = kept.filter(pl.col("step").is_between(window.from_step, window.to_step))
    if kept.is_empty():
        return []
    typical = (
        job_steps(report.run.steps.filter(pl.col("step").is_in(kept["step"].unique().implode())))
        .filter(pl.col("ranks") == pl.col("ranks").max())
        .with_columns(away=(pl.col("duration_ns") - report.throughput.median_step_ns).abs())
        .sort("away", "step")
    )
    step = int(typical["step"][0])
    ranks = sorted(kept["rank"].unique().to_list())
    slow = [s.rank for s in report.stragglers.stragglers]
    lanes = sorted({*slow[:_MAX_LANES], *ranks[: _MAX_LANES - len(slow[:_MAX_LANES])]})
    rows = (
        spans.filter(
            (pl.col("step") == step)
            & pl.col("rank").is_in(lanes)
            & pl.col("duration_ns").is_not_null()
            & (pl.col("kind") != "note")
        )
        .with_columns(at=report.run.clocks.corrected("start_ns"))
        .sort("rank", "at", "duration_ns", descending=[False, False, True])
        .head(_MAX_SPANS)
    )
    start = rows["at"].min()
    if not isinstance(start, int):
        return []
    lane_of = {rank: number for number, rank in enumerate(lanes)}
    return [
        Timeline(
            title=f"Step {step} on every rank"
            if len(lanes) == len(ranks)
            else f"Step {step} on {len(lanes)} of {len(ranks)} ranks",
            lanes=[f"rank {rank}" for rank in lanes],
            spans=_with_depth(rows, lane_of, start, slow),
        )
    ]


def _with_depth(
    rows: pl.DataFrame, lane_of: dict[int, int], start: int, slow: list[int]
) -> list[Span]:
    found = []
    opened: dict[int, list[int]] = {}
    for rank, kind, name, at, duration in rows.select(
        "rank", "kind", "name", "at", "duration_ns"
    ).iter_rows():
        ends = opened.setdefault(rank, [])
        while ends and ends[-1] <= at:
            ends.pop()
        found.append(
            Span(
                lane=lane_of[rank],
                start_ns=at - start,
                duration_ns=duration,
                name=name or kind.replace("_", " "),
                kind=kind,
                depth=len(ends),
                mark="late" if rank in slow and kind == "step" else None,
            )
        )
        ends.append(at + duration)
    return found

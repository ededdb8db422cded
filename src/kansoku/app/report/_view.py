"""The report as blocks: one screen in the terminal, the same with plots on a page."""

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from kansoku.app.report._blocks import (
    clock_blocks,
    collective_blocks,
    scaled,
    timeline_blocks,
)
from kansoku.app.report._resources import phase_resources
from kansoku.app.resources import resources_blocks
from kansoku.model import PHASES, Phase, Severity, Verdict
from kansoku.trace.clocks import ClockModel
from kansoku.trace.throughput import whole_steps
from kansoku.view import (
    Block,
    Column,
    Facts,
    Heading,
    Heatmap,
    Line,
    Sentence,
    Series,
    Table,
    Tone,
    View,
)
from kansoku.view.units import in_bytes

if TYPE_CHECKING:
    from kansoku.app.report._report import Report
    from kansoku.app.report._states import RankState

__all__ = ["build_view"]

_MAX_RANKS = 16
_MAX_POINTS = 600
_MAX_LANES = 64
_TITLES = {
    Phase.DATA_WAIT: "data wait",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.COLLECTIVE: "collective",
    Phase.CHECKPOINT: "checkpoint",
    Phase.OTHER: "other",
}
_TONES = {
    Severity.CRITICAL: Tone.BAD,
    Severity.WARNING: Tone.NOTICE,
    Severity.INFO: Tone.PLAIN,
}


def build_view(report: "Report") -> View:
    """Return the blocks of a report, most wanted first."""
    blocks: list[Block] = [Facts(items=_head(report)), *_findings(report)]
    blocks += _black_box(report)
    blocks += _where(report)
    blocks += collective_blocks(report)
    blocks += _resources(report)
    if report.run.use is not None:
        blocks += resources_blocks(report.run.use)
    blocks += clock_blocks(report)
    blocks += timeline_blocks(report)
    if report.missing:
        blocks.append(Heading(text="What is missing"))
        blocks += [Sentence(text=text, tone=Tone.MUTED) for text in report.missing[:20]]
        if len(report.missing) > 20:
            more = f"and {len(report.missing) - 20} more; see --json"
            blocks.append(Sentence(text=more, tone=Tone.MUTED))
    return View(title=f"kansoku report: {report.run.facts.run}", blocks=blocks)


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value / 1e6:.4g} ms"


def _head(report: "Report") -> list[tuple[str, str]]:
    facts, t = report.run.facts, report.throughput
    layout = report.run.layout
    job = shlex.join(facts.command) or facts.run
    if facts.slurm_job:
        job += f" (Slurm job {facts.slurm_job})"
    when = datetime.fromtimestamp(facts.start_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if facts.end_ns:
        when += f", {(facts.end_ns - facts.start_ns) / 1e9:.1f} s"
    if facts.exit_code is not None:
        when += f", exit code {facts.exit_code}"
    elif facts.end_ns is None:
        states = {rank.process for rank in report.box.ranks}
        if "running" in states:
            when += ", running"
        else:
            when += ", ended" if states == {"ended"} else ", its end was not seen"
    items = [("job", job), ("run", when), ("model", _model(report))]
    axes = " × ".join(f"{axis} {size}" for axis, size in layout.to_json().items() if size > 1)
    ranks = f"{layout.world} on {len(facts.nodes)} node{'s' if len(facts.nodes) != 1 else ''}"
    items.append(("ranks", f"{ranks}, {axes or 'no parallelism'}"))
    partly = 0 < t.ranks_seen < layout.world
    steps = f"{t.complete_steps} complete" + (
        f" on {t.ranks_seen} of {layout.world} ranks" if partly else ""
    )
    if t.steps == t.complete_steps + 1 and facts.exit_code == 0 and _only_begun(report):
        steps += ", and what came after the last update"
    elif t.complete_steps != t.steps:
        where = "all of them" if partly else "every rank"
        steps += f", {t.steps - t.complete_steps} begun and not completed on {where}"
    items.append(("steps", steps))
    time = f"mean {_ms(t.mean_step_ns)}, median {_ms(t.median_step_ns)}, p95 {_ms(t.p95_step_ns)}"
    if t.trend_ratio is not None:
        time += f", trend {t.trend_ratio:+.1%} over the run"
    items.append(("step time", time))
    rate = "unknown"
    if t.tokens_per_s is not None and t.tokens_per_s_per_gpu is not None:
        unit = "rank (CPU)" if facts.ranks and facts.ranks[0].device == "cpu" else "GPU"
        rate = f"{t.tokens_per_s:,.0f} tokens/s, {t.tokens_per_s_per_gpu:,.0f} tokens/s/{unit}"
    seen = f" (of {t.ranks_seen} of {layout.world} ranks)" if partly else ""
    items.append(("throughput", rate + seen))
    items.append(("model FLOPs", f"{scaled(t.flops_per_step, 'FLOP')} a step{seen}"))
    items.append(("MFU", _mfu(report)))
    return items


def _only_begun(report: "Report") -> bool:
    """Say whether no rank completed the last step: the end of the data, say, began it."""
    steps = report.run.steps
    return not steps.filter(pl.col("step") == pl.col("step").max())["complete"].any()


def _model(report: "Report") -> str:
    ranks = report.run.facts.ranks
    parameters = max((r.parameters for r in ranks if r.parameters), default=None)
    layers = max((r.layers for r in ranks if r.layers), default=None)
    hidden = max((r.hidden for r in ranks if r.hidden), default=None)
    parts = []
    if parameters:
        parts.append(f"{scaled(parameters, '', digits=4).strip()} parameters a rank")
    if layers:
        parts.append(f"{layers} layers")
    if hidden:
        parts.append(f"hidden size {hidden}")
    return ", ".join(parts) or "unknown"


def _mfu(report: "Report") -> str:
    mfu = report.mfu
    if mfu is None:
        return f"none: {report.mfu_reason}"
    return (
        f"{mfu.value:.1%} of {scaled(mfu.peak_flops, 'FLOP/s')} ({mfu.peak_source}); "
        f"{mfu.convention}; steps {mfu.window.from_step}-{mfu.window.to_step}"
    )


def _findings(report: "Report") -> list[Block]:
    blocks: list[Block] = [Heading(text="Findings")]
    verdict = report.stragglers.verdict
    if verdict is Verdict.NONE:
        text = f"No straggler found: {report.stragglers.reason}."
        blocks.append(Sentence(text=text, tone=Tone.GOOD))
    elif verdict is Verdict.UNKNOWN:
        text = f"Stragglers: unknown, because {report.stragglers.reason}."
        blocks.append(Sentence(text=text, tone=Tone.MUTED))
    blocks += [
        Sentence(
            text=finding.sentence,
            tone=_TONES[finding.severity],
            detail="; ".join(evidence.sentence for evidence in finding.evidence[:4]),
        )
        for finding in report.findings[:20]
    ]
    if report.stragglers.stragglers:
        blocks.append(
            Table(
                title="Stragglers",
                columns=[
                    Column(title="rank", numeric=True),
                    Column(title="phase"),
                    Column(title="cause"),
                    Column(title="own work / peers", numeric=True),
                    Column(title="step time lost", numeric=True),
                    Column(title="throughput lost", numeric=True),
                    Column(title="confidence", numeric=True),
                ],
                rows=[
                    [
                        s.rank,
                        _TITLES[s.phase],
                        s.cause.replace("_", " "),
                        f"{s.ratio:.2f}×",
                        f"{s.cost_ratio:.1%}",
                        _rate_lost(report, s.cost_ratio),
                        f"{s.confidence:.0%}",
                    ]
                    for s in report.stragglers.stragglers[:_MAX_RANKS]
                ],
                tones=[Tone.NOTICE] * len(report.stragglers.stragglers[:_MAX_RANKS]),
            )
        )
    return blocks


def _rate_lost(report: "Report", cost: float) -> str | None:
    rate = report.throughput.tokens_per_s
    if rate is None or cost >= 1:
        return None
    return f"{rate / (1 - cost) - rate:,.0f} tokens/s"


def _black_box(report: "Report") -> list[Block]:
    if not report.box.stopped:
        return []
    rows = [
        [
            r.rank,
            r.node,
            r.pid,
            _process_text(r),
            r.state.step,
            _state_text(r.state.kind, r.state.name, r.state.group, r.state.sequence),
            None if r.state.since_ns is None else _clock(r.state.since_ns),
            None if r.duration_ns is None else f"{r.duration_ns / 1e9:.1f} s",
        ]
        for r in report.box.ranks[:_MAX_LANES]
    ]
    return [
        Table(
            title="What every rank was in at the end of its record",
            columns=[
                Column(title="rank", numeric=True),
                Column(title="node"),
                Column(title="pid", numeric=True),
                Column(title="process"),
                Column(title="step", numeric=True),
                Column(title="in"),
                Column(title="since (UTC)"),
                Column(title="for", numeric=True),
            ],
            rows=rows,
            tones=[
                Tone.BAD if r.process == "gone" or r.failed else Tone.PLAIN
                for r in report.box.ranks[:_MAX_LANES]
            ],
            note=None
            if len(report.box.ranks) <= _MAX_LANES
            else f"first {_MAX_LANES} of {len(report.box.ranks)} ranks; all in --json",
        )
    ]


def _process_text(rank: "RankState") -> str:
    code = None if rank.end is None else rank.end.exit_code
    return rank.process if code is None else f"exit code {code}"


def _state_text(kind: str | None, name: str | None, group: str | None, sequence: int | None) -> str:
    if kind is None:
        return "between phases"
    if kind != "collective":
        return kind.replace("_", " ")
    return f"{name or 'collective'} {'' if sequence is None else sequence} of group {group}"


def _clock(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%H:%M:%S.%f")[:-3]


def _where(report: "Report") -> list[Block]:
    shares, window = report.throughput.breakdown, report.throughput.window
    if shares is None or window is None:
        return []
    steps = report.run.steps.filter(
        pl.col("step").is_between(window.from_step, window.to_step) & pl.col("complete")
    )
    per_rank = (
        steps.group_by("rank")
        .agg(pl.col("duration_ns", "run_delay_ns", *(f"{p.value}_ns" for p in PHASES)).mean())
        .sort("rank")
    )
    seen = [p for p in PHASES if shares[p] > 0]
    total = per_rank["duration_ns"].mean()
    queued = per_rank["run_delay_ns"].mean()
    blocks: list[Block] = [
        Heading(text="Where a step goes"),
        Table(
            title=f"Mean time a step, ms (steps {window.from_step}-{window.to_step})",
            columns=[
                Column(title="rank"),
                Column(title="step", numeric=True),
                *(Column(title=_TITLES[p], numeric=True) for p in seen),
                *([Column(title="(run queue)", numeric=True)] if queued is not None else []),
            ],
            rows=[
                *_rank_rows(per_rank, seen, queued=queued is not None),
                [
                    "all",
                    _cell_ms(total),
                    *(_cell_ms(_mean(per_rank, p)) for p in seen),
                    *([_cell_ms(queued)] if queued is not None else []),
                ],
                [
                    "share",
                    "100%",
                    *(f"{shares[p]:.1%}" for p in seen),
                    *([None] if queued is not None else []),
                ],
            ],
            note="The phases of a step sum to its duration; collectives count where they are "
            "exposed: the main thread blocked in them."
            + (
                " Run queue: time inside the phases that the thread waited for a CPU."
                if queued is not None
                else ""
            ),
        ),
    ]
    blocks += _over_time(steps, seen, report.run.clocks)
    return blocks


def _mean(per_rank: pl.DataFrame, phase: Phase) -> float:
    value = per_rank[f"{phase.value}_ns"].mean()
    return float(value) if isinstance(value, int | float) else 0.0


def _cell_ms(value: object) -> str | None:
    return f"{value / 1e6:.2f}" if isinstance(value, int | float) else None


def _rank_rows(
    per_rank: pl.DataFrame, seen: list[Phase], *, queued: bool
) -> list[list[str | None]]:
    shown = per_rank
    if len(per_rank) > _MAX_RANKS:
        # The ranks farthest from the others say more than the first ones.
        own = _own_work()
        shown = per_rank.with_columns(distance=(own - own.median()).abs()).top_k(
            _MAX_RANKS, by="distance"
        )
        shown = shown.sort("rank")
    return [
        [
            str(row["rank"]),
            _cell_ms(row["duration_ns"]),
            *(_cell_ms(row[f"{p.value}_ns"]) for p in seen),
            *([_cell_ms(row["run_delay_ns"])] if queued else []),
        ]
        for row in shown.iter_rows(named=True)
    ]


def _over_time(steps: pl.DataFrame, seen: list[Phase], clocks: ClockModel) -> list[Block]:
    by_step = whole_steps(steps, clocks).drop("start_ns", "ranks", "complete")
    if len(by_step) < 3:
        return []
    bucket = -(-len(by_step) // _MAX_POINTS)
    folded = (
        by_step.with_row_index()
        .group_by(pl.col("index") // bucket, maintain_order=True)
        .agg(pl.col("step").first(), pl.exclude("index", "step").mean())
    )
    x = [float(step) for step in folded["step"].to_list()]
    blocks: list[Block] = [
        Series(
            title="Step time",
            x_title="step",
            y_title="ms",
            lines=[Line(name="step", x=x, y=(folded["duration_ns"] / 1e6).to_list())],
        ),
        Series(
            title="Phases over time (collective: exposed)",
            x_title="step",
            y_title="ms, mean of the ranks",
            style="stacked",
            lines=[
                Line(name=_TITLES[p], x=x, y=(folded[f"{p.value}_ns"] / 1e6).to_list())
                for p in seen
            ],
        ),
    ]
    ranks = steps["rank"].unique().sort().to_list()
    if len(ranks) > 1:
        blocks.append(_heat(steps, ranks))
    return blocks


def _own_work() -> pl.Expr:
    own = pl.col("duration_ns") - pl.col("collective_ns")
    return (own - pl.col("run_delay_ns").fill_null(0)).clip(lower_bound=0)


def _heat(steps: pl.DataFrame, ranks: list[int]) -> Heatmap:
    """Return own work of each rank over time: a straggler is a bright row."""
    columns = 400
    first, last = int(steps["step"].min()), int(steps["step"].max())  # type: ignore[arg-type]
    width = max(-(-(last - first + 1) // columns), 1)
    rows = max(-(-len(ranks) // 512), 1)
    place = {rank: number // rows for number, rank in enumerate(ranks)}
    cells = (
        steps.with_columns(
            column=(pl.col("step") - first) // width,
            row=pl.col("rank").replace_strict(place, return_dtype=pl.Int64),
            own=_own_work() / 1e6,
        )
        .group_by("row", "column")
        .agg(pl.col("own").mean())
    )
    shape = (max(place.values()) + 1, (last - first) // width + 1)
    values = np.full(shape, np.nan)
    values[cells["row"].to_numpy(), cells["column"].to_numpy()] = cells["own"].to_numpy()
    return Heatmap(
        title="Own work by rank and step",
        row_labels=[f"rank {rank}" for rank in ranks[::rows]],
        column_labels=[str(first + n * width) for n in range(shape[1])],
        values=values,  # type: ignore[arg-type]
        unit="ms",
        low=float(np.nanmin(values)),
        high=float(np.nanmax(values)),
        row_title="rank",
        column_title="step",
    )


def _resources(report: "Report") -> list[Block]:
    rows = phase_resources(report.run)
    if not rows:
        return []
    steps = report.run.steps
    energy, nic = steps["energy_j"].sum(), steps["nic_bytes"].sum()
    known = steps["energy_j"].count() > 0, steps["nic_bytes"].count() > 0
    note = "All ranks, spans inside included."
    note += f" Energy {energy:,.0f} J." if known[0] else " Energy: no telemetry joined."
    note += f" NIC {in_bytes(float(nic))}." if known[1] else " NIC bytes: no telemetry joined."
    return [
        Table(
            title="Resources by phase",
            columns=[
                Column(title="phase"),
                Column(title="spans", numeric=True),
                Column(title="wall", numeric=True),
                Column(title="CPU", numeric=True),
                Column(title="CPU / wall", numeric=True),
                Column(title="peak memory", numeric=True),
                Column(title="device", numeric=True),
            ],
            rows=[
                [
                    r.kind.replace("_", " "),
                    r.count,
                    f"{r.wall_ns / 1e9:.2f} s",
                    None if r.cpu_ns is None else f"{r.cpu_ns / 1e9:.2f} s",
                    None if r.cpu_ns is None or not r.wall_ns else f"{r.cpu_ns / r.wall_ns:.0%}",
                    in_bytes(r.peak_rss_bytes),
                    None if r.device_ns is None else f"{r.device_ns / 1e9:.2f} s",
                ]
                for r in rows
            ],
            note=note,
        )
    ]

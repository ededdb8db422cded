"""Results of the planner: JSON, View and DataFrames of each."""

from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from kansoku.app._plan_compare import RunComparison, comparison_blocks
from kansoku.catalog.models import ModelShape
from kansoku.model import Mfu
from kansoku.plan.budget import Budget
from kansoku.plan.hardware import Hardware
from kansoku.plan.layout import Layout, Training
from kansoku.plan.parameters import count_parameters
from kansoku.plan.search import Candidate, SearchResult
from kansoku.plan.timing import TrafficColumns
from kansoku.plan.whatif import Change, Resource
from kansoku.view import Block, Column, Facts, Heading, Line, Sentence, Series, Table, Tone, View
from kansoku.view.units import in_time

__all__ = [
    "GIB",
    "SCHEMA",
    "ExplainResult",
    "SearchAnswer",
    "Sweep",
    "candidate_json",
    "layout_text",
    "note_blocks",
    "percent",
]

SCHEMA = "kansoku.plan/1"
GIB = 2**30
PARTS = {
    "gemm": "matrix products",
    "attention": "attention core",
    "elementwise": "elementwise (HBM)",
    "gaps": "gaps between kernels",
    "recompute": "recomputation",
    "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed",
    "ep": "expert parallel, exposed",
    "pp": "pipeline transfers, exposed",
    "dp": "data parallel, exposed",
    "bubble": "pipeline bubble and uneven stages",
    "optimizer": "optimizer",
}
RESOURCES = {
    "tensor_cores": "tensor cores",
    "memory_bandwidth": "HBM bandwidth",
    "launch": "kernel launches",
    "pipeline": "pipeline fill and balance",
    "nvlink": "NVLink",
    "fabric": "fabric (NICs, leaves, spines)",
}


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as every plan answer writes it."""
    layout = candidate.layout
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "cp": layout.cp,
        "ep": layout.ep,
        "vp": layout.vp,
        "micro_batch": layout.micro_batch,
        "recompute": layout.recompute,
        "zero": layout.zero,
        "step_s": candidate.step_s,
        "tokens_per_s_per_gpu": candidate.tokens_per_s_per_gpu,
        "mfu": candidate.mfu.to_json(),
        "hfu": candidate.hfu.to_json(),
        "memory_gib": candidate.memory_bytes / GIB,
        "fits": candidate.fits,
        "pareto": candidate.pareto,
        "breakdown": {f"{name}_s": value for name, value in candidate.breakdown.items()},
        "memory_breakdown": {f"{k}_gib": v / GIB for k, v in candidate.memory.items()},
        "placement": candidate.placement.to_json(),
    }


def _head(shape: ModelShape, hardware: Hardware, training: Training) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": shape.name,
        "cluster": hardware.name,
        "gpu": hardware.accelerator.name,
        "gpus": hardware.gpus,
        "global_batch": training.global_batch,
        "seq": training.seq,
        "precision": training.precision,
        "attention": training.attention,
        "schedule": training.schedule,
        "sequence_parallel": training.sequence_parallel,
    }


def _calibration_json(hardware: Hardware) -> dict[str, Any]:
    calibration = hardware.need_calibration()
    return {
        "gpu": calibration.gpu,
        "measured_points": calibration.measured,
        "mean_error_ratio": calibration.mean_error_ratio,
        "constants": calibration.constants(),
        "source": calibration.source,
    }


def note_blocks(notes: tuple[str, ...]) -> list[Block]:
    """Return what was derived, as muted sentences."""
    return [Sentence(text=text, tone=Tone.MUTED) for text in notes]


def percent(mfu: Mfu) -> str:
    """Return a utilisation for people."""
    return f"{100 * mfu.value:.1f} %"


def _setting_facts(
    shape: ModelShape, hardware: Hardware, training: Training
) -> list[tuple[str, str]]:
    counts = count_parameters(shape)
    active = f", {counts.active / 1e9:.1f} B active" if shape.experts else ""
    return [
        ("model", f"{shape.title}, {counts.total / 1e9:.2f} B parameters{active}"),
        ("machine", f"{hardware.gpus} × {hardware.accelerator.title}, {hardware.name}"),
        (
            "step",
            (
                f"{training.global_batch} sequences × {training.seq} = {training.tokens:,} tokens, "
                f"{training.precision}, {training.attention} attention, {training.schedule}"
            ),
        ),
    ]


def _budget_json(budget: Budget | None) -> dict[str, Any] | None:
    return None if budget is None else asdict(budget)


def _budget_blocks(budget: Budget | None) -> list[Block]:
    if budget is None:
        return []
    rows = [
        ("tokens", f"{budget.tokens:,.0f} in {budget.steps:,.0f} steps"),
        ("time to train", in_time(budget.total_s) or ""),
        ("of it evaluation", in_time(budget.evaluation_s) or ""),
        (
            "of it checkpoints",
            in_time(budget.checkpoint_s) or "unknown",
        ),
        ("checkpoint", f"{budget.checkpoint_bytes / GIB:,.0f} GiB each"),
        ("GPU-hours", f"{budget.gpu_hours:,.0f}"),
    ]
    if budget.energy_kwh is not None:
        rows.append(("energy", f"at most {budget.energy_kwh:,.0f} kWh ({budget.power_source})"))
    blocks: list[Block] = [Heading(text="For the token budget"), Facts(items=rows)]
    return blocks + [Sentence(text=text, tone=Tone.NOTICE) for text in budget.missing]


def layout_text(layout: Layout) -> str:
    """Return a layout in one line."""
    return (
        f"tp {layout.tp} × pp {layout.pp} × dp {layout.dp} × cp {layout.cp}"
        + (f" × ep {layout.ep}" if layout.ep > 1 else "")
        + f", vp {layout.vp}, micro-batch {layout.micro_batch}, recompute {layout.recompute}, "
        f"ZeRO {layout.zero}"
    )


_CANDIDATE_COLUMNS = (
    "tp", "pp", "dp", "cp", "ep", "vp", "mbs", "recompute", "zero", "step s", "tokens/s/GPU",
    "MFU", "GiB",
)  # fmt: skip


def _candidate_table(title: str, rows: tuple[Candidate, ...], note: str | None = None) -> Table:
    return Table(
        title=title,
        columns=[Column(title=t, numeric=t != "recompute") for t in _CANDIDATE_COLUMNS],
        rows=[
            (
                c.layout.tp, c.layout.pp, c.layout.dp, c.layout.cp, c.layout.ep, c.layout.vp,
                c.layout.micro_batch, c.layout.recompute, c.layout.zero, f"{c.step_s:.3f}",
                f"{c.tokens_per_s_per_gpu:.0f}", percent(c.mfu), f"{c.memory_bytes / GIB:.1f}",
            )
            for c in rows
        ],
        note=note,
    )  # fmt: skip


_FRONT_ROWS = 12


def _placement_table(candidate: Candidate) -> Table:
    rows = [
        (g.axis, g.size, g.stride, g.count, g.per_node, g.nodes, g.tier.replace("_", " "),
         g.crossing)
        for g in candidate.placement.groups
        if g.size > 1
    ]  # fmt: skip
    titles = (
        "groups", "size", "stride", "count", "per node", "nodes", "widest path", "crossing pods"
    )  # fmt: skip
    return Table(
        title="Placement of the fastest, from the inside out",
        columns=[Column(title=t, numeric=t not in {"groups", "widest path"}) for t in titles],
        rows=rows,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The best layout at one global batch; None where nothing fits."""

    global_batch: int
    best: Candidate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer:
    """Answer of ``plan search``."""

    shape: ModelShape
    hardware: Hardware
    training: Training
    result: SearchResult
    budget: Budget | None
    sweep: tuple[Sweep, ...]
    notes: tuple[str, ...]

    @property
    def candidates(self) -> pl.DataFrame:
        """Candidates, fastest first, one row each."""
        rows = [candidate_json(c) for c in self.result.candidates]
        nested = {"mfu", "hfu", "breakdown", "memory_breakdown", "placement"}
        return pl.DataFrame(
            [
                {k: v for k, v in row.items() if k not in nested}
                | {"mfu_ratio": row["mfu"]["value"]}
                | row["breakdown"]
                for row in rows
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the answer of ``plan search --json``."""
        found = bool(self.result.candidates)
        return _head(self.shape, self.hardware, self.training) | {
            "verdict": "found" if found else "none",
            "reason": None if found else "every layout was rejected; see rejected",
            "tried": self.result.tried,
            "feasible": self.result.feasible,
            "candidates": [candidate_json(c) for c in self.result.candidates],
            "pareto": [candidate_json(c) for c in self.result.pareto],
            "rejected": dict(self.result.rejected),
            "budget": _budget_json(self.budget),
            "batch_sweep": [
                {
                    "global_batch": s.global_batch,
                    "best": None if s.best is None else candidate_json(s.best),
                }
                for s in self.sweep
            ],
            "calibration": _calibration_json(self.hardware),
            "notes": list(self.notes),
        }

    def view(self) -> View:
        """Draw the ranking, the front and the reasons."""
        result = self.result
        blocks: list[Block] = [
            Facts(items=_setting_facts(self.shape, self.hardware, self.training))
        ]
        if not result.candidates:
            text = f"None of {result.tried:,} layouts is feasible"
            blocks.append(Sentence(text=text, tone=Tone.BAD))
        else:
            best = result.candidates[0]
            blocks += [
                Sentence(
                    text=f"Fastest of {result.feasible:,} feasible layouts: "
                    f"{best.step_s:.3f} s a step, MFU {percent(best.mfu)}",
                    tone=Tone.GOOD,
                    detail=f"MFU counts {best.mfu.convention} FLOPs against the dense "
                    f"{self.training.precision} peak of {best.mfu.peak_flops:.4g} FLOP/s; window: "
                    "one steady step, predicted",
                ),
                _candidate_table("Fastest layouts", result.candidates),
                _candidate_table(
                    "Pareto front of time against memory",
                    result.pareto[:_FRONT_ROWS],
                    note=f"{len(result.pareto)} in all; --json has them"
                    if len(result.pareto) > _FRONT_ROWS
                    else None,
                ),
                _placement_table(best),
                Series(
                    title="Pareto front",
                    x_title="memory, GiB",
                    y_title="step, s",
                    lines=[
                        Line(
                            name="front",
                            x=[c.memory_bytes / GIB for c in result.pareto],
                            y=[c.step_s for c in result.pareto],
                        )
                    ],
                    style="scatter",
                ),
            ]
        blocks.append(
            Table(
                title=f"Rejected, of {result.tried:,} combinations",
                columns=[Column(title="layouts", numeric=True), Column(title="reason")],
                rows=[
                    (f"{n:,}", r) for r, n in sorted(result.rejected.items(), key=lambda p: -p[1])
                ],
            )
        )
        blocks += self._sweep_blocks() + _budget_blocks(self.budget) + note_blocks(self.notes)
        return View(title=f"Plan: {self.shape.title}", blocks=blocks)

    def _sweep_blocks(self) -> list[Block]:
        if not self.sweep:
            return []
        rows = [
            (
                s.global_batch,
                None if s.best is None else f"{s.best.step_s:.3f}",
                None if s.best is None else f"{s.best.tokens_per_s_per_gpu:.0f}",
                "nothing fits" if s.best is None else layout_text(s.best.layout),
            )
            for s in self.sweep
        ]
        return [
            Table(
                title="Global batch: starting points, not promises",
                columns=[
                    Column(title="batch", numeric=True),
                    Column(title="step s", numeric=True),
                    Column(title="tokens/s/GPU", numeric=True),
                    Column(title="best layout"),
                ],
                rows=rows,
                note="A bigger batch fills the pipeline better; how many more tokens it needs to "
                "converge is not predicted.",
            )
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainResult:
    """Answer of ``plan explain``."""

    shape: ModelShape
    hardware: Hardware
    training: Training
    candidate: Candidate
    traffic: TrafficColumns
    resources: tuple[Resource, ...]
    changes: tuple[Change, ...]
    budget: Budget | None
    comparison: RunComparison | None
    notes: tuple[str, ...]

    @property
    def time_split(self) -> pl.DataFrame:
        """Seconds and share of the step by part."""
        parts = self.candidate.breakdown
        return pl.DataFrame(
            {
                "part": list(parts),
                "seconds": list(parts.values()),
                "share_ratio": [v / self.candidate.step_s for v in parts.values()],
            }
        )

    def _traffic(self) -> dict[str, dict[str, Any]]:
        tiers = {g.axis: g for g in self.candidate.placement.groups}
        return {
            axis: {
                "bytes": float(getattr(self.traffic, f"{axis}_bytes")[0]),
                "seconds": float(getattr(self.traffic, f"{axis}_s")[0]),
                "exposed_s": self.candidate.breakdown[axis],
                "size": tiers[axis].size,
                "tier": tiers[axis].tier,
            }
            for axis in ("tp", "cp", "ep", "dp", "pp")
        }

    def to_json(self) -> dict[str, Any]:
        """Return the answer of ``plan explain --json``."""
        critical = self.resources[0]
        return (
            _head(self.shape, self.hardware, self.training)
            | candidate_json(self.candidate)
            | {
                "gpu_memory_gib": self.hardware.memory_bytes / GIB,
                "time_split": self.time_split.to_dicts(),
                "critical_resource": {
                    "name": critical.name,
                    "seconds": critical.seconds,
                    "share": critical.share,
                },
                "resources": [asdict(r) for r in self.resources],
                "what_if": [asdict(c) for c in self.changes],
                "traffic": self._traffic(),
                "budget": _budget_json(self.budget),
                "run": None if self.comparison is None else self.comparison.to_json(),
                "calibration": _calibration_json(self.hardware),
                "notes": list(self.notes),
            }
        )

    def view(self) -> View:
        """Draw time split, resources, traffic and what-ifs."""
        c = self.candidate
        fit = f"{c.memory_bytes / GIB:.1f} of {self.hardware.memory_bytes / GIB:.1f} GiB"
        critical = self.resources[0]
        blocks: list[Block] = [
            Facts(
                items=[
                    *_setting_facts(self.shape, self.hardware, self.training),
                    ("layout", layout_text(c.layout)),
                    ("memory", f"{fit} on the fullest rank"),
                ]
            ),
            Sentence(
                text=f"{c.step_s:.4g} s a step: {c.tokens_per_s_per_gpu:.0f} tokens/s/GPU, "
                f"MFU {percent(c.mfu)}, HFU {percent(c.hfu)}",
                tone=Tone.GOOD if c.fits else Tone.NOTICE,
                detail=f"MFU: {c.mfu.convention} FLOPs, peak {c.mfu.peak_flops:.4g} FLOP/s "
                f"({c.mfu.peak_source}), window: one steady step",
            ),
        ]
        if not c.fits:
            blocks.append(Sentence(text=f"Does not fit in GPU memory: {fit}", tone=Tone.BAD))
        blocks.append(
            Sentence(
                text=f"Critical resource: {RESOURCES[critical.name]}, "
                f"{100 * critical.share:.0f} % of the step"
            )
        )
        blocks.append(
            Table(
                title="Where the step goes",
                columns=[
                    Column(title="part"),
                    Column(title="ms", numeric=True),
                    Column(title="%", numeric=True),
                ],
                rows=[
                    (PARTS[k], f"{1e3 * v:,.2f}", f"{100 * v / c.step_s:.1f}")
                    for k, v in sorted(c.breakdown.items(), key=lambda p: -p[1])
                    if v > 0
                ],
            )
        )
        blocks.append(self._traffic_table())
        blocks.append(
            Table(
                title="What would change it",
                columns=[
                    Column(title="change"),
                    Column(title="step s", numeric=True),
                    Column(title="tokens/s/GPU", numeric=True),
                    Column(title="gain", numeric=True),
                    Column(title="re-tuned"),
                ],
                rows=[
                    (
                        x.change,
                        f"{x.step_s:.4g}",
                        f"{x.tokens_per_s_per_gpu:.0f}",
                        f"{100 * (x.gain_ratio - 1):+.1f} %",
                        x.retuned,
                    )
                    for x in self.changes
                ],
            )
        )
        if self.comparison is not None:
            blocks += comparison_blocks(self.comparison)
        blocks += _budget_blocks(self.budget) + note_blocks(self.notes)
        return View(title=f"Plan: {self.shape.title}", blocks=blocks)

    def _traffic_table(self) -> Table:
        rows = [
            (
                axis,
                row["size"],
                row["tier"],
                f"{row['bytes'] / 1e9:.3f}",
                f"{1e3 * row['seconds']:.2f}",
                f"{1e3 * row['exposed_s']:.2f}",
            )
            for axis, row in self._traffic().items()
            if row["size"] > 1
        ]
        return Table(
            title="What one rank sends in a step",
            columns=[
                Column(title="groups"),
                Column(title="size", numeric=True),
                Column(title="widest path"),
                Column(title="GB", numeric=True),
                Column(title="ms", numeric=True),
                Column(title="exposed ms", numeric=True),
            ],
            rows=rows,
        )

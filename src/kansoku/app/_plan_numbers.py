"""Results of ``plan memory`` and ``plan flops``."""

from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from kansoku.app._plan_results import GIB, SCHEMA, layout_text, note_blocks, percent
from kansoku.catalog.models import ModelShape
from kansoku.model import Mfu
from kansoku.plan.flops import StepFlops
from kansoku.plan.hardware import Hardware
from kansoku.plan.layout import Layout, Training
from kansoku.plan.memory import MemoryColumns
from kansoku.plan.parameters import count_parameters
from kansoku.view import Block, Column, Facts, Sentence, Table, Tone, View

__all__ = ["FlopsResult", "MemoryResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """Answer of ``plan memory``."""

    shape: ModelShape
    hardware: Hardware | None
    training: Training
    layout: Layout
    columns: MemoryColumns
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> float:
        """Memory of the fullest rank."""
        return float(self.columns.total[0])

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None without hardware."""
        return None if self.hardware is None else self.total_bytes <= self.hardware.memory_bytes

    def _parts(self) -> dict[str, float]:
        names = (
            "weights", "gradients", "optimizer", "activations", "recompute_working", "logits",
            "communication", "context",
        )  # fmt: skip
        return {name: float(getattr(self.columns, name)[0]) for name in names}

    @property
    def parts(self) -> pl.DataFrame:
        """Bytes by part."""
        parts = self._parts()
        return pl.DataFrame({"part": list(parts), "bytes": list(parts.values())})

    def to_json(self) -> dict[str, Any]:
        """Return the answer of ``plan memory --json``."""
        parts = self._parts()
        states = parts["weights"] + parts["gradients"] + parts["optimizer"]
        matrices = float(self.columns.layer_matrix_parameters[0])
        rank = float(self.columns.parameters[0])
        layout = self.layout
        return {
            "schema": SCHEMA,
            "convention": "16-bit weights, gradients of grad_bytes, 12 bytes of fp32 optimizer "
            "states a parameter (arXiv 1910.02054); activations after arXiv 2205.05198 Table 2; "
            "fullest of the first and the last stage; GiB = 2^30 bytes",
            "model": self.shape.name,
            "gpus": layout.gpus,
            "global_batch": self.training.global_batch,
            "layout": asdict(layout),
            "precision": self.training.precision,
            "attention": self.training.attention,
            "sequence_parallel": self.training.sequence_parallel,
            "grad_bytes": self.training.grad_bytes,
            "memory_gib": self.total_bytes / GIB,
            "gpu_memory_gib": None if self.hardware is None else self.hardware.memory_bytes / GIB,
            "fits": self.fits,
            **{f"{name}_gib": value / GIB for name, value in parts.items()},
            "states_gib": states / GIB,
            "states_gb": states / 1e9,
            "layer_matrix_states_gib": matrices * states / rank / GIB,
            "parameters": rank,
            "layer_matrix_parameters": matrices,
            "notes": list(self.notes),
        }

    def view(self) -> View:
        """Draw the parts."""
        parts = self._parts()
        blocks: list[Block] = [
            Facts(
                items=[
                    ("model", self.shape.title),
                    ("layout", layout_text(self.layout)),
                    ("parameters of the rank", f"{float(self.columns.parameters[0]) / 1e9:.3f} B"),
                ]
            ),
            Table(
                title="Memory of the fullest rank",
                columns=[Column(title="part"), Column(title="GiB", numeric=True)],
                rows=[
                    *((k.replace("_", " "), f"{v / GIB:.3f}") for k, v in parts.items() if v),
                    ("total", f"{self.total_bytes / GIB:.3f}"),
                ],
            ),
        ]
        if self.hardware is not None:
            room = (
                f"{self.hardware.memory_bytes / GIB:.1f} GiB of {self.hardware.accelerator.title}"
            )
            blocks.append(
                Sentence(text=f"Fits in {room}", tone=Tone.GOOD)
                if self.fits
                else Sentence(text=f"Does not fit in {room}", tone=Tone.BAD)
            )
        return View(title="Memory", blocks=blocks + note_blocks(self.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsResult:
    """Answer of ``plan flops``."""

    shape: ModelShape
    global_batch: int
    recompute: str
    flops: StepFlops
    utilisation: dict[str, Mfu]
    notes: tuple[str, ...]

    @property
    def conventions(self) -> pl.DataFrame:
        """FLOPs of a step by convention."""
        rows = self.flops.conventions
        return pl.DataFrame({"convention": list(rows), "flops": list(rows.values())})

    def to_json(self) -> dict[str, Any]:
        """Return the answer of ``plan flops --json``."""
        counts = count_parameters(self.shape)
        tokens = self.flops.tokens
        return {
            "schema": SCHEMA,
            "model": self.shape.name,
            "global_batch": self.global_batch,
            "seq": self.shape.seq,
            "recompute": self.recompute,
            "tokens": tokens,
            "parameters": counts.total,
            "active_parameters": counts.active,
            "convention": "full_attention",
            "flops_per_step": self.flops.conventions["full_attention"],
            "conventions": {
                name: {"flops_per_step": value, "flops_per_token": value / tokens}
                for name, value in self.flops.conventions.items()
            },
            "parts": {
                "matrices": self.flops.matrices,
                "attention": self.flops.attention,
                "logits": self.flops.logits,
            },
            "mfu": self.utilisation["full_attention"].to_json() if self.utilisation else None,
            "hfu": self.utilisation["hardware"].to_json() if self.utilisation else None,
            "utilisation": {name: m.to_json() for name, m in self.utilisation.items()},
            "notes": list(self.notes),
        }

    def view(self) -> View:
        """Draw the conventions."""
        counts = count_parameters(self.shape)
        tokens = self.flops.tokens
        rows = [
            (
                name,
                f"{value:.4e}",
                f"{value / tokens / 1e9:.2f}",
                percent(self.utilisation[name]) if self.utilisation else None,
            )
            for name, value in self.flops.conventions.items()
        ]
        peak = next(iter(self.utilisation.values())).peak_source if self.utilisation else None
        return View(
            title=f"FLOPs: {self.shape.title}",
            blocks=[
                Facts(
                    items=[
                        ("parameters", f"{counts.total:,} ({counts.active:,} active)"),
                        ("tokens a step", f"{tokens:,}"),
                        ("recomputation", self.recompute),
                        *([("peak", peak)] if peak else []),
                    ]
                ),
                Table(
                    title="FLOPs of a step",
                    columns=[
                        Column(title="convention"),
                        Column(title="FLOPs", numeric=True),
                        Column(title="GFLOPs/token", numeric=True),
                        Column(title="utilisation", numeric=True),
                    ],
                    rows=rows,
                    note="hardware conventions count the recomputation; the others do not",
                ),
                *note_blocks(self.notes),
            ],
        )

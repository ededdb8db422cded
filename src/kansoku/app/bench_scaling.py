"""Scaling of measured or published results: table, plots, and what the figures can tell."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kansoku.app.bench_mfu import Hardware, mfu_of_run
from kansoku.app.bench_score import ScoredResult, score
from kansoku.bench.scaling import (
    Consistency,
    Measurement,
    ScalingRow,
    check_published,
    scaling_rows,
)
from kansoku.catalog import accelerator
from kansoku.catalog.models import model_shape
from kansoku.errors import InputError
from kansoku.plan.flops import step_flops
from kansoku.view import Block, Column, Facts, Line, Sentence, Series, Table, Tone, View

__all__ = ["Scaling", "published", "published_names", "scaling", "scaling_of_folders"]

SCHEMA = "kansoku.bench.scaling/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Node counts side by side."""

    title: str
    rows: tuple[ScalingRow, ...]
    label: str
    source: str
    consistency: tuple[Consistency, ...] = ()
    """One per row, where published figures can be held against each other."""
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer."""
        return {
            "schema": SCHEMA,
            "title": self.title,
            "label": self.label,
            "source": self.source,
            "rows": [_row_json(row) for row in self.rows],
            "remarks": list(self.remarks),
        }

    def view(self) -> View:
        """Return table, plots and remarks."""
        return _view(self)


def _row_json(row: ScalingRow) -> dict[str, Any]:
    return {
        "nodes": row.at.nodes,
        "gpus": row.at.gpus,
        "minutes": row.at.minutes,
        "speedup": row.speedup,
        "ideal_speedup": row.ideal,
        "efficiency": row.efficiency,
        "tokens_per_s_per_gpu": row.at.tokens_per_s_per_gpu,
        "mfu": row.at.mfu,
        "step_factor": row.step_factor,
        "convergence_factor": row.convergence_factor,
        "lost_to_steps": row.lost_to_steps,
        "lost_to_convergence": row.lost_to_convergence,
        "reason": row.reason,
    }


def _table() -> dict[str, Any]:
    file = resources.files("kansoku.catalog") / "data" / "published_scaling.toml"
    return tomllib.loads(file.read_text("utf-8"))


def published_names() -> list[str]:
    """Return the names of published scaling results on file."""
    return list(_table())


def published(name: str) -> Scaling:
    """Return a published result with what can and cannot be inferred from it."""
    table = _table()
    if name not in table:
        raise InputError(f"no published result {name!r}", remedy=f"known: {', '.join(table)}")
    entry = table[name]
    rows = [
        Measurement(label=entry["status"], source=entry["source"], **row) for row in entry["row"]
    ]
    shape = model_shape(entry["model"])
    flops = step_flops(shape, global_batch=1, seq=entry["sequence_length"])
    per_token = {key: value / flops.tokens for key, value in flops.conventions.items()}
    peaks = accelerator(entry["gpu"]).peak_flops
    checks = tuple(check_published(row, peaks, per_token) for row in rows)
    return Scaling(
        title=entry["title"],
        rows=tuple(scaling_rows(rows)),
        label=entry["status"],
        source=entry["source"],
        consistency=checks,
        remarks=tuple(_remarks(rows, checks, entry["not_published"], peaks)),
    )


def _remarks(
    rows: Sequence[Measurement],
    checks: Sequence[Consistency],
    not_published: Sequence[str],
    peaks: dict[str, float],
) -> list[str]:
    remarks = []
    names = {check.peak_name for check in checks}
    if len(names) == 1 and None not in names:
        name = str(names.pop())
        shown = ", ".join(f"{check.implied_peak_tflops:,.0f}" for check in checks)
        other = max(row.tflops_per_gpu or 0 for row in rows) * 1e12 / peaks["bf16"]
        remarks.append(
            f"MFU divides by {shown} TFLOP/s a GPU: the dense {name} peak, "
            f"{peaks[name] / 1e12:,.0f}; against bf16 it would be up to {100 * other:.0f} %."
        )
    values = [check.flops_per_token for check in checks if check.flops_per_token]
    if values and max(values) / min(values) > 1.02:
        middle = sorted(values)[len(values) // 2]
        for row, check in zip(rows, checks, strict=True):
            value = check.flops_per_token
            if value and abs(value / middle - 1) > 0.02 and row.tflops_per_gpu:
                remarks.append(
                    f"{row.gpus} GPUs: {row.tflops_per_gpu} TFLOP/s and "
                    f"{row.tokens_per_s_per_gpu} tokens/s a GPU contradict each other: "
                    f"{row.tflops_per_gpu * 1e12 / middle:,.0f} tokens/s would follow from the "
                    "other sizes' FLOPs a token, so its split of the loss is not to be relied on."
                )
    for row, check in zip(rows, checks, strict=True):
        if check.flops_per_token and check.nearest_convention and check.deviation is not None:
            remarks.append(
                f"{row.gpus} GPUs: {check.flops_per_token / 1e9:,.0f} GFLOP a token, "
                f"{100 * check.deviation:+.1f} % from {check.nearest_convention}."
            )
    remarks.append(
        "Not published, so not inferred: " + ", ".join(not_published) + ". Convergence and step "
        "speed can therefore only be told apart by the published rates."
    )
    return remarks


def _measurement(result: ScoredResult, gpus: int | None) -> Measurement:
    run = next((s for s in result.runs if s.run.status == "success"), None)
    if run is None or result.score_minutes is None:
        raise InputError("no score in this folder", where=result.folder)
    count = gpus
    if count is None and run.mfu is not None:
        count = int(run.mfu.peak_source.split()[0])
    if count is None:
        raise InputError(
            "the number of GPUs is unknown",
            where=result.folder,
            remedy="put system.json beside the logs, or write FOLDER:GPUS",
        )
    rates = [s.run.tokens_per_s for s in result.runs if s.run.tokens_per_s]
    tokens = [s.run.tokens for s in result.runs if s.run.tokens]
    middle = sorted(rates)[len(rates) // 2] if rates else None
    return Measurement(
        nodes=None,
        gpus=count,
        minutes=result.score_minutes,
        tokens=sorted(tokens)[len(tokens) // 2] if tokens else None,
        tokens_per_s_per_gpu=middle / count if middle else None,
        mfu=None if run.mfu is None else run.mfu.value,
        label=result.label,
        source=result.folder,
    )


_MOST_GPUS = 10_000_000
"""No job is larger; a typing error is."""


def _folder_and_gpus(text: str) -> tuple[str, int | None]:
    name, colon, count = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, None
    if not (count.isascii() and count.isdigit() and 0 < int(count) <= _MOST_GPUS):
        raise InputError(
            f"{count!r} is no number of GPUs (1 to {_MOST_GPUS:,})",
            where=text,
            remedy="FOLDER:GPUS such as n32/:256",
        )
    return name, int(count)


def scaling_of_folders(folders: Sequence[str], *, hardware: Hardware) -> Scaling:
    """Score folders of MLPerf logs, each a size; ``FOLDER:GPUS`` gives the size where unknown."""
    measurements = []
    for text in folders:
        path, gpus = _folder_and_gpus(text)
        own = Hardware(
            gpu=hardware.gpu, gpus=gpus or hardware.gpus, precision=hardware.precision,
            convention=hardware.convention,
        )  # fmt: skip
        measurements += [
            _measurement(result, gpus) for result in score([Path(path)], mfu=mfu_of_run(own))
        ]
    return scaling(measurements)


def scaling(measurements: Sequence[Measurement], *, title: str = "Scaling") -> Scaling:
    """Lay measurements side by side."""
    labels = {one.label for one in measurements}
    return Scaling(
        title=title,
        rows=tuple(scaling_rows(measurements)),
        label=labels.pop() if len(labels) == 1 else "unverified",
        source=", ".join(one.source for one in measurements if one.source),
    )


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}"


def _view(scaled: Scaling) -> View:
    columns = [
        Column(title=title, numeric=True)
        for title in (
            "nodes", "GPUs", "minutes", "speed-up", "ideal", "efficiency %", "tokens/s/GPU",
            "MFU %", "lost to steps %", "lost to convergence %",
        )
    ]  # fmt: skip
    rows = [
        (
            row.at.nodes,
            row.at.gpus,
            f"{row.at.minutes:.3f}",
            f"{row.speedup:.3f}",
            f"{row.ideal:.2f}",
            _percent(row.efficiency),
            None if row.at.tokens_per_s_per_gpu is None else f"{row.at.tokens_per_s_per_gpu:,.1f}",
            _percent(row.at.mfu),
            _percent(row.lost_to_steps),
            _percent(row.lost_to_convergence),
        )
        for row in scaled.rows
    ]
    x = [float(row.at.gpus) for row in scaled.rows]
    blocks: list[Block] = [
        Facts(items=[("label", scaled.label), ("source", scaled.source or "measured here")]),
        Table(title="By size", columns=columns, rows=rows),
        Series(
            title="Speed-up",
            x_title="GPUs",
            y_title="times the smallest size",
            lines=[
                Line(name="measured", x=x, y=[row.speedup for row in scaled.rows]),
                Line(name="ideal", x=x, y=[row.ideal for row in scaled.rows]),
            ],
        ),
        Series(
            title="Efficiency",
            x_title="GPUs",
            y_title="ratio",
            lines=[
                Line(name="efficiency", x=x, y=[row.efficiency for row in scaled.rows]),
                Line(name="kept by steps", x=x, y=[row.step_factor for row in scaled.rows]),
                Line(
                    name="kept by convergence",
                    x=x,
                    y=[row.convergence_factor for row in scaled.rows],
                ),
            ],
        ),
    ]
    blocks += [
        Sentence(text=text, tone=Tone.MUTED)
        for text in dict.fromkeys(row.reason for row in scaled.rows[1:] if row.reason)
    ]
    blocks += [Sentence(text=text, tone=Tone.NOTICE) for text in scaled.remarks]
    if scaled.label == "unverified":
        blocks.append(
            Sentence(text="Result not verified by MLCommons Association.", tone=Tone.MUTED)
        )
    return View(title=scaled.title, blocks=blocks)

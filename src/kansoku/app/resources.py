"""Resources per step, phase and token of a run: record them, join them, show them."""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.catalog import Cluster
from kansoku.model import RunFacts
from kansoku.node.edge.fast import FastSampler, read_samples
from kansoku.node.edge.machine import Machine
from kansoku.node.resources import SAMPLES_SCHEMA, Place, ResourceUse, join_resources
from kansoku.view import Block, Column, Sentence, Table, Tone

__all__ = [
    "SAMPLES_SCHEMA",
    "ResourceUse",
    "attach_resources",
    "record_resources",
    "resources_answer",
    "resources_blocks",
    "run_samples",
    "watched_resources",
]

_log = logging.getLogger(__name__)


def record_resources(
    folder: Path, *, node: str | None = None, interval_s: float = 0.05
) -> FastSampler:
    """Return a sampler to use in ``with`` around a job; it writes into ``folder`` (OUT/NODE).

    It runs in a thread of the calling process, not of the job's ranks.
    """
    return FastSampler(folder, node=node or Machine().name, interval_s=interval_s)


@contextlib.contextmanager
def watched_resources(folder: Path | None, node: str) -> Iterator[None]:
    """Sample this node fast while the block runs, into ``folder``; whatever fails costs samples.

    ``KANSOKU_SAMPLING_MS`` sets the time between samples (50; 0 switches it off).
    """
    sampler = None
    try:
        interval_ms = float(os.environ.get("KANSOKU_SAMPLING_MS", "50"))
        if folder is not None and interval_ms > 0:
            sampler = record_resources(folder, node=node, interval_s=interval_ms / 1e3)
            sampler.start()
    except Exception:  # noqa: BLE001 - the job goes on without us
        _log.warning("no fast samples of this node", exc_info=True)
    try:
        yield
    finally:
        if sampler is not None:
            with contextlib.suppress(Exception):
                sampler.close()


def run_samples(run_folder: Path | str) -> pl.DataFrame:
    """Return the fast samples of a run; empty where none were recorded."""
    return read_samples(Path(run_folder))


def places_of(facts: RunFacts, *, cluster: Cluster | None = None) -> dict[int, Place]:
    """Return where each rank ran; with the cluster file, also which NICs are its own."""
    members = [rank for rank in facts.ranks if rank.rank is not None]
    on_node = Counter(rank.node for rank in members)
    on_gpu_of = Counter((rank.node, rank.local_rank) for rank in members)
    found = {}
    for rank in facts.ranks:
        if rank.rank is None:
            continue
        on_gpu = rank.device is not None and rank.device != "cpu" and rank.local_rank is not None
        nics = None
        if cluster is not None and on_gpu and rank.node in {n.name for n in cluster.nodes}:
            own = [n.device for n in cluster.node(rank.node).kind.nics if n.gpu == rank.local_rank]
            nics = tuple(own) or None
        found[rank.rank] = Place(
            node=rank.node,
            gpu=f"gpu{rank.local_rank}" if on_gpu else None,
            nics=nics,
            share=1 / on_node[rank.node],
            gpu_share=1 / on_gpu_of[rank.node, rank.local_rank],
        )
    return found


def attach_resources(
    steps: pl.DataFrame,
    spans: pl.DataFrame,
    samples: pl.DataFrame,
    *,
    facts: RunFacts,
    cluster: Cluster | None = None,
) -> ResourceUse:
    """Join samples with steps and spans; ``result.steps`` has ``energy_j`` and ``nic_bytes``."""
    return join_resources(steps, spans, samples, places_of(facts, cluster=cluster))


def resources_answer(use: ResourceUse) -> dict[str, Any]:
    """Return the ``resources`` object of a report's JSON."""
    by_phase = _by_phase(use)
    return {
        "energy_j": use.totals["energy_j"],
        "energy_error_j": use.totals["energy_error_j"],
        "nic_bytes": use.totals["nic_bytes"],
        "energy_per_token_j": use.totals["energy_per_token_j"],
        "sampling_ms": None if use.sampling_ns is None else use.sampling_ns / 1e6,
        "phases": by_phase.to_dicts(),
        "missing": list(use.missing),
    }


def _by_phase(use: ResourceUse) -> pl.DataFrame:
    def total(name: str) -> pl.Expr:
        return pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()).alias(name)

    return use.phases.group_by("phase", maintain_order=True).agg(
        pl.col("duration_ns").sum(),
        total("energy_j"),
        total("energy_error_j"),
        total("nic_bytes"),
        pl.col("sm_activity").mean(),
    )


def resources_blocks(use: ResourceUse) -> Sequence[Block]:
    """Return the report's section on resources."""
    blocks: list[Block] = []
    rows = [
        (
            row["phase"],
            _scaled(row["duration_ns"], 1e9),
            _with_error(row["energy_j"], row["energy_error_j"]),
            _scaled(row["nic_bytes"], 1e6),
            _scaled(row["sm_activity"], 0.01),
        )
        for row in _by_phase(use).to_dicts()
    ]
    if any(energy is not None or traffic for _, _, energy, traffic, _ in rows):
        note = "Sums over ranks and steps; the limits of error come from the time between samples"
        if use.sampling_ns is not None:
            note += f" ({use.sampling_ns / 1e6:.0f} ms)"
        blocks.append(
            Table(
                title="Energy and traffic by phase",
                columns=[
                    Column(title="phase"),
                    Column(title="rank-seconds", numeric=True),
                    Column(title="J", numeric=True),
                    Column(title="NIC MB", numeric=True),
                    Column(title="SM %", numeric=True),
                ],
                rows=rows,
                note=f"{note}. What ranks of a node (CPU, NICs) or GPU share is split equally.",
            )
        )
    per_token = use.totals["energy_per_token_j"]
    if per_token is not None:
        blocks.append(Sentence(text=f"{per_token * 1e3:.3g} mJ per token"))
    blocks += [Sentence(text=text, tone=Tone.MUTED) for text in use.missing]
    return blocks


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else round(value / unit, 3)


def _with_error(value: float | None, error: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"

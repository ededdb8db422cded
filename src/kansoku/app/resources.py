"""Resources per step, phase and token of a run: record them, join them, show them."""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.app._other_jobs import OtherJobs
from kansoku.catalog import Cluster
from kansoku.model import RankFacts, RunFacts
from kansoku.node.edge.fast import FastSampler, LookForOthers, read_samples
from kansoku.node.edge.machine import Machine
from kansoku.node.gpu_identity import gpu_of_rank
from kansoku.node.resources import (
    SAMPLES_SCHEMA,
    Place,
    ResourceUse,
    gpu_uuids,
    join_resources,
)
from kansoku.view import Block, Column, Sentence, Table, Tone

__all__ = [
    "SAMPLES_SCHEMA",
    "ResourceUse",
    "attach_resources",
    "gpu_of",
    "places_of",
    "record_resources",
    "resources_answer",
    "resources_blocks",
    "run_samples",
    "sampling_interval_s",
    "watched_resources",
]

_log = logging.getLogger(__name__)


def record_resources(
    folder: Path,
    *,
    node: str | None = None,
    interval_s: float = 0.05,
    look_for_others: LookForOthers | None = None,
) -> FastSampler:
    """Return a sampler to use in ``with`` around a job; it writes into ``folder`` (OUT/NODE).

    It runs in a thread of the calling process, not of the job's ranks.
    """
    return FastSampler(
        folder,
        node=node or Machine().name,
        interval_s=interval_s,
        look_for_others=look_for_others,
    )


def sampling_interval_s() -> float:
    """Return the time between samples, by ``KANSOKU_SAMPLING_MS`` (50); 0: none are wanted."""
    return float(os.environ.get("KANSOKU_SAMPLING_MS", "50")) / 1e3


@contextlib.contextmanager
def watched_resources(
    folder: Path | None, node: str, *, rings: Path | None = None
) -> Iterator[None]:
    """Sample this node fast while the block runs, into ``folder``; whatever fails costs samples.

    ``KANSOKU_SAMPLING_MS`` sets the time between samples (50; 0 switches it off). ``rings`` is the
    folder of the job's own rings: those of other jobs stand beside it.
    """
    sampler = None
    try:
        interval_s = sampling_interval_s()
        if folder is not None and interval_s > 0:
            others = None if rings is None else OtherJobs(rings, environment=os.environ)
            sampler = record_resources(
                folder, node=node, interval_s=interval_s, look_for_others=others
            )
            sampler.start()
    except Exception:  # noqa: BLE001 - the job goes on without us
        _log.warning("no fast samples of this node", exc_info=True)
    try:
        yield
    finally:
        if sampler is not None:
            with contextlib.suppress(Exception):
                sampler.close()


def run_samples(run_folder: Path | str, missing: list[str] | None = None) -> pl.DataFrame:
    """Return the fast samples of a run; empty where none were recorded.

    What cannot be read becomes a sentence in ``missing``.
    """
    return read_samples(Path(run_folder), [] if missing is None else missing)


def places_of(
    facts: RunFacts,
    *,
    cluster: Cluster | None = None,
    uuids: Mapping[str, Mapping[str, str]] | None = None,
    whole_node: bool = False,
) -> dict[int, Place]:
    """Return where each rank ran; with the cluster file, also which NICs are its own.

    ``uuids`` are those of each node's GPUs; ``whole_node`` says that the samples were taken
    outside the job, as the agent does.
    """
    members = {rank.rank: rank for rank in facts.ranks if rank.rank is not None}
    on_node = Counter(rank.node for rank in members.values())
    gpus = {
        number: gpu_of(rank, uuids=(uuids or {}).get(rank.node, {}), whole_node=whole_node)
        for number, rank in members.items()
    }
    on_gpu_of = Counter((members[number].node, gpu) for number, (gpu, _) in gpus.items())
    found = {}
    for number, rank in members.items():
        gpu, note = gpus[number]
        nics = None
        if cluster is not None and gpu and rank.node in {n.name for n in cluster.nodes}:
            index = int(gpu.removeprefix("gpu"))
            own = [n.device for n in cluster.node(rank.node).kind.nics if n.gpu == index]
            nics = tuple(own) or None
        found[number] = Place(
            node=rank.node,
            gpu=gpu,
            nics=nics,
            share=1 / on_node[rank.node],
            gpu_share=1 / on_gpu_of[rank.node, gpu],
            note=note,
        )
    return found


def gpu_of(
    rank: RankFacts, *, uuids: Mapping[str, str], whole_node: bool
) -> tuple[str | None, str | None]:
    """Return the device of a rank's GPU, or None and why; None and None on CPUs."""
    # From outside the kind of device is not seen, unless it is the CPU.
    unseen = rank.device is None and not (rank.recorder == "attach" and uuids)
    if unseen or rank.device == "cpu" or rank.local_rank is None:
        return None, None
    return gpu_of_rank(rank.local_rank, rank.extra, uuids=uuids, whole_node=whole_node)


def attach_resources(
    steps: pl.DataFrame,
    spans: pl.DataFrame,
    samples: pl.DataFrame,
    *,
    facts: RunFacts,
    cluster: Cluster | None = None,
) -> ResourceUse:
    """Join samples with steps and spans; ``result.steps`` has ``energy_j`` and ``nic_bytes``."""
    places = places_of(facts, cluster=cluster, uuids=gpu_uuids(samples))
    return join_resources(steps, spans, samples, places)


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

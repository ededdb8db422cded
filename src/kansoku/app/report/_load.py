"""Read a run directory and bring it into the tables that every analysis starts from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.app._run_clocks import aligned_arrivals
from kansoku.app.resources import ResourceUse, attach_resources, run_samples
from kansoku.errors import InputError
from kansoku.formats.run_directory import ProcessState, read_run
from kansoku.formats.run_tables import read_tables
from kansoku.model import Finding, RunFacts
from kansoku.trace.clocks import ClockModel
from kansoku.trace.collectives import collective_rows
from kansoku.trace.layout import Layout, read_layout
from kansoku.trace.steps import merge_steps, step_rows

__all__ = ["LoadedRun", "load_run"]


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """One run in tables, with what follows from them directly."""

    path: Path
    facts: RunFacts
    spans: pl.DataFrame
    """The ``spans`` table, each rank on its own clock."""
    steps: pl.DataFrame
    """The ``steps`` table plus ``run_delay_ns``; phases sum to the duration."""
    collectives: pl.DataFrame
    """Every collective of every rank with its run-wide group key."""
    arrivals: pl.DataFrame
    """Synchronous collectives matched across ranks, times on one clock."""
    clocks: ClockModel
    layout: Layout
    counters: pl.DataFrame | None = None
    """``rank, kind, count, bytes`` as each process counted itself."""
    resources: pl.DataFrame | None = None
    """``rank, step, kind, id, peak_rss_bytes, device_ns, tokens, flops`` of phases and steps."""
    processes: tuple[ProcessState, ...] = ()
    peak: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """What could not be read or seen, in sentences."""
    use: ResourceUse | None = None
    """Energy and traffic of steps and phases; None where the node was not sampled."""

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of the report."""
        from kansoku.app.report._report import report

        return report(self).findings


def load_run(path: Path | str) -> LoadedRun:
    """Read a run directory, a folder of rings or one ring file.

    Raise InputError where there is nothing of a run; whatever else is wrong becomes a sentence in
    ``missing``.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(
            "no such file or directory",
            where=str(path),
            remedy="name the --out folder of kansoku run",
        )
    data = read_run(path)
    tables = read_tables(path) if path.is_dir() else None
    facts, spans, missing = data.facts, data.spans, list(data.missing)
    kept = None
    if tables is not None:
        missing += tables.missing
        kept = tables.steps
        known = {rank.rank for rank in facts.ranks}
        more = tuple(rank for rank in tables.ranks if rank.rank not in known)
        if more:
            ranks = sorted([*facts.ranks, *more], key=lambda r: -1 if r.rank is None else r.rank)
            facts = replace(facts, ranks=tuple(ranks))
        if tables.spans is not None:
            spans = pl.concat([spans, tables.spans]) if len(spans) else tables.spans
    steps = merge_steps(step_rows(spans, facts=facts, resources=data.resources), kept)
    del kept, tables  # as large as what was made of them
    use = _resource_use(path, steps, spans, facts, missing)
    if use is not None:
        steps = use.steps.select(steps.columns)  # the error columns stay in ``use``
    rows = collective_rows(spans, facts)
    matched, clocks = aligned_arrivals(rows, facts.node_of_rank)
    return LoadedRun(
        path=path,
        facts=facts,
        spans=spans,
        steps=steps,
        collectives=rows,
        arrivals=matched,
        clocks=clocks,
        layout=read_layout(facts, spans),
        counters=data.counters,
        resources=data.resources,
        use=use,
        processes=data.processes,
        peak=data.peak,
        missing=tuple(dict.fromkeys(missing)),
    )


def _resource_use(
    path: Path, steps: pl.DataFrame, spans: pl.DataFrame, facts: RunFacts, missing: list[str]
) -> ResourceUse | None:
    samples = run_samples(path, missing) if path.is_dir() else None
    if samples is None or samples.is_empty() or steps.is_empty():
        return None
    return attach_resources(steps, spans, samples, facts=facts)

"""Run folders beside a store, from generated schedules: what every rank did is known by hand."""

import json
from dataclasses import replace
from pathlib import Path

import polars as pl

from kansoku.formats.run_tables import write_tables


def save_run(folder, facts, *, spans=None, steps=None, run=None, job=None, device="h100-sxm"):
    """Write a run folder with the ranks on a known GPU, so that MFU has a peak."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = run or facts.run
    text = {
        "schema": "kansoku.run/1",
        "run": name,
        "command": list(facts.command),
        "start_ns": facts.start_ns,
        "end_ns": facts.end_ns,
        "exit_code": facts.exit_code,
        "slurm_job": job,
        "nodes": list(facts.nodes),
        "ranks": [{"rank": r.rank, "node": r.node, "pid": r.pid} for r in facts.ranks],
    }
    (folder / "run.json").write_text(json.dumps(text), encoding="utf-8")
    ranks = [replace(rank, device=device, model_flops_per_step=6e12) for rank in facts.ranks]
    named = pl.lit(name).alias("run")
    write_tables(
        folder,
        spans=None if spans is None else spans.with_columns(named),
        steps=None
        if steps is None
        else steps.with_columns(named, tokens=pl.lit(1024.0), flops=pl.lit(6e12)),
        ranks=ranks,
    )
    return folder

"""Garbage collection is weighed against the steps that it interrupts, not the imports before."""

from types import SimpleNamespace

import polars as pl

from kansoku.app.report._findings import ReportPolicy, _collections
from kansoku.model import table_schema


def a_run(step):
    spans = pl.DataFrame(
        [
            dict.fromkeys(table_schema("spans"))
            | {"rank": 0, "step": step, "kind": "gc", "name": "gc", "duration_ns": 900}
        ],
        schema=table_schema("spans"),
    )
    facts = SimpleNamespace(run="r", slurm_job=None, nodes=("n",), ranks=())
    return SimpleNamespace(
        spans=spans, steps=pl.DataFrame({"duration_ns": [1000]}), facts=facts, path="r"
    )


def test_pauses_before_the_first_step_are_no_finding():
    assert _collections(a_run(None), SimpleNamespace(window=(0, 1)), ReportPolicy()) == []


def test_pauses_inside_steps_are():
    (found,) = _collections(a_run(3), SimpleNamespace(window=(0, 1)), ReportPolicy())
    assert "90%" in found.sentence

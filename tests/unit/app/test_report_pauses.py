"""Garbage collection is weighed against the steps of the window, not the imports or warm-up."""

from types import SimpleNamespace

import polars as pl
import pytest

from kansoku.app.report._findings import ReportPolicy, _collections
from kansoku.model import table_schema
from kansoku.model.mfu import StepWindow

WINDOW = SimpleNamespace(window=StepWindow(from_step=2, to_step=3))


def a_run(step):
    spans = pl.DataFrame(
        [
            dict.fromkeys(table_schema("spans"))
            | {"rank": 0, "step": step, "kind": "gc", "name": "gc", "duration_ns": 900}
        ],
        schema=table_schema("spans"),
    )
    steps = pl.DataFrame({"step": [0, 2, 3], "duration_ns": [9_000, 1_000, 2_000]})
    facts = SimpleNamespace(run="r", slurm_job=None, nodes=("n",), ranks=())
    return SimpleNamespace(spans=spans, steps=steps, facts=facts, path="r")


@pytest.mark.parametrize("step", [None, 0, 4])
def test_pauses_outside_the_window_are_no_finding(step):
    assert _collections(a_run(step), WINDOW, ReportPolicy()) == []


def test_pauses_inside_the_window_are():
    """900 of 3,000 ns."""
    (found,) = _collections(a_run(3), WINDOW, ReportPolicy())
    assert "30%" in found.sentence
    assert "steps 2-3" in found.evidence[0].sentence


def test_without_a_window_nothing_is_said():
    assert _collections(a_run(3), SimpleNamespace(window=None), ReportPolicy()) == []

"""Figures of a run's pages against values worked out by hand."""

import numpy as np
import polars as pl
import pytest
from tests.labs.generated_run import MS, START_NS, Schedule, generate
from tests.labs.web_run import save_run

from kansoku.app.report import load_run, report
from kansoku.app.web_jobs._figures import (
    folded,
    matrix,
    rates,
    step_collectives,
    step_spans,
    steps_with_spans,
)
from kansoku.app.web_jobs._runs import windowed
from kansoku.app.web_jobs._step import timeline_of
from kansoku.errors import InputError
from kansoku.model import table_schema


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four ranks; rank 2 takes half as long again in forward; no jitter, so sums are exact."""
    facts, spans, steps = generate(Schedule(slow={(2, "forward"): 1.5}, jitter=0.0, steps=12))
    folder = save_run(tmp_path_factory.mktemp("run") / "r", facts, spans=spans, steps=steps)
    return load_run(folder)


# Work of a step, ms: 2 data, 15 forward (22.5 on rank 2), 30 backward, 3 optimizer, 1 other;
# four all-reduces of 0.5 ms. The others wait 7.5 ms for rank 2 at the first of them.
FAST, SLOW, STEP = 51.0, 58.5, 60.5


def test_the_matrix_holds_every_ranks_own_work(run):
    found = matrix(run, "own")
    assert found.ranks == (0, 1, 2, 3)
    assert found.steps == tuple(range(12))
    assert found.values[:, 5].tolist() == pytest.approx([FAST, FAST, SLOW, FAST])
    assert matrix(run, "collective").values[:, 3].tolist() == pytest.approx([9.5, 9.5, 2.0, 9.5])
    assert matrix(run, "step").values[0, 0] == pytest.approx(STEP)


def test_a_rank_without_a_step_has_no_value_there(run):
    from dataclasses import replace

    less = replace(run, steps=run.steps.filter(~((pl.col("rank") == 1) & (pl.col("step") == 4))))
    values = matrix(less, "own").values
    assert np.isnan(values[1, 4])
    assert np.isfinite(values).sum() == 47


def test_rates_are_work_over_the_jobs_time(run):
    found = rates(report(run))
    assert found["duration_ns"].to_list() == [round(STEP * MS)] * 12
    # 1024 tokens and 6 TFLOP a rank and step; H100: 989 TFLOP/s a GPU (the dense bf16 peak).
    assert found["tokens_per_s_per_gpu"][3] == pytest.approx(1024 / 0.0605)
    assert found["mfu"][3] == pytest.approx(6e12 / 0.0605 / 989e12, rel=1e-3)
    assert found["forward_ns"][7] == pytest.approx((15 * 3 + 22.5) / 4 * MS)


def test_folding_keeps_sums_and_the_first_steps_name():
    frame = pl.DataFrame({"step": range(10), "duration_ns": [float(n) for n in range(10)]})
    found = folded(frame, points=5)
    assert found["step"].to_list() == [0, 2, 4, 6, 8]
    assert found["duration_ns"].to_list() == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert folded(frame, points=10).equals(frame)


def test_collectives_of_a_step_are_joined_and_the_late_rank_is_marked(run):
    met = step_collectives(run, 5)
    assert len(met) == 4
    first = met.row(0, named=True)
    assert (first["op"], first["ranks"], first["last_rank"]) == ("all_reduce", 4, 2)
    assert first["spread_ns"] == round(7.5 * MS)
    assert first["transfer_ns"] == 500_000
    assert met["held_up"].to_list() == [True, False, False, False]
    found = step_spans(run, 5)
    late = found.frame.filter("late")
    assert late.select("rank", "late_ns", "wait_ns").rows() == [(2, round(7.5 * MS), 0)]
    joined = found.frame.filter(pl.col("join") >= 0).group_by("join").len()
    assert joined["len"].to_list() == [4] * 4


def test_spans_nest_below_each_other(run):
    found = step_spans(run, 5).frame.filter(pl.col("rank") == 0)
    depth = dict(found.select("kind", "depth").unique().iter_rows())
    assert depth == {
        "step": 0, "data_wait": 1, "forward": 1, "backward": 1, "optimizer": 1, "collective": 2,
    }  # fmt: skip
    assert steps_with_spans(run) == list(range(12))


def test_what_overlaps_without_nesting_gets_a_row_of_its_own(run):
    """Two all-reduces issued without blocking run on beside backward and beside each other."""
    from dataclasses import replace

    columns = {
        "run": "generated", "rank": 0, "step": 99, "kind": "collective", "name": "all_reduce",
        "thread": 2,
    }  # fmt: skip
    base = START_NS + 10**12
    rows = [
        columns | {"kind": "step", "name": "", "thread": 1, "start_ns": base,
                   "duration_ns": 100, "id": 1},
        columns | {"kind": "backward", "name": "", "thread": 1, "start_ns": base + 10,
                   "duration_ns": 50, "id": 2},
        columns | {"start_ns": base + 20, "duration_ns": 60, "id": 3},
        columns | {"start_ns": base + 30, "duration_ns": 20, "id": 4},
        columns | {"start_ns": base + 55, "duration_ns": 10, "id": 5},
    ]  # fmt: skip
    schema = dict(table_schema("spans"))
    spans = pl.DataFrame(rows, schema_overrides=schema)
    spans = spans.with_columns(
        pl.lit(None, dtype=kind).alias(name)
        for name, kind in schema.items()
        if name not in spans.columns
    ).select(list(schema))
    found = step_spans(replace(run, spans=spans), 99).frame
    depth = dict(found.select("id", "depth").iter_rows())
    assert depth == {1: 0, 2: 1, 3: 2, 4: 3, 5: 3}
    # No two spans of one row overlap.
    for _, row in found.sort("start_ns").group_by("lane", "depth"):
        ends = (row["start_ns"] + row["duration_ns"]).to_list()
        assert all(a <= b for a, b in zip(ends, row["start_ns"].to_list()[1:], strict=False))


def test_an_open_span_lasts_until_the_last_thing_seen(run):
    from dataclasses import replace

    target = (pl.col("rank") == 3) & (pl.col("step") == 11) & (pl.col("kind") == "optimizer")
    spans = run.spans.with_columns(duration_ns=pl.when(target).then(None).otherwise("duration_ns"))
    found = step_spans(replace(run, spans=spans), 11)
    row = found.frame.filter((pl.col("rank") == 3) & (pl.col("kind") == "optimizer"))
    assert row["open"].to_list() == [True]
    assert row["start_ns"][0] + row["duration_ns"][0] == found.end_ns


def test_the_timelines_columns_are_in_drawing_order(run):
    found = step_spans(run, 5)
    columns = timeline_of(found, "/runs/generated")
    arrays = columns.arrays
    keys = list(zip(arrays["lane"], arrays["depth"], arrays["start_ns"], strict=True))
    assert keys == sorted(keys)
    assert arrays["id"].tolist() == found.frame["id"].to_list()
    assert arrays["mark"].sum() == 1
    assert arrays["start_ns"].min() == 0
    assert columns.header["links"]["span"] == "/runs/generated/steps/5?rank={lane}&span={id}"
    # Half a megabyte less for every ten thousand spans than with eight bytes everywhere.
    assert sum(a.itemsize for a in arrays.values()) <= 32


def test_a_step_without_spans_is_empty(run):
    found = step_spans(run, 1000)
    assert len(found.frame) == 0
    assert timeline_of(found, "/runs/x").arrays["lane"].size == 0
    assert step_collectives(run, 1000).is_empty()


def test_a_window_of_steps_is_cut_out(run):
    found = windowed(run, 3, 6)
    assert found.steps["step"].unique().sort().to_list() == [3, 4, 5, 6]
    assert found.spans["step"].min() == 3
    assert windowed(run, None, None) is run
    with pytest.raises(InputError, match="its steps are 0-11"):
        windowed(run, 50, None)

"""Phases sum to the step; time is booked where it belongs."""

import itertools
import json

import polars as pl
import polars.testing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.labs.generated_run import MS, Schedule, generate

from kansoku.model import PHASES, table_schema
from kansoku.model.tables import PROCESS_SHIFT
from kansoku.trace.steps import merge_steps, queue_rows, step_rows

NAMES = [f"{phase.value}_ns" for phase in PHASES]
KINDS = ["data_wait", "forward", "backward", "optimizer", "collective", "checkpoint", "evaluation",
         "gc", "compile", "collective_wait", "something_else"]  # fmt: skip


def table(rows):
    """Make a spans table from (kind, start, end or None, thread, attributes)."""
    return pl.DataFrame(
        [
            {
                "run": "r", "rank": row.get("rank", 0), "step": row.get("step"), "kind": row["kind"],
                "name": row.get("name", ""), "start_ns": row["start"],
                "duration_ns": None if row["end"] is None else row["end"] - row["start"],
                "id": number, "thread": row.get("thread", 1),
                "attributes": json.dumps(row["attributes"], separators=(",", ":")) if "attributes" in row else None,
            }
            for number, row in enumerate(rows, start=1)
        ],
        schema={k: v for k, v in table_schema("spans").items() if k in
                {"run", "rank", "step", "kind", "name", "start_ns", "duration_ns", "id", "thread", "attributes"}},
    ).with_columns(pl.lit(None, dtype=pl.Int64).alias("cpu_ns"))  # fmt: skip


def span(kind, start, end, **more):
    return {"kind": kind, "start": start, "end": end, **more}


def phases(rows, step=0):
    row = step_rows(table(rows)).row(step, named=True)
    return {phase.value: row[f"{phase.value}_ns"] for phase in PHASES if row[f"{phase.value}_ns"]}


def test_the_plain_step_by_hand():
    rows = [
        span("step", 0, 100, step=0),
        span("data_wait", 0, 10),
        span("forward", 12, 40),
        span("backward", 40, 80),
        span("collective", 70, 78),
        span("optimizer", 82, 95),
    ]
    assert phases(rows) == {
        "data_wait": 10, "forward": 28, "backward": 32, "collective": 8, "optimizer": 13, "other": 9,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        # Activation checkpointing: forward repeated inside backward is backward.
        ([span("backward", 10, 60), span("forward", 20, 30)], {"backward": 50, "other": 50}),
        # A forward inside a forward (a module called by another) is counted once.
        ([span("forward", 10, 60), span("forward", 20, 30)], {"forward": 50, "other": 50}),
        # Evaluation outside a phase is other, with all that is in it but its collectives.
        (
            [span("evaluation", 10, 60), span("data_wait", 10, 20), span("forward", 20, 50)],
            {"other": 100},
        ),
        (
            [span("forward", 10, 60), span("evaluation", 20, 30)],
            {"forward": 50, "other": 50},
        ),
        ([span("gc", 10, 60)], {"other": 100}),
        ([span("forward", 0, 50), span("gc", 10, 20)], {"forward": 50, "other": 50}),
        ([span("optimizer", 0, 50), span("compile", 10, 20)], {"optimizer": 50, "other": 50}),
        ([span("backward", 0, 50), span("gc", 5, 9), span("collective", 6, 8)],
         {"backward": 48, "collective": 2, "other": 50}),
        # A closure inside the optimizer trains: its forward is a forward.
        ([span("optimizer", 0, 90), span("forward", 10, 30), span("backward", 30, 60)],
         {"optimizer": 40, "forward": 20, "backward": 30, "other": 10}),
        ([span("checkpoint", 10, 90), span("collective", 20, 30)],
         {"checkpoint": 70, "collective": 10, "other": 20}),
        # A data wait that belongs to an evaluation.
        ([span("data_wait", 0, 30, attributes={"evaluates": True})], {"other": 100}),
        # Issued without blocking: only the wait is exposed.
        ([span("backward", 0, 80), span("collective", 10, 70, attributes={"async": True}),
          span("collective_wait", 60, 70)], {"backward": 70, "collective": 10, "other": 20}),
    ],
)  # fmt: skip
def test_time_is_booked_where_it_belongs(inner, expected):
    assert phases([span("step", 0, 100, step=0), *inner]) == expected


def test_reducer_on_another_thread_is_exposed_after_the_last_issue():
    rows = [
        span("step", 0, 200, step=0),
        span("backward", 0, 100),
        span("collective", 20, 60, thread=2),  # hidden behind the backward
        span("collective", 70, 95, thread=2),  # issued last: from 70 on nothing is left to compute
    ]
    assert phases(rows) == {"backward": 75, "collective": 25, "other": 100}


def test_the_last_step_is_kept_and_flagged():
    rows = [
        span("step", 0, 100, step=0),
        span("forward", 0, 50),
        span("step", 100, None, step=1),
        span("forward", 110, 140),
        span("backward", 140, None),
        span("collective", 150, None),
    ]
    answer = step_rows(table(rows))
    assert answer["complete"].to_list() == [True, False]
    # Until the last thing the rank recorded: the collective began at 150.
    assert answer["duration_ns"].to_list() == [100, 50]
    incomplete = [span("step", 0, 10, step=0, attributes={"incomplete": True})]
    assert step_rows(table(incomplete))["complete"].to_list() == [False]


def test_what_a_killed_process_left_open_ends_with_it():
    """Started again, the rank has another main thread; steps of 100, a backward of 20 in each."""
    again = 1 << PROCESS_SHIFT
    rows = [
        span("step", 0, 100, step=0, thread=7),
        span("backward", 10, 30, thread=7),
        span("step", 100, None, step=1, thread=7),
        span("forward", 110, 140, thread=7),
        span("backward", 150, None, thread=7),
        span("step", 5000, 5100, step=2, thread=8),
        span("backward", 5010, 5030, thread=8),
        span("collective", 5015, 5025, thread=8),
    ]
    spans = table(rows).with_columns(
        id=pl.col("id") + pl.when(pl.col("thread") == 8).then(again).otherwise(0)
    )
    answer = step_rows(spans)
    assert answer["duration_ns"].to_list() == [100, 50, 100]
    assert answer["backward_ns"].to_list() == [20, 0, 10]
    assert answer["collective_ns"].to_list() == [0, 0, 10]
    assert answer["other_ns"].to_list() == [80, 20, 80]


def test_a_span_across_steps_is_cut_at_the_boundary():
    rows = [
        span("step", 0, 100, step=0),
        span("step", 100, 200, step=1),
        span("checkpoint", 90, 130),
        span("forward", 150, 260),
    ]
    assert phases(rows, 0) == {"checkpoint": 10, "other": 90}
    assert phases(rows, 1) == {"checkpoint": 30, "forward": 50, "other": 20}


times = st.integers(0, 1000)
anything = st.lists(
    st.tuples(st.sampled_from(KINDS), times, st.one_of(st.none(), times), st.integers(0, 2), st.integers(1, 2)),
    max_size=40,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    cuts=st.lists(times, min_size=2, max_size=6, unique=True),
    spans=anything,
    last_open=st.booleans(),
)
def test_whatever_the_spans_phases_sum_to_the_step_and_none_is_negative(cuts, spans, last_open):
    cuts = sorted(cuts)
    rows = []
    for rank in range(3):
        for number, (start, end) in enumerate(itertools.pairwise(cuts)):
            last = last_open and number == len(cuts) - 2
            rows.append(span("step", start, None if last else end, rank=rank, step=number))
    rows += [
        span(kind, start, None if end is None else max(start, end), rank=rank, thread=thread)
        for kind, start, end, rank, thread in spans
    ]
    answer = step_rows(table(rows))
    assert len(answer) == 3 * (len(cuts) - 1)
    assert (answer.select(pl.min_horizontal(NAMES).min()).item()) >= 0
    total = answer.select(pl.sum_horizontal(NAMES)).to_series()
    assert total.to_list() == answer["duration_ns"].to_list()
    closed = answer.filter("complete")
    spans_of_steps = table(rows).filter(
        (pl.col("kind") == "step") & pl.col("duration_ns").is_not_null()
    )
    assert sorted(closed["duration_ns"]) == sorted(spans_of_steps["duration_ns"])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_order_of_rows_does_not_matter(seed):
    _, spans, _ = generate(Schedule(steps=6, tensor_parallel=2, forward_collectives=2))
    shuffled = spans.sample(fraction=1, shuffle=True, seed=seed)
    polars.testing.assert_frame_equal(step_rows(shuffled), step_rows(spans))


def test_a_generated_run_comes_back_to_the_nanosecond():
    facts, spans, truth = generate(
        Schedule(tensor_parallel=2, forward_collectives=3, rotating_ns=5 * MS)
    )
    columns = ["rank", "step", "start_ns", "duration_ns", *NAMES]
    polars.testing.assert_frame_equal(
        step_rows(spans, facts=facts).select(columns), truth.select(columns)
    )


def test_kept_step_rows_fill_the_steps_without_spans():
    _, spans, truth = generate(Schedule(steps=20), spans_every=5)
    merged = merge_steps(step_rows(spans), truth)
    assert len(merged) == len(truth)
    assert merged["duration_ns"].to_list() == truth["duration_ns"].to_list()


def test_run_queue_time_is_not_counted_across_processes():
    """Of a rank started again the counter begins anew, or goes on after an import of 9 s."""
    rows = [(0, 0, 1, 5), (0, 1, 2, 9), (0, 2, (1 << 48) + 1, 9_000), (0, 3, (1 << 48) + 2, 9_003)]
    resources = pl.DataFrame(
        [(rank, step, "forward", span, queued) for rank, step, span, queued in rows],
        schema={"rank": pl.Int32, "step": pl.Int32, "kind": pl.String, "id": pl.Int64,
                "queued_ns": pl.Int64},
        orient="row",
    )  # fmt: skip
    assert queue_rows(resources).rows() == [
        (0, 0, "forward", 0), (0, 1, "forward", 4), (0, 2, "forward", 0), (0, 3, "forward", 3),
    ]  # fmt: skip

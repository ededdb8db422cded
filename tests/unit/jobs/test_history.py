"""The history on disk: idempotent, incremental, never worse after a stale reading."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kansoku.errors import InputError
from kansoku.formats.slurm import JOB_SCHEMA
from kansoku.jobs.edge import history as module
from kansoku.jobs.edge.history import Merged, ParquetHistory


def rows(*given_rows):
    full = [{"cluster": "c", "job_id": str(r["raw_id"]), **r} for r in given_rows]
    return pl.DataFrame(full, schema=JOB_SCHEMA, orient="row")


def job(number, state="COMPLETED", submit=None, **more):
    return {"raw_id": number, "submit_ns": submit or number * 10, "state": state, **more}


def test_twice_is_once(tmp_path):
    history = ParquetHistory(tmp_path)
    frame = rows(*[job(n) for n in range(1, 50)])
    assert history.merge("jobs", frame) == Merged(new=49)
    assert history.merge("jobs", frame) == Merged(unchanged=49)
    assert history.scan("jobs").collect().height == 49


def test_running_becomes_completed_and_never_back(tmp_path):
    history = ParquetHistory(tmp_path)
    running = rows(job(1, "RUNNING", user="ann", comment="first"))
    done = rows(job(1, "FAILED", exit_code=3))
    assert history.merge("jobs", running).new == 1
    assert history.merge("jobs", done).updated == 1
    assert history.merge("jobs", running).unchanged == 1
    row = history.scan("jobs").collect().row(0, named=True)
    # What the second reading did not know stays from the first.
    assert (row["state"], row["exit_code"], row["user"], row["comment"]) == (
        "FAILED", 3, "ann", "first",
    )  # fmt: skip


def test_the_finished_reading_wins_inside_one_import(tmp_path):
    history = ParquetHistory(tmp_path)
    assert history.merge("jobs", rows(job(1, "FAILED"), job(1, "RUNNING"))).new == 1
    assert history.scan("jobs").collect()["state"].to_list() == ["FAILED"]


def test_recycled_ids_and_incarnations_are_different_rows(tmp_path):
    history = ParquetHistory(tmp_path)
    frame = rows(job(1, submit=10), job(1, submit=20), {**job(1, submit=10), "cluster": "d"})
    assert history.merge("jobs", frame).new == 3


def test_compaction_keeps_every_row(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_SMALL", 3)
    history = ParquetHistory(tmp_path)
    for n in range(1, 30):
        history.merge("jobs", rows(job(n), job(n + 1, "RUNNING")))
    frame = history.scan("jobs").collect()
    assert sorted(frame["raw_id"]) == list(range(1, 31))
    assert frame.filter(pl.col("state") == "RUNNING")["raw_id"].to_list() == [30]
    assert len(list((tmp_path / "jobs").glob("*.parquet"))) <= 10


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(1, 6), st.sampled_from(["RUNNING", "FAILED"])),
            min_size=1, max_size=5,
        ),
        max_size=6,
    )
)  # fmt: skip
def test_any_sequence_of_imports(tmp_path_factory, batches):
    """The state kept is FAILED exactly for jobs that any reading saw FAILED."""
    history = ParquetHistory(tmp_path_factory.mktemp("h"))
    for batch in batches:
        history.merge("jobs", rows(*[job(n, state) for n, state in batch]))
    seen = [pair for batch in batches for pair in batch]
    failed = {n for n, state in seen if state == "FAILED"}
    frame = history.scan("jobs").collect()
    assert sorted(frame["raw_id"]) == sorted({n for n, _ in seen})
    assert set(frame.filter(pl.col("state") == "FAILED")["raw_id"]) == failed


def test_notes_and_unknown_tables(tmp_path):
    history = ParquetHistory(tmp_path)
    assert history.note("x") is None
    history.remember("x", "5")
    history.remember("y", "6")
    assert (history.note("x"), history.note("y")) == ("5", "6")
    with pytest.raises(InputError, match="no history table"):
        history.scan("nope")

"""A run whose steps became slower for good: since when, and in which phase on every rank."""

import json

import polars as pl
import pytest
from tests.labs.generated_run import MS, Schedule, generate

from kansoku.app.diagnose import diagnose_folder
from kansoku.formats.run_tables import write_tables
from kansoku.model import Domain, Verdict

STEPS, FROM, EXTRA_NS = 200, 90, 40 * MS
ORDER = ["data_wait", "forward", "backward", "optimizer"]


def made(folder, phase=None, *, device=None, slow=None):
    """Write a run of 200 steps whose ``phase`` takes 40 ms longer from step 90 on, on every rank."""
    facts, spans, _ = generate(Schedule(steps=STEPS, slow=slow or {}))
    if phase is not None:
        later = ORDER[ORDER.index(phase) + 1 :]
        moved = pl.col("kind").is_in(later)
        if phase != "optimizer":
            moved = moved | (pl.col("kind") == "collective")
        before = pl.max_horizontal(pl.col("step") - FROM, 0).cast(pl.Int64) * EXTRA_NS
        slow_step = pl.col("step") >= FROM
        spans = spans.with_columns(
            start_ns=pl.col("start_ns")
            + before
            + pl.when(slow_step & moved).then(EXTRA_NS).otherwise(0),
            duration_ns=pl.col("duration_ns")
            + pl.when(slow_step & pl.col("kind").is_in(["step", phase]))
            .then(EXTRA_NS)
            .otherwise(0),
        )
    run = {"schema": "kansoku.run/1", "run": facts.run, "command": ["train"], "exit_code": 0,
           "start_ns": facts.start_ns, "end_ns": facts.end_ns, "nodes": list(facts.nodes)}  # fmt: skip
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(run))
    write_tables(folder, steps=None, spans=spans, ranks=facts.ranks)
    begins = spans.filter((pl.col("kind") == "step") & (pl.col("step") == FROM))["start_ns"].min()
    return folder, begins


def test_work_that_grew_on_all_ranks_is_slow_for_an_unknown_reason(tmp_path):
    folder, begins = made(tmp_path / "run", "forward")
    (incident,) = diagnose_folder(folder).incidents
    assert (incident.kind, incident.verdict) == ("slow", Verdict.UNKNOWN)
    assert incident.onset_ns == begins


def test_data_that_all_ranks_wait_for_are_the_storages(tmp_path):
    folder, begins = made(tmp_path / "run", "data_wait")
    (incident,) = diagnose_folder(folder).incidents
    first = incident.hypotheses[0]
    assert (incident.kind, first.domain, first.component) == (
        "slow",
        Domain.STORAGE,
        "data loading",
    )
    assert first.subject is None
    assert incident.onset_ns == begins
    # 50 ms of work and 2 ms of collectives a step, and 40 ms more.
    assert "from step 90 on" in first.evidence_for[0].sentence
    assert "data wait on every rank" in first.evidence_for[0].sentence


@pytest.mark.parametrize("slow", [None, {(2, "backward"): 1.5}], ids=["healthy", "one slow rank"])
def test_a_pace_that_never_changes_is_no_slow_down(tmp_path, slow):
    folder, _ = made(tmp_path / "run", slow=slow)
    told = [e.sentence for i in diagnose_folder(folder).incidents
            for h in i.hypotheses for e in h.evidence_for]  # fmt: skip
    assert not [sentence for sentence in told if sentence.startswith("steps take")]
    assert bool(told) is (slow is not None)

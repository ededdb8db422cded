"""The report of generated runs: schema, sentences, what is missing."""

import dataclasses
import io
import json
import os

import msgspec
import orjson
import polars as pl
import pytest
from rich.console import Console
from tests.labs.generated_run import MS, Schedule, generate, with_clocks

from kansoku.app._few_ranks import few_ranks
from kansoku.app.peak import run_peak
from kansoku.app.report import load_run, report
from kansoku.app.report._findings import _blocked_sentence
from kansoku.cli._draw import draw
from kansoku.errors import InputError
from kansoku.formats.run_tables import write_tables
from kansoku.model import Finding
from kansoku.trace.blackbox import BlockedCollective


# The contract of kansoku.report/1, written by hand; forbid_unknown_fields makes it exact.
class _Struct(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Window(_Struct):
    from_step: int
    to_step: int


class _Mfu(_Struct):
    value: float
    convention: str
    peak_flops: float
    peak_source: str
    window: _Window


class _StepTime(_Struct):
    median: float | None
    p95: float | None


class _Breakdown(_Struct):
    data_wait: float
    forward: float
    backward: float
    optimizer: float
    collective: float
    checkpoint: float
    other: float


class _Collective(_Struct):
    group: str
    op: str
    count: int
    bytes: int | None
    busbw_bytes_per_s: float | None
    wait_ratio: float | None


class _Straggler(_Struct):
    rank: int
    phase: str
    ratio: float
    cost_ratio: float
    confidence: float


class _Finding(_Struct):
    id: str
    severity: str
    sentence: str
    evidence: list


class _Report(_Struct):
    schema: str
    job: dict
    ranks: int
    layout: dict[str, int]
    steps: int
    step_time_ms: _StepTime
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    model_flops_per_step: float | None
    mfu: _Mfu | None
    breakdown: _Breakdown | None
    collectives: list[_Collective]
    verdict: str
    reason: str
    stragglers: list[_Straggler]
    findings: list[_Finding]
    missing: list[str]


def save(folder, facts, spans, steps=None, *, peak=None, **changes):
    """Write a generated run as a run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {"schema": "kansoku.run/1", "run": facts.run, "command": list(facts.command),
           "start_ns": facts.start_ns, "end_ns": facts.end_ns, "exit_code": 0,
           "nodes": list(facts.nodes), "peak": peak} | changes  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    write_tables(folder, steps=steps, spans=spans, ranks=facts.ranks)
    return folder


PEAK = {"flops": 2e12, "source": "measured: matrix product", "precision": "float32"}


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    facts, spans, _ = generate(Schedule(slow={(2, "forward"): 2.0}, tensor_parallel=2))
    return report(save(tmp_path_factory.mktemp("run"), facts, spans, peak=PEAK))


def checked(answer):
    return msgspec.json.decode(orjson.dumps(answer.to_json()), type=_Report)


def test_json_is_exactly_the_schema(slow):
    answer = checked(slow)
    assert answer.schema == "kansoku.report/1"
    assert answer.verdict == "found"
    assert [(s.rank, s.phase) for s in answer.stragglers] == [(2, "forward")]
    assert answer.layout == {"dp": 2, "tp": 2, "pp": 1}
    shares = answer.breakdown
    assert sum(getattr(shares, f) for f in shares.__struct_fields__) == pytest.approx(1, abs=1e-12)
    # 4 ranks of 1024 tokens each, two tensor shards see the same: 2048 a step.
    ends = slow.run.steps.group_by("step").agg((pl.col("start_ns") + pl.col("duration_ns")).max())
    ends = ends.sort("step")["start_ns"].to_list()
    seconds = (ends[59] - ends[5]) / 54 / 1e9  # on the wall, steps 6 to 59
    assert answer.tokens_per_s == pytest.approx(2048 / seconds)
    assert answer.tokens_per_s_per_gpu == pytest.approx(answer.tokens_per_s / 4)
    assert answer.model_flops_per_step == pytest.approx(4 * 6e9)
    assert answer.mfu.value == pytest.approx(24e9 / seconds / 2e12)
    assert answer.mfu.window.from_step == 6


def test_findings_are_records_with_evidence(slow):
    (first, *_) = slow.findings
    assert isinstance(first, Finding)
    assert first.id == "straggler.forward"
    assert str(first.subject) == "rank:2"
    assert first.sentence.startswith("Rank 2 is slow in forward")
    assert len(first.evidence) >= 2
    assert load_run(slow.run.path).findings[0].id == first.id


def test_the_view_is_drawn_in_the_terminal(slow):
    console = Console(width=110, record=True, file=io.StringIO())
    draw(slow.view(), console)
    text = console.export_text()
    for words in ("dp 2 × tp 2", "collective", "bus bandwidth", "Rank 2 is slow", "MFU"):
        assert words in text, words


def test_a_healthy_run_says_none(tmp_path):
    facts, spans, _ = generate(Schedule())
    answer = checked(report(save(tmp_path, facts, spans, peak=PEAK)))
    assert (answer.verdict, answer.stragglers) == ("none", [])
    assert not [f for f in answer.findings if f.severity != "info"]


def test_an_unknown_device_gets_no_mfu_and_a_reason(tmp_path):
    facts, spans, _ = generate(Schedule())
    ranks = [dataclasses.replace(rank, device="Example X9000") for rank in facts.ranks]
    answer = report(save(tmp_path, dataclasses.replace(facts, ranks=tuple(ranks)), spans))
    assert answer.to_json()["mfu"] is None
    assert any("no MFU" in text and "Example X9000" in text for text in answer.missing)


def test_known_gpus_use_the_published_dense_peak(tmp_path):
    facts, _, _ = generate(Schedule(steps=1))
    ranks = [dataclasses.replace(r, device="NVIDIA H100 80GB HBM3") for r in facts.ranks]
    peak, source = run_peak(dataclasses.replace(facts, ranks=tuple(ranks)), {})
    assert peak == pytest.approx(4 * 989e12)  # dense bf16, datasheet without sparsity
    assert "H100" in source


def test_a_gpu_of_a_rank_started_again_is_one_gpu(tmp_path):
    facts, _, _ = generate(Schedule(steps=1))
    ranks = [dataclasses.replace(r, device="NVIDIA H100 80GB HBM3") for r in facts.ranks]
    again = [dataclasses.replace(r, pid=r.pid + 1_000) for r in ranks]
    peak, _ = run_peak(dataclasses.replace(facts, ranks=(*ranks, *again)), {})
    assert peak == pytest.approx(4 * 989e12)


@pytest.mark.parametrize("flops", [0, -1, float("nan"), float("inf"), True, "a", None])
def test_a_peak_that_is_none_is_not_divided_by(flops):
    facts, _, _ = generate(Schedule(steps=1))
    peak, reason = run_peak(facts, {"flops": flops})
    assert (peak, reason) == (None, "the CPUs' peak was not measured when the run was made")


def test_steps_are_the_completed_ones_and_the_rest_is_said_apart(tmp_path):
    facts, spans, _ = generate(Schedule(steps=20))
    cut = pl.when((pl.col("rank") == 1) & (pl.col("kind") == "step") & (pl.col("step") == 19))
    spans = spans.with_columns(duration_ns=cut.then(None).otherwise("duration_ns"))
    answer = report(save(tmp_path, facts, spans))
    shown = answer.to_json()
    assert (shown["steps"], shown["job"]["steps_begun"]) == (19, 20)
    assert dict(answer.view().blocks[0].items)["steps"] == (
        "19 complete, 1 begun and not completed on every rank"
    )
    nowhere = (pl.col("kind") == "step") & (pl.col("step") == 19)
    spans = spans.with_columns(duration_ns=pl.when(nowhere).then(None).otherwise("duration_ns"))
    ended = save(tmp_path / "ended", facts, spans)
    assert dict(report(ended).view().blocks[0].items)["steps"] == (
        "19 complete, and what came after the last update"
    )


def test_a_step_that_the_end_of_the_recording_cut_off_is_not_complete(tmp_path):
    """The processes count what they close: 20 each, of which the recording cut the last."""
    facts, spans, _ = generate(Schedule(ranks=2, steps=20))
    last = (pl.col("kind") == "step") & (pl.col("step") == 19)
    cut = pl.when(last).then(pl.lit('{"incomplete":true}')).otherwise("attributes")
    spans = spans.with_columns(attributes=cut)
    counters = pl.DataFrame(
        {"rank": [0, 1], "kind": ["step"] * 2, "count": [20, 20], "bytes": [0, 0]}
    )
    run = dataclasses.replace(load_run(save(tmp_path, facts, spans)), counters=counters)
    answer = report(run)
    assert (answer.throughput.complete_steps, answer.throughput.steps) == (19, 20)
    # What was lost to the ring counts: 30 closed, one of them cut off.
    more = dataclasses.replace(run, counters=counters.with_columns(count=pl.lit(30)))
    assert report(more).throughput.complete_steps == 29


def test_a_rank_without_a_numbered_step_is_said(tmp_path):
    facts, spans, _ = generate(Schedule(steps=20))
    without = (pl.col("rank") != 3) | (pl.col("kind") != "step")
    spans = spans.filter(without).with_columns(
        step=pl.when(pl.col("rank") != 3).then("step"),
    )
    answer = report(save(tmp_path, facts, spans))
    assert dict(answer.view().blocks[0].items)["steps"] == "20 complete on 3 of 4 ranks"
    assert (
        "rank 3: spans, but none in a numbered step; the steps' figures lack it" in answer.missing
    )


def test_totals_that_lack_a_rank_say_so(tmp_path):
    facts, spans, _ = generate(Schedule(steps=20))
    ranks = tuple(r for r in facts.ranks if r.rank != 3)
    less = dataclasses.replace(facts, ranks=ranks)
    folder = save(tmp_path, less, spans.filter(pl.col("rank") != 3), peak=PEAK)
    answer = report(folder)
    said = "no record of rank 3: tokens/s and model FLOPs are those of 3 of 4 ranks"
    assert said in answer.missing
    assert answer.mfu_reason == "the FLOPs are those of 3 of 4 ranks, the CPUs' peak that of all"
    head = dict(answer.view().blocks[0].items)
    assert head["throughput"].endswith("(of 3 of 4 ranks)")
    assert head["model FLOPs"].endswith("(of 3 of 4 ranks)")
    shown = answer.to_json()
    assert (shown["ranks"], shown["job"]["ranks_seen"]) == (4, 3)
    assert shown["tokens_per_s_per_gpu"] == pytest.approx(shown["tokens_per_s"] / 3)


def test_collectives_that_were_not_kept_are_counted(tmp_path):
    """3 steps of 4 all-reduces of 4 MiB on two ranks: 24; the processes counted 100."""
    facts, spans, _ = generate(Schedule(ranks=2, steps=3))
    run = load_run(save(tmp_path, facts, spans))
    counters = pl.DataFrame(
        {"rank": [0, 1], "kind": ["collective"] * 2, "count": [50, 50], "bytes": [7_000, 8_000]}
    )
    answer = report(dataclasses.replace(run, counters=counters))
    said = (
        "of 100 collectives (15,000 bytes) that the ranks counted, 24 (100,663,296 bytes) were "
        "kept: counts and bytes by group are those"
    )
    assert said in answer.missing
    (table,) = [b for b in answer.view().blocks if getattr(b, "title", "").startswith("Collecti")]
    assert said in table.note
    assert report(run).collectives_lost is None


def test_step_rows_and_sampled_spans_together(tmp_path):
    facts, spans, steps = generate(Schedule(steps=100, slow={(1, "backward"): 1.5}), spans_every=10)
    answer = report(save(tmp_path, facts, spans, steps))
    assert answer.throughput.steps == 100
    assert answer.stragglers.steps_used == 90
    assert [s.rank for s in answer.stragglers.stragglers] == [1]


def test_shifted_clocks_are_shown_and_corrected(tmp_path):
    facts, spans, _ = generate(Schedule(ranks=16, steps=40))
    offset = dict.fromkeys(range(8, 16), 20000000.0)
    answer = report(save(tmp_path, facts, with_clocks(spans, offset, {}), peak=PEAK))
    finding = next(f for f in answer.findings if f.id == "clock.offset")
    assert "20.0" in finding.sentence
    clocks = answer.to_json()["job"]["clocks"]
    assert clocks["offsets"][12]["offset_us"] == pytest.approx(20_000, abs=100)
    first, second = clocks["hosts"]
    assert (first["ranks"], second["ranks"]) == (list(range(8)), list(range(8, 16)))
    assert (first["offset_us"], first["uncertainty_us"]) == (0, None)  # the reference
    off = abs(second["offset_us"] - 20_000)
    assert off <= second["uncertainty_us"] < 100
    assert second["drift_ppm"] == pytest.approx(0, abs=20)
    (table,) = [b for b in answer.view().blocks if getattr(b, "title", "").startswith("Clock off")]
    assert f"±{second['uncertainty_us']:.0f} µs" in {row[3] for row in table.rows}
    assert checked(answer).verdict == "none"


def test_a_lasting_slowdown_is_a_finding(tmp_path):
    facts, spans, _ = generate(Schedule(steps=100))
    late = (pl.col("step") >= 60) & pl.col("kind").is_in(["step", "forward"])
    spans = spans.with_columns(
        start_ns=pl.col("start_ns") + pl.max_horizontal(pl.col("step") - 60, 0).cast(pl.Int64) * 40 * MS
        + pl.when((pl.col("step") >= 60) & ~pl.col("kind").is_in(["step", "data_wait", "forward"]))
        .then(40 * MS).otherwise(0),
        duration_ns=pl.col("duration_ns") + pl.when(late).then(40 * MS).otherwise(0),
    )  # fmt: skip
    answer = report(save(tmp_path, facts, spans, peak=PEAK))
    (finding,) = [f for f in answer.findings if f.id == "step_time.changed"]
    assert "From step 60 on the job is slower" in finding.sentence


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "schema", "pipe"])
def test_damaged_tables_are_said_not_invented(tmp_path, damage):
    facts, spans, _ = generate(Schedule(steps=12))
    folder = save(tmp_path, facts, spans)
    file = folder / "spans" / "part-0.parquet"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "text":
        file.write_text("no parquet")
    elif damage == "pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        pl.DataFrame({"start_ns": ["x"]}).write_parquet(file)
    answer = checked(report(folder))
    assert answer.steps == 0
    assert answer.verdict == "unknown"
    assert any("cannot be read" in text for text in answer.missing)


def test_what_an_earlier_process_of_a_rank_had_begun_is_not_its_state(tmp_path):
    """Rank 1 died in a forward of its first process; its second one ended in order."""
    facts, spans, _ = generate(Schedule(ranks=2, steps=4))
    died = (pl.col("rank") == 1) & (pl.col("kind") == "forward") & (pl.col("step") == 1)
    spans = spans.with_columns(
        duration_ns=pl.when(died).then(None).otherwise("duration_ns"),
        id=pl.col("id") + pl.when(pl.col("step") >= 2).then(1 << 48).otherwise(0),
    )
    box = report(save(tmp_path, facts, spans)).box
    assert [rank.state.kind for rank in box.ranks] == [None, None]
    # Ids of the native lane are higher than those of any process: rank 1 is in its last forward.
    spans = spans.with_columns(
        id=pl.col("id") + pl.when(pl.col("kind") == "collective").then(1 << 56).otherwise(0),
        duration_ns=pl.when((pl.col("rank") == 1) & (pl.col("step") == 3))
        .then(pl.when(pl.col("kind").is_in(["collective", "data_wait"])).then("duration_ns"))
        .otherwise("duration_ns"),
    ).filter(~((pl.col("rank") == 1) & pl.col("kind").is_in(["backward", "optimizer"])
               & (pl.col("step") == 3)))  # fmt: skip
    box = report(save(tmp_path / "native", facts, spans)).box
    assert [(rank.state.kind, rank.state.step) for rank in box.ranks] == [
        (None, 3), ("forward", 3),
    ]  # fmt: skip


def test_no_run_is_a_usage_error(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        report(tmp_path / "nothing")
    with pytest.raises(InputError):
        report(tmp_path)


@pytest.mark.parametrize(
    ("waiting", "missing", "said"),
    [
        ((0,), (1,), "Rank 0 waits in all_reduce 7 of group g for rank 1 (no record)."),
        ((2, 0), (1,), "Ranks 2, 0 wait in all_reduce 7 of group g for rank 1 (no record)."),
        ((0,), (), "and rank 0 never left it"),
        ((0, 1), (), "and ranks 0, 1 never left it"),
    ],
)
def test_one_rank_waits_and_many_wait(waiting, missing, said):
    blocked = BlockedCollective(
        group="g", sequence=7, op="all_reduce", waiting=waiting, missing=missing, entered_ns=1,
        missing_states={},
    )  # fmt: skip
    assert said in _blocked_sentence(blocked, {})


def test_few_ranks_carry_their_noun():
    said = [few_ranks(ranks) for ranks in ((3,), (0, 1), range(6), range(7))]
    assert said == ["rank 3", "ranks 0, 1", "ranks 0, 1, 2, 3, 4, 5", "ranks 0, 1, 2 … 6 (7 ranks)"]

"""What-if from files: operation traces, Kineto sets; the answer's contract."""

import json
from dataclasses import replace

import polars as pl
import pytest
from tests.labs.generated_run import Schedule, generate, with_clocks
from tests.labs.kineto_files import Job, document, row, write
from tests.labs.operation_traces import pipeline_rows
from tests.labs.pipeline_run import pipeline_run
from tests.labs.web_run import save_run
from typer.testing import CliRunner

from kansoku.app.trace_whatif import whatif
from kansoku.cli.trace_whatif import command
from kansoku.errors import InputError
from kansoku.model import ProcessGroup


def kineto(folder, compute_us, *, steps=4, ranks=4):
    """Steps of 100 µs: 10 idle, compute, a collective until 90, 10 idle."""
    for rank in range(ranks):
        rows = []
        for step in range(steps):
            at = 1_000_000.0 + 100 * step
            took = compute_us(rank, step)
            rows += [
                row("user_annotation", f"ProfilerStep#{step}", 1, 1, at, 100, {}),
                row("kernel", "gemm", rank, 7, at + 10, took, {"device": rank, "stream": 7}),
                row(
                    "kernel",
                    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)",
                    rank,
                    40,
                    at + 10 + took,
                    80 - took,
                    {"device": rank, "stream": 40, "Collective name": "allreduce"},
                ),
            ]
        job = Job(rank=rank, world=ranks)
        write(folder / f"rank{rank}.json", json.dumps(document(job, rows)))
    return folder


def test_a_slow_rank_in_kineto_traces(tmp_path):
    answer = whatif([kineto(tmp_path, lambda rank, _step: 60 if rank == 2 else 40)]).to_json()
    # The collective itself takes 20 µs. Ideal: 45 µs of mean compute, 20 of idle, 20 of transfer.
    assert answer["actual_s"] == pytest.approx(100e-6)
    assert answer["ideal_s"] == pytest.approx(85e-6)
    assert answer["culprit"]["kind"] == "worker"
    assert (answer["culprit"]["dp"], answer["culprit"]["pp"]) == (2, 0)
    assert answer["culprit"]["share"] == pytest.approx(1.0)
    assert answer["source"] == "kineto"


def test_a_slow_last_stage_in_kineto_traces(tmp_path):
    folder = kineto(tmp_path, lambda rank, _step: 60 if rank >= 2 else 40)
    answer = whatif([folder], stages=2).to_json()
    assert (answer["culprit"]["kind"], answer["culprit"]["pp"]) == ("stage", 1)


def test_one_rank_cannot_be_compared(tmp_path):
    result = whatif([kineto(tmp_path, lambda _rank, _step: 40, ranks=1)])
    assert result.to_json()["verdict"] == "unknown"
    assert "one rank" in result.reason
    assert result.workers.is_empty()


def test_a_slow_rank_in_a_run(tmp_path):
    schedule = Schedule(ranks=4, steps=12, jitter=0.0, slow={(1, "backward"): 1.5})
    facts, spans, _ = generate(schedule)
    answer = whatif([save_run(tmp_path / "run", facts, spans=spans)]).to_json()
    assert answer["source"] == "run"
    # 51 ms of work, 15 more on rank 1, four transfers of 0.5 ms; the first step is left out.
    assert answer["actual_s"] == pytest.approx(0.068, rel=1e-6)
    assert len(answer["steps"]) == 11
    assert (answer["culprit"]["kind"], answer["culprit"]["dp"]) == ("worker", 1)


def test_the_command_and_its_contract(tmp_path):
    import typer

    slow = pipeline_rows(forward=lambda _dp, pp, _step, _mb: 1.5 if pp == 1 else 1.0)
    slow.write_parquet(tmp_path / "trace-X.parquet")
    (tmp_path / "meta-X.yaml").write_text("trial_name: X\ndsp_size: 1\n")
    app = typer.Typer()
    app.command()(command)
    page = tmp_path / "page.html"
    outcome = CliRunner().invoke(app, [str(tmp_path), "--json", "--html", str(page)])
    assert outcome.exit_code == 1
    answer = json.loads(outcome.stdout)
    assert list(answer)[:9] == [
        "schema", "slowdown", "ideal_s", "actual_s", "workers", "stages", "operations", "verdict",
        "culprit",
    ]  # fmt: skip
    assert answer["schema"] == "kansoku.trace.whatif/1"
    assert {"dp", "pp", "share"} <= answer["workers"][0].keys()
    assert {"pp", "share"} <= answer["stages"][0].keys()
    assert {"type", "share"} <= answer["operations"][0].keys()
    assert {"kind", "dp", "pp", "share"} <= answer["culprit"].keys()
    assert answer["slowdown"] == pytest.approx(answer["actual_s"] / answer["ideal_s"])
    assert "last stage" in page.read_text()
    assert "last stage" in CliRunner().invoke(app, [str(tmp_path)]).stdout


def test_tables(tmp_path):
    pipeline_rows(dp_size=3).write_parquet(tmp_path / "trace-X.parquet")
    result = whatif([tmp_path / "trace-X.parquet"])
    assert result.workers.shape == (6, 5)
    assert result.stages.schema == {"pp": pl.Int64, "share": pl.Float64, "slowdown": pl.Float64}
    assert "optimizer" in result.operations["type"].to_list()
    assert result.to_json()["culprit"] is None


def test_nothing_there():
    with pytest.raises(InputError, match="no such file"):
        whatif(["/nowhere/at/all"])


def test_stages_by_process_groups(tmp_path):
    slow = {(rank, phase): 1.5 for rank in (2, 3) for phase in ("forward", "backward")}
    facts, spans, _ = generate(Schedule(ranks=4, steps=6, jitter=0.0, slow=slow))
    pairs = {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}
    ranks = tuple(
        replace(
            rank,
            groups=(
                *rank.groups,
                ProcessGroup(name=f"p{rank.rank % 2}", description="mesh_pp",
                             ranks=pairs[rank.rank]),
            ),
        )
        for rank in facts.ranks
    )  # fmt: skip
    run = save_run(tmp_path / "run", replace(facts, ranks=ranks), spans=spans)
    culprit = whatif([run]).to_json()["culprit"]
    assert (culprit["kind"], culprit["pp"]) == ("stage", 1)


def one_slow_worker(dp, pp, _step, _batch):
    return 1.5 if (dp, pp) == (1, 0) else 1.0


def test_operations_of_a_pipeline_run_by_hand(tmp_path):
    # One micro-batch, two stages, four pipelines: forward 1 s, backward 2 s, optimizer 0.5 s, in a
    # row. Worker (1, 0) takes half as long again: 1.5 + 1 + 2 + 3 + 0.5.
    rows = pipeline_rows(micro_batches=1, steps=4, forward=one_slow_worker)
    facts, spans = pipeline_run(rows)
    answer = whatif([save_run(tmp_path / "run", facts, spans=spans)]).to_json()
    assert answer["source"] == "run"
    assert len(answer["steps"]) == 3  # the first is left out
    assert answer["actual_s"] == pytest.approx(8.0)
    # Means over eight workers: forward 1.0625, backward 2.125; twice, and the optimizer.
    assert answer["ideal_s"] == pytest.approx(6.875)
    # With it ideal its pipeline takes 3.1875 + 3 + 0.5, longer than the 6.5 of the others.
    slow = next(one for one in answer["workers"] if (one["dp"], one["pp"]) == (1, 0))
    assert slow["rank"] == 2
    assert slow["share"] == pytest.approx((8 - 6.6875) / (8 - 6.875))
    assert (answer["culprit"]["kind"], answer["culprit"]["dp"], answer["culprit"]["pp"]) == (
        "worker", 1, 0,
    )  # fmt: skip
    kinds = {one["type"] for one in answer["operations"]}
    assert {"forward-compute", "backward-compute", "forward-pp-comm", "backward-pp-comm"} <= kinds
    assert any("host delay" in line for line in answer["incomplete"])


@pytest.mark.parametrize("clocks", [{}, {0: 4e6, 1: -7e6, 3: 2e7, 6: 1e6}])
def test_a_pipeline_run_answers_as_its_operations_do(tmp_path, clocks):
    rows = pipeline_rows(
        stages=2,
        micro_batches=4,
        steps=10,  # as many collectives as two hosts need to tell their clocks apart
        forward=lambda dp, pp, step, batch: 1 + 0.3 * (pp == 1) + 0.01 * ((dp + step + batch) % 3),
        transfer=lambda _dp, _step: 0.25,
    )
    rows.filter(pl.col("step") > 0).write_parquet(tmp_path / "trace-X.parquet")
    wanted = whatif([tmp_path / "trace-X.parquet"]).to_json()
    facts, spans = pipeline_run(rows)
    # A clock is a host's: each rank has one of its own.
    ranks = tuple(replace(one, node=f"node{one.rank}") for one in facts.ranks)
    facts = replace(facts, ranks=ranks)
    spans = with_clocks(spans, clocks, {}).cast(dict(spans.schema))
    answer = whatif([save_run(tmp_path / "run", facts, spans=spans)]).to_json()
    for name in ("slowdown", "ideal_s", "actual_s"):
        assert answer[name] == pytest.approx(wanted[name], rel=1e-6)
    for part, keys in (("workers", ("dp", "pp")), ("stages", ("pp",)), ("operations", ("type",))):
        shares = {tuple(one[key] for key in keys): one["share"] for one in wanted[part]}
        # Clipping takes no time here, and what takes none leaves no operation.
        shares.pop(("optimizer-clip-main-grad",), None)
        assert {tuple(one[key] for key in keys) for one in answer[part]} == set(shares)
        for one in answer[part]:
            assert one["share"] == pytest.approx(shares[tuple(one[k] for k in keys)], abs=1e-5)
    assert (answer["culprit"]["kind"], answer["culprit"]["pp"]) == ("stage", 1)


def test_a_pipeline_run_without_its_transfers_is_replayed_by_phases(tmp_path):
    facts, spans = pipeline_run(pipeline_rows(micro_batches=2, steps=4, forward=one_slow_worker))
    lost = spans.filter(pl.col("name") != "send")
    answer = whatif([save_run(tmp_path / "run", facts, spans=lost)]).to_json()
    assert answer["slowdown"] > 1
    assert any("transfers that were not recorded" in line for line in answer["incomplete"])


def test_a_step_of_a_pipeline_run_with_a_lost_receive_is_left_out(tmp_path):
    facts, spans = pipeline_run(pipeline_rows(micro_batches=2, steps=5, forward=one_slow_worker))
    lost = (pl.col("name") == "recv") & (pl.col("step") == 3) & (pl.col("rank") == 1)
    first = spans.filter(lost)["id"][0]
    kept = spans.filter(~(lost & (pl.col("id") == first)))
    answer = whatif([save_run(tmp_path / "run", facts, spans=kept)]).to_json()
    assert [one["step"] for one in answer["steps"]] == [1, 2, 4]
    assert any(line.startswith("1 of 4 steps lack operations") for line in answer["incomplete"])


def test_a_negative_share_is_shown_and_explained(tmp_path):
    for rank, (begin, took) in enumerate([(10, 50), (30, 40)]):
        rows = []
        for step in range(4):
            at = 1_000_000.0 + 100 * step
            device = {"device": rank, "stream": 7}
            reduce = {"device": rank, "stream": 40, "Collective name": "allreduce"}
            name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)"
            rows += [
                row("user_annotation", f"ProfilerStep#{step}", 1, 1, at, 100, {}),
                row("kernel", "gemm", rank, 7, at + begin, took, device),
                row("kernel", name, rank, 40, at + begin + took, 90 - begin - took, reduce),
            ]
        write(tmp_path / f"rank{rank}.json", json.dumps(document(Job(rank=rank, world=2), rows)))
    found = whatif([tmp_path])
    # Ideal: 30 µs of idle, 45 of compute, 20 of transfer. With compute alone at its mean, rank 1
    # needs 40 + 45 + 20 = 105 µs where it needed 100: -5 of a loss of 5. Idle alone at its mean
    # leaves rank 0 at 30 + 50 + 20 = 100: nothing.
    answer = found.to_json()
    assert answer["actual_s"] == pytest.approx(100e-6)
    assert answer["ideal_s"] == pytest.approx(95e-6)
    shares = {one["type"]: one["share"] for one in answer["operations"]}
    assert shares["compute"] == pytest.approx(-1.0)
    assert shares["device-idle"] == pytest.approx(0.0, abs=1e-9)
    table = next(b for b in found.view().blocks if getattr(b, "title", "") == "Operation types")
    assert ("compute", "-100.0%") in {cells[:2] for cells in table.rows}
    assert "-0.0%" not in {cells[1] for cells in table.rows}
    assert table.note.startswith("below 0: ")
    assert "faster than its mean" in table.note


def test_shares_within_the_loss_need_no_word(tmp_path):
    found = whatif([kineto(tmp_path, lambda rank, _step: 60 if rank == 2 else 40)])
    assert all(getattr(block, "note", None) is None for block in found.view().blocks)

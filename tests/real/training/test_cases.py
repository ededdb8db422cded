"""Every kind of training, run for real over Gloo: spans against what the script itself counted."""

import polars as pl
import pytest
from tests.labs.training import Cases, bare_environment, observed_environment, run_cases

from kansoku.app.report import report

pytestmark = pytest.mark.real

CASES = [
    "ddp", "accumulation", "recompute", "workers", "two_optimizers", "adversarial", "evaluation",
    "compile", "fsdp", "tensor", "mesh", "pipeline", "collectives",
]  # fmt: skip
STEPS = 24  # the wrappers in C take over after sixteen updates
RANKS = {case: 4 if case == "mesh" else 2 for case in CASES}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Cases:
    folder = tmp_path_factory.mktemp("observed")
    return run_cases(folder, CASES, observed_environment(folder, STEPS=STEPS))


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Cases:
    folder = tmp_path_factory.mktemp("bare")
    return run_cases(folder, ["ddp", "compile", "fsdp"], bare_environment(STEPS=STEPS))


def complete_steps(cases, case, rank):
    steps = cases.spans(case, rank, "step")
    complete = ~pl.col("attributes").fill_null("").str.contains("incomplete")
    return steps.filter(complete & pl.col("duration_ns").is_not_null())


@pytest.mark.parametrize("case", [case for case in CASES if case != "collectives"])
def test_phases_match_the_scripts_own_count(cases, case):
    for rank in range(RANKS[case]):
        counted = cases.counted(case, rank)
        assert len(complete_steps(cases, case, rank)) == counted["steps"]
        forwards = cases.spans(case, rank, "forward")
        repeated = pl.col("attributes").fill_null("").str.contains("recompute")
        first = forwards.filter(~repeated)
        backwards = cases.spans(case, rank, "backward")
        if case == "pipeline":
            # torch runs each stage once more in the first step, to learn the shapes.
            assert len(first.filter(pl.col("step") == 0)) == 4 + 1
            first, backwards = (part.filter(pl.col("step") > 0) for part in (first, backwards))
            counted["forwards"] = counted["micro_batches"] - 4
        assert len(first) == counted["forwards"]
        assert len(backwards) == counted.get("backwards", counted["forwards"])
        assert len(cases.spans(case, rank, "evaluation")) == counted.get("evaluations", 0)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost_open_or_negative(cases, case):
    data = cases.data(case)
    assert data.facts.ranks
    assert [p.lost for p in data.processes] == [0] * RANKS[case]
    assert data.spans["duration_ns"].null_count() == 0
    assert data.spans["duration_ns"].min() >= 0
    assert [p.state for p in data.processes] == ["closed"] * RANKS[case]
    errors = [text for text in data.missing if "swallowed" in text]
    assert errors == []


@pytest.mark.parametrize("case", CASES)
def test_steps_touch_and_children_lie_inside_their_parents(cases, case):
    for rank in range(RANKS[case]):
        steps = cases.spans(case, rank, "step").sort("start_ns")
        ends = (steps["start_ns"] + steps["duration_ns"]).to_list()
        assert steps["start_ns"].to_list()[1:] == ends[:-1]
        spans = cases.data(case).spans.filter(pl.col("rank") == rank)
        main = spans.filter(pl.col("kind") != "collective")
        pairs = main.join(main, left_on="parent", right_on="id", suffix="_up")
        end, end_up = (pl.col(f"start_ns{s}") + pl.col(f"duration_ns{s}") for s in ("", "_up"))
        outside = pairs.filter((pl.col("start_ns") < pl.col("start_ns_up")) | (end > end_up))
        assert len(outside) == 0, outside


def test_ddps_reducer_is_seen_from_c_plus_plus(cases):
    for rank in range(2):
        counted = cases.counted("ddp", rank)
        reduced = cases.spans("ddp", rank, "collective").filter(
            (pl.col("name") == "all_reduce") & pl.col("step").is_not_null()
        )
        assert reduced["bytes"].sum() == counted["gradient_bytes"] * counted["steps"]
        assert len(reduced) >= counted["buckets"] * counted["steps"]
        assert set(reduced["dtype"]) == {"float32"}
        assert set(reduced["group"]) == {"0"}


def test_accumulation_reduces_once_an_update(cases):
    counted = cases.counted("accumulation", 0)
    assert (counted["steps"], counted["forwards"]) == (STEPS, 4 * STEPS)
    reduced = cases.spans("accumulation", 0, "collective").filter(
        (pl.col("name") == "all_reduce") & pl.col("step").is_not_null()
    )
    assert reduced["bytes"].sum() == counted["gradient_bytes"] * counted["steps"]


def test_sequences_are_the_same_on_every_member(cases):
    for case in ("ddp", "fsdp", "tensor", "mesh"):
        collectives = cases.data(case).spans.filter(pl.col("kind") == "collective")
        members = {group.name: group.ranks for group in _groups(cases, case)}
        for (group,), part in collectives.group_by("group"):
            rows = part.pivot("rank", index="sequence", values="name", aggregate_function="first")
            assert len(rows.columns) - 1 == len(members[group])
            assert rows.null_count().sum_horizontal().item() == 0
            for row in rows.drop("sequence").iter_rows():
                assert len(set(row)) == 1


def _groups(cases, case):
    return {g.name: g for r in cases.data(case).facts.ranks for g in r.groups}.values()


def test_recomputed_forwards_belong_to_the_backward(cases):
    spans = cases.data("recompute").spans.filter(pl.col("rank") == 0)
    repeated = spans.filter(pl.col("attributes").fill_null("").str.contains("recompute"))
    assert len(repeated) == 2 * cases.counted("recompute", 0)["steps"]  # two checkpointed blocks
    parents = repeated.join(spans, left_on="parent", right_on="id", suffix="_up")
    assert set(parents["kind_up"]) == {"backward"}


def test_compile_has_no_break_and_no_graph_more_than_bare(cases, bare):
    for rank in range(2):
        with_us, without = cases.counted("compile", rank), bare.counted("compile", rank)
        assert with_us["graph_breaks"] == without["graph_breaks"] == 0
        assert with_us["graphs"] == without["graphs"]
    assert len(cases.spans("compile", 0, "compile")) >= 1


def test_the_loss_is_bitwise_the_same(cases, bare):
    for case in ("ddp", "compile", "fsdp"):
        for rank in range(2):
            assert cases.counted(case, rank)["loss"] == bare.counted(case, rank)["loss"]


def test_checkpoints_and_evaluation(cases):
    counted = cases.counted("evaluation", 0)
    saved = cases.spans("evaluation", 0, "checkpoint")
    inner = saved.join(saved, left_on="parent", right_on="id", how="semi")
    assert len(saved) - len(inner) == counted["checkpoints"]
    assert {"torch.save", "torch.load", "distributed.checkpoint.save"} <= set(saved["name"])


def test_workers_never_write(cases):
    """Two forked workers a rank: two rings, one a rank, and the counts of the others."""
    folder = cases.folder / "rings" / "workers"
    pids = set((cases.folder / "workers.pids").read_text().split())
    assert {path.stem.rpartition("-")[2] for path in folder.glob("*.ring")} == pids
    waits = cases.spans("workers", 0, "data_wait")
    assert len(waits) == cases.counted("workers", 0)["loads"] + 1  # and the end of the data


@pytest.mark.parametrize("case", ["fsdp", "tensor", "mesh"])
def test_operators_match_torchs_dispatch_mode(cases, case):
    names = {
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "all_reduce": "all_reduce",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_gather_into_tensor": "all_gather",
    }
    for rank in range(RANKS[case]):
        dispatched = cases.counted(case, rank)["dispatched"]
        expected: dict[str, int] = {}
        for operator, count in dispatched.items():
            if operator in names:
                expected[names[operator]] = expected.get(names[operator], 0) + count
        seen = cases.spans(case, rank, "collective").filter(
            pl.col("name").is_in(list(expected)) & pl.col("step").is_not_null()
        )
        counts = dict(seen.group_by("name").len().iter_rows())
        assert counts == expected


def test_mesh_axes_have_their_names(cases):
    groups = {g.description: g.ranks for g in cases.data("mesh").facts.ranks[0].groups}
    assert groups["dp"] == (0, 2)
    assert groups["tp"] == (0, 1)
    assert [g.description for g in _groups(cases, "pipeline")] == ["pp"]


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        ("ddp", {"dp": 2, "tp": 1, "pp": 1}),
        ("fsdp", {"dp": 2, "tp": 1, "pp": 1}),
        ("tensor", {"dp": 1, "tp": 2, "pp": 1}),
        ("pipeline", {"dp": 1, "tp": 1, "pp": 2}),
        ("mesh", {"dp": 2, "tp": 2, "pp": 1}),
    ],
)
def test_the_report_says_the_layout_that_the_script_made(cases, case, axes):
    assert report(cases.folder / "rings" / case).to_json()["layout"] == axes


def test_pipeline_sends_every_micro_batch(cases):
    counted = cases.counted("pipeline", 0)
    for rank, (first, second) in enumerate((("send", "recv"), ("recv", "send"))):
        for name in (first, second):
            moved = cases.spans("pipeline", rank, "collective").filter(
                (pl.col("name") == name) & (pl.col("bytes") == 1 * 16 * 32 * 4)
            )
            assert len(moved) == counted["micro_batches"]
            assert set(moved["attributes"].str.json_path_match("$.peer")) == {str(1 - rank)}


def test_every_collective_of_the_python_api(cases):
    for rank in range(2):
        expected = cases.counted("collectives", rank)["expected"]
        seen = cases.spans("collectives", rank, "collective")
        # The group's own making may broadcast; the script's are all others.
        found = {
            name: [count, size]
            for name, count, size in seen.group_by("name")
            .agg(pl.len(), pl.col("bytes").sum())
            .iter_rows()
            if name in expected
        }
        assert found == expected
        assert "bfloat16" in set(seen["dtype"])


def test_model_facts_by_hand(cases):
    """Width 32, two layers of 4·32² + 2·4·32² weights, head 64·32; 4 × 16 tokens a step."""
    weights = 2 * (4 * 32 * 32 + 2 * 4 * 32 * 32) + 64 * 32
    attention = 2 * 4 * 4 * 16 * 16 * 32
    whole = 3 * (2 * weights * 64 + attention)
    facts = cases.data("ddp").facts.ranks[0]
    assert facts.model_flops_per_step == whole
    assert facts.tokens_per_step == 64
    assert (facts.layers, facts.hidden) == (2, 32)
    biases = 2 * (4 * 32 + 4 * 32 + 32 + 2 * 32) + 64
    assert facts.parameters == weights + biases + 64 * 32  # and the embedding
    split = cases.data("tensor").facts.ranks[0]
    assert split.model_flops_per_step == whole / 2  # also of the head, which both compute


@pytest.fixture(scope="module")
def fallback(tmp_path_factory) -> Cases:
    folder = tmp_path_factory.mktemp("fallback")
    environment = observed_environment(folder, KANSOKU_NATIVE=0, STEPS=STEPS)
    return run_cases(folder, ["ddp", "collectives", "fsdp"], environment)


def test_without_a_compiler_flight_recorder_gives_the_counts(fallback):
    counted = fallback.counted("ddp", 0)
    seen = fallback.spans("ddp", 0, "collective").filter(pl.col("name") == "all_reduce")
    gradients = seen.filter(pl.col("step").is_not_null())
    assert gradients["bytes"].sum() == counted["gradient_bytes"] * counted["steps"]
    assert set(gradients["attributes"].str.json_path_match("$.no_times")) == {"true"}
    assert any("Flight Recorder" in text for text in fallback.data("ddp").missing)


def test_without_a_compiler_gathers_count_what_a_rank_ends_up_with(cases, fallback):
    def gathered(these):
        seen = these.spans("fsdp", 0, "collective")
        return seen.filter(pl.col("name") == "all_gather")["bytes"].sum()

    assert gathered(fallback) == gathered(cases) > 0


def test_without_a_compiler_python_is_seen_with_times(fallback):
    expected = fallback.counted("collectives", 0)["expected"]
    seen = fallback.spans("collectives", 0, "collective")
    counts = dict(seen.group_by("name").len().iter_rows())
    assert {name: counts.get(name, 0) for name in expected} == {
        name: count for name, (count, _) in expected.items()
    }
    timed = seen.filter((pl.col("name") == "broadcast") & (pl.col("duration_ns") > 0))
    assert len(timed) == 1

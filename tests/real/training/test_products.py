"""Model FLOPs of real trainings: by hand, and by torch's FlopCounterMode on the whole model.

Width 32, two layers, 4 × 16 tokens, 64 words; forward and backward are three forwards; attention
counts whole. FlopCounterMode knows no attention on CPUs but as its products: it is shown those.
"""

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from tests.labs.training import Cases, bare_environment, observed_environment

pytestmark = pytest.mark.real

SCRIPT = Path(__file__).parents[2] / "labs" / "product_ranks.py"
WIDTH, LAYERS, TOKENS, WORDS = 32, 2, 64, 64
BATCH, SEQUENCE = 4, 16
LINEAR = LAYERS * 2 * TOKENS * (4 + 8) * WIDTH**2
HEAD = 2 * TOKENS * WIDTH * WORDS
ATTENTION = LAYERS * 4 * BATCH * SEQUENCE**2 * WIDTH
GPT = 3 * (LINEAR + HEAD + ATTENTION)
ENCODER = 3 * (LAYERS * 2 * TOKENS * (4 + 4) * WIDTH**2 + HEAD)
EXPERTS = 3 * (
    2 * TOKENS * WIDTH**2  # a token through one of four experts
    + 2 * TOKENS * 2 * 4 * WIDTH**2  # the LSTM's eight matrices
    + 2 * TOKENS * WIDTH * 3 * WIDTH // 2  # three places of half the channels
    + HEAD
)
MODELS = {
    "function": GPT,
    "by_hand": GPT,
    "recompute": GPT,
    "reentrant": GPT,
    "broken": GPT,
    "penalty": GPT,
    "compiled": GPT,
    "compiled_blocks": GPT,
    "batch_first": ENCODER + 3 * ATTENTION,
    # What is 4 × 16 is a sequence of 4 here, 16 times.
    "sequence_first": ENCODER + 3 * LAYERS * 4 * SEQUENCE * BATCH**2 * WIDTH,
    "experts": EXPERTS,
}
SPLIT = {"split_mlp": 1, "split_all": 1, "split_sequence": 1, "split_data": 2, "sharded": 2}
"""How many replicas of the model, each with data of its own, train."""


def run(folder: Path, environment: dict[str, str], *arguments: str) -> Cases:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Cases(folder=folder)


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Cases:
    folder = tmp_path_factory.mktemp("products")
    environment = observed_environment(folder)
    run(folder, environment, "--alone", "sequence_first")
    return run(folder, environment, *MODELS, *SPLIT)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Cases:
    environment = bare_environment(PEER=1)
    return run(tmp_path_factory.mktemp("bare"), environment, *MODELS, *SPLIT)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory) -> Cases:
    folder = tmp_path_factory.mktemp("fallback")
    environment = observed_environment(folder, KANSOKU_NATIVE=0)
    counted = [case for case in MODELS if case not in ("by_hand", "experts")]
    return run(folder, environment, *counted, *SPLIT)


def settled(cases: Cases, case: str) -> list[float]:
    """Return each rank's FLOPs of a step once a compiler has traced: all steps but the first."""
    rows = cases.data(case).resources.filter((pl.col("kind") == "step") & (pl.col("step") > 0))
    per_rank = rows.group_by("rank").agg(pl.col("flops").unique()).sort("rank")["flops"].to_list()
    assert [len(values) for values in per_rank] == [1] * len(per_rank)
    return [values[0] for values in per_rank]


@pytest.mark.parametrize("case", MODELS)
def test_a_model_by_hand(cases, case):
    assert settled(cases, case) == [MODELS[case]]
    facts = cases.data(case).facts.ranks[0]
    assert facts.model_flops_per_step == MODELS[case]
    assert facts.tokens_per_step == TOKENS
    assert facts.extra["flops_convention"].startswith("operators: ")


@pytest.mark.parametrize("case", [case for case in MODELS if case != "experts"])
def test_a_model_by_torchs_own_counter(cases, bare, case):
    assert settled(cases, case) == [3 * bare.counted(case, 0)["whole_forward"]]


@pytest.mark.parametrize("case", SPLIT)
def test_the_sum_over_ranks_is_the_models_once_a_replica(cases, case):
    ranks = settled(cases, case)
    assert sum(ranks) == SPLIT[case] * GPT
    assert len(set(ranks)) == 1


def test_a_process_without_a_group_is_counted_too(cases):
    assert settled(cases, "sequence_first_alone") == [MODELS["sequence_first"]]


@pytest.mark.parametrize("case", [*MODELS, *SPLIT])
def test_losses_are_bitwise_those_of_the_bare_job(cases, bare, case):
    assert cases.counted(case, 0)["losses"] == bare.counted(case, 0)["losses"]


@pytest.mark.parametrize("case", ["compiled", "compiled_blocks"])
def test_no_graph_more_than_bare(cases, fallback, bare, case):
    assert cases.counted(case, 0)["graphs"] == bare.counted(case, 0)["graphs"]
    assert fallback.counted(case, 0)["graphs"] == bare.counted(case, 0)["graphs"]


@pytest.mark.parametrize("case", [*MODELS, *SPLIT])
def test_nothing_was_swallowed(cases, case):
    data = cases.data(case)
    assert [process.lost for process in data.processes] == [0] * len(data.processes)
    assert not [text for text in data.missing if "swallowed" in text or "FLOPs" in text]


def test_without_a_compiler_modules_count(fallback):
    for case in ("function", "recompute", "reentrant", "batch_first", "sequence_first"):
        assert settled(fallback, case) == [MODELS[case]]
    for case, replicas in SPLIT.items():
        assert sum(settled(fallback, case)) == replicas * GPT
    facts = fallback.data("function").facts.ranks[0]
    assert facts.extra["flops_convention"].startswith("modules: ")
    assert any("outside modules" in text for text in fallback.data("function").missing)


def test_without_a_compiler_a_compiled_model_counts_its_weights(fallback):
    """Its blocks are not named as attention, and nothing may watch what a compiler reads."""
    for case in ("compiled", "compiled_blocks"):
        assert settled(fallback, case) == [GPT - 3 * ATTENTION]


def test_every_rank_of_the_bare_job_wrote_its_losses(bare):
    for case in SPLIT:
        losses = [json.loads(path.read_text())["losses"] for path in bare.folder.glob(f"{case}-*")]
        assert all(len(values) == 4 for values in losses)

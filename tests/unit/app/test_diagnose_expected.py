"""A run's own model, layout and devices before the planner: Llama 2 7B on eight H100s.

Published: 6,738,415,616 parameters in 32 layers of 4,096, a vocabulary of 32,000, no weights tied;
trained here on 64 sequences of 4,096 tokens a step. FLOPs a token as the record counts them: six of
every weight but the embedding's, and 12 · layers · width · sequence of full attention.
"""

import json
from dataclasses import replace

import pytest
from tests.labs.generated_run import MS, Schedule, generate

from kansoku.app.diagnose import diagnose_folder
from kansoku.app.diagnose._expected import expected_step, request_of_run
from kansoku.app.plan import PlanRequest, explain
from kansoku.app.report import report
from kansoku.formats.run_tables import write_tables
from kansoku.model import Verdict

PARAMETERS, LAYERS, WIDTH, VOCABULARY, SEQUENCE, BATCH = 6_738_415_616, 32, 4096, 32_000, 4096, 64
FLOPS_A_TOKEN = 6 * (PARAMETERS - VOCABULARY * WIDTH) + 12 * LAYERS * WIDTH * SEQUENCE
H100 = "NVIDIA H100 80GB HBM3"


def made(folder, *, tp=1, step_s=3.0, device=H100, exit_code=None, **changed):
    """Write a run of Llama 2 7B on eight ranks, whose steps take so long."""
    work = round(step_s * 1000 / 51) * MS
    facts, spans, _ = generate(
        Schedule(ranks=8, tensor_parallel=tp, steps=24, forward_ns=15 * work, backward_ns=30 * work,
                 optimizer_ns=3 * work, data_wait_ns=2 * work, other_ns=work)
    )  # fmt: skip
    tokens = BATCH * SEQUENCE / (8 // tp)
    known = {
        "device": device, "parameters": PARAMETERS // tp, "layers": LAYERS, "hidden": WIDTH,
        "tokens_per_step": tokens, "model_flops_per_step": FLOPS_A_TOKEN * tokens / tp,
        "extra": {"precision": "bfloat16"},
    } | changed  # fmt: skip
    ranks = tuple(replace(rank, **known) for rank in facts.ranks)
    run = {"schema": "kansoku.run/1", "run": facts.run, "command": ["train"], "start_ns": facts.start_ns,
           "exit_code": exit_code, "nodes": list(facts.nodes)}  # fmt: skip
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(run))
    write_tables(folder, steps=None, spans=spans, ranks=ranks)
    return folder


@pytest.mark.parametrize("tp", [1, 2])
def test_the_model_and_its_layout_come_back(tmp_path, tp):
    answer = report(made(tmp_path / "run", tp=tp))
    asked = request_of_run(answer)
    assert (asked.layers, asked.hidden, asked.seq, asked.global_batch) == (
        LAYERS, WIDTH, SEQUENCE, BATCH,
    )  # fmt: skip
    assert (asked.tp, asked.pp, asked.dp, asked.gpus) == (tp, 1, 8 // tp, 8)
    assert asked.vocab == pytest.approx(VOCABULARY, rel=0.15)
    by_name = PlanRequest(model="llama2-7b", gpu="h100-sxm", gpus=8, tp=tp, pp=1, dp=8 // tp,
                          global_batch=BATCH, precision="bf16")  # fmt: skip
    seconds, _ = expected_step(answer)
    assert seconds == pytest.approx(explain(by_name).candidate.step_s, rel=0.05)


@pytest.mark.parametrize(("step_s", "slow"), [(3.0, False), (4.5, False), (8.0, True)])
def test_steps_far_above_what_the_layout_can_reach_are_slow(tmp_path, step_s, slow):
    found = diagnose_folder(made(tmp_path / "run", step_s=step_s)).incidents
    assert [(i.kind, i.verdict) for i in found] == ([("slow", Verdict.UNKNOWN)] if slow else [])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"device": "Some Accelerator 9"}, "no peak is guessed"),
        ({"parameters": 46_702_792_704}, "no transformer of the usual form"),  # Mixtral 8x7B
        ({"hidden": None}, "not seen"),
        ({"tokens_per_step": 1000.0}, "sequence length"),
    ],
)
def test_what_cannot_be_planned_is_said_and_not_guessed(tmp_path, changed, why):
    told = diagnose_folder(made(tmp_path / "run", step_s=8.0, **changed))
    assert told.incidents == ()
    (sentence,) = [s for s in told.missing if s.startswith("no expected step time")]
    assert why in sentence


def test_nothing_is_expected_of_cpus(tmp_path):
    told = diagnose_folder(made(tmp_path / "run", step_s=8.0, device="cpu"))
    assert told.incidents == ()
    assert not [s for s in told.missing if "expected" in s]

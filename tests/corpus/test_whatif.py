"""The published results of ByteDance's analyser on a real 128-GPU job."""

import json

import pytest

from kansoku.app.trace_whatif import whatif


@pytest.fixture(scope="module")
def answer(corpus):
    return whatif([corpus / "straggler"]).to_json()


def published(corpus, name):
    return json.loads((corpus / "straggler" / f"{name}-SE.json").read_text())


def test_step_times_and_slowdown(corpus, answer):
    ours = answer["last_stage"]
    for name in ("tori", "tideal", "trem", "tadd", "rem", "add"):
        assert ours[name] == pytest.approx(published(corpus, "ms")[name], rel=1e-6)
    result = published(corpus, "result")
    assert answer["slowdown"] == pytest.approx(result["blocking_slowdown"], rel=1e-8)
    assert {str(one["step"]): one["actual_s"] for one in answer["steps"]} == pytest.approx(
        result["step_t_nodelay"], rel=1e-6
    )


def test_slow_workers(corpus, answer):
    ours = answer["slow_workers"]
    for name in ("tori", "tideal", "trem", "tadd", "rem", "add"):
        assert ours[name] == pytest.approx(published(corpus, "mw")[name], rel=1e-5)
    assert answer["mw"] == pytest.approx(0.025, abs=5e-4)
    assert answer["ms"] == pytest.approx(0.688, abs=5e-4)


def test_slowdowns_of_every_part(corpus, answer):
    result = published(corpus, "result")
    for key, name, field in (
        ("blocking_decompose_by_stage", "stages", "pp"),
        ("blocking_decompose_by_dp_rank", "dp_ranks", "dp"),
        ("blocking_decompose_by_optype", "operations", "type"),
    ):
        ours = {str(part[field]): part["slowdown"] for part in answer[name]}
        assert ours == pytest.approx(result[key], rel=1e-6)


def test_the_last_stage_and_unequal_sequences_are_the_causes(answer):
    assert answer["verdict"] == "found"
    culprit = answer["culprit"]
    assert (culprit["kind"], culprit["pp"], culprit["dp"]) == ("stage", 1, None)
    assert culprit["share"] == pytest.approx(0.688, abs=5e-4)
    assert [one["cause"] for one in answer["causes"]] == ["last_stage", "sequence_length"]

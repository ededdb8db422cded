"""Folders of MLPerf logs: the review's scaling factor, labels, and what is refused."""

import json

import pytest

from kansoku.app.bench_mfu import Hardware, mfu_of_run
from kansoku.app.bench_score import score, score_json
from kansoku.errors import InputError


def event(key, time_ms, value=None, **metadata):
    body = {"key": key, "time_ms": time_ms, "value": value, "metadata": metadata}
    return f":::MLLOG {json.dumps(body)}\n"


def write_runs(folder, minutes, benchmark="gpt3"):
    folder.mkdir(exist_ok=True)
    for number, length in enumerate(minutes):
        (folder / f"result_{number}.txt").write_text(
            event("submission_benchmark", 1, benchmark)
            + event("global_batch_size", 1, 2048)
            + event("max_sequence_length", 1, 2048)
            + event("run_start", 0)
            + event("block_start", 0, first_epoch_num=0)
            + event("eval_accuracy", 1, 2.6, epoch_num=1_207_959_552)
            + event("run_stop", length * 60_000, status="success")
        )
    return folder


def answer(*paths, **hardware):
    return score_json(score(list(paths), mfu=mfu_of_run(Hardware(**hardware))))


def test_the_reviews_scaling_factor_multiplies_the_score(tmp_path):
    folder = write_runs(tmp_path / "a", [10, 20, 30])
    assert answer(folder)["score_minutes"] == 20
    (folder / "scaling.json").write_text('{"scaling_factor": 1.05}')
    assert answer(folder)["score_minutes"] == pytest.approx(21)


def test_a_broken_scaling_file_is_said_and_not_used(tmp_path):
    folder = write_runs(tmp_path / "a", [10, 20, 30])
    (folder / "scaling.json").write_text('{"scaling_factor": -1}')
    told = answer(folder)
    assert told["score_minutes"] == 20
    assert any("no positive number" in note for note in told["notes"])


def test_mfu_by_hand(tmp_path):
    """GPT-3 175B: 96 layers of 12 h² weights, full attention and 51,200 logits, 6 FLOPs each."""
    folder = write_runs(tmp_path / "a", [100, 100, 100])
    mfu = answer(folder, gpu="h100", gpus=1024, precision="fp8")["runs"][0]["mfu"]
    h, layers, s, vocab = 12_288, 96, 2048, 51_200
    per_token = 6 * (12 * layers * h * h + 2 * layers * h * s + h * vocab)
    rate = 1_207_959_552 / 6000
    assert mfu["value"] == pytest.approx(per_token * rate / (1024 * 1978.9e12), rel=1e-9)
    assert mfu["window"] == {"from_step": 1, "to_step": 288}


def test_unknown_hardware_has_no_mfu_but_a_reason(tmp_path):
    run = answer(write_runs(tmp_path / "a", [10]), gpu="tpu-v9", gpus=4)["runs"][0]
    assert run["mfu"] is None
    assert "no peak is guessed" in run["mfu_reason"]


def test_several_folders(tmp_path):
    one, two = write_runs(tmp_path / "a", [1, 2, 3]), write_runs(tmp_path / "b", [4, 5, 6])
    told = answer(one, two)
    assert [result["score_minutes"] for result in told["results"]] == [2, 5]
    assert len(told["runs"]) == 6


def test_mixed_benchmarks_are_refused(tmp_path):
    folder = write_runs(tmp_path / "a", [1, 2])
    (folder / "result_9.txt").write_text(event("submission_benchmark", 1, "bert"))
    with pytest.raises(InputError, match="different benchmarks: bert, gpt3"):
        answer(folder)


def test_a_folder_without_logs_names_the_remedy(tmp_path):
    with pytest.raises(InputError, match="name the log files"):
        answer(tmp_path)

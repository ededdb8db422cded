"""Folders of MLPerf logs: the review's scaling factor, labels, and what is refused."""

import json

import pytest

from kansoku.app.bench_mfu import Hardware, mfu_of_run
from kansoku.app.bench_scaling import scaling_of_folders
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
    assert mfu["value"] == pytest.approx(per_token * rate / (1024 * 1979e12), rel=1e-9)
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


@pytest.mark.parametrize("factor", ["NaN", "Infinity", "true", '"1.1"'])
def test_a_factor_must_be_a_finite_number(tmp_path, factor):
    folder = write_runs(tmp_path / "a", [10, 20, 30])
    (folder / "scaling.json").write_text(f'{{"scaling_factor": {factor}}}')
    told = answer(folder)
    assert told["score_minutes"] == 20
    assert any("no positive number" in note for note in told["notes"])


# The score of NVIDIA's Eos_n32 in MLPerf Training 4.1.
EOS = {"submitter": "NVIDIA", "system_name": "Eos_n32"}


def test_published_is_only_a_whole_set(tmp_path):
    """A damaged slowest run leaves the olympic mean as it is, but is not what was published."""
    folder = write_runs(tmp_path / "a", [96.404, 96.664, 100.439])
    (folder / "system.json").write_text(json.dumps(EOS))
    assert answer(folder)["label"] == "published"
    (folder / "result_2.txt").write_bytes(b"\x00\xff" * 5000)
    told = answer(folder)
    assert (told["score_minutes"], told["label"]) == (pytest.approx(96.664), "unverified")


def test_a_wrong_log_costs_the_mfu_not_the_score(tmp_path):
    folder = write_runs(tmp_path / "a", [10, 20, 30])
    for system in ({"number_of_nodes": -3}, {"number_of_nodes": "1e3"}, {"number_of_nodes": 1}):
        (folder / "system.json").write_text(
            json.dumps({"accelerators_per_node": 1, "accelerator_model_name": "H100"} | system)
        )
        told = answer(folder)
        assert told["score_minutes"] == 20
        assert told["runs"][0]["mfu"] is None
    assert "outside 0-1" in told["runs"][0]["mfu_reason"]
    with pytest.raises(InputError, match=r"result_0.txt: .*is --gpus 1 right"):
        answer(folder, gpus=1)


def test_unknown_precision_convention_and_ruleset_are_refused(tmp_path):
    folder = write_runs(tmp_path / "a", [10, 20, 30])
    for hardware in ({"precision": "fp64"}, {"convention": "ours"}):
        with pytest.raises(InputError, match="unknown"):
            answer(folder, **hardware)
    with pytest.raises(InputError, match=r"ruleset '9\.9'.*4\.1\.0"):
        score([folder], mfu=mfu_of_run(Hardware()), ruleset="9.9")


def test_files_of_another_kind_are_refused(tmp_path):
    (tmp_path / "result_0.txt").write_text("no log\n" * 3)
    with pytest.raises(InputError, match="no :::MLLOG line in 3 lines"):
        answer(tmp_path)


def test_too_few_converged_runs_are_a_finding(tmp_path):
    def found(folder):
        (result,) = score([folder], mfu=mfu_of_run(Hardware()))
        return result.finding

    folder = write_runs(tmp_path / "a", [10, 20, 30])
    assert not found(folder)
    assert not found(write_runs(tmp_path / "b", [10]))  # one run has no score, and is none wrong
    for number in (0, 1):
        path = folder / f"result_{number}.txt"
        path.write_text(path.read_text().replace("success", "aborted"))
    assert found(folder)


@pytest.mark.parametrize("count", ["0", "-5", "x", "9" * 21, ""])
def test_a_size_is_a_number_of_gpus(tmp_path, count):
    folder = write_runs(tmp_path / "a", [10, 20, 30])
    with pytest.raises(InputError, match="is no number of GPUs"):
        scaling_of_folders([f"{folder}:{count}"], hardware=Hardware())


def test_a_folder_without_logs_names_the_remedy(tmp_path):
    with pytest.raises(InputError, match="name the log files"):
        answer(tmp_path)

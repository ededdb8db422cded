"""Scores of MLPerf logs against hand-made logs and mlperf-logging's own checker."""

import json
import math

import pytest

from kansoku.bench.score import check_convergence, olympic_mean, score_run
from kansoku.catalog.mlperf import benchmark_rule, reference_points
from kansoku.errors import InputError
from kansoku.formats.mllog import read_log


def line(key, time_ms, value=None, prefix="", **metadata):
    event = {"namespace": "", "time_ms": time_ms, "event_type": "POINT_IN_TIME", "key": key,
             "value": value, "metadata": metadata}  # fmt: skip
    return f"{prefix}:::MLLOG {json.dumps(event)}"


def a_run(*, minutes=10, tokens=1_207_959_552, status="success", batch=2048, extra=(), prefix=""):
    stop = 1_000_000 + minutes * 60_000
    return [
        line("submission_benchmark", 1, "gpt3", prefix),
        line("global_batch_size", 2, batch, prefix),
        line("max_sequence_length", 2, 2048, prefix),
        line("run_start", 1_000_000, None, prefix),
        line("block_start", 1_000_000, None, prefix, first_epoch_num=0),
        *extra,
        line("eval_start", 1_060_000, None, prefix),
        line("eval_stop", 1_120_000, None, prefix),
        line("eval_accuracy", stop - 1, 2.689, prefix, epoch_num=tokens),
        line("run_stop", stop, None, prefix, status=status),
    ]


@pytest.fixture
def write(tmp_path):
    def write_one(lines, name="result_0.txt", encoding="utf-8"):
        path = tmp_path / name
        path.write_bytes("\n".join(lines).encode(encoding))
        return read_log(path)

    return write_one


GPT3 = benchmark_rule("gpt3")


def test_a_plain_run(write):
    run = score_run(write(a_run()), GPT3)
    assert run.minutes == 10
    assert run.status == "success"
    assert run.samples == 1_207_959_552
    assert run.evaluation_share == pytest.approx(0.1)  # one minute of ten
    assert run.tokens_per_s == pytest.approx(1_207_959_552 / 600)


def test_rank_prefixes_and_other_output_do_not_matter(write):
    noise = ["loss = 3.2"] * 20_000
    plain = score_run(write(a_run()), GPT3)
    noisy = score_run(write([*noise, *a_run(prefix="[node-3:7]: 12: "), *noise]), GPT3)
    assert (noisy.minutes, noisy.samples) == (plain.minutes, plain.samples)


def test_several_ranks_that_log_the_same(write):
    lines = a_run()
    several = [line("init_start", 5 + i) for i in range(8)] + [
        entry for entry in lines for _ in range(4)
    ]
    assert score_run(write(several), GPT3).minutes == 10


def test_empty_metadata_and_broken_lines_are_named(write):
    lines = a_run(extra=['x:::MLLOG {"key": "eval_accuracy", "time_ms": '])
    lines[0] = ':::MLLOG {"key": "submission_benchmark", "value": "gpt3", "time_ms": 3}'
    run = score_run(write(lines), GPT3)
    assert run.benchmark == "gpt3"
    assert "1 damaged log lines set aside, the first at row 6" in run.notes[0]


def test_latin1_bytes_do_not_stop_the_reader(write):
    lines = a_run(extra=[line("submission_org", 3, "Société")])
    assert score_run(write(lines, encoding="latin-1"), GPT3).minutes == 10


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        (a_run()[:-1], "incomplete", "no run_stop"),
        (a_run()[:3], "incomplete", "no run_start"),
        (a_run(status="aborted"), "aborted", ""),
    ],
)
def test_runs_without_an_end(write, lines, status, words):
    run = score_run(write(lines), GPT3)
    assert run.status == status
    assert words in " ".join(run.notes)


def test_two_runs_in_one_file_have_no_time(write):
    """The first start to the last stop would be the time of both and the gap between."""
    later = [text.replace("1000000", "9000000") for text in a_run()]
    later[-1] = line("run_stop", 9_600_000, None, status="success")
    run = score_run(write(a_run() + later), GPT3)
    assert (run.status, run.minutes) == ("incomplete", None)
    assert "row 13: another run starts after run_stop" in " ".join(run.notes)


@pytest.mark.parametrize("batch", [-5, 0, 1e300, "many", None])
def test_an_impossible_batch_is_said_and_left_out(write, batch):
    run = score_run(write(a_run(batch=batch)), GPT3)
    assert run.global_batch_size is None
    assert run.minutes == 10
    assert "row 2: global_batch_size" in " ".join(run.notes)


def test_a_file_without_a_log_line_says_so(write):
    run = score_run(write(["loss 3.2"] * 7), GPT3)
    assert run.notes == ("no :::MLLOG line in 7 lines: this is no MLPerf log",)


def test_a_stop_in_another_century_is_no_time(write):
    lines = a_run()
    lines[-1] = line("run_stop", 1e300, None, status="success")
    run = score_run(write(lines), GPT3)
    assert (run.status, run.minutes) == ("incomplete", None)


def test_a_log_that_cannot_be_read_names_the_remedy(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read: Is a directory \(check the path"):
        read_log(tmp_path)


def test_olympic_mean():
    assert olympic_mean([5.0, 1.0, 3.0], 1) == 3
    assert olympic_mean([5.0, 1.0, math.inf], 1) == 5  # the lost run is the slowest
    assert olympic_mean([1.0, math.inf, math.inf], 1) is None
    assert olympic_mean([1.0, 2.0], 1) is None


def _official(folder, ruleset):
    from mlperf_logging.rcp_checker import rcp_checker

    return rcp_checker.check_directory(
        str(folder), "training", ruleset, False, False, rcp_pass="pruned_rcps"
    )


# Tokens of three runs; batches on a reference, between two, and below all.
@pytest.mark.parametrize("batch", [1024, 1536, 2048, 2560, 4096, 5000, 6144, 8192, 9000])
@pytest.mark.parametrize("tokens", [950_000_000, 1_100_000_000, 1_207_959_552, 1_600_000_000])
def test_convergence_agrees_with_the_official_checker(write, tmp_path, batch, tokens):
    logs = [
        write(a_run(tokens=tokens + i * 50_331_648, batch=batch), f"result_{i}.txt")
        for i in range(3)
    ]
    runs = [score_run(log, GPT3) for log in logs]
    ours = check_convergence(runs, GPT3, reference_points("4.1.0", "gpt3"), "4.1.0")
    passed, message, _norm = _official(tmp_path, "4.1.0")
    if batch == 9000:
        assert ours.verdict == "unknown"
        assert "Missing RCP" in message
    else:
        assert (ours.verdict == "pass") == passed, (message, ours.reason)

"""What is wrong with the flags of the reference pre-training, told before ranks start."""

import pytest

from kansoku.bench.edge.pretrain_flags import pretrain_parser, pretrain_problem


def problem(text, ranks=4):
    return pretrain_problem(pretrain_parser().parse_args(text.split()), ranks)


@pytest.mark.parametrize(
    "text",
    ["", "--tp 2 --pp 2", "--family llama --kv-heads 2 --tp 2", "--strategy fsdp --micro-batch 1"],
)
def test_what_runs_has_no_problem(text):
    assert problem(text) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--tp 3", "--pp 1 x --tp 3 does not divide 4 ranks"),
        ("--pp 4 --layers 6", "--pp 4 does not divide 6 layers"),
        ("--heads 3", "3 heads do not divide --hidden 128"),
        ("--kv-heads 3", "--kv-heads 3 does not divide 4 heads"),
        ("--kv-heads 1 --tp 2", "--tp 2 does not divide"),
        ("--family llama --hidden 12 --heads 4", "heads of 3 are odd"),
        ("--tp 4 --sequence-parallel --seq 66", "does not divide --seq 66"),
        ("--global-batch 7", "global batch 7 does not divide by 4 replicas x --micro-batch 4"),
        ("--steps 0", "--steps 0 is not 1 to"),
        ("--eval-every 0", "--eval-every 0 is not 1 to"),
        ("--layers -1", "--layers -1 is not"),
        ("--vocab 99999999999999999999", "--vocab 99999999999999999999 is not"),
        ("--lr nan", "--lr nan is no learning rate"),
        ("--target-loss inf", "--target-loss inf is no loss"),
        ("--checkpoint-every 5", "--checkpoint-every needs --checkpoint"),
        ("--tokens /nonexistent", "/nonexistent: no such file"),
    ],
)
def test_each_problem_names_its_value(text, words):
    found = problem(text)
    assert found is not None
    assert words in found
    assert "\n" not in found


def test_a_file_too_short_for_one_sequence(tmp_path):
    file = tmp_path / "tokens"
    for size, good in ((2 * 66, True), (2 * 65, False), (133, False)):
        file.write_bytes(bytes(size))
        assert (problem(f"--tokens {file}") is None) == good  # sequences of 64

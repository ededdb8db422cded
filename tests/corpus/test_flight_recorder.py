"""Injected faults on a real 16-rank Megatron job: ranks 9 and 14 in both sets."""

import shutil

import pytest

from kansoku.app.trace_hang import hang, hang_json

SETS = ["gpu_error_2nd", "lock_gil_1st"]


@pytest.mark.parametrize("name", SETS)
def test_the_injected_ranks_are_named(corpus, name):
    answer = hang_json(hang([corpus / "flight_recorder" / name]))
    assert answer["verdict"] == "missing_ranks"
    assert answer["culprits"] == [9, 14]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("lost", [9, 14])
def test_a_culprit_without_a_dump_is_still_named(corpus, tmp_path, name, lost):
    folder = tmp_path / "dumps"
    shutil.copytree(corpus / "flight_recorder" / name, folder)
    folder.chmod(0o755)
    (folder / f"_dump_{lost}").unlink()
    assert hang([folder]).verdict.culprits == (9, 14)


def test_a_damaged_dump_counts_as_silence(corpus, tmp_path):
    folder = tmp_path / "dumps"
    shutil.copytree(corpus / "flight_recorder" / SETS[0], folder)
    folder.chmod(0o755)
    dump = folder / "_dump_9"
    content = dump.read_bytes()
    dump.unlink()
    dump.write_bytes(content[:100])
    report = hang([folder])
    assert report.verdict.culprits == (9, 14)
    assert "_dump_9" in report.unreadable[0]

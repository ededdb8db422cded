"""Folders of a run."""

from kansoku.app._run_files import refusal


def test_a_folder_that_refuses_says_why(tmp_path):
    assert refusal(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert refusal(tmp_path / "none") == "No such file or directory"

"""What a command prints: the answer before the page, and errors as they are."""

import json
import sys

import pytest

from kansoku.cli._main import main
from kansoku.cli._output import emit
from kansoku.errors import InputError
from kansoku.view import Sentence, View


def test_a_page_that_cannot_be_written_does_not_cost_the_answer(tmp_path, capsysbinary):
    """The answer may have taken hours."""
    view = View(title="t", blocks=[Sentence(text="the answer")])
    with pytest.raises(InputError, match="choose another --html"):
        emit({"a": 1}, view, as_json=True, html=tmp_path / "none" / "x.html")
    assert json.loads(capsysbinary.readouterr().out) == {"a": 1}


def test_an_error_shows_the_path_as_it_is(monkeypatch, capsys):
    """Rich turns ``:x:`` into a picture unless told not to."""
    monkeypatch.setattr(sys, "argv", ["kansoku", "bench", "score", "/nonexistent:x:"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "/nonexistent:x: no such file" in capsys.readouterr().err.replace("::", ":")


def test_names_do_not_command_the_terminal(monkeypatch, capsys):
    """A job, a kernel or a file may be named to clear the screen."""
    emit({}, View(title="t", blocks=[Sentence(text="job \x1b[2Jx is slow")]))
    assert "job \\x1b[2Jx is slow" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["kansoku", "report", "/none\x1b[2J"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "/none\\x1b[2J" in said

"""The command line finds commands by file name and keeps its exit codes."""

import json
import os
import subprocess
import sys

import pytest


def kansoku(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kansoku", *arguments], capture_output=True, text=True, timeout=60
    )


def test_help_and_version():
    assert "LLM training" in kansoku("--help").stdout
    assert kansoku("--version").stdout.startswith("kansoku 0.")


def test_wrong_command_is_usage():
    answer = kansoku("nope")
    assert answer.returncode == 2
    assert "No such command 'nope'" in answer.stderr


def test_closed_stdout_and_full_disk_are_no_internal_errors():
    program = f"{sys.executable} -m kansoku plan flops --model gpt2 --json"
    for closed in (">&-", "<&- >&-"):
        answer = subprocess.run(f"{program} {closed}", shell=True, capture_output=True, text=True)
        assert (answer.returncode, answer.stderr) == (0, "")
    full = subprocess.run(f"{program} >/dev/full", shell=True, capture_output=True, text=True)
    assert (full.returncode, full.stderr) == (3, "kansoku: No space left on device\n")


@pytest.fixture
def no_reader():
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "flops", "--model", "gpt2"),
        ("plan", "flops", "--model", "gpt2", "--json"),
        ("plan", "flops", "--help"),
        ("--help",),
        ("--version",),
        ("guard",),
    ],
)
def test_a_reader_that_leaves_ends_the_command_quietly(no_reader, words):
    """As head does; 141 is what a shell gives for SIGPIPE, and no finding."""
    program = [sys.executable, "-m", "kansoku", *words]
    answer = subprocess.run(program, stdout=no_reader, stderr=subprocess.PIPE, timeout=60)
    assert (answer.returncode, answer.stderr) == (141, b"")
    with_reader = subprocess.run(program, stdout=subprocess.PIPE, timeout=60)
    assert with_reader.returncode != 141


@pytest.mark.parametrize(
    "words", [("nope",), ("run", "--ouut", "x", "--", "true"), ("report", "/none"), ("guard", "x")]
)
@pytest.mark.parametrize("stderr", ["full", "closed", "no reader"])
def test_usage_stays_usage_where_stderr_cannot_be_written(no_reader, words, stderr):
    to = {"full": "2>/dev/full", "closed": "2>&-", "no reader": f"2>&{no_reader}"}[stderr]
    command = ["sh", "-c", f'exec "$@" {to}', "sh", sys.executable, "-m", "kansoku", *words]
    assert subprocess.run(command, pass_fds=[no_reader], timeout=60).returncode == 2


_WORD = """import os, sys
from kansoku.cli._streams import open_standard_streams
open_standard_streams()
print("said", file=sys.%s)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("stream", "unbuffered"), [("stderr", "1"), ("stdout", "1"), ("stderr", "")]
)
def test_a_line_is_out_when_it_is_said(stream, unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    program = [sys.executable, "-c", _WORD % stream]
    answer = subprocess.run(program, capture_output=True, env=environment, timeout=60)
    assert answer.stdout + answer.stderr == b"said\n"


def test_page_that_cannot_be_written_is_named(tmp_path):
    for page in (tmp_path, tmp_path / "none" / "x.html"):
        answer = kansoku("plan", "flops", "--model", "gpt2", "--html", str(page))
        assert answer.returncode == 2
        assert answer.stderr.startswith(f"kansoku: {page}: the page cannot be written: ")


def test_unknown_option_of_run_is_usage_not_a_program():
    answer = kansoku("run", "--ouut", "x", "--", "true")
    assert answer.returncode == 2
    assert "unknown option --ouut" in answer.stderr


def test_names_and_terminals_that_are_no_utf8(tmp_path):
    folder = os.fsencode(tmp_path) + b"/run-\xff"
    command = [sys.executable, "-m", "kansoku"]
    ended = subprocess.run([*command, "run", "--no-report", "--out", folder, "--", "true"])
    assert ended.returncode == 0
    answer = subprocess.run([*command, "report", "--json", folder], capture_output=True)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["schema"] == "kansoku.report/1"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    screen = subprocess.run([*command, "report", folder], capture_output=True, env=ascii_only)
    assert screen.returncode == 0, screen.stderr


def test_port_that_cannot_be_is_usage():
    for option in ("--port", "--otlp-port", "--grpc-port"):
        answer = kansoku("serve", option, "99999")
        assert answer.returncode == 2
        assert option in answer.stderr

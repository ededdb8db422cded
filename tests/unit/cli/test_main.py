"""The command line finds commands by file name and keeps its exit codes."""

import json
import os
import subprocess
import sys


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
    closed = subprocess.run(f"{program} >&-", shell=True, capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
    full = subprocess.run(f"{program} >/dev/full", shell=True, capture_output=True, text=True)
    assert (full.returncode, full.stderr) == (3, "kansoku: No space left on device\n")


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

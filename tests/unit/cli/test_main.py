"""The command line finds commands by file name and keeps its exit codes."""

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

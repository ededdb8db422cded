"""`kansoku top` where there is no terminal."""

import subprocess
import sys

from kansoku.store import LocalStore


def test_without_a_terminal_it_says_so_and_ends(tmp_path):
    """In a pipe no key could end it, and the pipe would fill with pictures."""
    LocalStore(tmp_path).close()
    answer = subprocess.run(
        [sys.executable, "-m", "kansoku", "top", str(tmp_path)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.returncode == 3
    assert answer.stderr.startswith("kansoku: kansoku top needs a terminal (in a script: ")
    assert answer.stdout == ""

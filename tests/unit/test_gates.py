"""The gates of `make check` hold: lint, format, types, layers."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GATES = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["mypy"],
    "layers": ["lint-imports"],
}


@pytest.mark.parametrize("gate", GATES)
def test_gate(gate):
    program, *arguments = GATES[gate]
    answer = subprocess.run(
        [str(Path(sys.executable).parent / program), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-1000:]

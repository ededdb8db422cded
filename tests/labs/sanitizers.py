"""An environment in which what the job compiles is watched by sanitizers."""

import os
import subprocess

_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"


def sanitized_environment(**more: str) -> dict[str, str]:
    """Return ours, with C compiled for the address and undefined-behaviour sanitizers."""
    runtime = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return os.environ | {
        "CC": f"gcc {_FLAGS}",
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        **more,
    }

"""C code under the address and undefined-behaviour sanitizers, which end the program at a breach."""

import shutil
import subprocess
from pathlib import Path


def run_sanitized(folder: Path, program: str, stream: bytes) -> int:
    """Compile a program, give it the stream, and return the number that it printed."""
    (folder / "harness.c").write_text(program)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    subprocess.run(
        [compiler, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
         "-o", folder / "harness", folder / "harness.c"],
        check=True, capture_output=True,
    )  # fmt: skip
    done = subprocess.run(
        [folder / "harness"], input=stream, capture_output=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return int(done.stdout)

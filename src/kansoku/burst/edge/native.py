"""The counter reader compiled by this machine's C compiler; nothing where there is none.

Python pays some 30 µs for being woken each millisecond with cold caches, which is more than the
reading. The compiled reader is made anew at every start (a fraction of a second), into a folder of
its own that is gone when it runs: no cache that somebody else could write to.
"""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["start_native"]

_SOURCE = Path(__file__).with_name("reader.c")
_COMPILERS = ("cc", "gcc", "clang")
_LONGEST_S = 30


def start_native(words: Sequence[str], fd: int) -> "subprocess.Popen[bytes] | None":
    """Start the compiled reader with these arguments; None where it cannot be made or run."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    with (
        contextlib.suppress(OSError, subprocess.SubprocessError),
        tempfile.TemporaryDirectory(prefix="kansoku-burst-") as folder,
    ):
        target = Path(folder) / "reader"
        subprocess.run(
            [compiler, "-O2", "-w", "-o", str(target), str(_SOURCE)],
            check=True, capture_output=True, timeout=_LONGEST_S,
        )  # fmt: skip
        return subprocess.Popen(
            [str(target), *words],
            pass_fds=[fd], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
    return None

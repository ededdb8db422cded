"""The counter reader compiled by this machine's C compiler; nothing where there is none.

Python pays some 30 µs for being woken each millisecond with cold caches, which is more than the
reading. The compiled reader is made anew at every start (a fraction of a second), into a folder of
its own that is gone when it runs: no cache that somebody else could write to.
"""

import contextlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kansoku.formats.edge.compiled import compile_c

__all__ = ["start_native"]

_SOURCE = Path(__file__).with_name("reader.c")


def start_native(words: Sequence[str], fd: int) -> "subprocess.Popen[bytes] | None":
    """Start the compiled reader with these arguments; None where it cannot be made or run."""
    with (
        contextlib.suppress(OSError),
        tempfile.TemporaryDirectory(prefix="kansoku-burst-") as folder,
    ):
        target = Path(folder) / "reader"
        compile_c(_SOURCE, target, "-O2")
        return subprocess.Popen(
            [str(target), *words],
            pass_fds=[fd], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
    return None

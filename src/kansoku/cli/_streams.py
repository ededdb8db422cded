"""Make the three standard streams safe to use, whatever the caller left us.

Done at the file descriptor, below print, Rich, typer and logging, which each answer a lost reader
in a way of their own.
"""

import io
import os
import signal
import sys
from typing import Any, NoReturn

__all__ = ["open_standard_streams"]


def open_standard_streams() -> None:
    """Replace what is closed or breaks.

    Closed streams go to nobody, so that no file takes their numbers; characters that an encoding
    lacks (a Latin-1 terminal, a file name that is no UTF-8) are escaped. Where stdout's reader
    (head, less) is gone we end as other tools do; what stderr does not take is nobody's loss.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _over(_Answer(1, "w", closefd=False), sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _over(_Talk(2, "w", closefd=False), sys.stderr)


def _over(raw: io.FileIO, old: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a stream that writes through ``raw`` as the old one did."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=old.encoding,
        errors="backslashreplace",
        line_buffering=old.line_buffering or old.write_through,  # PYTHONUNBUFFERED
    )


class _Answer(io.FileIO):
    """Stdout: without a reader the command ends, quietly, with what a shell gives for SIGPIPE."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _end_without_reader()


def _end_without_reader() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still buffered
    sys.exit(128 + signal.SIGPIPE)


class _Talk(io.FileIO):
    """Stderr: a full disk or a lost reader changes neither what is done nor the exit code."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)

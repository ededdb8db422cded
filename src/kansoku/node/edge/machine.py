"""The real machine, or a recorded tree of one, behind the Host protocol."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kansoku.node.host import CommandResult, Space

__all__ = ["Machine"]

_READ_LIMIT = 4 * 1024 * 1024


class Machine:
    """Files under a root folder, a clock, and programs of PATH."""

    def __init__(
        self,
        *,
        root: str | Path = "/",
        name: str | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        programs: Callable[[Sequence[str], float], CommandResult] | None = None,
    ) -> None:
        """Read under ``root``; a recorded tree runs no programs unless some are passed in."""
        self._root = str(root).rstrip("/")
        self._name = name or socket.gethostname().partition(".")[0]
        self._now_ns = now_ns
        self._programs = programs

    @property
    def name(self) -> str:
        """Node name."""
        return self._name

    @property
    def is_recorded(self) -> bool:
        """True for a tree that is not this machine's own."""
        return self._root != ""

    def now_ns(self) -> int:
        """Unix time."""
        return self._now_ns()

    def read_bytes(self, path: str) -> bytes | None:
        """Return a file's bytes, at most 4 MiB; None where it is absent or unreadable."""
        # os.open and os.read: a third of the cost of a Python file object, hundreds a round.
        try:
            descriptor = os.open(self._root + path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            first = os.read(descriptor, 65536)
            parts, size = [first], len(first)
            while first and size < _READ_LIMIT:  # procfs gives a page or so at a time
                first = os.read(descriptor, 65536)
                parts.append(first)
                size += len(first)
            return b"".join(parts)
        except OSError:  # such as EINVAL of a counter the firmware does not have
            return None
        finally:
            os.close(descriptor)

    def read(self, path: str) -> str | None:
        """Return a file's text, at most 4 MiB; None where it is absent or unreadable."""
        data = self.read_bytes(path)
        return None if data is None else data.decode("utf-8", "replace")

    def names(self, path: str) -> list[str]:
        """Return the sorted entries of a folder; empty where there is none."""
        try:
            return sorted(os.listdir(self._root + path))  # noqa: PTH208 - names, not paths
        except OSError:
            return []

    def link(self, path: str) -> str | None:
        """Return where a symbolic link points; None where there is none."""
        try:
            return os.readlink(self._root + path)  # noqa: PTH115 - as cheap as it gets
        except OSError:
            return None

    def space(self, path: str) -> Space | None:
        """Return the size of the file system at a path; None where it does not answer."""
        try:
            found = os.statvfs(self._root + path)
        except OSError:
            return None
        return Space(
            total_bytes=found.f_blocks * found.f_frsize,
            free_bytes=found.f_bfree * found.f_frsize,
            available_bytes=found.f_bavail * found.f_frsize,
        )

    def find_program(self, name: str) -> str | None:
        """Return the path of a program, or None."""
        if self._programs is not None:
            return name
        return None if self.is_recorded else shutil.which(name)

    def run(self, command: Sequence[str], *, timeout_s: float) -> CommandResult:
        """Run a program without a shell; code 127 where it is missing, 124 out of time."""
        if self._programs is not None:
            return self._programs(command, timeout_s)
        if self.is_recorded:
            return CommandResult(code=127, stdout="", stderr="a recorded tree runs no programs")
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                timeout=timeout_s,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return CommandResult(code=124, stdout="", stderr=f"no answer in {timeout_s:g} s")
        except OSError as error:
            return CommandResult(code=127, stdout="", stderr=str(error))
        return CommandResult(
            code=done.returncode,
            stdout=done.stdout.decode("utf-8", "replace"),
            stderr=done.stderr.decode("utf-8", "replace"),
        )

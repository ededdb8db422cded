"""What a collector may ask of the machine it runs on.

Collectors see the machine only through this protocol, so that a recorded /proc and /sys tree
with a fixed clock tests them as the real ones do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["CommandResult", "Host", "Space"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a program said."""

    code: int
    """Exit code; 124 where it ran out of time."""
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Size of a file system."""

    total_bytes: int
    free_bytes: int
    """Free for root."""
    available_bytes: int
    """Free for others."""


class Host(Protocol):
    """The machine, or a recording of one."""

    @property
    def name(self) -> str:
        """Node name."""
        ...

    def now_ns(self) -> int:
        """Unix time."""
        ...

    def read(self, path: str) -> str | None:
        """Return a file's text, at most 4 MiB; None where it is absent or unreadable."""
        ...

    def read_bytes(self, path: str) -> bytes | None:
        """Return a file's bytes, at most 4 MiB; None where it is absent or unreadable."""
        ...

    def names(self, path: str) -> list[str]:
        """Return the sorted entries of a folder; empty where there is none."""
        ...

    def link(self, path: str) -> str | None:
        """Return where a symbolic link points; None where there is none."""
        ...

    def space(self, path: str) -> Space | None:
        """Return the size of the file system at a path; None where it does not answer."""
        ...

    def find_program(self, name: str) -> str | None:
        """Return the path of a program, or None."""
        ...

    def run(self, command: Sequence[str], *, timeout_s: float) -> CommandResult:
        """Run a program without a shell."""
        ...

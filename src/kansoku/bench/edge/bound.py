"""Become a command that ends when the process that started it does, even by SIGKILL.

A program, not a module: ``python bound.py PARENT COMMAND…``; PARENT is the process that started it.
The command gets SIGTERM, and torchrun then ends its ranks. Elsewhere than on Linux it just runs.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for the signal, then turn into the command: the request outlives that."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we asked
            sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()

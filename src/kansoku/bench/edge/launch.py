"""Start a benchmark's ranks with torchrun and get back what rank 0 wrote."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kansoku.errors import DependencyError, InputError, PlatformError

__all__ = ["launch_ranks", "need_memory"]

_PR_SET_PDEATHSIG = 1
_LAST_CHANCE_S = 40.0
"""torchrun gives its workers 30 s to end."""
_LONGEST_WORDS = 300
_TERMINATED = 128 + signal.SIGTERM
# The line that names an error, with or without torchrun's rank prefix; torchrun's own summary of
# its children names none.
_ERROR_LINE = re.compile(
    r"^(?:\[?(?:default|rank)?\d*\]?:\s*)?((?:\w+\.)*\w*(?:Error|Exception): .+)"
)


def need_memory(nbytes: float, what: str) -> None:
    """Refuse what this machine's free memory cannot hold; on GPUs their allocator tells."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("ascii"))
    if found is None or Path("/dev/nvidia0").exists():
        return
    free = 1024 * int(found[1])
    if nbytes > free:
        raise InputError(
            f"{what} needs {nbytes / 2**30:,.1f} GiB of memory, {free / 2**30:,.1f} GiB are free",
            remedy="smaller sizes or fewer ranks",
        )


def _die_with_us() -> None:
    """Have the kernel end torchrun when this process ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that ranks are ended and files removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise SystemExit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# What a rank says that C++ ended, and how torchrun tells of one that died without a word.
_OTHER_WORDS = (re.compile(r"what\(\):\s*(.+)"), re.compile(r"(Signal \d+ \(\w+\).*)"))


def _last_words(output: str) -> str:
    """Return the line that names the first error, else the last line with a word in it."""
    lines = [line.strip() for line in output.splitlines() if re.search(r"\w", line)]
    found = (match[1] for line in lines if (match := _ERROR_LINE.match(line)))
    words = next((text for text in found if "ChildFailedError" not in text), None)
    for pattern in _OTHER_WORDS:
        words = words or next((m[1] for line in lines if (m := pattern.search(line))), None)
    return (words or (lines[-1] if lines else "no output"))[:_LONGEST_WORDS]


def _end(child: subprocess.Popen[str]) -> None:
    """Have torchrun end its ranks, which are in sessions of their own, and wait for it."""
    child.terminate()
    try:
        child.communicate(timeout=_LAST_CHANCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()


def _run(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> tuple[int, str]:
    """Run to the end and return exit code and output; what ends us ends the ranks too."""
    with _terminated_like_interrupted():
        try:
            # In a session of its own: Ctrl-C reaches it through us alone, and once.
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                errors="replace", env=environment, start_new_session=True,
                preexec_fn=_die_with_us,  # noqa: PLW1509 - one system call, no lock of ours
            )  # fmt: skip
        except OSError as error:
            raise PlatformError(
                f"{command[0]}: {error.strerror or error}", remedy="is the --launcher right?"
            ) from None
        try:
            out, err = child.communicate(timeout=timeout_s)
        except BaseException:
            _end(child)
            raise
    return child.returncode, err or out


def launch_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    timeout_s: float,
    launcher: Sequence[str] = (),
) -> dict[str, Any]:
    """Run ``module`` on ``ranks`` local ranks; return the JSON that it wrote to ``--out``.

    ``launcher`` replaces torchrun, for several nodes (``srun`` with ``torchrun`` inside). Raises
    PlatformError with the ranks' first error when they fail.
    """
    try:
        import torch  # noqa: F401 - only to know whether it is there
    except ImportError:
        raise DependencyError.missing(
            "benchmarks of collectives and checkpoints", "torch", "train"
        ) from None
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [*(launcher or torchrun), "-m", module, "--out", str(out), *arguments]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        if not launcher:
            # Host names of laptops and containers often do not resolve; one node needs none.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            code, output = _run(command, environment, timeout_s)
        except subprocess.TimeoutExpired:
            raise PlatformError(
                f"{module} did not end within {timeout_s:.0f} s", remedy="fewer sizes or ranks"
            ) from None
        if code != 0 or not out.exists():
            raise PlatformError(
                f"the ranks ended with {code}: {_last_words(output)}",
                remedy="smaller sizes, fewer ranks, or another path",
            )
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result

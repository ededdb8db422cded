"""CPU profiles of a job's processes: py-spy samples them, Pyroscope keeps them."""

import shutil
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kansoku.errors import DependencyError, InputError
from kansoku.formats.folded import merge_folded, parse_folded

__all__ = ["Profile", "find_py_spy", "profile_process", "push_profile"]

_EXTRA_S = 20.0
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Stacks of one process over some seconds."""

    pid: int
    start_ns: int
    end_ns: int
    rate_hz: int
    stacks: dict[str, int]


def find_py_spy() -> str:
    """Return the path of py-spy, beside this Python or in PATH; raise DependencyError."""
    import sys

    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise DependencyError.missing("CPU profiles", "py-spy", "agent")
    return found


def profile_process(pid: int, *, start_ns: int, seconds: int = 5, rate_hz: int = 50) -> Profile:
    """Sample a Python process without stopping it; raise InputError with py-spy's own words.

    ``--nonblocking`` reads a running process: a torn stack now and then is dropped by py-spy, and
    the job never waits for us.
    """
    with tempfile.TemporaryDirectory(prefix="kansoku-profile-") as folder:
        output = Path(folder) / "stacks"
        command = [
            find_py_spy(), "record", "--pid", str(pid), "--duration", str(seconds), "--rate",
            str(rate_hz), "--format", "raw", "--nonblocking", "--output", str(output),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=seconds + _EXTRA_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise InputError(f"py-spy did not end while sampling process {pid}") from None
        text = output.read_text("utf-8", "replace") if output.exists() else ""
    stacks, _ = parse_folded(text)
    if not stacks:
        said = " ".join(done.stderr.split())[-300:] or "no stacks: was the process idle?"
        raise InputError(f"py-spy, process {pid}: {said}", remedy="root or CAP_SYS_PTRACE")
    return Profile(
        pid=pid,
        start_ns=start_ns,
        end_ns=start_ns + seconds * 1_000_000_000,
        rate_hz=rate_hz,
        stacks=stacks,
    )


def push_profile(url: str, profile: Profile, labels: Mapping[str, str]) -> None:
    """Send to Pyroscope's ``/ingest`` in folded format; raise OSError where it is refused."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is not an http:// or https:// address")
    names = ",".join(f"{key}={_clean(value)}" for key, value in sorted(labels.items()))
    query = urllib.parse.urlencode(
        {
            "name": f"kansoku.training{{{names}}}",
            "from": profile.start_ns // 1_000_000_000,
            "until": -(-profile.end_ns // 1_000_000_000),
            "format": "folded",
            "sampleRate": profile.rate_hz,
            "spyName": "pyspy",
            "units": "samples",
        }
    )
    request = urllib.request.Request(  # noqa: S310 - scheme checked above
        f"{url.rstrip('/')}/ingest?{query}",
        data=merge_folded(profile.stacks).encode(),
        headers={"content-type": "text/plain"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the same
        answer.read(4096)


def _clean(value: str) -> str:
    """Keep what Pyroscope's label syntax allows."""
    return "".join(c if c.isalnum() or c in "-_./:" else "_" for c in value)

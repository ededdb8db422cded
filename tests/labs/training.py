"""Start real trainings with and without the recorder, on Gloo, with ranks as processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from kansoku.capture import write_payload
from kansoku.formats.run_directory import RunData, read_run

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("training_ranks.py")
CACHE = ROOT / ".lab" / "capture"
"""Compiled recorders, kept between test runs."""


def bare_environment(**more: object) -> dict[str, str]:
    """Return an environment for a Gloo job on this machine, without the recorder."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KANSOKU_", "SLURM_"))}
    kept.pop("PYTHONPATH", None)
    return kept | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "KANSOKU_CACHE_DIR": str(CACHE),
        "PYTHONWARNINGS": "ignore",
        **{key: str(value) for key, value in more.items()},
    }


def observed_environment(folder: Path, **more: object) -> dict[str, str]:
    """Return the same with the recorder on the path; rings go to ``folder/rings/RUN``."""
    payload = folder / "payload"
    if not payload.exists():
        write_payload(str(payload))
    return bare_environment(
        PYTHONPATH=payload,
        KANSOKU_RING_DIR=folder / "rings",
        KANSOKU_RING_BYTES=2 << 20,
        **more,
    )


@dataclass(frozen=True, kw_only=True)
class Cases:
    """Trainings that ran: what each rank's script counted, and what was recorded."""

    folder: Path

    def counted(self, case: str, rank: int) -> dict:
        return json.loads((self.folder / f"{case}-{rank}.json").read_text())

    def data(self, case: str) -> RunData:
        return read_run(self.folder / "rings" / case)

    def spans(self, case: str, rank: int, kind: str) -> pl.DataFrame:
        spans = self.data(case).spans
        return spans.filter((pl.col("rank") == rank) & (pl.col("kind") == kind))


def start_cases(folder: Path, cases: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """Start the trainings; the caller waits or kills."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), *cases],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its ranks can be ended with it
    )


def end_cases(process: subprocess.Popen) -> str:
    """Kill the trainings and their ranks, which hold the pipe too; return what they said."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    return output


def run_cases(
    folder: Path, cases: list[str], environment: dict[str, str], timeout: float = 240
) -> Cases:
    """Run the trainings to their end."""
    process = start_cases(folder, cases, environment)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output = end_cases(process)
        raise AssertionError(
            f"trainings did not end within {timeout} s:\n{output[-4000:]}"
        ) from None
    assert process.returncode == 0, output[-4000:]
    return Cases(folder=folder)

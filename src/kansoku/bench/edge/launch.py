"""Start a benchmark's ranks with torchrun and get back what rank 0 wrote."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kansoku.errors import DependencyError, PlatformError

__all__ = ["launch_ranks"]


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
    PlatformError with the end of the ranks' output when they fail.
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
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False,
                env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise PlatformError(
                f"{module} did not end within {timeout_s:.0f} s", remedy="fewer sizes or ranks"
            ) from None
        if answer.returncode != 0 or not out.exists():
            tail = "\n".join((answer.stderr or answer.stdout).strip().splitlines()[-6:])
            raise PlatformError(f"{module} ended with {answer.returncode}: {tail}")
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result

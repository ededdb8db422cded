"""The whole story on one machine: train, slow one rank down on purpose, find it."""

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kansoku.app.report import Report, report
from kansoku.app.run import run
from kansoku.errors import DependencyError, PlatformError

__all__ = ["DemoOutcome", "demo", "example_script"]

_PHASES = {"forward": "forward", "data": "data_wait", "optimizer": "optimizer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """What was done to the training, and what the report said."""

    report: Report
    rank: int
    """The rank slowed on purpose."""
    phase: str
    named: bool
    """The report named this rank, and no other."""
    out: Path


def example_script() -> Path:
    """Return the training script of the source tree; raise PlatformError outside one."""
    for folder in Path(__file__).resolve().parents:
        script = folder / "examples" / "train_gpt.py"
        if script.is_file():
            return script
    raise PlatformError(
        "examples/train_gpt.py is not here",
        remedy="run the demo in a source tree, or name a script with --script",
    )


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Let children's stdout go to stderr: what the training says is talk, the report is data."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def demo(
    *,
    out: Path | None = None,
    rank: int | None = None,
    phase: str = "forward",
    ranks: int = 4,
    steps: int = 60,
    script: Path | None = None,
    say: Callable[[str], None] | None = None,
    base_environment: Mapping[str, str] | None = None,
) -> DemoOutcome:
    """Train a small GPT on ``ranks`` ranks with one slowed in ``phase``; report what was found.

    ``rank`` is drawn at random when not given: the report does not know it. Raise DependencyError
    without torch, PlatformError where the training fails.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise DependencyError.missing("kansoku demo", "torch", "train")
    slow = secrets.randbelow(ranks) if rank is None else rank
    folder = Path(tempfile.mkdtemp(prefix="kansoku-demo-")) / "run" if out is None else out
    environment = dict(os.environ if base_environment is None else base_environment)
    environment |= {
        "SLOW_RANK": str(slow),
        "SLOW_PHASE": phase,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = ["--nproc-per-node", str(ranks), str(script or example_script()), "--steps", str(steps)]
    with _stdout_to_stderr():
        outcome = run([*launch, *job], out=folder, base_environment=environment, say=say)
    if outcome.exit_code != 0:
        raise PlatformError(
            f"the training ended with exit code {outcome.exit_code}",
            where=str(folder),
            remedy="its own messages are above",
        )
    answer = report(outcome.out)
    found = [s.rank for s in answer.stragglers.stragglers]
    return DemoOutcome(
        report=answer, rank=slow, phase=_PHASES[phase], named=found == [slow], out=outcome.out
    )

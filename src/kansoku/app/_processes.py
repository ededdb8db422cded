"""Whether a process of this machine still is the one that wrote a ring."""

from pathlib import Path

__all__ = ["start_ticks", "still_runs"]

_PROC = Path("/proc")


def start_ticks(pid: int, proc: Path = _PROC) -> int | None:
    """Return when a process started, in clock ticks since boot; None where it is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    # Zombies have ended; only their parent has not noticed.
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def still_runs(pid: int, started: int, proc: Path = _PROC) -> bool:
    """Say whether the process that wrote ``started`` (ticks since boot) into its ring still runs.

    Numbers of processes are used again, so the number alone says nothing; 0 is a writer that did
    not know when it started.
    """
    ticks = start_ticks(pid, proc)
    return ticks is not None and started in {0, ticks}

"""Slurm's own commands, run so that they do not load slurmdbd or slurmctld more than needed."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from kansoku.errors import PlatformError

__all__ = ["LiveSlurm", "Runner", "local_zone", "run_command"]

Runner = Callable[[Sequence[str], Mapping[str, str]], bytes]
"""Runs a command with extra environment and returns its stdout."""

_TIMEOUT_S = 300
_EVERY_STATE = "PD,R,S,CD,CA,F,TO,NF,PR,BF,DL,OOM,RQ,RS,RV"


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Run one of Slurm's commands; raise PlatformError with what it said."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if shutil.which(command[0], path=path) is None:
        raise PlatformError(
            f"no command {command[0]} here",
            remedy="run this where Slurm's commands are, or give saved outputs as files",
        )
    try:
        answer = subprocess.run(
            list(command),
            capture_output=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, **environment, "PATH": path},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PlatformError(f"{command[0]} did not answer within {_TIMEOUT_S} s") from None
    if answer.returncode:
        said = answer.stderr.decode("utf-8", "replace").strip().splitlines()
        raise PlatformError(f"{' '.join(command[:3])} …: {said[0] if said else 'failed'}")
    return answer.stdout


def local_zone() -> str:
    """Return the name of this machine's time zone (TZ, /etc/timezone, /etc/localtime), or UTC."""
    name = os.environ.get("TZ", "").lstrip(":")
    if (name and "/" in name) or name in {"UTC", "GMT"}:
        return name
    try:
        return Path("/etc/timezone").read_text(encoding="utf-8").strip() or "UTC"
    except OSError:
        pass
    target = os.path.realpath("/etc/localtime")
    marker = "/zoneinfo/"
    return target.split(marker, 1)[1] if marker in target else "UTC"


class LiveSlurm:
    """Asks a live Slurm. ``run`` is passed in so that tests can count and answer the calls."""

    def __init__(self, run: Runner = run_command, *, cluster: str | None = None) -> None:
        """Ask the default cluster, or ``cluster`` (sacct -M)."""
        self._run = run
        self._cluster = ["-M", cluster] if cluster else []

    def known_columns(self, wanted: Sequence[str]) -> list[str]:
        """Return those of the columns that this version of sacct has; asks no daemon."""
        known = {w.lower() for w in self._run(["sacct", "--helpformat"], {}).decode().split()}
        return [name for name in wanted if name.lower() in known]

    def sacct_text(self, since_s: int, until_s: int, columns: Sequence[str]) -> bytes:
        """Return ``sacct -P`` of the window with a delimiter that names hardly hold.

        Every state is named: without them sacct goes by eligibility and leaves out jobs that
        were held and cancelled before they ever were eligible.
        """
        window = ["-S", _stamp(since_s), "-E", _stamp(until_s), "-s", _EVERY_STATE]
        command = [
            "sacct", *self._cluster, "-a", "-D", *window, "-P", "--delimiter=\x1f",
            f"--format={','.join(columns)}",
        ]  # fmt: skip
        return self._run(command, {"TZ": "UTC"})

    def job_text(self, job: str, columns: Sequence[str]) -> bytes:
        """Return ``sacct -P`` of one job, all its incarnations, delimited as sacct_text."""
        command = [
            "sacct", *self._cluster, "-a", "-D", "-j", job, "-P", "--delimiter=\x1f",
            f"--format={','.join(columns)}",
        ]  # fmt: skip
        return self._run(command, {"TZ": "UTC"})

    def nodes(self) -> bytes:
        """Return ``sinfo --json``."""
        return self._run(["sinfo", *self._cluster, "--json"], {})

    def nodes_text(self) -> bytes:
        """Return ``scontrol show nodes``: the same in every version."""
        return self._run(["scontrol", *self._cluster, "show", "nodes"], {})

    def queue(self) -> bytes:
        """Return ``squeue --json``."""
        return self._run(["squeue", *self._cluster, "--json"], {})

    def node_events(self, since_s: int) -> bytes:
        """Return down and drain intervals, times in UTC."""
        command = [
            "sacctmgr", "-P", "show", "event", f"start={_stamp(since_s)}",
            "format=Cluster,NodeName,TimeStart,TimeEnd,State,Reason,User",
        ]  # fmt: skip
        return self._run(command, {"TZ": "UTC"})

    def set_admin_comment(self, job: str, text: str) -> None:
        """Write a job's AdminComment (needs an operator's right); seen by sacct afterwards."""
        self._run(["sacctmgr", "-i", "modify", "job", f"jobid={job}", "set",
                   f"admincomment={text}"], {})  # fmt: skip


def _stamp(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S")

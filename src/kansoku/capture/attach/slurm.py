"""Which processes of this node belong to a Slurm job: by ``scontrol listpids``, by cgroup."""

from __future__ import annotations

import re

__all__ = ["cgroup_job", "parse_listpids"]

_JOB_CGROUP = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)


def parse_listpids(text: str, job: str) -> list[int]:
    """Return the process ids in the answer of ``scontrol listpids`` that are the job's.

    Columns PID, JOBID, STEPID, LOCALID, GLOBALID; the slurmstepd's children say ``-``.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines or lines[0][:2] != ["PID", "JOBID"]:
        return []
    return [
        int(fields[0])
        for fields in lines[1:]
        if len(fields) >= 2 and fields[0].isdigit() and fields[1] == job and int(fields[0]) > 0
    ]


def cgroup_job(text: str) -> str | None:
    """Return the Slurm job that ``/proc/PID/cgroup`` names, if one."""
    found = _JOB_CGROUP.search(text)
    return found[1] if found else None

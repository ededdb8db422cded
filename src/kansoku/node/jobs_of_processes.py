"""Which Slurm job a process belongs to, from its control group."""

import re

__all__ = ["slurm_job_of"]

_JOB = re.compile(r"/job_(\d{1,10})(?:/|$)", re.MULTILINE)


def slurm_job_of(cgroup: str) -> str | None:
    """Return the raw job id in the text of /proc/PID/cgroup; None outside Slurm.

    >>> slurm_job_of("0::/system.slice/slurmstepd.scope/job_417/step_0/user/task_3")
    '417'
    """
    match = _JOB.search(cgroup)
    return match[1] if match else None

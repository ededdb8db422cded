"""Query parts that dashboards share."""

from collections.abc import Sequence
from typing import Any

from kansoku.deploy.dashboards._panels import choice

__all__ = ["FREE", "GPU", "NODE", "by_job", "grown", "job_variable", "node_variable", "per_job"]

NODE = 'host_name=~"$node"'
GPU = f'{NODE},hw_type="gpu",hw_name=~"$gpu"'
_HELD = "max by (host_name, hw_name, slurm_job_id, slurm_user) (%kansoku.slurm.job.gpu{{{match}}})"
FREE = " unless on (host_name, hw_name) max by (host_name, hw_name) (%kansoku.slurm.job.gpu)"


def by_job(device: str, *, match: str = "") -> str:
    """Return a device query joined with the jobs that hold the GPU: one series a job and GPU.

    ``device`` has one series a host_name and hw_name. Device series carry no job id; the mapping
    series does, so the join stands on its side.
    """
    return f"{_HELD.format(match=match)} * on (host_name, hw_name) group_left () {device}"


def grown(metric: str, match: str) -> str:
    """Return how much a rarely moving counter grew over the time chosen.

    Not ``increase``: VictoriaMetrics takes a new series to start at zero, so that a GPU with five
    errors in its life would show five new ones whenever its agent starts.
    """
    return f"{metric}{{{match}}} - min_over_time({metric}{{{match}}}[$__range])"


def per_job(metric: str, more: str = "") -> str:
    """Return a GPU metric of the chosen job."""
    device = f'max by (host_name, hw_name) ({metric}{{hw_type="gpu"{more}}})'
    return by_job(device, match='slurm_job_id=~"$job"')


def node_variable(metric: str = "kansoku.agent.samples") -> Any:
    """Return the variable ``$node``: nodes that have this metric."""
    return choice("node", "node", f"label_values(%{metric}, host_name)")


def job_variable() -> Sequence[Any]:
    """Return the variable ``$job``."""
    return [
        choice("job", "job", "label_values(%kansoku.slurm.job.state, slurm_job_id)", several=False)
    ]

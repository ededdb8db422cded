"""Which of the node's GPUs a process may use, by its environment: CUDA is not touched."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["gpu_facts"]

_NAMES = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")


def gpu_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what an environment says of a process's GPUs, as facts of its ring."""
    return {name: environment[name][:512] for name in _NAMES if name in environment}

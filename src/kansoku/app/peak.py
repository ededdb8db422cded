"""The peak that MFU is measured against: a datasheet's, or what a short product shows of CPUs."""

import math
import os
from collections.abc import Mapping
from typing import Any

from kansoku.app.cpu_peak import measure_cpu_peak
from kansoku.catalog.accelerators import accelerator
from kansoku.errors import InputError
from kansoku.model import RunFacts

__all__ = ["gpu_name", "gpu_peak", "run_peak"]

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float8": "fp8", "bf16": "bf16"}


def gpu_name(kind: str | None) -> str | None:
    """Return the catalogue's name of what Slurm or a cluster file calls a GPU; None if unknown.

    >>> gpu_name("h100")
    'h100-sxm'
    """
    for name in (kind, f"{kind}-sxm") if kind else ():
        try:
            return accelerator(str(name)).name
        except InputError:
            continue
    return None


def gpu_peak(kind: str | None) -> float | None:
    """Return the dense bf16 peak of one GPU in FLOP/s; None where the kind is unknown."""
    name = gpu_name(kind)
    return None if name is None else accelerator(name).peak("bf16")


def _flops(measured: Mapping[str, Any]) -> float | None:
    """Return a peak that was measured; None for anything else that stands there."""
    value = measured.get("flops")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None


def run_peak(facts: RunFacts, measured: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the peak of all devices of a run in FLOP/s and its source, or None and the reason.

    ``measured`` is what ``kansoku run`` measured of one node's CPUs; without it the CPUs are
    measured now if the run was on this very machine.
    """
    devices = {rank.device for rank in facts.ranks}
    if not devices or None in devices:
        return None, "the device of some ranks is not known"
    nodes = {rank.node for rank in facts.ranks}
    if devices == {"cpu"}:
        if _flops(measured) is None:
            if nodes != {os.uname().nodename}:
                return None, "the CPUs' peak was not measured when the run was made"
            measured = measure_cpu_peak()
        source, flops = str(measured.get("source", "measured")), _flops(measured)
        return (None if flops is None else flops * len(nodes)), source
    precision = "bf16"
    stated = {rank.extra.get("dtype", "") for rank in facts.ranks} - {""}
    if len(stated) == 1:
        precision = _PRECISIONS.get(stated.pop().removeprefix("torch."), precision)
    total, sources = 0.0, []
    # A rank that was started again is there twice, its GPU is not.
    for rank in {(rank.rank, rank.node): rank for rank in facts.ranks}.values():
        try:
            device = accelerator(str(rank.device))
            total += device.peak(precision)
        except InputError as error:
            return None, str(error)
        sources.append(f"{device.title} dense {precision}: {device.source}")
    return total, "; ".join(dict.fromkeys(sources))

"""The peak that MFU is measured against: a datasheet's, or a short matrix product's on CPUs."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kansoku.catalog.accelerators import accelerator
from kansoku.errors import InputError
from kansoku.model import RunFacts

__all__ = ["gpu_name", "gpu_peak", "measure_cpu_peak", "run_peak"]

_SIZE = 768
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float8": "fp8", "bf16": "bf16"}


def measure_cpu_peak(
    *, seconds: float = 0.6, clock: Callable[[], int] = time.perf_counter_ns
) -> dict[str, Any]:
    """Return what this machine's CPUs reach in float32 matrix products: ``flops, source``.

    The best of repeated products counts: a peak is what the hardware can do, not its mean under
    load. All cores take part, as the BLAS library decides.
    """
    rng = np.random.default_rng(0)
    a = rng.standard_normal((_SIZE, _SIZE), dtype=np.float32)
    b = rng.standard_normal((_SIZE, _SIZE), dtype=np.float32)
    out = np.empty((_SIZE, _SIZE), dtype=np.float32)
    np.matmul(a, b, out=out)
    best = None
    end = clock() + round(seconds * 1e9)
    while best is None or clock() < end:
        begin = clock()
        np.matmul(a, b, out=out)
        took = max(clock() - begin, 1)
        best = took if best is None else min(best, took)
    return {
        "flops": 2.0 * _SIZE**3 / (best * 1e-9),
        "source": f"measured: float32 matrix product of {_SIZE}, all CPUs of {os.uname().nodename}",
        "precision": "float32",
    }


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
        if not isinstance(measured.get("flops"), int | float):
            if nodes != {os.uname().nodename}:
                return None, "the CPUs' peak was not measured when the run was made"
            measured = measure_cpu_peak()
        return float(measured["flops"]) * len(nodes), str(measured.get("source", "measured"))
    precision = "bf16"
    stated = {rank.extra.get("dtype", "") for rank in facts.ranks} - {""}
    if len(stated) == 1:
        precision = _PRECISIONS.get(stated.pop().removeprefix("torch."), precision)
    total, sources = 0.0, []
    for rank in facts.ranks:
        try:
            device = accelerator(str(rank.device))
            total += device.peak(precision)
        except InputError as error:
            return None, str(error)
        sources.append(f"{device.title} dense {precision}: {device.source}")
    return total, "; ".join(dict.fromkeys(sources))

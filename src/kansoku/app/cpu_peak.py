"""What a machine's CPUs can reach, from a product so small that other work hardly disturbs it.

A product on all cores at once is as slow as its slowest thread: on a busy machine it shows what was
left over, a fifth of the peak. A product of one thread that takes 0.2 ms lies within one turn on a
CPU, so the best of hundreds is undisturbed however busy the machine is. Times the cores that the
job may use, that is the peak of all of them; cores are taken to be alike.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

__all__ = ["core_seconds", "measure_cpu_peak", "usable_cores"]

_SIZE = 256
_LONGEST_S = 30.0
# A process of its own: how many threads a BLAS library uses is settled when it is loaded.
_LIBRARIES = ("OPENBLAS", "MKL", "OMP", "BLIS")
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in _LIBRARIES}
_PRODUCTS = """
import sys, time
import numpy as np
size, seconds = int(sys.argv[1]), float(sys.argv[2])
rng = np.random.default_rng(0)
a, b = (rng.random((size, size), dtype=np.float32) for _ in range(2))
out = np.empty_like(a)
best, count, until = 0, 0, time.monotonic() + seconds
while count < 20 or time.monotonic() < until:
    begin = time.perf_counter_ns()
    np.matmul(a, b, out=out)
    took = time.perf_counter_ns() - begin
    best, count = min(best or took, took), count + 1
print(best, count)
"""
_CPUS = Path("/sys/devices/system/cpu")
_GROUPS = Path("/sys/fs/cgroup")


def measure_cpu_peak(
    *, seconds: float = 0.25, run: Callable[[float], tuple[int, int]] | None = None
) -> dict[str, Any]:
    """Return ``{"flops", "source", "precision"}`` of float32 products on all usable cores.

    Where it cannot be measured ``flops`` is None and ``source`` is the reason. ``run`` does
    products for so many seconds and returns the shortest in ns and how many there were.
    """
    try:
        best_ns, count = (run or _one_thread)(seconds)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"flops": None, "source": f"the CPUs' peak was not measured: {error}"}
    cores = usable_cores(os.sched_getaffinity(0), _siblings, quota=core_seconds())
    return {
        "flops": 2.0 * _SIZE**3 / (best_ns * 1e-9) * cores,
        "source": f"measured: float32 matrix product of {_SIZE}×{_SIZE} on one core, best of "
        f"{count}, times {cores:g} core{'s' if cores != 1 else ''}",
        "precision": "float32",
    }


def _one_thread(seconds: float) -> tuple[int, int]:
    paths = os.pathsep.join(path for path in sys.path if path)
    found = subprocess.run(
        [sys.executable, "-c", _PRODUCTS, str(_SIZE), str(seconds)],
        env={**os.environ, **_ONE_THREAD, "PYTHONPATH": paths, "KANSOKU_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=True,
    ).stdout.split()
    best_ns, count = (int(word) for word in found)
    if best_ns <= 0:
        raise ValueError("a product took no time")
    return best_ns, count


def usable_cores(
    cpus: Collection[int], siblings: Callable[[int], str], *, quota: float | None = None
) -> float:
    """Return how many cores the CPUs stand for, no more than the quota allows.

    Threads of one core share its arithmetic units. ``siblings`` names those of a CPU, in any form.

    >>> usable_cores({0, 1, 2, 3}, lambda cpu: f"{cpu % 2},{cpu % 2 + 2}")
    2.0
    >>> usable_cores(range(64), str, quota=1.5)
    1.5
    """
    cores = float(len({siblings(cpu) for cpu in cpus}))
    return cores if quota is None else min(cores, quota)


def _siblings(cpu: int) -> str:
    try:
        file = _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        return file.read_text(encoding="utf-8").strip() or str(cpu)
    except OSError:
        return str(cpu)


def core_seconds(root: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the CPU seconds a second that control groups allow; None without a limit."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    place = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = root / place.lstrip("/")
    limits = []
    for group in (folder, *folder.parents):
        try:
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()[:2]
            limits += [] if quota == "max" else [int(quota) / int(period)]
        except (OSError, ValueError, ZeroDivisionError):
            pass
        if group == root:
            break
    return min(limits, default=None)

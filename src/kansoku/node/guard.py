"""Is this node fit for a job? The checks of the node guard, in the order of what they cost.

Each check sees the machine through :class:`Host` and says ``ok``, ``warn``, ``block`` or
``skipped`` with a sentence. Only what would spoil a job blocks; a check that cannot see is skipped,
never a reason to block. Nothing here imports more than the standard library, because the guard
runs before every job and its time is counted from the start of the process.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from kansoku.errors import ConfigurationError
from kansoku.formats.kernel_log import classify, parse_kmsg
from kansoku.node.host import Host

__all__ = ["CHECKS", "Check", "GpuReadings", "GuardPolicy", "guard_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """What the node must have. None: taken from the machine itself, or not checked."""

    gpus: int | None = None
    """None: as many as NVIDIA devices stand on the PCI bus."""
    nics: tuple[str, ...] = ()
    """RDMA devices or interfaces whose link must be up."""
    nic_rate_gbits: float | None = None
    """Least rate of those links."""
    mounts: tuple[str, ...] = ()
    """Must be mounted, answer and be writable."""
    disks: tuple[str, ...] = ("/", "/tmp", "/dev/shm")  # noqa: S108 - looked at, not written
    least_free_ratio: float = 0.02
    memory_bytes: int | None = None
    """Least memory of the node."""
    xid_look_back_s: float = 86_400.0
    """Fatal Xids younger than this block, unless the node was booted since."""
    ecc_uncorrected: int = 0
    """Uncorrected errors of a GPU since boot that are still accepted."""
    pcie_width: bool = True
    """Block on a GPU with fewer PCIe lanes than it has."""
    clock_error_s: float = 1.0
    """Largest error of the clock that the kernel may estimate."""


def guard_policy(table: Mapping[str, Any], where: str) -> GuardPolicy:
    """Return the policy of a parsed TOML file; raise ConfigurationError for what it has not."""
    known = {field.name: getattr(GuardPolicy(), field.name) for field in fields(GuardPolicy)}
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigurationError(
                f"unknown key {key!r}", where=where, remedy=f"known: {', '.join(known)}"
            )
        if isinstance(known[key], tuple):
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise ConfigurationError(f"{key} must be a list of names", where=where)
            changes[key] = tuple(value)
        elif isinstance(known[key], bool) != isinstance(value, bool) or not isinstance(
            value, int | float
        ):
            raise ConfigurationError(f"{key} must be a number, not {value!r}", where=where)
        else:
            changes[key] = value
    return GuardPolicy(**changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What one check found."""

    name: str
    status: str
    """``ok``, ``warn``, ``block``, ``skipped``, ``late`` (no answer in time), ``broken``."""
    sentence: str


class GpuReadings(Protocol):
    """What the guard asks of NVML, and of the kernel's clock."""

    def gpus(self) -> list[Mapping[str, float | None]] | None:
        """Return readings of each GPU (``lost`` 1 where it does not answer); None: no library."""

    def clock(self) -> tuple[bool, float] | None:
        """Return whether the clock is synchronised and its largest error in seconds."""

    def kernel_log(self) -> list[str]:
        """Return the records of /dev/kmsg that the kernel still holds."""

    def hardware_codes(self) -> frozenset[tuple[str, int | None]]:
        """Return the Xids and SXids that speak against the hardware and kill jobs."""


_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")


def _on_bus(host: Host) -> int:
    count = 0
    for name in host.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{name}"
        if (host.read(f"{folder}/vendor") or "").strip() != _NVIDIA:
            continue
        if (host.read(f"{folder}/class") or "").startswith(_GPU_CLASSES):
            count += 1
    return count


def _gpus(host: Host, policy: GuardPolicy, readings: GpuReadings) -> Iterable[Check]:
    bus = _on_bus(host)
    wanted = policy.gpus if policy.gpus is not None else bus
    found = readings.gpus()
    if found is None:
        if wanted == 0:
            yield Check(name="gpus", status="skipped", sentence="no GPU on this node")
        else:
            yield Check(
                name="gpus", status="block", sentence=f"{wanted} GPUs expected, no driver answers"
            )
        return
    good = [gpu for gpu in found if not gpu.get("lost")]
    if len(good) < wanted:
        yield Check(name="gpus", status="block", sentence=f"{len(good)} of {wanted} GPUs answer")
    else:
        yield Check(name="gpus", status="ok", sentence=f"{len(good)} GPUs answer")
    yield from _gpu_health(found, policy)


def _gpu_health(found: list[Mapping[str, float | None]], policy: GuardPolicy) -> Iterable[Check]:
    bad: list[str] = []
    for index, gpu in enumerate(found):
        errors = gpu.get("ecc_uncorrected")
        if errors is not None and errors > policy.ecc_uncorrected:
            bad.append(f"GPU {index} has {errors:.0f} uncorrected memory errors since boot")
        if gpu.get("remap_failed"):
            bad.append(f"GPU {index} could not remap a memory row: it must be replaced")
        elif gpu.get("remap_pending"):
            bad.append(f"GPU {index} has a row remapping pending: it needs a reset")
        if gpu.get("recovery_action"):
            bad.append(f"GPU {index} asks for recovery action {gpu['recovery_action']:.0f}")
    yield Check(
        name="ecc",
        status="block" if bad else "ok",
        sentence="; ".join(bad) or "no uncorrected memory errors, no row to remap",
    )
    narrow = [
        f"GPU {index} has {gpu['pcie_width']:.0f} of {gpu['pcie_width_max']:.0f} PCIe lanes"
        for index, gpu in enumerate(found)
        if (gpu.get("pcie_width") or 0) < (gpu.get("pcie_width_max") or 0)
        and gpu.get("pcie_width") is not None
    ]
    yield Check(
        name="pcie",
        status=("block" if policy.pcie_width else "warn") if narrow else "ok",
        sentence="; ".join(narrow) or "all GPUs have their PCIe lanes",
    )


def _xids(host: Host, policy: GuardPolicy, readings: GpuReadings) -> Iterable[Check]:
    text = host.read("/proc/uptime")
    if text is None:
        return
    codes = readings.hardware_codes()
    since_us = (float(text.split()[0]) - policy.xid_look_back_s) * 1e6
    fatal: list[str] = []
    for line in readings.kernel_log():
        if "Xid" not in line:
            continue
        record = parse_kmsg(line)
        message = classify(record) if record else None
        if record is None or message is None or (record.boot_us or 0) < since_us:
            continue
        if message.kind in {"xid", "sxid"} and (message.kind, message.code) in codes:
            fatal.append(f"{message.kind.upper()} {message.code} on {message.pci}")
        elif message.kind == "gpu_lost":
            fatal.append(f"GPU {message.pci} fell off the bus")
    some = "; ".join(dict.fromkeys(fatal))
    yield Check(
        name="xid",
        status="block" if fatal else "ok",
        sentence=some or f"no fatal Xid in the last {policy.xid_look_back_s / 3600:g} h",
    )


_RATE = re.compile(r"([\d.]+)\s*Gb")


def _nics(host: Host, policy: GuardPolicy, readings: GpuReadings) -> Iterable[Check]:  # noqa: ARG001
    bad, seen = [], 0
    for name in policy.nics:
        ports = host.names(f"/sys/class/infiniband/{name}/ports")
        if ports:
            seen += 1
            folder = f"/sys/class/infiniband/{name}/ports/{ports[0]}"
            state = (host.read(f"{folder}/state") or "").partition(":")[2].strip()
            rate = _RATE.match((host.read(f"{folder}/rate") or "").strip())
            speed = float(rate[1]) if rate else None
        elif (state := (host.read(f"/sys/class/net/{name}/operstate") or "").strip()) != "":
            seen += 1
            text = (host.read(f"/sys/class/net/{name}/speed") or "").strip()
            speed = float(text) / 1000 if text.isdigit() else None
            state = "ACTIVE" if state in {"up", "unknown"} else state
        else:
            bad.append(f"{name} is not there")
            continue
        if state != "ACTIVE":
            bad.append(f"{name} is {state.lower()}")
        elif policy.nic_rate_gbits and speed is not None and speed < policy.nic_rate_gbits:
            bad.append(f"{name} runs at {speed:g} of {policy.nic_rate_gbits:g} Gb/s")
    if bad:
        yield Check(name="nics", status="block", sentence="; ".join(bad))
    elif seen:
        yield Check(name="nics", status="ok", sentence=f"{seen} links are up")
    else:
        yield Check(name="nics", status="skipped", sentence="the policy names no NICs")


def _clock(host: Host, policy: GuardPolicy, readings: GpuReadings) -> Iterable[Check]:  # noqa: ARG001
    clock = readings.clock()
    if clock is None:
        return
    synchronised, error_s = clock
    if not synchronised:
        yield Check(name="clock", status="warn", sentence="the clock is not synchronised")
    elif error_s > policy.clock_error_s:
        text = f"the clock may be wrong by {error_s:.1f} s"
        yield Check(name="clock", status="warn", sentence=text)
    else:
        text = f"synchronised, at most {error_s * 1e3:.0f} ms off"
        yield Check(name="clock", status="ok", sentence=text)


def _memory(host: Host, policy: GuardPolicy, readings: GpuReadings) -> Iterable[Check]:  # noqa: ARG001
    total = re.search(r"MemTotal:\s+(\d+) kB", host.read("/proc/meminfo") or "")
    bad = []
    if total and policy.memory_bytes and int(total[1]) * 1024 < 0.95 * policy.memory_bytes:
        have, want = int(total[1]) / 2**20, policy.memory_bytes / 2**30
        bad.append(f"{have:.0f} of {want:.0f} GiB of memory")
    for name in host.names("/sys/devices/system/edac/mc"):
        count = (host.read(f"/sys/devices/system/edac/mc/{name}/ue_count") or "0").strip()
        if count.isdigit() and int(count) > 0:
            bad.append(f"{count} uncorrected memory errors on {name}")
    yield Check(
        name="memory", status="block" if bad else "ok", sentence="; ".join(bad) or "memory is whole"
    )


def _mounted(host: Host) -> dict[str, set[str]]:
    table = {}
    for line in (host.read("/proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) >= 4:
            table[words[1].replace("\\040", " ")] = set(words[3].split(","))
    return table


def _disks(host: Host, policy: GuardPolicy, readings: GpuReadings) -> Iterable[Check]:  # noqa: ARG001
    mounted, bad = _mounted(host), []
    for path in policy.disks:
        if "ro" in mounted.get(path, set()):
            bad.append(f"{path} is read-only")
        space = host.space(path)
        if space is None or space.total_bytes == 0:
            continue
        if space.available_bytes < policy.least_free_ratio * space.total_bytes:
            bad.append(f"{path} has {space.available_bytes / space.total_bytes:.1%} left")
    yield Check(
        name="disk",
        status="block" if bad else "ok",
        sentence="; ".join(bad) or "local disks have room",
    )


def _mounts(host: Host, policy: GuardPolicy, readings: GpuReadings) -> Iterable[Check]:  # noqa: ARG001
    if not policy.mounts:
        yield Check(name="mounts", status="skipped", sentence="the policy names no mounts")
        return
    mounted = _mounted(host)
    bad = [f"{path} is not mounted" for path in policy.mounts if path not in mounted]
    bad += [f"{path} is read-only" for path in policy.mounts if "ro" in mounted.get(path, set())]
    bad += [
        f"{path} does not answer"
        for path in policy.mounts
        if path in mounted and host.space(path) is None
    ]
    yield Check(
        name="mounts",
        status="block" if bad else "ok",
        sentence="; ".join(bad) or f"{len(policy.mounts)} mounts answer",
    )


_CheckFunction = Callable[[Host, GuardPolicy, GpuReadings], Iterable[Check]]

CHECKS: tuple[tuple[str, tuple[_CheckFunction, ...], tuple[str, ...]], ...] = (
    ("quick", (_memory, _disks, _clock, _nics, _xids), ("memory", "disk", "clock", "nics", "xid")),
    ("gpu", (_gpus,), ("gpus", "ecc", "pcie")),
    ("mounts", (_mounts,), ("mounts",)),
)
"""Groups that run beside each other, because a driver or a dead server may hold one for good:
name, functions, and the names of what they answer."""

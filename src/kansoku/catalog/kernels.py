"""What a row of a GPU trace is: kinds, collectives, kernel families, as data with sources."""

import re
import tomllib
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import resources

__all__ = ["KernelRules", "RowKind", "kernel_rules"]


class RowKind(IntEnum):
    """Kind of a trace row; the numbers are column codes and never change."""

    OTHER = 0
    COMPUTE = 1
    COLLECTIVE = 2
    MEMCPY = 3
    MEMSET = 4
    DEVICE_SYNC = 5
    """Waiting on a device stream: never work."""
    LAUNCH = 6
    """A runtime or driver call on the host."""
    ANNOTATION = 7
    DEVICE_ANNOTATION = 8
    MODULE = 9
    """A call of an ``nn.Module``, from the Python stack."""
    HOST_COLLECTIVE = 10
    """A collective as the host saw it (``record_param_comms``, ``nccl:``, ``gloo:``)."""
    OPERATOR = 11
    PYTHON = 12


_FROM_DATA = {
    "kernel": RowKind.COMPUTE,
    "memcpy": RowKind.MEMCPY,
    "memset": RowKind.MEMSET,
    "device_sync": RowKind.DEVICE_SYNC,
    "launch": RowKind.LAUNCH,
    "annotation": RowKind.ANNOTATION,
    "device_annotation": RowKind.DEVICE_ANNOTATION,
    "operator": RowKind.OPERATOR,
    "python": RowKind.PYTHON,
    "host_collective": RowKind.HOST_COLLECTIVE,
    "other": RowKind.OTHER,
}


@dataclass(frozen=True, kw_only=True)
class KernelRules:
    """The rules of ``data/kernel_rules.toml``, compiled."""

    categories: dict[str, RowKind]
    """Lower-case category to kind."""
    sync_names: tuple[re.Pattern[str], ...]
    idle_calls: tuple[re.Pattern[str], ...]
    """Names of runtime calls that launch nothing and wait for nothing."""
    collective_names: tuple[re.Pattern[str], ...]
    operations: tuple[tuple[re.Pattern[str], str], ...]
    families: tuple[tuple[re.Pattern[str], str], ...]
    dtype_bytes: dict[str, int]
    bus_factors: dict[str, str]

    def category(self, text: str | None) -> RowKind:
        """Return the kind of a category; unknown ones are OTHER and never count as work."""
        return self.categories.get((text or "").lower(), RowKind.OTHER)

    def refine(self, kind: RowKind, name: str, *, has_collective_arguments: bool) -> RowKind:
        """Return the final kind of a row of a category, by arguments first, then by name."""
        match kind:
            case RowKind.COMPUTE:
                if any(rule.search(name) for rule in self.sync_names):
                    return RowKind.DEVICE_SYNC
                if has_collective_arguments or any(r.search(name) for r in self.collective_names):
                    return RowKind.COLLECTIVE
            case RowKind.OPERATOR if name in {"record_param_comms", "c10d::record_param_comms"}:
                return RowKind.HOST_COLLECTIVE
            case RowKind.ANNOTATION if name.startswith(
                ("nccl:", "gloo:", "c10d::", "mpi:", "xccl:")
            ):
                return RowKind.HOST_COLLECTIVE
            case RowKind.PYTHON if name.startswith("nn.Module: "):
                return RowKind.MODULE
            case _:
                pass
        return kind

    def is_idle_call(self, name: str) -> bool:
        """Say whether a runtime call of this name neither launches nor waits."""
        return any(rule.search(name) for rule in self.idle_calls)

    def operation(self, name: str) -> str:
        """Return the collective's operation in one word, ``unknown`` where nothing matches."""
        return next((word for rule, word in self.operations if rule.search(name)), "unknown")

    def family(self, name: str) -> str:
        """Return the family of a compute kernel, ``other`` where nothing matches."""
        return next((word for rule, word in self.families if rule.search(name)), "other")

    def bus_factor(self, operation: str, ranks: int | None) -> float | None:
        """Return bus over algorithm bandwidth as nccl-tests defines it; None where unknown."""
        factor = self.bus_factors.get(operation)
        if factor == "unit":
            return 1.0
        if factor is None or ranks is None or ranks < 1:
            return None
        return (2.0 if factor == "two" else 1.0) * (ranks - 1) / ranks


@cache
def kernel_rules() -> KernelRules:
    """Read the shipped rules."""
    text = (resources.files("kansoku.catalog") / "data" / "kernel_rules.toml").read_text("utf-8")
    data = tomllib.loads(text)
    return KernelRules(
        categories={name: _FROM_DATA[kind] for name, kind in data["categories"].items()},
        sync_names=tuple(re.compile(row["pattern"]) for row in data["sync_names"]),
        idle_calls=tuple(re.compile(row["pattern"]) for row in data["idle_calls"]),
        collective_names=tuple(re.compile(row["pattern"]) for row in data["collective_names"]),
        operations=tuple((re.compile(r["pattern"]), r["operation"]) for r in data["operations"]),
        families=tuple((re.compile(r["pattern"]), r["family"]) for r in data["families"]),
        dtype_bytes=data["dtype_bytes"],
        bus_factors=data["bus_factor"],
    )

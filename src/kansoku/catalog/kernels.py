"""What a row of a GPU trace is: kinds, collectives, kernel families, as data with sources."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

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


_SEARCHED_CHARACTERS = 4096
"""Of a name; bounds the work on a hostile one."""
_REMEMBERED_NAMES = 1 << 14


@dataclass(frozen=True, slots=True)
class _Rule:
    words: tuple[str, ...]
    pattern: str
    """Searched with :mod:`re`, which compiles it at its first use; empty: none."""
    needs: tuple[str, ...]
    """One of these stands in every name in which the pattern can be found; an empty one in all."""
    answer: str = ""


@dataclass(frozen=True, kw_only=True)
class KernelRules:
    """The rules of ``data/kernel_rules.toml``."""

    categories: dict[str, RowKind]
    """Lower-case category to kind."""
    sync_names: tuple[_Rule, ...]
    idle_calls: tuple[_Rule, ...]
    """Names of runtime calls that launch nothing and wait for nothing."""
    collective_names: tuple[_Rule, ...]
    operations: tuple[_Rule, ...]
    families: tuple[_Rule, ...]
    dtype_bytes: dict[str, int]
    bus_factors: dict[str, str]
    _families_of: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Answers given; the ranks of a job run the same kernels."""

    def category(self, text: str | None) -> RowKind:
        """Return the kind of a category; unknown ones are OTHER and never count as work."""
        return self.categories.get((text or "").lower(), RowKind.OTHER)

    def refine(self, kind: RowKind, name: str, *, has_collective_arguments: bool) -> RowKind:
        """Return the final kind of a row of a category, by arguments first, then by name."""
        match kind:
            case RowKind.COMPUTE:
                if _first(self.sync_names, name) is not None:
                    return RowKind.DEVICE_SYNC
                if has_collective_arguments or _first(self.collective_names, name) is not None:
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
        return _first(self.idle_calls, name) is not None

    def operation(self, name: str) -> str:
        """Return the collective's operation in one word, ``unknown`` where nothing matches."""
        found = _first(self.operations, name)
        return "unknown" if found is None else found.answer

    def family(self, name: str) -> str:
        """Return the family of a compute kernel, ``other`` where nothing matches."""
        known = self._families_of.get(name)
        if known is None:
            found = _first(self.families, name)
            known = "other" if found is None else found.answer
            if len(self._families_of) < _REMEMBERED_NAMES:
                self._families_of[name] = known
        return known

    def bus_factor(self, operation: str, ranks: int | None) -> float | None:
        """Return bus over algorithm bandwidth as nccl-tests defines it; None where unknown."""
        factor = self.bus_factors.get(operation)
        if factor == "unit":
            return 1.0
        if factor is None or ranks is None or ranks < 1:
            return None
        return (2.0 if factor == "two" else 1.0) * (ranks - 1) / ranks


def _first(rules: tuple[_Rule, ...], name: str) -> _Rule | None:
    lowered = name[:_SEARCHED_CHARACTERS].lower()
    for rule in rules:
        for word in rule.words:
            if word in lowered:
                return rule
        for need in rule.needs:
            if need in lowered:
                if re.search(rule.pattern, lowered) is not None:
                    return rule
                break
    return None


def _rules(rows: list[Mapping[str, Any]], answer: str = "source") -> tuple[_Rule, ...]:
    return tuple(
        _Rule(
            tuple(row.get("words", ())),
            row.get("pattern", ""),
            tuple(row.get("needs", ("",) if "pattern" in row else ())),
            row[answer],
        )
        for row in rows
    )


@cache
def kernel_rules() -> KernelRules:
    """Read the shipped rules."""
    # By path: importlib.resources takes longer to load than the file to read.
    path = Path(__file__).parent / "data" / "kernel_rules.toml"
    data = tomllib.loads(path.read_text("utf-8"))
    return KernelRules(
        categories={name: _FROM_DATA[kind] for name, kind in data["categories"].items()},
        sync_names=_rules(data["sync_names"]),
        idle_calls=_rules(data["idle_calls"]),
        collective_names=_rules(data["collective_names"]),
        operations=_rules(data["operations"], "operation"),
        families=_rules(data["families"], "family"),
        dtype_bytes=data["dtype_bytes"],
        bus_factors=data["bus_factor"],
    )

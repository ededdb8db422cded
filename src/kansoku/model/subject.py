"""What a finding is about, whose fault it is, and how sure we are that there is one."""

import re
from dataclasses import dataclass
from enum import StrEnum

from kansoku.errors import InputError

__all__ = ["Domain", "Subject", "Verdict"]


class Verdict(StrEnum):
    """Answer to "is there one?"; before the first check it is UNKNOWN."""

    FOUND = "found"
    NONE = "none"
    UNKNOWN = "unknown"


class Domain(StrEnum):
    """Where the cause of an incident lies."""

    APPLICATION = "application"
    FRAMEWORK = "framework"
    GPU_HARDWARE = "gpu_hardware"
    NETWORK = "network"
    STORAGE = "storage"
    SCHEDULER = "scheduler"
    HOST = "host"


_KINDS = ("job", "rank", "node", "gpu", "nic", "link", "switch", "storage")
_PATTERN = re.compile(rf"({'|'.join(_KINDS)}):(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A thing that can be well or ill, written ``kind:name``.

    Forms: ``job:ID``, ``rank:N``, ``node:NAME``, ``gpu:NODE/I``, ``nic:NODE/DEV``, ``link:A-B``,
    ``switch:NAME``, ``storage:NAME``.
    """

    kind: str
    name: str

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or not self.name:
            raise InputError(
                f"subject {self.kind}:{self.name} is not one of {', '.join(_KINDS)} with a name"
            )

    @classmethod
    def parse(cls, text: str) -> "Subject":
        """Read ``kind:name``; raise InputError for anything else."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise InputError(f"{text!r} is not a subject such as node:c001 or gpu:c001/3")
        return cls(kind=match[1], name=match[2])

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

"""Which jobs hold this node and its GPUs: ``scontrol show job -d`` and ``scontrol show node``.

``squeue --json`` of Slurm 22.05 says how many GPUs a job has, not which; only the detailed
``scontrol`` output names their indices node by node.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["JobOnNode", "NodeState", "parse_jobs", "parse_node_states"]

_INDEX_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w/:.]*)=")
_GRES_INDEX = re.compile(r"gpu(?::[\w.-]+)?:\d+\(IDX:([0-9,\-]+)\)")
_MAX_GPUS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOnNode:
    """A job that holds one node."""

    job_id: str
    state: str
    user: str
    account: str
    partition: str
    gpus: tuple[int, ...]
    """GPU indices on this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """State and flags of one node."""

    name: str
    states: tuple[str, ...]
    """Lower case, base state first: ``idle``, ``drain``, ``not_responding`` …"""
    reason: str | None


def _blocks(text: str, first: str) -> list[str]:
    parts = re.split(rf"(?m)^(?={first}=)", text)
    return [part for part in parts if part.startswith(f"{first}=")]


def _fields(line: str) -> dict[str, str]:
    """Split ``A=1 B=two words C=`` by the names; a value may hold spaces."""
    marks = list(_FIELD.finditer(line))
    ends = [*(m.start() for m in marks[1:]), len(line)][: len(marks)]
    return {m[1]: line[m.end() : end].strip() for m, end in zip(marks, ends, strict=True)}


def _indices(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        match = _INDEX_RANGE.fullmatch(part)
        if match:
            low, high = int(match[1]), int(match[2] or match[1])
            found.extend(range(low, min(high, low + _MAX_GPUS) + 1))
    return tuple(found)


def parse_jobs(
    text: str, node: str, expand: Callable[[str], list[str]]
) -> tuple[list[JobOnNode], int]:
    """Return the running jobs that hold ``node``, and how many blocks were unreadable.

    ``expand`` turns a host list into names.
    """
    jobs: list[JobOnNode] = []
    bad = 0
    for block in _blocks(text, "JobId"):
        facts: dict[str, str] = {}
        gpus: list[int] = []
        here = False
        for line in block.splitlines():
            # A job's name may hold anything, "JobState=FAILED" included; it ends its line.
            found = _fields(line.partition(" JobName=")[0])
            if set(found) >= {"Nodes", "CPU_IDs"}:
                try:
                    on_node = node in expand(found["Nodes"])
                except ValueError:
                    bad += 1
                    continue
                if on_node:
                    here = True
                    for match in _GRES_INDEX.finditer(found.get("GRES", "")):
                        gpus.extend(_indices(match[1]))
            else:
                for name, value in found.items():
                    facts.setdefault(name, value)
        if not here or facts.get("JobState") not in {"RUNNING", "COMPLETING", "SUSPENDED"}:
            continue
        jobs.append(
            JobOnNode(
                job_id=_people_id(facts),
                state=facts["JobState"].lower(),
                user=facts.get("UserId", "").partition("(")[0],
                account=facts.get("Account", ""),
                partition=facts.get("Partition", ""),
                gpus=tuple(sorted(set(gpus))),
            )
        )
    return jobs, bad


def _people_id(facts: dict[str, str]) -> str:
    """12, or 12_3 for a task of an array, or 12+1 for a part of a heterogeneous job."""
    if "ArrayJobId" in facts and facts.get("ArrayTaskId", "").isdigit():
        return f"{facts['ArrayJobId']}_{facts['ArrayTaskId']}"
    if "HetJobId" in facts and "HetJobOffset" in facts:
        return f"{facts['HetJobId']}+{facts['HetJobOffset']}"
    return facts["JobId"]


def parse_node_states(text: str) -> list[NodeState]:
    """Return the nodes of ``scontrol show node``."""
    found = []
    for block in _blocks(text, "NodeName"):
        facts: dict[str, str] = {}
        for line in block.splitlines():
            for name, value in _fields(line).items():
                facts.setdefault(name, value)
        states = facts.get("State", "UNKNOWN").lower().replace("*", "+not_responding").split("+")
        found.append(
            NodeState(
                name=facts["NodeName"],
                states=tuple(dict.fromkeys(s for s in states if s)),
                reason=facts.get("Reason") or None,
            )
        )
    return found

"""PyTorch execution traces (Chakra) as spans without times.

``torch.profiler.ExecutionTraceObserver`` writes the operators of one rank in order of their ids,
with parents (``ctrl_deps``), shapes and types; it keeps no clock. So ``start_ns`` and
``duration_ns`` are null, and order is the id's. Schema ``1.0.x`` (fields of a node) and
``1.1.x-chakra`` (attributes).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.errors import InputError
from kansoku.formats.kineto import rank_from_name
from kansoku.model.run import ProcessGroup
from kansoku.model.tables import table_schema

__all__ = ["ExecutionTrace", "read_execution_trace"]

_LARGEST_BYTES = 1 << 30
_COLLECTIVE = re.compile(
    r"^(?:c10d::|gloo:|nccl:|mpi:|ucc:|_c10d_functional::)(?P<name>\w+?)_?$|^record_param_comms$"
)
_STEP = re.compile(r"ProfilerStep[*#]?\s*#?(\d+)")
_WIDTH_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "int": 4, "long": 8, "long int": 8,
    "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1,
}  # fmt: skip
_GROUPS = "## process_group:init ##"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionTrace:
    """One rank's operators."""

    schema: str
    rank: int | None
    """By the file's name."""
    spans: pl.DataFrame
    """The ``spans`` table, times null, in order of execution."""
    groups: tuple[ProcessGroup, ...]
    set_aside: int
    """Nodes without an id or a name."""


def read_execution_trace(path: Path, *, run: str | None = None) -> ExecutionTrace:
    """Read a trace; raise InputError if it is none."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError("larger than 1 GiB", where=str(path))
        document = json.loads(path.read_bytes())
        nodes = document["nodes"]
        schema = str(document["schema"])
        if not isinstance(nodes, list):
            raise TypeError("nodes are no list")
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"not an execution trace, or cut off: {error}", where=str(path)) from None
    rank = rank_from_name(str(path))
    rows: list[tuple[Any, ...]] = []
    groups: list[ProcessGroup] = []
    steps: dict[int, int] = {}
    whole = [n for n in nodes if isinstance(n, dict) and isinstance(n.get("id"), int)
             and isinstance(n.get("name"), str)]  # fmt: skip
    for node in sorted(whole, key=lambda one: int(one["id"])):
        if node["name"] == _GROUPS:
            groups += _groups(node)
            continue
        parent = node.get("ctrl_deps", node.get("parent"))
        parent = parent if isinstance(parent, int) and parent != node["id"] else None
        match = _STEP.search(node["name"])
        step = int(match[1]) if match else steps.get(parent if parent is not None else -1)
        if step is not None:
            steps[node["id"]] = step
        rows.append(_row(node, parent, step, rank, run))
    return ExecutionTrace(
        schema=schema,
        rank=rank,
        spans=pl.DataFrame(rows, schema=table_schema("spans"), orient="row"),
        groups=tuple(groups),
        set_aside=len(nodes) - len(whole),
    )


def _attributes(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node's attributes; in schema 1.0 they are fields of the node."""
    found = node.get("attrs")
    if isinstance(found, list):
        return {
            one["name"]: one.get("value")
            for one in found
            if isinstance(one, dict) and "name" in one
        }
    return {key: node[key] for key in ("rf_id", "seq_id", "tid", "fw_parent") if key in node}


def _row(
    node: Mapping[str, Any], parent: int | None, step: int | None, rank: int | None, run: str | None
) -> tuple[Any, ...]:
    attributes = _attributes(node)
    match = _COLLECTIVE.match(node["name"])
    collective = attributes.get("collective_name") or (match["name"] if match else None)
    size, dtype = _tensor(node)
    thread = attributes.get("tid")
    kept = {
        key: attributes[key]
        for key in ("rf_id", "fw_parent", "pg_desc", "pg_size", "in_msg_nelems", "out_msg_nelems")
        if attributes.get(key) not in (None, "", 0)
    }
    return (
        run,
        rank,
        step,
        "collective" if match or attributes.get("collective_name") else "operator",
        str(collective or node["name"]),
        None,
        None,
        node["id"],
        parent,
        str(attributes["pg_name"]) if attributes.get("pg_name") not in (None, "") else None,
        None,
        size,
        dtype,
        None,
        thread if isinstance(thread, int) else None,
        None,
        json.dumps(kept) if kept else None,
    )


def _tensor(node: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Return bytes and type of the first input tensor."""
    inputs = node.get("inputs")
    if isinstance(inputs, dict):
        shapes, types = inputs.get("shapes"), inputs.get("types")
    else:  # schema 1.0
        shapes, types = node.get("input_shapes"), node.get("input_types")
    if not (isinstance(shapes, list) and isinstance(types, list)):
        return None, None
    for given, kind in zip(shapes, types, strict=False):
        found = re.search(r"Tensor\(([^)]*)\)", str(kind))
        if found is None:
            continue
        shape = given
        while isinstance(shape, list) and shape and isinstance(shape[0], list):
            shape = shape[0]  # a list of tensors: the first
        width = _WIDTH_BYTES.get(found[1])
        if width is None or not all(isinstance(extent, int) for extent in shape):
            return None, found[1]
        size = width
        for extent in shape:
            size *= extent
        return size, found[1]
    return None, None


def _groups(node: Mapping[str, Any]) -> list[ProcessGroup]:
    values = node.get("inputs", {})
    values = values.get("values") if isinstance(values, dict) else values
    try:
        listed = json.loads(values[0])  # type: ignore[index]
        return [
            ProcessGroup(
                name=str(one["pg_name"]),
                description=one.get("pg_desc"),
                ranks=tuple(int(rank) for rank in one.get("ranks", ()))
                or tuple(range(int(one.get("group_size", 0)))),
                backend=one.get("backend_config"),
            )
            for one in listed
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return []

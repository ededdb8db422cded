"""NCCL Inspector's files as spans: one JSON object a completed collective or send and receive.

Source: the inspector plugin's README and ``inspector_json.cc`` in NCCL (2.28 and later). A file
holds the objects one after the other, on lines or not; what no reader could parse is counted.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.errors import InputError
from kansoku.model.tables import table_schema

__all__ = ["InspectorFile", "read_inspector"]

_LARGEST_BYTES = 4 << 30
_CHUNK = 1 << 20
_LONGEST_OBJECT = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorFile:
    """What one process wrote."""

    spans: pl.DataFrame
    """The ``spans`` table; ``rank`` is the rank within the communicator, ``start_ns`` the time of
    writing minus the duration where events were not traced (``attributes`` says which)."""
    damaged: int
    """Stretches that were no object of this format."""


def read_inspector(path: Path, *, run: str | None = None) -> InspectorFile:
    """Read one file; raise InputError if nothing in it is of this format."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError("larger than 4 GiB", where=str(path))
        rows: list[tuple[Any, ...]] = []
        damaged = 0
        for item in _objects(path):
            row = None if item is None else _row(item, run, len(rows))
            if row is None:
                damaged += 1
            else:
                rows.append(row)
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
    if not rows:
        raise InputError("no collective of NCCL Inspector in it", where=str(path))
    schema = table_schema("spans")
    return InspectorFile(
        spans=pl.DataFrame(rows, schema=schema, orient="row").sort("start_ns"), damaged=damaged
    )


def _objects(path: Path) -> Iterator[Mapping[str, Any] | None]:
    """Yield the objects; None for each stretch that is none. Holds one object at a time."""
    decoder = json.JSONDecoder()
    buffer = ""
    with path.open(encoding="utf-8", errors="replace") as stream:
        while True:
            chunk = stream.read(_CHUNK)
            buffer += chunk
            at = 0
            while (begin := buffer.find("{", at)) >= 0:
                try:
                    found, at = decoder.raw_decode(buffer, begin)
                except (ValueError, RecursionError):
                    if chunk and len(buffer) - begin < _LONGEST_OBJECT:
                        break  # its rest is still to come
                    yield None
                    line = buffer.find("\n", begin)
                    at = len(buffer) if line < 0 else line + 1
                    continue
                yield found
            buffer = buffer[begin:] if begin >= 0 else ""
            if not chunk:
                return


def _row(item: Mapping[str, Any], run: str | None, number: int) -> tuple[Any, ...] | None:
    header, meta = item.get("header"), item.get("metadata")
    collective = item.get("coll_perf")
    work, prefix = (collective, "coll") if collective is not None else (item.get("p2p_perf"), "p2p")
    if not (isinstance(header, dict) and isinstance(meta, dict) and isinstance(work, dict)):
        return None
    try:
        duration = round(float(work[f"{prefix}_exec_time_us"]) * 1000)
        written = int(meta["dump_timestamp_us"]) * 1000
        traced = work.get("event_trace_ts", {}).get(f"{prefix}_start_ts")
        start = int(traced) * 1000 if traced else written - duration
        sequence = work.get(f"{prefix}_sn")
        size = work.get(f"{prefix}_msg_size_bytes")
        attributes = {
            "ranks": header.get("n_ranks"),
            "nodes": header.get("nnodes"),
            "start": "traced" if traced else "written minus duration",
            "timing": work.get(f"{prefix}_timing_source"),
            "algorithm_bytes_per_s": _giga(work.get(f"{prefix}_algobw_gbs")),
            "bus_bytes_per_s": _giga(work.get(f"{prefix}_busbw_gbs")),
            "host": meta.get("hostname"),
            "pid": meta.get("pid"),
            "peer": work.get("p2p_peer"),
            "communicator": header.get("comm_name"),
        }
        return (
            run,
            int(header["rank"]),
            None,
            "collective",
            _name(str(work[prefix])),
            start,
            duration,
            number,
            None,
            str(header["id"]),
            None if sequence is None else int(sequence),
            None if size is None else int(size),
            None,
            None,
            None,
            None,
            json.dumps({key: value for key, value in attributes.items() if value is not None}),
        )
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        return None


def _name(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _giga(value: object) -> float | None:
    return float(value) * 1e9 if isinstance(value, int | float) else None

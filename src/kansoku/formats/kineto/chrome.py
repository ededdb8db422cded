"""Write spans as a Kineto-style Chrome trace of one rank."""

import json
from collections.abc import Iterable
from typing import IO, Any

import msgspec
import orjson
import polars as pl

__all__ = ["write_kineto"]

_CATEGORIES = {
    "kernel": "kernel",
    "collective": "kernel",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "device_sync": "cuda_sync",
    "launch": "cuda_runtime",
    "device_annotation": "gpu_user_annotation",
    "operator": "cpu_op",
    "host_collective": "cpu_op",
    "python": "python_function",
    "module": "python_function",
}


def write_kineto(
    file: IO[bytes],
    frames: Iterable[pl.DataFrame],
    *,
    rank: int | None,
    world_size: int | None = None,
) -> int:
    """Write the ``spans`` rows of one rank; return the number of slices.

    Stamps are µs since the first span's whole second, kept in ``baseTimeNanoseconds``. Rows that
    came from a Kineto file get their own category, process, thread and arguments back.
    """
    count = 0
    base: int | None = None
    for frame in frames:
        closed = frame.filter(pl.col("duration_ns").is_not_null())
        for row in closed.iter_rows(named=True):
            if base is None:
                base = row["start_ns"] // 10**9 * 10**9
                file.write(_head(rank, world_size, base))
            file.write((b",\n" if count else b"\n") + _json(_event(row, base)))
            count += 1
    if base is None:
        file.write(_head(rank, world_size, 0))
    file.write(b"\n]}\n")
    return count


def _json(event: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(event)
    except TypeError:  # numbers beyond 64 bits, which the file had
        return json.dumps(event, ensure_ascii=True).encode()


def _head(rank: int | None, world_size: int | None, base_ns: int) -> bytes:
    info = {
        key: value
        for key, value in (("rank", rank), ("world_size", world_size))
        if value is not None
    }
    head = orjson.dumps(
        {
            "schemaVersion": 1,
            "distributedInfo": info,
            "displayTimeUnit": "ns",
            "baseTimeNanoseconds": base_ns,
        }
    )
    return head[:-1] + b',"traceEvents":['


def _event(row: dict[str, Any], base: int) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if row["attributes"]:
        try:
            decoded = msgspec.json.decode(row["attributes"])
        except msgspec.DecodeError:
            decoded = None
        if isinstance(decoded, dict):
            attributes = decoded
    arguments = attributes.get("args")
    if not isinstance(arguments, dict):
        arguments = {
            key: row[key]
            for key in ("step", "group", "sequence", "bytes", "dtype")
            if row[key] is not None
        }
        if row["kind"] == "collective":
            arguments |= {"Collective name": row["name"]}
            if row["group"] is not None:
                arguments["Process Group Name"] = row["group"]
            if row["sequence"] is not None:
                arguments["Seq"] = row["sequence"]
    on_device = str(row["device"] or "").startswith(("gpu", "cuda"))
    kind = row["kind"] or "other"
    default = _CATEGORIES.get(kind, "user_annotation") if on_device else _host_category(kind)
    return {
        "ph": "X",
        "cat": attributes.get("cat") or default,
        "name": row["name"] or kind,
        "pid": attributes.get("pid", row["rank"] or 0),
        "tid": attributes.get("tid", row["thread"] or 0),
        "ts": _microseconds(row["start_ns"] - base),
        "dur": _microseconds(row["duration_ns"]),
        "args": arguments,
    }


def _host_category(kind: str) -> str:
    found = _CATEGORIES.get(kind, "user_annotation")
    return "user_annotation" if found in ("kernel", "gpu_memcpy", "gpu_memset") else found


def _microseconds(ns: int) -> float | int:
    """Return µs that print with at most three decimals; exact below 2**43 µs."""
    return ns // 1000 if ns % 1000 == 0 else ns / 1000

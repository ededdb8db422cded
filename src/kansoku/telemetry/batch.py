"""A batch of rows of several tables as bytes: what the spool keeps and our Arrow transport sends.

``KAB1``, then for each table: length of its name (u16), name, length of its data (u64), an Arrow
IPC stream with zstd buffers. Numbers are little endian. The schema's metadata carries, as JSON,
``kansoku.resource`` (resource attributes of the sender) and ``kansoku.metrics`` (metric name to
unit, kind and description). Any Arrow library reads the streams.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
import pyarrow as pa

from kansoku.errors import InputError
from kansoku.model import TABLES

__all__ = ["CONTENT_TYPE", "pack_batch", "unpack_batch"]

CONTENT_TYPE = "application/vnd.kansoku.arrow"
_MAGIC = b"KAB1"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")
_RESOURCE, _METRICS = b"kansoku.resource", b"kansoku.metrics"


def pack_batch(
    tables: Mapping[str, pa.Table],
    *,
    resource: Mapping[str, str] | None = None,
    metrics: Mapping[str, Mapping[str, str]] | None = None,
) -> bytes:
    """Return the bytes of a batch."""
    parts = [_MAGIC]
    for name, rows in tables.items():
        metadata = {_RESOURCE: orjson.dumps(dict(resource or {}))}
        if name == "metrics":
            metadata[_METRICS] = orjson.dumps({k: dict(v) for k, v in (metrics or {}).items()})
        sink = pa.BufferOutputStream()
        table = rows.replace_schema_metadata(metadata)
        with pa.ipc.new_stream(sink, table.schema, options=_OPTIONS) as writer:
            writer.write_table(table)
        data = sink.getvalue()
        raw = name.encode()
        parts += [struct.pack("<H", len(raw)), raw, struct.pack("<Q", len(data)), data]
    return b"".join(parts)


def unpack_batch(
    payload: bytes, *, max_bytes: int = 1 << 30
) -> tuple[dict[str, pa.Table], dict[str, str], dict[str, dict[str, str]]]:
    """Return tables, resource attributes and metric descriptions.

    Raises InputError for anything malformed, and for data that would exceed ``max_bytes`` in
    memory.
    """
    if payload[:4] != _MAGIC:
        raise InputError("not a kansoku Arrow batch: it does not begin with KAB1")
    tables: dict[str, pa.Table] = {}
    resource: dict[str, str] = {}
    metrics: dict[str, dict[str, str]] = {}
    room = max_bytes
    for name, data in _sections(memoryview(payload)):
        if name not in TABLES or name in tables:
            raise InputError(f"batch: no table {name!r}, or twice; known: {', '.join(TABLES)}")
        try:
            rows, room = _read_stream(data, room)
            metadata = rows.schema.metadata or {}
            resource |= _texts(orjson.loads(metadata.get(_RESOURCE, b"{}")))
            for metric, info in orjson.loads(metadata.get(_METRICS, b"{}")).items():
                metrics[metric] = _texts(info)
        except (pa.ArrowException, orjson.JSONDecodeError, AttributeError, OSError) as error:
            raise InputError(f"batch, table {name}: {error}") from None
        tables[name] = rows.replace_schema_metadata(None)
    return tables, resource, metrics


def _sections(view: memoryview) -> Iterator[tuple[str, memoryview]]:
    at = len(_MAGIC)
    while at < len(view):
        try:
            (size,) = struct.unpack_from("<H", view, at)
            name = bytes(view[at + 2 : at + 2 + size]).decode()
            at += 2 + size
            (length,) = struct.unpack_from("<Q", view, at)
        except (struct.error, UnicodeDecodeError):
            raise InputError(f"batch: cut off or garbled at byte {at}") from None
        at += 8
        if length > len(view) - at:
            raise InputError(f"batch: table {name} says {length} bytes, {len(view) - at} remain")
        yield name, view[at : at + length]
        at += length


def _read_stream(data: memoryview, room: int) -> tuple[pa.Table, int]:
    """Read record batches while they fit; validate every one before it is trusted."""
    batches = []
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        for batch in reader:
            batch.validate(full=True)
            room -= batch.nbytes
            if room < 0:
                raise InputError("batch: its data exceed the memory allowed for one request")
            batches.append(batch)
        return pa.Table.from_batches(batches, schema=reader.schema), room


def _texts(values: Any) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}

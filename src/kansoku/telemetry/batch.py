"""A batch of rows of several tables as bytes: what the spool keeps and our Arrow transport sends.

``KAB2``, the length (u32) of a JSON header and the header, then for each table: length of its name
(u16), name, length of its data (u64), an Arrow IPC stream with zstd buffers. Numbers are little
endian. The header holds ``resource`` (resource attributes of the sender) and ``metrics`` (metric
name to unit, kind and description). Any Arrow library reads the streams. ``KAB1``, which spools
of older agents hold, has no header: the same JSON stands in each schema's metadata, as
``kansoku.resource`` and ``kansoku.metrics``.

Frames are written by Polars, so that an agent that only sends never loads PyArrow: 24 MB.
"""

import io
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson
import polars as pl

from kansoku.errors import InputError
from kansoku.model import TABLES

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["CONTENT_TYPE", "pack_batch", "unpack_batch"]

CONTENT_TYPE = "application/vnd.kansoku.arrow"
_MAGIC, _OLD_MAGIC = b"KAB2", b"KAB1"
_RESOURCE, _METRICS = b"kansoku.resource", b"kansoku.metrics"


def pack_batch(
    tables: "Mapping[str, pl.DataFrame | pa.Table]",
    *,
    resource: Mapping[str, str] | None = None,
    metrics: Mapping[str, Mapping[str, str]] | None = None,
) -> bytes:
    """Return the bytes of a batch."""
    header = orjson.dumps(
        {
            "resource": dict(resource or {}),
            "metrics": {name: dict(info) for name, info in (metrics or {}).items()},
        }
    )
    parts = [_MAGIC, struct.pack("<I", len(header)), header]
    for name, rows in tables.items():
        data = _frame_stream(rows) if isinstance(rows, pl.DataFrame) else _arrow_stream(rows)
        raw = name.encode()
        parts += [struct.pack("<H", len(raw)), raw, struct.pack("<Q", len(data)), data]
    return b"".join(parts)


def _frame_stream(rows: pl.DataFrame) -> bytes:
    sink = io.BytesIO()
    rows.write_ipc_stream(sink, compression="zstd", compat_level=pl.CompatLevel.oldest())
    return sink.getvalue()


def _arrow_stream(rows: "pa.Table") -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_table(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def unpack_batch(
    payload: bytes, *, max_bytes: int = 1 << 30
) -> "tuple[dict[str, pa.Table], dict[str, str], dict[str, dict[str, str]]]":
    """Return tables, resource attributes and metric descriptions.

    Raises InputError for anything malformed, and for data that would exceed ``max_bytes`` in
    memory.
    """
    import pyarrow as pa

    resource, metrics, start = _header(payload)
    tables: dict[str, pa.Table] = {}
    room = max_bytes
    for name, data in _sections(memoryview(payload), start):
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


def _header(payload: bytes) -> tuple[dict[str, str], dict[str, dict[str, str]], int]:
    """Return resource, metrics, and where the tables begin."""
    if payload[:4] == _OLD_MAGIC:
        return {}, {}, len(_OLD_MAGIC)
    if payload[:4] != _MAGIC:
        raise InputError("not a kansoku Arrow batch: it begins with neither KAB2 nor KAB1")
    try:
        (size,) = struct.unpack_from("<I", payload, len(_MAGIC))
        start = len(_MAGIC) + 4
        header = orjson.loads(payload[start : start + size])
        metrics = {str(name): _texts(info) for name, info in header["metrics"].items()}
        return _texts(header["resource"]), metrics, start + size
    except (struct.error, orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise InputError(f"batch: its header is cut off or garbled: {error}") from None


def _sections(view: memoryview, start: int) -> Iterator[tuple[str, memoryview]]:
    at = start
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


def _read_stream(data: memoryview, room: int) -> "tuple[pa.Table, int]":
    """Read record batches while they fit; validate every one before it is trusted."""
    import pyarrow as pa

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

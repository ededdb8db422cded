"""What both receivers share: a request body to rows to the store, with counts at every stage."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
from isal import isal_zlib

from kansoku.errors import BusyError, InputError
from kansoku.model import Origin, Receipt
from kansoku.telemetry.batch import unpack_batch
from kansoku.telemetry.decode import decode, decode_json
from kansoku.telemetry.decode_plain import Decoded, owner_of
from kansoku.telemetry.labels import merge_labels

__all__ = ["Intake", "IntakeCounts", "IntakeLimits", "Sink", "TooLargeError", "inflate"]


class Sink(Protocol):
    """Where rows go: answers when they are durable."""

    def submit(
        self,
        batches: Mapping[str, pa.Table],
        *,
        origin: Origin | None = None,
        digest: str | None = None,
        owners: Sequence[Any] = (),
        info: Sequence[Any] = (),
    ) -> "Future[Receipt]":
        """Queue rows; raises BusyError when too many wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    """What bounds one request and all of them."""

    max_body_bytes: int = 16 << 20
    """Size on the wire."""
    max_inflated_bytes: int = 64 << 20
    """Size after decompression; a bomb is cut off there."""
    max_in_flight_bytes: int = 256 << 20
    """Inflated bodies being decoded or committed; more is answered with "busy"."""
    digest_window: bool = True
    """Recognise the retry of a request without (agent, sequence) by its bytes."""


@dataclass(slots=True, kw_only=True)
class IntakeCounts:
    """Requests and items at every stage.

    ``items`` of accepted requests = ``kept`` + ``duplicate`` + ``rejected`` + ``skipped``, where
    a histogram point counts as the rows it became.
    """

    requests: int = 0
    accepted: int = 0
    malformed: int = 0
    too_large: int = 0
    wrong_type: int = 0
    unauthorized: int = 0
    busy: int = 0
    failed: int = 0
    bytes_in: int = 0
    items: int = 0
    rows: int = 0
    kept: int = 0
    duplicate: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


class TooLargeError(InputError):
    """A body exceeds what one request may hold."""


def inflate(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the body decompressed; raise InputError for an unknown or broken encoding.

    Raises TooLargeError as soon as the result exceeds ``max_bytes``, holding no more than that.
    """
    encoding = encoding.strip().lower()
    if encoding in {"", "identity"}:
        if len(body) > max_bytes:
            raise TooLargeError(f"body of {len(body)} bytes exceeds {max_bytes}")
        return body
    if encoding == "zstd":
        return _inflate_zstd(body, max_bytes)
    if encoding not in {"gzip", "deflate"}:
        raise InputError(f"content encoding {encoding!r} is not gzip, deflate, zstd or identity")
    machine = zlib.decompressobj(wbits=47)
    try:
        result = machine.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InputError(f"broken {encoding} body: {error}") from None
    if len(result) > max_bytes:
        raise TooLargeError(f"body inflates beyond {max_bytes} bytes")
    if not machine.eof:
        raise InputError(f"broken {encoding} body: it is cut off")
    return result


def _inflate_zstd(body: bytes, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    room = max_bytes
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            while chunk := stream.read(min(1 << 20, room + 1)):
                room -= len(chunk)
                if room < 0:
                    raise TooLargeError(f"body inflates beyond {max_bytes} bytes")
                parts.append(chunk)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"broken zstd body: {error}") from None
    return b"".join(parts)


def _digest(signal: str, body: bytes) -> str:
    """Return what tells one body from another: length and two checksums.

    A cryptographic digest took a sixth of the whole way of a span; who forges a collision loses
    rows of its own alone.
    """
    return f"{signal}:{len(body):x}:{isal_zlib.crc32(body):08x}{isal_zlib.adler32(body):08x}"


class Intake:
    """Bodies in, durable rows out."""

    def __init__(
        self, sink: Sink, *, clock_ns: Callable[[], int], limits: IntakeLimits | None = None
    ) -> None:
        self._sink = sink
        self._clock_ns = clock_ns
        self.limits = limits or IntakeLimits()
        self.counts = IntakeCounts()
        self._in_flight = 0

    def begin(self, size: int) -> None:
        """Reserve memory for a request; raise BusyError when too much is in flight."""
        self.counts.requests += 1
        self.counts.bytes_in += size
        if self._in_flight and self._in_flight + size > self.limits.max_in_flight_bytes:
            self.counts.busy += 1
            raise BusyError("too many requests are being worked on")
        self._in_flight += size

    def end(self, size: int) -> None:
        """Give the memory back."""
        self._in_flight -= size

    def otlp(
        self, signal: str, body: bytes, *, json: bool = False, origin: Origin | None = None
    ) -> "Future[Receipt]":
        """Decode an inflated OTLP body and queue its rows."""
        now = self._clock_ns()
        try:
            one = decode_json if json else decode
            decoded = one(signal, body, received_ns=now)
        except InputError:
            self.counts.malformed += 1
            raise
        digest = None
        if origin is None and self.limits.digest_window and body:
            digest = _digest(signal, body)
        return self._submit(decoded, origin, digest)

    def arrow(self, body: bytes, *, origin: Origin | None) -> "Future[Receipt]":
        """Unpack one of our Arrow batches and queue its rows."""
        try:
            tables, resource, metrics = unpack_batch(
                body, max_bytes=8 * self.limits.max_inflated_bytes
            )
        except InputError:
            self.counts.malformed += 1
            raise
        decoded = Decoded(items=sum(len(rows) for rows in tables.values()))
        decoded.tables = {
            name: merge_labels(rows, resource) if name == "metrics" else rows
            for name, rows in tables.items()
        }
        if (owner := owner_of(resource)) is not None:
            decoded.owners.add(owner)
        decoded.info = {
            name: (name, one.get("unit") or None, one.get("kind") or None,
                   one.get("description") or None)
            for name, one in metrics.items()
        }  # fmt: skip
        return self._submit(decoded, origin, None)

    def _submit(
        self, decoded: Decoded, origin: Origin | None, digest: str | None
    ) -> "Future[Receipt]":
        try:
            answer = self._sink.submit(
                decoded.tables,
                origin=origin,
                digest=digest,
                owners=tuple(decoded.owners),
                info=tuple(decoded.info.values()),
            )
        except BusyError:
            self.counts.busy += 1
            raise
        except InputError:
            self.counts.malformed += 1
            raise
        rows = sum(len(table) for table in decoded.tables.values())
        answer.add_done_callback(lambda done: self._count(done, decoded, rows))
        return answer

    def _count(self, done: "Future[Receipt]", decoded: Decoded, rows: int) -> None:
        counts = self.counts
        if done.exception() is not None:
            counts.failed += 1
            return
        receipt = done.result()
        counts.accepted += 1
        counts.items += decoded.items
        counts.rows += rows
        counts.kept += sum(receipt.rows.values())
        if receipt.duplicate:
            counts.duplicate += rows
        for reason, number in receipt.rejected.items():
            counts.rejected[reason] = counts.rejected.get(reason, 0) + number
        for reason, number in decoded.skipped.items():
            counts.skipped[reason] = counts.skipped.get(reason, 0) + number

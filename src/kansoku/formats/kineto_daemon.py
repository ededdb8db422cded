"""Messages between Kineto and its profiling daemon: datagrams of a 40-byte header and a body.

Source: dynolog's ipcfabric (``FabricManager.h``, ``Utils.h``), as compiled into torch. The header
is the body's size (8 bytes) and a type in 32 NUL-padded bytes. Integers are the machine's own:
both sides are on one machine. A process registers (``ctxt``: device, pid, job), then asks every
few seconds for a configuration (``req``: type, count, job, pids of itself and its ancestors) and
gets a text, empty for none.
"""

import struct
from dataclasses import dataclass

from kansoku.errors import InputError

__all__ = ["ACTIVITIES", "Register", "Request", "encode_reply", "parse_message"]

ACTIVITIES = 2
"""Bit of a request that asks for an activity (trace) configuration."""
_HEADER = struct.Struct("=Q32s")
_CONTEXT = struct.Struct("=iiq")
_REQUEST = struct.Struct("=iiq")
_MAX_PIDS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A process says that it is there."""

    device: int
    pid: int
    """As the process sees itself: inside a container, its number there."""
    job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A process asks whether it should record."""

    type: int
    job: int
    pids: tuple[int, ...]
    """Its own, then its ancestors'."""


def parse_message(datagram: bytes) -> Register | Request:
    """Return the message; raise InputError if it is none."""
    if len(datagram) < _HEADER.size:
        raise InputError(f"a datagram of {len(datagram)} bytes, expected at least {_HEADER.size}")
    size, name = _HEADER.unpack_from(datagram)
    body = datagram[_HEADER.size :]
    if len(body) != size:
        raise InputError(f"a body of {len(body)} bytes, its header says {size}")
    kind = name.split(b"\0", 1)[0]
    if kind == b"ctxt" and size >= _CONTEXT.size:
        device, pid, job = _CONTEXT.unpack_from(body)
        return Register(device=device, pid=pid, job=job)
    if kind == b"req" and size >= _REQUEST.size:
        config, count, job = _REQUEST.unpack_from(body)
        if 0 < count <= _MAX_PIDS and size >= _REQUEST.size + 4 * count:
            pids = struct.unpack_from(f"={count}i", body, _REQUEST.size)
            return Request(type=config, job=job, pids=pids)
    raise InputError(f"an unknown message {kind!r} of {size} bytes")


def encode_reply(message: Register | Request, *, config: str = "", count: int = 0) -> bytes:
    """Return the answer: how many processes of the job are known, or a configuration."""
    if isinstance(message, Register):
        body, kind = struct.pack("=i", count), b"ctxt"
    else:
        body, kind = config.encode(), b"req"
    return _HEADER.pack(len(body), kind) + body

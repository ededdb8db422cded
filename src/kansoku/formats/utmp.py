"""Login records of Linux (/run/utmp): who is logged in, from where, since when."""

import struct
from dataclasses import dataclass

__all__ = ["RECORD_BYTES", "Session", "parse_utmp"]

# struct utmp of glibc on 64-bit Linux: type, pid, line, id, user, host, exit, session, tv, address.
_RECORD = struct.Struct("<hxxi32s4s32s256shhiii4i20x")
RECORD_BYTES = _RECORD.size
_USER_PROCESS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One login."""

    user: str
    line: str
    host: str
    pid: int
    start_ns: int
    """Unix time."""


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def parse_utmp(data: bytes) -> list[Session]:
    """Return the user sessions; a torn last record is left out."""
    found = []
    for offset in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        kind, pid, line, _, user, host, _, _, _, seconds, micros, *_ = _RECORD.unpack_from(
            data, offset
        )
        if kind == _USER_PROCESS and user.strip(b"\0"):
            found.append(
                Session(
                    user=_text(user),
                    line=_text(line),
                    host=_text(host),
                    pid=pid,
                    start_ns=seconds * 1_000_000_000 + micros * 1000,
                )
            )
    return found

"""What controller and agents say to each other, as MessagePack over HTTP."""

import ipaddress
import sys
from array import array
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from kansoku.errors import InputError
from kansoku.fabric.settings import Settings

__all__ = [
    "Entry",
    "Pinglist",
    "Register",
    "RnicAddress",
    "ServiceTuple",
    "Tuples",
    "decode_settings",
    "packed_address",
    "text_of_address",
]


_BROADCAST = ipaddress.IPv4Address("255.255.255.255")


class RnicAddress(msgspec.Struct, frozen=True):
    """One RNIC as its agent announces it."""

    name: str
    """``NODE/DEV``."""
    address: str
    """IP address (UDP) or GID (verbs)."""
    qpn: int


class Register(msgspec.Struct, frozen=True):
    """An agent announces its RNICs; again after every start, since QPNs change."""

    node: str
    incarnation: int
    rnics: list[RnicAddress]


class Entry(NamedTuple):
    """One tuple to probe."""

    target: int
    """RNIC index in the plan."""
    address: str
    qpn: int
    port: int
    kind: int
    interval_s: float


class Tuples(msgspec.Struct, frozen=True):
    """Tuples as little-endian columns: a pinglist of hundreds is cut from arrays and copied.

    A cluster of 10,000 RNICs has millions of them; as objects they would take a controller
    minutes.
    """

    target: bytes
    """int32."""
    port: bytes
    """int32."""
    kind: bytes
    """int8."""
    interval_s: bytes
    """float32."""
    address: bytes
    """16 bytes each; IPv4 as ::ffff:a.b.c.d."""
    qpn: bytes
    """uint32."""

    def __len__(self) -> int:
        return len(self.kind)

    def entries(self) -> list[Entry]:
        """Return the rows."""
        columns = zip(
            _numbers("i", self.target), _numbers("I", self.qpn), _numbers("i", self.port),
            _numbers("b", self.kind), _numbers("f", self.interval_s), strict=True,
        )  # fmt: skip
        return [
            Entry(target, text_of_address(self.address[16 * n : 16 * n + 16]), qpn, *rest)
            for n, (target, qpn, *rest) in enumerate(columns)
        ]


def _numbers(code: str, data: bytes) -> list[Any]:
    column = array(code, data)
    if sys.byteorder != "little":
        column.byteswap()
    return column.tolist()


@lru_cache(maxsize=65536)
def packed_address(text: str) -> bytes:
    """Return 16 bytes of an IP address or GID; raise InputError for anything else."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise InputError(f"{text!r} is neither an IP address nor a GID") from None
    many = address.is_multicast or address == _BROADCAST
    if many or address.is_unspecified or getattr(address, "scope_id", None):
        raise InputError(f"{text!r} is not the address of one RNIC")
    if isinstance(address, ipaddress.IPv4Address):
        return b"\0" * 10 + b"\xff\xff" + address.packed
    return address.packed


@lru_cache(maxsize=65536)
def text_of_address(data: bytes) -> str:
    """Return the text of 16 bytes, IPv4 dotted."""
    address = ipaddress.IPv6Address(data)
    return str(address.ipv4_mapped or address)


class Pinglist(msgspec.Struct, frozen=True):
    """What one RNIC does until it hears otherwise."""

    version: str
    settings: dict[str, float]
    probes: Tuples
    traces: Tuples
    """Tuples of which this RNIC is the target: it traces the way of its ACKs."""


class ServiceTuple(msgspec.Struct, frozen=True):
    """One path of a running job."""

    source: str
    """``NODE/DEV``."""
    target: str
    port: int


def decode_settings(data: dict[str, float]) -> Settings:
    """Return the settings of a pinglist; unknown ones of a newer controller are left out."""
    known = Settings.__dataclass_fields__
    given = {name: value for name, value in data.items() if name in known}
    return msgspec.convert(given, Settings, strict=False)

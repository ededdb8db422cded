"""What controller and agents say to each other, as MessagePack over HTTP."""

import msgspec

from kansoku.fabric.settings import Settings

__all__ = [
    "AckPath",
    "Entry",
    "Pinglist",
    "Register",
    "RnicAddress",
    "ServiceTuple",
    "decode_settings",
]


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


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One tuple to probe."""

    target: int
    address: str
    qpn: int
    port: int
    kind: int
    interval_s: float


class AckPath(msgspec.Struct, array_like=True, frozen=True):
    """The path of ACKs to trace: probes come from ``address`` and ``port``."""

    target: int
    address: str
    port: int


class Pinglist(msgspec.Struct, frozen=True):
    """What one RNIC does until it hears otherwise."""

    version: str
    settings: dict[str, float]
    probes: list[Entry]
    traces: list[AckPath]


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

"""What a transport does for prober and responder; UDP and verbs implement it.

A transport belongs to one RNIC. It sends 50-byte packets along a chosen path (source port or
what stands for it), stamps what it sends and receives as near to the wire as it can, and reports
switches that answered a packet whose hop limit ran out.
"""

from dataclasses import dataclass
from typing import Protocol

from kansoku.fabric.probe import Packet, StampSource

__all__ = ["HopAnswer", "Peer", "Received", "Stamped", "Transport"]


@dataclass(frozen=True, slots=True)
class Peer:
    """Where to send: an address (UDP) or GID (verbs), and the queue pair there."""

    address: str
    qpn: int


@dataclass(slots=True)
class Received:
    """One of our packets came in; anything else is dropped by the transport."""

    packet: Packet
    address: str
    """Where an answer goes, to the queue pair that the packet names as its source."""
    nic_ns: int | None
    """Receive stamp of NIC or kernel; None where only the application's clock is known."""
    now_ns: int
    """When the application got it."""
    source: StampSource


@dataclass(slots=True)
class Stamped:
    """The send stamp of an earlier packet came in."""

    token: int
    nic_ns: int
    source: StampSource


@dataclass(slots=True)
class HopAnswer:
    """A switch returned a packet whose hop limit ran out."""

    data: bytes
    """The packet as the switch quoted it."""
    address: str


class Transport(Protocol):
    """The way packets of one RNIC go in and out."""

    address: str
    qpn: int
    stamps: StampSource
    """Whose stamps were asked for; what came is part of every packet."""

    def send(
        self, data: bytes, peer: Peer, source_port: int, *, token: int | None = None, hops: int = 0
    ) -> Stamped | None:
        """Send one packet along the path of ``source_port``; never block.

        With a ``token`` its send stamp is wanted: returned at once where the stamp is there
        already, else it comes through :meth:`poll`. ``hops`` limits the path for traces (0: no
        limit). Raises OSError when the packet could not leave.
        """

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when :meth:`poll` has something."""

    def poll(self) -> list[Received | Stamped | HopAnswer]:
        """Return what came in, stamps before packets; never block."""

    def close(self) -> None:
        """Give everything back."""

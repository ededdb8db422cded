"""The probe protocol: bytes in, events out. No socket and no clock.

A probe and its two acknowledgements, with the six stamps of R-Pingmesh::

    prober                      responder
    ① CPU, ② NIC   ── probe ──▶  ③ NIC
    ⑤ NIC, ⑥ CPU   ◀── ACK1 ──  ④ NIC
                   ◀── ACK2 ──  carries ④ - ③

What a probe is waiting for is one state; :data:`TRANSITIONS` is the whole machine. The NIC stamp
② arrives on its own way and is data, not state. An answer that comes after the timeout changes no
outcome, but it is reported as late: it says that the host was slow, not that the network lost.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

__all__ = [
    "SIZE",
    "TRANSITIONS",
    "Kind",
    "Late",
    "Packet",
    "Prober",
    "Responder",
    "Result",
    "StampSource",
    "State",
    "decode",
    "encode",
    "encode_probe",
    "slot_decoder",
]

SIZE = 50
"""Bytes of payload, as in the paper."""
_FIELDS = "4sBBHIIQqI14x"
_FORMAT = struct.Struct(f"!{_FIELDS}")
_MAGIC = b"kRP1"
_LONGEST_NS = 86_400_000_000_000  # of a delay that a responder can mean
_HELD = 65536  # acknowledgements whose stamp is awaited; a flood must not fill the memory


class Kind(IntEnum):
    """What a packet is."""

    PROBE = 1
    ACK1 = 2
    ACK2 = 3
    TRACE = 4
    TRACE_REPLY = 5


class StampSource(StrEnum):
    """Where the NIC stamps of a result come from; the weakest one names the result."""

    HARDWARE = "hardware"
    KERNEL = "kernel"
    APPLICATION = "application"


class State(StrEnum):
    """What a probe is waiting for."""

    SENT = "sent"
    HAVE_ACK1 = "have_ack1"
    HAVE_ACK2 = "have_ack2"
    COMPLETE = "complete"
    LOST = "lost"


_TIMEOUT = "timeout"
TRANSITIONS: dict[tuple[State, Kind | str], State] = {
    (State.SENT, Kind.ACK1): State.HAVE_ACK1,
    (State.SENT, Kind.ACK2): State.HAVE_ACK2,
    (State.HAVE_ACK1, Kind.ACK2): State.COMPLETE,
    (State.HAVE_ACK2, Kind.ACK1): State.COMPLETE,
    (State.SENT, _TIMEOUT): State.LOST,
    (State.HAVE_ACK1, _TIMEOUT): State.LOST,
    (State.HAVE_ACK2, _TIMEOUT): State.LOST,
}


class Packet(NamedTuple):
    """One decoded packet."""

    kind: Kind
    hop: int
    """Hop limit of a trace; 0 otherwise."""
    source_port: int
    target_qpn: int
    source_qpn: int
    sequence: int
    delay_ns: int
    """④ - ③ of an ACK2; 0 otherwise."""
    tuple_id: int


def encode(
    kind: int,
    *,
    source_port: int,
    target_qpn: int,
    source_qpn: int,
    sequence: int,
    hop: int = 0,
    delay_ns: int = 0,
    tuple_id: int = 0,
) -> bytes:
    """Return the 50 bytes of a packet."""
    return _FORMAT.pack(
        _MAGIC, kind, hop, source_port, target_qpn, source_qpn, sequence, delay_ns, tuple_id
    )


_KINDS = {int(kind): kind for kind in Kind}


def decode(data: bytes) -> Packet | None:
    """Return the packet, or None for anything that is not one of ours."""
    if len(data) != SIZE:
        return None
    magic, kind, hop, port, target, source, sequence, delay, tuple_id = _FORMAT.unpack(data)
    if magic != _MAGIC or kind not in _KINDS:
        return None
    return Packet(_KINDS[kind], hop, port, target, source, sequence, delay, tuple_id)


def slot_decoder(*, before: int, after: int) -> Callable[[memoryview], Iterable[Packet | None]]:
    """Return :func:`decode` for packets at equal distances in one piece of memory.

    ``before`` and ``after`` are the bytes of a slot around its packet, whose length the caller
    has to check: whatever lies in the slot is read.
    """
    unpack = struct.Struct(f"!{before}x{_FIELDS}{after}x").iter_unpack
    kinds, new = _KINDS.get, tuple.__new__

    def packets(memory: memoryview) -> Iterable[Packet | None]:
        for magic, number, *rest in unpack(memory):
            kind = kinds(number)
            known = magic == _MAGIC and kind is not None
            yield new(Packet, (kind, *rest)) if known else None

    return packets


# Names of the module: an enumeration's members are slow to look up, and these are for every packet.
_ACK1, _KERNEL, _APPLICATION = Kind.ACK1, StampSource.KERNEL, StampSource.APPLICATION

_STATES = tuple(State)
_WAITING, _COMPLETE = _STATES.index(State.SENT), _STATES.index(State.COMPLETE)


def _step(state: State, event: Kind | str) -> int | None:
    after = TRANSITIONS.get((state, event))
    return None if after is None else _STATES.index(after)


# The table by position, since enumeration members are slow dictionary keys and this runs for
# every packet: _NEXT[state][kind], _LOST[state].
_NEXT = [[None, *(_step(state, kind) for kind in Kind)] for state in _STATES]
_LOST = [_step(state, _TIMEOUT) for state in _STATES]


def encode_probe(
    source_port: int, target_qpn: int, source_qpn: int, sequence: int, tuple_id: int
) -> bytes:
    """Return a probe; :func:`encode` without its conveniences."""
    return _FORMAT.pack(_MAGIC, 1, 0, source_port, target_qpn, source_qpn, sequence, 0, tuple_id)


@dataclass(slots=True)
class Result:
    """The outcome of one probe."""

    tuple_id: int
    t1_ns: int
    """①; each difference stays inside one clock."""
    t2_ns: int | None
    t5_ns: int | None
    t6_ns: int | None
    responder_delay_ns: int | None
    """④ - ③, None when lost."""
    rtt_ns: int | None
    """Network round trip, None when lost."""
    prober_delay_ns: int | None
    """(⑥-①)-(⑤-②); None when lost or without NIC stamps."""
    stamp_source: StampSource
    lost: bool
    target_qpn: int


@dataclass(frozen=True, slots=True)
class Late:
    """An answer that came after its probe was counted as lost."""

    tuple_id: int
    t1_ns: int
    responder_delay_ns: int | None
    """Known when it was the ACK2 that came late."""


class _Pending:
    __slots__ = (
        "delay", "source", "state", "t1", "t2", "t5", "t5_source", "t6", "target_qpn", "tuple_id",
    )  # fmt: skip

    def __init__(self, tuple_id: int, t1: int, target_qpn: int, source: StampSource) -> None:
        self.tuple_id = tuple_id
        self.t1 = t1
        self.target_qpn = target_qpn
        self.state: int | None = _WAITING
        self.source = source
        self.t2: int | None = None
        self.t5: int | None = None
        self.t6: int | None = None
        self.t5_source = source
        self.delay: int | None = None


class Prober:
    """The probes of one RNIC that are under way."""

    def __init__(self, *, timeout_ns: int, hold_ns: int) -> None:
        """Lose a probe after ``timeout_ns``; look at late answers for ``hold_ns`` more."""
        self._timeout = timeout_ns
        self._hold = hold_ns
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._late: OrderedDict[int, _Pending] = OrderedDict()
        self.sequence = 0
        self.duplicates = 0
        self.strangers = 0

    def __len__(self) -> int:
        return len(self._pending)

    def configure(self, timeout_ns: int, hold_ns: int) -> None:
        """Change the times; probes under way are judged by the new ones."""
        self._timeout, self._hold = timeout_ns, hold_ns

    def start(self, tuple_id: int, t1_ns: int, target_qpn: int) -> int:
        """Register a probe sent at ① and return its sequence number."""
        self.sequence += 1
        self._pending[self.sequence] = _Pending(tuple_id, t1_ns, target_qpn, _APPLICATION)
        return self.sequence

    def cancel(self, sequence: int) -> None:
        """Forget a probe that this host could not send: it says nothing about the network."""
        self._pending.pop(sequence, None)

    def stamped(self, sequence: int, t2_ns: int, source: StampSource) -> None:
        """Take the NIC's stamp ② of a probe."""
        pending = self._pending.get(sequence)
        if pending is not None:
            pending.t2 = t2_ns
            pending.source = source

    def receive(
        self,
        packet: Packet,
        t5_ns: int | None,
        t6_ns: int,
        source: StampSource = StampSource.KERNEL,
    ) -> Result | Late | None:
        """Take an ACK1 (⑤ by the NIC, ⑥ when polled) or ACK2; return an event when there is one.

        ``source`` says whose clock ⑤ is.
        """
        pending = self._pending.get(packet.sequence)
        if pending is None:
            return self._receive_late(packet)
        kind = packet.kind
        if not -_LONGEST_NS < packet.delay_ns < _LONGEST_NS:
            self.strangers += 1
            return None
        state = _NEXT[pending.state or 0][kind]
        if state is None:
            self.duplicates += 1
            return None
        # The kernel's clock decides: an answer that lay in the socket because we were slow is in
        # time. A NIC's own clock has nothing to do with ①.
        arrived = t5_ns if t5_ns is not None and source is _KERNEL else t6_ns
        if arrived - pending.t1 > self._timeout:
            self._lose(packet.sequence, pending)
            self._late[packet.sequence] = pending
            return self._result(pending, lost=True)
        pending.state = state
        if kind is _ACK1:
            pending.t5, pending.t6, pending.t5_source = t5_ns, t6_ns, source
        else:
            pending.delay = packet.delay_ns
        if state == _COMPLETE:
            del self._pending[packet.sequence]
            return self._result(pending, lost=False)
        return None

    def _receive_late(self, packet: Packet) -> Late | None:
        pending = self._late.get(packet.sequence)
        if pending is None or not -_LONGEST_NS < packet.delay_ns < _LONGEST_NS:
            self.strangers += 1
            return None
        if packet.kind is Kind.ACK2:
            del self._late[packet.sequence]
            return Late(pending.tuple_id, pending.t1, packet.delay_ns)
        return None

    def _lose(self, sequence: int, pending: _Pending) -> None:
        del self._pending[sequence]
        pending.state = _LOST[pending.state or 0]

    def expire(self, now_ns: int) -> list[Result]:
        """Return the probes whose time is over; call it after draining the socket."""
        lost = []
        while self._pending:
            sequence, pending = next(iter(self._pending.items()))
            age = now_ns - pending.t1
            if age < 0:  # the clock was set back: when it was sent is not known any more
                del self._pending[sequence]
                continue
            if age <= self._timeout:
                break
            self._lose(sequence, pending)
            self._late[sequence] = pending
            lost.append(self._result(pending, lost=True))
        while self._late:
            sequence, pending = next(iter(self._late.items()))
            age = now_ns - pending.t1
            if 0 <= age <= self._timeout + self._hold and len(self._late) < _HELD:
                break
            del self._late[sequence]
        return lost

    @staticmethod
    def _result(pending: _Pending, *, lost: bool) -> Result:
        t1, t2, t5, t6, delay = pending.t1, pending.t2, pending.t5, pending.t6, pending.delay
        rtt: int | None = None
        prober: int | None = None
        source = pending.source
        if not lost and t6 is not None and delay is not None:
            if t2 is not None and t5 is not None and pending.t5_source is source:
                rtt = t5 - t2 - delay
                prober = t6 - t1 - (t5 - t2)
            else:
                source = _APPLICATION
                kernel = t5 is not None and pending.t5_source is _KERNEL
                rtt = (t5 if kernel and t5 is not None else t6) - t1 - delay
        return Result(
            pending.tuple_id, t1, t2, t5, t6, delay, rtt, prober, source, lost, pending.target_qpn
        )


class Responder:
    """Answers probes of one RNIC: ACK1 at once, ACK2 when the stamp of ACK1 is known."""

    def __init__(self, qpn: int) -> None:
        """Answer for this queue pair number only, as the hardware would."""
        self.qpn = qpn
        self.stale = 0
        self._held: OrderedDict[int, tuple[Packet, int | None, StampSource, int]] = OrderedDict()
        self._token = 0

    def receive(
        self,
        packet: Packet,
        t3_ns: int | None,
        now_ns: int,
        source: StampSource = StampSource.KERNEL,
    ) -> tuple[bytes, int] | None:
        """Return ACK1 and the token of its stamp; None for a probe to an older QPN.

        ``source`` says whose clock ③ is; ``now_ns`` is the application's.
        """
        if packet.target_qpn != self.qpn:
            self.stale += 1
            return None
        self._token += 1
        if len(self._held) >= _HELD:
            self._held.popitem(last=False)
        self._held[self._token] = (packet, t3_ns, source, now_ns)
        ack = encode(
            Kind.ACK1,
            source_port=packet.source_port,
            target_qpn=packet.source_qpn,
            source_qpn=self.qpn,
            sequence=packet.sequence,
            tuple_id=packet.tuple_id,
        )
        return ack, self._token

    def stamped(
        self,
        token: int,
        t4_ns: int | None,
        now_ns: int,
        source: StampSource = StampSource.KERNEL,
    ) -> tuple[bytes, Packet] | None:
        """Return ACK2 for the stamp ④ of ACK1, and the probe it answers.

        Where ③ and ④ are not of one clock, the application's times stand for both.
        """
        held = self._held.pop(token, None)
        if held is None:
            return None
        packet, t3, t3_source, then = held
        one_clock = t3 is not None and t4_ns is not None and t3_source is source
        delay = t4_ns - t3 if one_clock and t4_ns is not None and t3 is not None else now_ns - then
        ack = encode(
            Kind.ACK2,
            source_port=packet.source_port,
            target_qpn=packet.source_qpn,
            source_qpn=self.qpn,
            sequence=packet.sequence,
            delay_ns=delay,
            tuple_id=packet.tuple_id,
        )
        return ack, packet

"""Decode one chunk of events into columns.

The intact case goes through msgspec's typed decoder, which skips what no analysis needs. A chunk
that it refuses is cut in halves until the damage stands alone in a small stretch, which is then
repaired and read event by event.
"""

import gc
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from kansoku.formats.kineto._repair import repair_chunk, salvage
from kansoku.formats.kineto._scan import Piece, last_seam, middle_seam

__all__ = [
    "EXACT_LIMIT_US",
    "Arguments",
    "Begin",
    "Damage",
    "Decoded",
    "End",
    "Event",
    "FullEvent",
    "cut_tail",
    "decode",
    "nanoseconds",
]

_STRETCH_BYTES = 32 << 10
# Doubles hold microseconds to the nanosecond up to 2**43; above, stamps are read as text.
EXACT_LIMIT_US = float(1 << 43)
_ARRAY_END = re.compile(rb"\}\s*\](?=\s*(?:\}|,\s*\"|$))")
_NO_MORE = re.compile(rb"\s*\](?=\s*(?:\}|,\s*\"|$))")
_MAX_NS = 1 << 62
_BETWEEN = b", \t\r\n"
_BETWEEN_BYTES = frozenset(bytes([code]) for code in _BETWEEN)
_BETWEEN_RUN = re.compile(rb"[, \t\r\n]*")

_Loose = int | float | str | None


class Arguments(msgspec.Struct, gc=False):
    """The arguments that some analysis reads; all others are skipped, not built."""

    correlation: _Loose = None
    device: _Loose = None
    stream: _Loose = None
    bytes: _Loose = None
    size: _Loose = None
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    group_size: Any = msgspec.field(default=None, name="Group size")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    sequence: Any = msgspec.field(default=None, name="Seq")


_LOOSE_ARGUMENTS = {"correlation", "device", "stream", "bytes", "size"}


class Event(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """One complete slice."""

    cat: str | None = None
    name: _Loose = ""
    pid: _Loose = None
    tid: _Loose = None
    ts: _Loose = None
    dur: _Loose = None
    args: Arguments | None = None


class _ExactEvent(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """The same with stamps as text, for files whose stamps a double cannot hold."""

    cat: str | None = None
    name: _Loose = ""
    pid: _Loose = None
    tid: _Loose = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"null")
    args: Arguments | None = None


class FullEvent(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """The same with every argument kept as the text it was, for conversion."""

    cat: str | None = None
    name: _Loose = ""
    pid: _Loose = None
    tid: _Loose = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"null")
    args: msgspec.Raw = msgspec.Raw(b"null")


class _Edge(msgspec.Struct, gc=False, tag_field="ph"):
    cat: str | None = None
    name: _Loose = None
    pid: _Loose = None
    tid: _Loose = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    args: Arguments | None = None


class Begin(_Edge, gc=False, tag="B"):
    """The beginning of a slice whose end is an event of its own."""


class End(_Edge, gc=False, tag="E"):
    """Such an end."""


# Flows, metadata, instants, counters: known, and not slices.
_OTHER_PHASES = "bensftMiICPNODvVRc(),=SpF"
_OTHERS = tuple(
    msgspec.defstruct(f"_Other{number}", [], tag_field="ph", tag=letter, gc=False)
    for number, letter in enumerate(_OTHER_PHASES)
)
_KNOWN_PHASES = frozenset(_OTHER_PHASES) | {"X", "B", "E"}


def _decoder(kind: type[msgspec.Struct]) -> Callable[[bytes], Any]:
    union: Any = kind | Begin | End
    for other in _OTHERS:
        union |= other
    return msgspec.json.Decoder(list[union]).decode


_DECODERS: dict[type[msgspec.Struct], Callable[[bytes], Any]] = {
    kind: _decoder(kind) for kind in (Event, _ExactEvent, FullEvent)
}
_DECODE_ONE = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(slots=True, kw_only=True)
class Damage:
    """What could not be read, or only after a repair."""

    lost_bytes: int = 0
    lost_stretches: int = 0
    lost_events: int = 0
    repaired: int = 0

    def add(self, other: "Damage") -> None:
        """Sum the counts of another chunk into this one."""
        self.lost_bytes += other.lost_bytes
        self.lost_stretches += other.lost_stretches
        self.lost_events += other.lost_events
        self.repaired += other.repaired


@dataclass(slots=True, kw_only=True)
class Decoded:
    """Slices of one chunk, and what stood after the end of the array."""

    events: list[Any]
    rows: int
    """Events of every type, slices or not."""
    damage: Damage
    tail: str | None
    """Text after the array's end; None where its end was not seen."""
    edges: list[Begin | End] = field(default_factory=list)
    """Beginnings and ends that are events of their own."""


def decode(piece: Piece, *, exact: bool = False, full: bool = False) -> Decoded:
    """Decode the events of a piece; stamps stay raw text where ``exact``.

    With ``full`` the events are FullEvents, stamps and arguments raw.
    """
    wanted = FullEvent if full else _ExactEvent if exact else Event
    out = Decoded(events=[], rows=0, damage=Damage(), tail=None)
    data, out.tail = cut_tail(piece) if piece.last else (piece.data, None)
    data = bytes(data)
    was_on = gc.isenabled()
    gc.disable()
    try:
        _decode_into(data, out, wanted, last=piece.last and out.tail is None)
    finally:
        if was_on:
            gc.enable()
    return out


def cut_tail(piece: Piece) -> tuple[bytes | memoryview, str | None]:
    """Split the last chunk at the end of the array, if that is plain to see."""
    data = piece.data
    # Where the file's head is lost, what stands first ends nothing.
    if piece.kind != "headless" and (match := _NO_MORE.match(data)):
        return b"", str(data[match.end() :], "utf-8", "replace")
    start = last_seam(data) or 0
    for match in _ARRAY_END.finditer(data, start):
        try:
            _DECODE_ONE(bytes(data[start : match.start() + 1]).lstrip(b", \t\r\n"))
        except msgspec.DecodeError:
            continue
        return data[: match.start() + 1], str(data[match.end() :], "utf-8", "replace")
    return data, None


def _decode_into(data: bytes, out: Decoded, wanted: type[msgspec.Struct], *, last: bool) -> None:
    # Offsets, not slices: copies of megabytes cost as much as decoding them.
    between = _BETWEEN_RUN.match(data)
    first = between.end() if between is not None else 0
    end = len(data.rstrip(_BETWEEN)) if data[-1:] in _BETWEEN_BYTES else len(data)
    if first >= end or (last and out.tail is not None):
        return
    read = _DECODERS[wanted]
    try:
        events = read(b"".join((b"[", memoryview(data)[first:end], b"]")))
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        body = data[first:end]
        if len(body) > _STRETCH_BYTES and (cut := middle_seam(body)) is not None:
            _decode_into(body[:cut], out, wanted, last=False)
            _decode_into(body[cut:], out, wanted, last=last)
            return
    else:
        _take(events, out, wanted)
        return
    repaired = repair_chunk(body)
    if repaired != body:
        try:
            events = read(b"[" + repaired + b"]")
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            pass
        else:
            out.damage.repaired += 1
            _take(events, out, wanted)
            return
    _salvage_into(body, out, wanted, last=last)


def _salvage_into(body: bytes, out: Decoded, wanted: type[msgspec.Struct], *, last: bool) -> None:
    """Read what can be read of a damaged stretch, event by event."""
    found = salvage(body, last=last)
    out.damage.add(
        Damage(
            lost_bytes=found.lost_bytes,
            lost_stretches=found.lost_stretches,
            lost_events=found.lost_events,
            repaired=found.repaired,
        )
    )
    build = _full_from_dict if wanted is FullEvent else _from_dict
    for event in found.events:
        phase = event.get("ph")
        if not _is_whole(event):
            out.damage.add(_lost(event))
            continue
        out.rows += 1
        if phase == "X":
            out.events.append(build(event))
        elif phase in ("B", "E"):
            out.edges.append(_edge_from_dict(Begin if phase == "B" else End, event))
    if found.tail is not None:
        out.tail = found.tail


def _take(events: list[Any], out: Decoded, wanted: type[msgspec.Struct]) -> None:
    out.rows += len(events)
    out.events += [event for event in events if type(event) is wanted]
    if not {Begin, End}.isdisjoint(map(type, events)):
        out.edges += [event for event in events if type(event) in (Begin, End)]


def _is_whole(event: dict[str, Any]) -> bool:
    """Say whether an event tells what it is: without that it would vanish unsaid."""
    phase, category = event.get("ph"), event.get("cat")
    known = isinstance(phase, str) and phase in _KNOWN_PHASES
    return known and (category is None or isinstance(category, str))


def _lost(event: dict[str, Any]) -> Damage:
    size = len(json.dumps(event).encode("utf-8", "replace"))
    return Damage(lost_bytes=size, lost_stretches=1, lost_events=1)


def _edge_from_dict(kind: type[Begin] | type[End], row: dict[str, Any]) -> Begin | End:
    whole = _from_dict(row)
    stamp = msgspec.Raw(str(whole.ts).encode("utf-8", "replace"))
    return kind(
        cat=whole.cat, name=whole.name, pid=whole.pid, tid=whole.tid, ts=stamp, args=whole.args
    )


def _from_dict(row: dict[str, Any]) -> Event:
    arguments = row.get("args")
    built = None
    if isinstance(arguments, dict):
        built = Arguments()
        for name, key in zip(
            Arguments.__struct_fields__, Arguments.__struct_encode_fields__, strict=True
        ):
            value = arguments.get(key)
            setattr(built, name, _loose(value) if name in _LOOSE_ARGUMENTS else value)
    category = _loose(row.get("cat"))
    return Event(
        cat=category if isinstance(category, str) else None,
        name=_loose(row.get("name")),
        pid=_loose(row.get("pid")),
        tid=_loose(row.get("tid")),
        ts=_loose(row.get("ts")),
        dur=_loose(row.get("dur")),
        args=built,
    )


def _full_from_dict(row: dict[str, Any]) -> FullEvent:
    """Build the event that conversion wants; numbers that were kept as text stay text."""

    def raw(key: str) -> msgspec.Raw:
        value = row.get(key)
        text = (
            value
            if key != "args" and isinstance(value, str)
            else json.dumps(value, ensure_ascii=False)
        )
        return msgspec.Raw(text.encode("utf-8", "replace"))

    small = _from_dict({**row, "args": None})
    return FullEvent(
        cat=small.cat,
        name=small.name,
        pid=small.pid,
        tid=small.tid,
        ts=raw("ts"),
        dur=raw("dur"),
        args=raw("args"),
    )


def _loose(value: Any) -> _Loose:
    if isinstance(value, str) and not value.isascii():  # half a surrogate pair is no text
        return value.encode("utf-8", "replace").decode()
    return value if isinstance(value, int | float | str) else None


def nanoseconds(value: Any) -> int | None:
    """Return microseconds in any form the field writes as integer ns; None where unreadable."""
    if isinstance(value, msgspec.Raw):
        value = bytes(value).decode("utf-8", "replace").strip('" ')
    result: int | None
    if type(value) is int:
        result = value * 1000
    elif isinstance(value, str):
        try:
            number = Decimal(value.strip().replace(",", "."))
            result = int((number * 1000).to_integral_value()) if number.is_finite() else None
        except (InvalidOperation, ValueError, OverflowError):
            return None
    elif isinstance(value, float) and abs(value) < _MAX_NS:
        whole = int(value // 1)
        result = whole * 1000 + round((value - whole) * 1000)
    else:
        return None
    return result if result is not None and abs(result) < _MAX_NS else None

"""Read what broken writers wrote: repairs of JSON that change no intact value.

Each repair is one that users reported: bare NaN and Infinity, control bytes, invalid UTF-8, comma
decimals, unescaped quotes and backslashes. A stretch that no repair makes readable is left out
and counted, never guessed.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from kansoku.formats.kineto._scan import EVENT_START

__all__ = ["Salvage", "repair_chunk", "salvage"]

# Only straight after a key: text that merely looks like it stands inside strings.
_NUMBER_WORDS = re.compile(
    rb"((?<!\\)\"\s*:\s*)[-+]?(?:NaN|nan|Infinity|Inf|inf|1\.#IND|1\.#INF)(?=\s*[,}\]])"
)
_COMMA_DECIMAL = re.compile(rb"((?<!\\)\"\s*:\s*-?\d+),(\d+)(?=\s*[,}\r\n])")
_CONTROL = bytes(32 if (code < 32 and code not in (9, 10, 13)) else code for code in range(256))
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_END = re.compile(r"\s*\]\s*(?:\}|,\s*\"|$)")
_AFTER_VALUE = re.compile(r'\s*(?:[}\]]|,\s*"[^"\n]*"\s*:|$)')
_AFTER_ELEMENT = re.compile(r'\s*(?:\]|,\s*(?:["\[{\-\d]|true|false|null)|$)')
_CLOSING = re.compile(r"\s*\](?=\s*(?:\}|,\s*\"|$))")
# Numbers with a fraction stay text: stamps keep every digit of the file.
_STARTS = re.compile(EVENT_START.pattern.decode())
_FAILURES_LIMIT = 20_000
_WINDOW = 1 << 16
"""No event of a damaged stretch is longer; it bounds the work on an unclosed one."""
_DECODER = json.JSONDecoder(strict=False, parse_float=str)


def repair_chunk(data: bytes) -> bytes:
    """Return the chunk with the repairs that are safe over many events at once."""
    data = data.translate(_CONTROL)
    data = _NUMBER_WORDS.sub(rb"\1null", data)
    data = _COMMA_DECIMAL.sub(rb"\1.\2", data)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        data = data.decode("utf-8", "replace").encode()
    return data


@dataclass(slots=True, kw_only=True)
class Salvage:
    """What could be read of a damaged stretch."""

    events: list[dict[str, Any]] = field(default_factory=list)
    repaired: int = 0
    """Events read only after a repair."""
    lost_bytes: int = 0
    lost_stretches: int = 0
    lost_events: int = 0
    """Event beginnings seen in the stretches that could not be read."""
    tail: str | None = None
    """What follows the end of the array, if the end was seen."""


def salvage(data: bytes, *, last: bool) -> Salvage:
    """Read events one by one; skip from a broken one to the next beginning of an event."""
    text = data.decode("utf-8", "replace")
    out = Salvage()
    position, size = 0, len(text)
    failures = 0
    while position < size:
        character = text[position]
        if character in " \t\r\n,":
            position += 1
            continue
        if character == "]" and (last or size - position > 1) and _END.match(text, position):
            out.tail = text[position + 1 :]
            return out
        if character == "{":
            value, end = _decode_at(text, position)
            if value is not None:
                out.events.append(value)
                position = end
                continue
        following = _STARTS.search(text, position + 1)
        end = size if following is None else following.start()
        failures += 1
        if failures > _FAILURES_LIMIT:  # hostile or beyond hope: bounded work, all counted
            end = size
        piece = text[position:end]
        value, rest = _repair(piece)
        if value is not None:
            out.events.append(value)
            out.repaired += 1
            if last and (closing := _CLOSING.match(rest)):
                out.tail = rest[closing.end() :] + text[end:]
                return out
        elif piece.strip("}], \t\r\n"):
            out.lost_bytes += len(piece.encode("utf-8", "replace"))
            out.lost_stretches += 1
            out.lost_events += 1 if _STARTS.match(piece) else 0
        position = end
    return out


def _decode_at(text: str, position: int) -> tuple[dict[str, Any] | None, int]:
    window, base = text, 0
    if len(text) - position > _WINDOW:
        window, base = text[position : position + _WINDOW], position
    try:
        value, end = _DECODER.raw_decode(window, position - base)
    except (ValueError, RecursionError):
        return None, position
    return (value, end + base) if isinstance(value, dict) and _is_event(value) else (None, position)


def _is_event(value: dict[str, Any]) -> bool:
    return "ph" in value or "ts" in value


def _repair(piece: str) -> tuple[dict[str, Any] | None, str]:
    """Escape stray backslashes and quotes of one event, then read it; None if that fails.

    Also returns what follows the event in the piece.
    """
    if not piece.startswith("{") or len(piece) > 1 << 20:
        return None, ""
    data = repair_chunk(piece.encode("utf-8", "replace")).decode("utf-8", "replace")
    for candidate in (data, _BAD_ESCAPE.sub(r"\\\\", data)):
        value, end = _decode_at(candidate, 0)
        rest = candidate[end:]
        if value is not None and (not rest.strip("}], \t\r\n") or _CLOSING.match(rest)):
            return value, rest
    fixed, rest = _escape_quotes(_BAD_ESCAPE.sub(r"\\\\", data))
    value, _ = _decode_at(fixed, 0)
    return value, rest


def _escape_quotes(text: str) -> tuple[str, str]:
    """Escape quotes inside strings: one closes only if JSON goes on as it must after it."""
    out: list[str] = []
    position, size = 0, len(text)
    expect_key = False
    stack: list[str] = []
    while position < size:
        character = text[position]
        if character == '"':
            is_key = expect_key and bool(stack) and stack[-1] == "{"
            ends = _AFTER_ELEMENT if stack and stack[-1] == "[" else _AFTER_VALUE
            position = _copy_string(text, position, out, ends=None if is_key else ends)
            expect_key = False
            continue
        if character in "{[":
            stack.append(character)
            expect_key = character == "{"
        elif character in "}]":
            if stack:
                stack.pop()
            expect_key = False
        elif character == ",":
            expect_key = True
        elif character == ":":
            expect_key = False
        out.append(character)
        position += 1
        if not stack:
            break
    return "".join(out), text[position:]


def _copy_string(text: str, position: int, out: list[str], *, ends: re.Pattern[str] | None) -> int:
    """Copy one string; ``ends`` matches what may follow its closing quote, None for a key."""
    out.append('"')
    position += 1
    while position < len(text):
        character = text[position]
        if character == "\\":
            out.append(text[position : position + 2])
            position += 2
            continue
        if character == '"':
            rest = text[position + 1 : position + 400]
            closes = rest.lstrip().startswith(":") if ends is None else ends.match(rest)
            if closes:
                out.append('"')
                return position + 1
            out.append('\\"')
        else:
            out.append(character)
        position += 1
    return position

"""Find exported functions of a shared library: name, place in the file, first bytes.

Reads ELF64 through a memory map: the dynamic symbol table alone, which is what stays in a stripped
library. C++ functions are found by the beginning of their mangled name, since the rest (types of
arguments) differs between versions. Bounds are checked: the file belongs to somebody else's job.
"""

from __future__ import annotations

import bisect
import mmap
import os
import re
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["ElfError", "Function", "Library", "Ranges"]

_SYMBOL = struct.Struct("<IBBHQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_DYNSYM, _LOAD, _FUNC, _IFUNC = 11, 1, 2, 10
_X86_64 = 62
_FEW_SYMBOLS = 60_000


class ElfError(Exception):
    """The bytes are no library that can be probed."""


class Function(NamedTuple):
    """One exported function."""

    name: str
    address: int
    """As linked; the process adds where it mapped the library."""
    offset: int
    """In the file: what a uprobe is set by."""
    size: int
    code: bytes
    """Its first bytes."""


class Library:
    """The functions of one file."""

    def __init__(self, path: str):
        self.path = path
        try:
            with open(path, "rb") as stream:
                if os.fstat(stream.fileno()).st_size < 64:
                    raise ElfError(f"{path}: not an ELF file")
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ElfError(f"{path}: {error}") from error
        try:
            self._read_header()
        except (struct.error, IndexError, ValueError) as error:
            raise ElfError(f"{path}: damaged ELF file: {error}") from error

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def _read_header(self) -> None:
        head = self._map[:64]
        if head[:4] != b"\x7fELF" or head[4] != 2 or head[5] != 1:
            raise ElfError(f"{self.path}: not a little-endian 64-bit ELF file")
        (self.machine,) = struct.unpack_from("<H", head, 18)
        if self.machine != _X86_64:
            raise ElfError(f"{self.path}: machine {self.machine} is not x86-64")
        segments, sections = struct.unpack_from("<QQ", head, 32)
        _, count, section_bytes, section_count, _ = struct.unpack_from("<HHHHH", head, 54)
        self._segments = []
        for number in range(count):
            kind, _, offset, address, _, size, _, _ = _SEGMENT.unpack_from(
                self._map, segments + number * _SEGMENT.size
            )
            if kind == _LOAD:
                self._segments.append((address, offset, size))
        self._symbols = self._strings = (0, 0)
        if section_bytes != _SECTION.size:
            return
        table = [
            _SECTION.unpack_from(self._map, sections + n * section_bytes)
            for n in range(section_count)
        ]
        for section in table:
            if section[1] == _DYNSYM and section[6] < len(table):
                strings = table[section[6]]
                self._symbols = (section[4], section[5])
                self._strings = (strings[4], strings[5])

    def offset_of(self, address: int) -> int | None:
        """Return where an address as linked lies in the file."""
        for start, offset, size in self._segments:
            if start <= address < start + size:
                return int(address - start + offset)
        return None

    def address_of(self, offset: int) -> int | None:
        """Return the address as linked of a place in the file."""
        for start, at, size in self._segments:
            if at <= offset < at + size:
                return int(offset - at + start)
        return None

    def find(self, beginnings: Iterable[str]) -> dict[str, list[Function]]:
        """Return the functions whose mangled name starts so; exact where it ends with ``$``.

        One pass over the names, one over the symbols: 0.1 s for libtorch.
        """
        wanted = list(beginnings)
        found: dict[str, list[Function]] = {w: [] for w in wanted}
        for function in self._functions(self._names(wanted)):
            for beginning in wanted:
                exact = beginning.endswith("$")
                if function.name == beginning[:-1] or (
                    not exact and function.name.startswith(beginning)
                ):
                    found[beginning].append(function)
        return found

    def _names(self, wanted: list[str]) -> dict[int, str] | None:
        """Return where the wanted names stand in the table; None: look at every symbol.

        A linker may keep one name as the tail of another (``_exit`` in ``quick_exit``), which a
        search for whole names misses. Small libraries are read name by name, therefore; the mangled
        names of the large ones are nobody's tail.
        """
        if self._symbols[1] // _SYMBOL.size < _FEW_SYMBOLS:
            return None
        pattern = re.compile(
            b"\\0("
            + b"|".join(
                re.escape(w[:-1].encode()) + b"(?=\\0)"
                if w.endswith("$")
                else re.escape(w.encode()) + b"[^\\0]*"
                for w in sorted(wanted, key=len, reverse=True)
            )
            + b")"
        )
        start, size = self._strings
        return {
            match.start(1) - start: match[1].decode("ascii", "replace")
            for match in pattern.finditer(self._map, start, start + size)
        }

    def _name(self, place: int) -> str:
        start, size = self._strings
        if place >= size:
            return ""
        end = self._map.find(b"\0", start + place, min(start + size, start + place + 1024))
        return self._map[start + place : end].decode("ascii", "replace") if end > 0 else ""

    def _functions(self, names: dict[int, str] | None) -> list[Function]:
        start, size = self._symbols
        raw = memoryview(self._map)[start : start + size - size % _SYMBOL.size]
        found = []
        try:
            # The first word of each symbol says where its name is: compare those alone.
            places: Any = raw.cast("I")[:: _SYMBOL.size // 4].tolist()
            for number, place in enumerate(places):
                if names is not None and place not in names:
                    continue
                at = start + number * _SYMBOL.size
                _, info, _, section, address, length = _SYMBOL.unpack_from(self._map, at)
                offset = self.offset_of(address)
                name = self._name(place) if names is None else names[place]
                if section and info & 15 in (_FUNC, _IFUNC) and offset is not None:
                    code = bytes(self._map[offset : offset + 32])
                    found.append(Function(name, address, offset, length, code))
        finally:
            raw.release()
        return found


class Ranges:
    """Say quickly whether an address lies in one of several functions."""

    def __init__(self, spans: Iterable[tuple[int, int]]):
        self.spans = sorted(spans)
        self._starts = [start for start, _ in self.spans]

    def __contains__(self, address: int) -> bool:
        place = bisect.bisect_right(self._starts, address) - 1
        return place >= 0 and address < self.spans[place][1]

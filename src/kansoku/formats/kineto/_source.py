"""Find trace files and inflate them: plain, gzip, members of tar archives."""

import logging
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

from isal import isal_zlib

from kansoku.errors import InputError
from kansoku.formats.kineto._spare import Spare

__all__ = ["Source", "find_sources", "inflated_bytes", "is_plain", "read_blocks", "read_stretch"]

_BLOCK_BYTES = 1 << 18
_GZIP_RATIO = 10
_MEMBER_BLOCK_BYTES = 1 << 14
_SUFFIXES = (".json", ".json.gz", ".trace", ".trace.gz")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
_GZIP_ERRORS: tuple[type[Exception], ...] = (isal_zlib.error, zlib.error)  # type: ignore[assignment]
_ARCHIVE_ERRORS: tuple[type[Exception], ...] = (
    tarfile.TarError,
    EOFError,
    OSError,
    *_GZIP_ERRORS,
)
_OWN_FILES = frozenset({"run.json", "package.json"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One trace: a file, or a member of an archive."""

    path: Path
    member: str | None
    size_bytes: int
    """Size on disk, or of the member."""
    named: bool = True
    """The user named it; else it lay in a folder or archive, and need not be a trace."""

    def __str__(self) -> str:
        return f"{self.path}!{self.member}" if self.member else str(self.path)

    @property
    def file_name(self) -> str:
        """The name that may tell the rank."""
        return Path(self.member or self.path).name


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """Return the traces that files, folders and archives hold, in path order.

    Raises InputError naming the path that does not exist or holds none.
    """
    found: list[Source] = []
    for path in paths:
        if path.is_dir():
            inside = [
                source
                for entry in sorted(path.rglob("*"))
                if entry.is_file() and entry.name not in _OWN_FILES and _has_suffix(entry.name)
                for source in _expand(entry, named=False)
            ]
            if not inside:
                raise InputError("no trace files in this folder", where=str(path))
            found += inside
        elif path.exists():
            found += _expand(path)
        else:
            raise InputError("no such file or folder", where=str(path))
    return found


def _has_suffix(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES + _TAR_SUFFIXES)


def _expand(path: Path, *, named: bool = True) -> list[Source]:
    if not path.name.lower().endswith(_TAR_SUFFIXES):
        return [Source(path=path, member=None, size_bytes=path.stat().st_size, named=named)]
    members: list[Source] = []
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and member.name.lower().endswith(_SUFFIXES):
                    members.append(  # noqa: PERF401 - what came before a cut is kept
                        Source(path=path, member=member.name, size_bytes=member.size, named=False)
                    )
    except _ARCHIVE_ERRORS as error:
        if not members:
            raise InputError(f"unreadable archive: {error}", where=str(path)) from None
        logger.warning("%s ends early (%s); members after the cut are lost", path, error)
    if not members:
        raise InputError("no trace files in this archive", where=str(path))
    return sorted(members, key=lambda source: source.member or "")


def inflated_bytes(source: Source) -> int:
    """Return about how many bytes of text a source holds."""
    return source.size_bytes * (_GZIP_RATIO if source.file_name.endswith(".gz") else 1)


def read_blocks(source: Source, problems: list[str]) -> Iterator[bytes | memoryview]:
    """Yield the inflated bytes; what cut the stream short is added to ``problems``.

    A block holds what it does until the next one is asked for: fresh memory costs as much as
    reading from the disk's cache.
    """
    if source.member is not None:
        yield from _member_blocks(source, problems)
        return
    try:
        with source.path.open("rb", buffering=0) as file:
            raw = _file_blocks(file)
            first = next(raw, memoryview(b""))
            whole = chain([first], raw)
            yield from _inflate(whole, problems) if bytes(first[:2]) == b"\x1f\x8b" else whole
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", where=str(source)) from None


def is_plain(source: Source) -> bool:
    """Say whether positions in the events are positions in the file: no archive, no gzip."""
    if source.member is not None or not source.path.is_file():  # a pipe is read once only
        return False
    try:
        with source.path.open("rb") as file:
            return file.read(2) != b"\x1f\x8b"
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", where=str(source)) from None


def read_stretch(path: Path, offset: int, size: int) -> bytes:
    """Return bytes of a plain file."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size) or b""


_blocks = Spare(lambda: bytearray(_BLOCK_BYTES))


def _file_blocks(file: FileIO) -> Iterator[memoryview]:
    with _blocks.lent() as lent:
        block = memoryview(lent)[:_BLOCK_BYTES]
        while size := file.readinto(block):
            yield block[:size]


def _member_blocks(source: Source, problems: list[str]) -> Iterator[bytes]:
    try:
        with tarfile.open(source.path) as archive:
            member = next((entry for entry in archive if entry.name == source.member), None)
            # Read beneath tarfile, which refuses a member that a cut archive holds in part.
            file = archive.fileobj
            if file is None or member is None:
                raise InputError("unreadable archive", where=str(source))
            file.seek(member.offset_data)
            raw = _limited_blocks(file, member.size, problems)
            first = next(raw, b"")
            whole = chain([first], raw)
            yield from _inflate(whole, problems) if first[:2] == b"\x1f\x8b" else whole
    except _ARCHIVE_ERRORS as error:
        problems.append(f"truncated: the archive ends early ({error})")


def _limited_blocks(file: Any, size: int, problems: list[str]) -> Iterator[bytes]:
    left = size
    while left > 0:
        block = file.read(min(_MEMBER_BLOCK_BYTES, left))
        if not block:
            problems.append("truncated: the archive ends early")
            return
        left -= len(block)
        yield block


def _inflate(blocks: Iterator[bytes | memoryview], problems: list[str]) -> Iterator[bytes]:
    """Inflate one or more gzip members; keep what came before a cut or a bad checksum."""
    inflater = isal_zlib.decompressobj(wbits=31)
    started = False
    for block in blocks:
        data = block
        while data:
            started = True
            try:
                out = inflater.decompress(data, _BLOCK_BYTES)
            except _GZIP_ERRORS as error:
                problems.append(f"damaged gzip stream: {error}")
                return
            if out:
                yield out
            if inflater.eof:
                data = inflater.unused_data.lstrip(b"\x00")
                inflater = isal_zlib.decompressobj(wbits=31)
                started = False
            else:
                data = inflater.unconsumed_tail
    if started and not inflater.eof:
        problems.append("truncated: the gzip stream ends early")

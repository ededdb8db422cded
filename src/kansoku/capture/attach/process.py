"""A process seen from outside: its files in /proc, and words of its memory."""

from __future__ import annotations

import os
import re
import struct
from typing import NamedTuple

__all__ = ["GroupFacts", "Mapping", "Memory", "Process", "descendants"]

_MAX_GROUP = 1 << 20


class Mapping(NamedTuple):
    """One mapped stretch of a file."""

    start: int
    end: int
    offset: int
    path: str


class GroupFacts(NamedTuple):
    """A process group as the object in the process's memory says."""

    name: str
    description: str | None
    rank: int | None
    size: int | None
    ranks: tuple[int, ...]
    """Global ranks, in group order; empty where they could not be read."""


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None


class Process:
    """What /proc says of one process. Raise OSError where it is gone or not ours to see."""

    def __init__(self, pid: int):
        self.pid = pid
        self.start, self._image = self._read()

    def _read(self) -> tuple[int, tuple[int, ...]]:
        """Return when it started, and where its code and its stack lie; zeros: it is ending."""
        with open(f"/proc/{self.pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            raise ProcessLookupError(f"process {self.pid} has ended")
        return int(fields[19]), tuple(map(int, fields[23:26]))

    def alive(self) -> bool:
        """Say whether it still runs: not another with its number."""
        try:
            return self._read()[0] == self.start
        except OSError:
            return False

    def replaced(self, memory: Memory) -> bool:
        """Say whether it has put another program in its place (exec) since it was found.

        ``memory`` is what it had then. One that is ending has it no more either, but no new one.
        """
        gone = memory.gone()  # first: what is seen after that is of another memory
        try:
            start, image = self._read()
        except OSError:
            return False
        return start == self.start and any(image) and (gone or image != self._image)

    def mappings(self) -> list[Mapping]:
        """Return its mapped files."""
        found = []
        with open(f"/proc/{self.pid}/maps", encoding="utf-8", errors="surrogateescape") as stream:
            for line in stream:
                fields = line.rstrip("\n").split(None, 5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    start, _, end = fields[0].partition("-")
                    found.append(
                        Mapping(int(start, 16), int(end, 16), int(fields[2], 16), fields[5])
                    )
        return found

    def outside_path(self, path: str) -> str:
        """Return a path of its own file system as we reach it: it may live in a container."""
        return f"/proc/{self.pid}/root{path}"

    def environment(self) -> dict[str, str]:
        """Return the environment it started with."""
        with open(f"/proc/{self.pid}/environ", "rb") as stream:
            raw = stream.read()
        pairs = (item.partition(b"=") for item in raw.split(b"\0"))
        return {
            k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, _, v in pairs if k
        }

    def command(self) -> list[str]:
        """Return its command line."""
        with open(f"/proc/{self.pid}/cmdline", "rb") as stream:
            raw = stream.read().rstrip(b"\0")
        return [part.decode("utf-8", "replace") for part in raw.split(b"\0")] if raw else []

    def peak_rss_bytes(self) -> int:
        """Return the high-water mark of its memory; -1 unknown."""
        try:
            with open(f"/proc/{self.pid}/status", "rb") as stream:
                found = re.search(rb"^VmHWM:\s+(\d+) kB", stream.read(), re.MULTILINE)
        except OSError:
            return -1
        return int(found[1]) << 10 if found else -1

    def ranks(self) -> tuple[int, int, int]:
        """Return rank, local rank and world size by its environment; -1 unknown."""
        environment = self.environment()

        def first(*names: str) -> int:
            values = (_integer(environment.get(name)) for name in names)
            return next((value for value in values if value is not None), -1)

        return (
            first("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
            first("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
            first("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
        )

    def torch_version(self, library: str) -> str | None:
        """Return torch's version from the file beside its library."""
        place = os.path.join(os.path.dirname(os.path.dirname(library)), "version.py")
        try:
            with open(self.outside_path(place), encoding="utf-8", errors="replace") as stream:
                found = re.search(r"__version__ = ['\"]([^'\"]+)", stream.read(4096))
        except OSError:
            return None
        return found[1] if found else None

    def python_version(self) -> str | None:
        """Return the Python it runs by the names of its mapped files: major and minor."""
        for mapping in self.mappings():
            found = re.search(r"(?:lib|/)python(3\.\d+)", mapping.path)
            if found:
                return found[1]
        return None


def descendants(pid: int) -> list[int]:
    """Return the process and all below it: torchrun's workers, a launcher's ranks."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        try:
            tasks = os.listdir(f"/proc/{one}/task")
        except OSError:
            continue
        for task in tasks:
            try:
                with open(f"/proc/{one}/task/{task}/children", "rb") as stream:
                    waiting += [int(child) for child in stream.read().split()]
            except OSError:
                continue
    return found


class Memory:
    """Words of another process's memory, read through /proc/PID/mem."""

    def __init__(self, pid: int):
        self._file = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self, address: int, size: int) -> bytes:
        """Return the bytes; empty where nothing is mapped."""
        if not 0 < address < 1 << 47:
            return b""
        try:
            return os.pread(self._file, size, address)
        except (OSError, ValueError, OverflowError):
            return b""

    def gone(self) -> bool:
        """Say whether there is no such memory any more: the process ended, or runs a new program.

        What is not mapped cannot be read; of memory that is no more one reads nothing.
        """
        try:
            return os.pread(self._file, 1, 1 << 16) == b""
        except OSError:
            return False

    def _text(self, raw: bytes, at: int, address: int) -> str | None:
        """Return the std::string at ``raw[at:]``, which stands at ``address + at``, if one."""
        pointer, length, capacity = struct.unpack_from("<QQQ", raw, at)
        if pointer == address + at + 16:  # short strings lie in the object itself
            if length > 15:
                return None
            text = raw[at + 16 : at + 16 + length]
        elif 15 < length <= capacity < 4096:
            text = self.read(pointer, length)
            if len(text) < length:
                return None
        else:
            return None
        return text.decode("ascii") if all(32 <= byte < 127 for byte in text) else None

    def group(self, address: int) -> GroupFacts | None:
        """Read a c10d::Backend: rank, size, name, description and the ranks of its members.

        Its fields are found by what they must look like, not by fixed places: rank and size stand
        first, the strings point into themselves, the options name the backend.
        """
        raw = self.read(address, 1024)
        if len(raw) < 64:
            return None
        rank = size = None
        for at in (16, 24):  # one or two words of reference counts
            r, s = struct.unpack_from("<ii", raw, at)
            if 0 <= r < s <= _MAX_GROUP:
                rank, size = r, s
                break
        texts = []
        at = 24
        while at + 32 <= min(len(raw), 256):
            text = self._text(raw, at, address)
            if text is None:
                at += 8
            else:
                texts.append(text)
                at += 32
        if not texts:
            return None
        ranks = self._members(raw, size) if size else ()
        if not ranks and size and texts[0] == "0":
            ranks = tuple(range(size))
        description = texts[1] if len(texts) > 1 and texts[1] not in ("", "undefined") else None
        return GroupFacts(texts[0], description, rank, size, ranks)

    def _members(self, raw: bytes, size: int) -> tuple[int, ...]:
        """Find the options (which name their backend) and in them the members of the group."""
        for at in range(0, len(raw) - 8, 8):
            (pointer,) = struct.unpack_from("<Q", raw, at)
            if pointer % 8 or not 1 << 16 < pointer < 1 << 47:
                continue
            options = self.read(pointer, 256)
            if len(options) < 256:
                continue
            for name in range(16, 64, 8):
                if self._text(options, name, pointer) not in ("gloo", "nccl"):
                    continue
                for place in range(name + 32, 200, 8):
                    begin, end, limit = struct.unpack_from("<QQQ", options, place)
                    if begin and end - begin == 8 * size and end <= limit:
                        found = struct.unpack(f"<{size}Q", self.read(begin, 8 * size))
                        if len(set(found)) == size and max(found) < _MAX_GROUP:
                            return found
                return ()
        return ()

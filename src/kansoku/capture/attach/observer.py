"""Watch processes: set probes, read what the kernel noted, keep one ring a process that calls.

A ring is made at a process's first call: shells and loader workers below a job make none.

The loop is the caller's: ``add`` a process, then ``poll`` some ten times a second. A process whose
torch is not mapped yet is looked at again at each poll. ``close`` takes everything out.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from kansoku.capture.attach import decode
from kansoku.capture.attach.align import Alignment
from kansoku.capture.attach.book import Book, Call
from kansoku.capture.attach.bpf import Bpf, Event
from kansoku.capture.attach.elf import ElfError, Function, Library, Ranges
from kansoku.capture.attach.probes import PROBES, Probe, cheap_offset, library_of
from kansoku.capture.attach.process import GroupFacts, Memory, Process
from kansoku.capture.payload.gpus import gpu_facts
from kansoku.model import ring

__all__ = ["Observer", "Watched"]

_RETURNED = 1 << 15
_TARGET_SHIFT = 16
_LOOK_AGAIN_NS = 50_000_000
_LOOK_BEFORE_TORCH_NS, _LOOK_AFTER_TORCH_NS = 500_000_000, 1_000_000_000
"""The rarest looks at what a process maps: importing torch takes a second from there on. One look
reads and splits some 700 lines; twenty a second of four ranks cost several percent of a core."""
_ANCHOR_NS = 10_000_000_000
_IDLE_NS = 300_000_000
_MAX_RETURN_SITES = 64
_SAME_SOURCE_BYTES = 256 << 10

BLIND_SPOTS = (
    "seen from outside: no CPU time of phases, no model, tokens, FLOPs or MFU",
    "seen from outside: checkpoints, garbage collection and compilation count as other",
    "seen from outside: steps are counted from the attachment",
)


def _anchor() -> tuple[int, int]:
    """Read both clocks within the same instant: the narrowest of five tries."""
    tries = []
    for _ in range(5):
        before = time.monotonic_ns()
        unix = time.time_ns()
        after = time.monotonic_ns()
        tries.append((after - before, (before + after) // 2, unix))
    return min(tries)[1:]


class _Found(NamedTuple):
    """The probed functions of one file, found once for all its processes."""

    library: Library
    functions: dict[int, list[Function]]
    """By number of the probe."""


class Watched:
    """One process under observation; its ring is made by ``begin_record``."""

    def __init__(
        self, number: int, process: Process, ring_dir: str, run: str, node: str, size: int
    ):
        self.number = number
        self.process = process
        self.pid = process.pid
        self.exit_code: int | None = None
        self.ended = False
        self.attached: list[str] = []
        self.steps_through: list[str] = []
        self.links: list[int] = []
        self.seen: set[str] = set()
        self._looked = self._mapped = 0
        self.sites: dict[int, int] = {}
        """Where calls return to, and since when that is probed."""
        self.groups: dict[int, GroupFacts] = {}
        self.newborn: dict[int, tuple[int, int]] = {}
        """Rank and size of the groups whose making was seen, not used yet."""
        self.nested = Ranges(())
        self.marks: list[int] = []
        self.mark_ends = -1
        """The link at the entry of what ends marks; -1: none any more."""
        self.leaving = False
        """No probe is set any more: only what was noted before is taken."""
        self.has_process_groups = False
        self._anchored = time.monotonic_ns()
        self._size = size
        self.path = os.path.join(ring_dir, f"{node}-{process.pid}.ring")
        if os.path.exists(self.path):  # of the program that it was before
            self.path = os.path.join(ring_dir, f"{node}-{process.pid}-{number}.ring")
        self.writer: ring.RingWriter | None = None
        self.failure = ""
        """Why it has no ring although it called."""
        self.rank, self.local_rank, self.world_size = process.ranks()
        self.facts: dict[str, Any] = {
            "run": run,
            "node": node,
            "recorder": "attach",
            "python": process.python_version(),
            "groups": [],
            "missing": list(BLIND_SPOTS),
            "extra": gpu_facts(process.environment()),
        }
        self.book = Book(None, peak_rss=process.peak_rss_bytes)
        self.memory = Memory(process.pid)  # last: what fails before leaves nothing open

    def begin_record(self) -> None:
        """Make the ring, where there is none yet. Raise OSError where it cannot be made."""
        if self.writer is not None:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._size)
            buffer = mmap.mmap(descriptor, self._size)
        except BaseException:
            os.unlink(self.path)
            raise
        finally:
            os.close(descriptor)
        ring.format_ring(
            buffer,
            pid=self.pid,
            process_start=self.process.start,
            anchor=_anchor(),
            lane_shares=(1,),
        )
        self.writer = self.book.writer = ring.RingWriter(buffer)
        self.writer.set_ranks(self.rank, self.local_rank, self.world_size)
        self.writer.set_facts(self.facts)

    def release(self) -> None:
        """Let go of the ring of a process that has ended: it is kept elsewhere."""
        if self.writer is not None:
            self.writer = None
            del self.book.writer

    def tell(self) -> None:
        """Write the facts into the ring, where there is one."""
        if self.writer is not None:
            self.writer.set_facts(self.facts)

    def miss(self, sentence: str) -> None:
        """Note something that cannot be seen."""
        if sentence not in self.facts["missing"]:
            self.facts["missing"].append(sentence)
            self.tell()

    def is_due(self, now: int) -> bool:
        """Say whether to look at its libraries: ever more rarely since the last one was found."""
        rarest = _LOOK_AFTER_TORCH_NS if "torch" in self.facts else _LOOK_BEFORE_TORCH_NS
        self._mapped = self._mapped or now
        if now - self._looked < min((now - self._mapped) // 4, rarest):
            return False
        self._looked = now
        return True

    def maps(self, path: str) -> None:
        """Note that it maps a library, which is not looked at again."""
        self.seen.add(path)
        self._mapped = 0

    def ends_mark(self, caller: int) -> bool:
        """Say whether the end of a RecordFunction was called for a mark.

        Works and destructors call it too. The function that ends a mark is no exported one, but it
        stands in the library beside the one that begins it: both are of one source file.
        """
        return any(abs(caller - begin) < _SAME_SOURCE_BYTES for begin in self.marks)

    def refresh(self, now: int) -> None:
        """Read the clocks together again, now and then."""
        if self.writer is not None and now - self._anchored > _ANCHOR_NS:
            self._anchored = now
            self.writer.set_anchor(*_anchor())

    def makes_group(self, address: int, rank: int, size: int) -> None:
        """Note that a group is made: its counts are whole. With the first, training begins."""
        self.book.begins()
        rank, size = rank & 0xFFFFFFFF, size & 0xFFFFFFFF
        self.newborn[address] = (rank, size)
        if not self.groups and rank < size:  # the first one is the default group
            self._is_rank(rank, size)

    def _is_rank(self, rank: int, size: int) -> None:
        self.rank, self.world_size = rank, size
        local = self.local_rank if self.local_rank >= 0 else rank
        if self.writer is not None:
            self.writer.set_ranks(rank, local, size)

    def group(self, address: int) -> GroupFacts | None:
        """Return the group whose object stands there; tell the ring of new ones."""
        known = self.groups.get(address)
        born = self.newborn.pop(address, None)
        if known is not None and born is None:
            return known
        found = self.memory.group(address)
        if found is None and born is not None and not self.groups:
            # Gone before we looked. Torch counts its groups; the first is "0" and holds every rank.
            found = GroupFacts("0", None, *born, tuple(range(born[1])))
        elif found is None:
            self.miss("a process group's name and members could not be read from memory")
            found = GroupFacts(f"unknown-{len(self.groups)}", None, None, None, ())
        self.groups[address] = found
        if born is not None:
            self.book.born(found.name)
        if found.name == "0" and found.rank is not None and found.size is not None:
            self._is_rank(found.rank, found.size)
        if all(group["name"] != found.name for group in self.facts["groups"]):
            self.facts["groups"].append(
                {
                    "name": found.name,
                    "description": decode.axis(found.description),
                    "ranks": list(found.ranks),
                    "backend": None,
                }
            )
            self.tell()
        return found

    def shares(self, group: GroupFacts, *, pairs: bool) -> None:
        """Note an operation of a group: of a pair of ranks both make each one between them."""
        self.book.place.shared |= group.size != 1
        if group.size is None or (pairs and group.size > 2):
            self.book.place.mixes(group.name)

    def finish(self, *, ended: bool) -> None:
        """Close the record: the process has ended, or we leave it."""
        if self.writer is not None:
            killed = ended and self.exit_code is None
            if killed:
                self.book.stop()  # the last word is what it was in
            else:
                self.book.finish(time.monotonic_ns())
            if unseen := self.book.unseen():
                self.miss(unseen)
            if not killed:
                self.writer.set_state(ring.CLOSED)
        self.memory.close()


class Observer:
    """Probes on any number of processes, one ring each."""

    def __init__(
        self,
        *,
        ring_dir: str,
        run: str,
        node: str,
        ring_bytes: int = ring.DEFAULT_RING_BYTES,
        launches: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        self._ring_dir, self._run, self._node = ring_dir, run, node
        self._ring_bytes = ring_bytes
        self._launches = launches
        self._clock = clock
        self._bpf = Bpf()
        try:
            self._bpf.program(
                "plain", 0
            )  # what is not allowed is to be known before a ring is made
        except OSError:
            self._bpf.close()
            raise
        self._files: dict[tuple[int, int], _Found | None] = {}
        self.watched: dict[int, Watched] = {}
        self._by_number: dict[int, Watched] = {}
        self.alignment = Alignment()
        self._looked = 0
        self._busy = 0
        self._dropped = 0
        self.events = 0

    @property
    def dropped(self) -> int:
        """Return how many calls the kernel could not note."""
        return self._bpf.dropped

    def add(self, pid: int) -> Watched:
        """Watch a process. Raise OSError where it is gone."""
        if pid in self.watched and not self.watched[pid].ended:
            return self.watched[pid]
        watched = Watched(
            len(self._by_number) + 1,
            Process(pid),
            self._ring_dir,
            self._run,
            self._node,
            self._ring_bytes,
        )
        place = watched.book.place = self.alignment.place(watched.number, watched.miss)
        place.shared = watched.rank >= 0 and watched.world_size > 1
        self.watched[pid] = self._by_number[watched.number] = watched
        self._look(watched, first=True)
        return watched

    def forget(self, pid: int) -> None:
        """Take a process that does nothing worth recording off the list, with its ring."""
        watched = self.watched.pop(pid)
        self._leave(watched)
        if watched.writer is not None:
            os.unlink(watched.path)

    def poll(self) -> int:
        """Take what the kernel noted; look for new libraries and ended processes."""
        events = self._bpf.poll()
        for event in events:
            self._take(event)
        now = self._clock()
        self.events += len(events)
        if events:
            self._busy = now
        elif now - self._busy > _IDLE_NS:
            self._busy = now
            for watched in self.watched.values():
                if not watched.ended:
                    watched.book.idle(now)
        if now - self._looked > _LOOK_AGAIN_NS:
            self._looked = now
            for watched in list(self.watched.values()):
                self._look_after(watched, now)
        return len(events)

    def _look_after(self, watched: Watched, now: int) -> None:
        if watched.ended:
            return
        ended = not watched.process.alive()
        if ended or watched.process.replaced(watched.memory):
            watched.leaving = True
            for event in self._bpf.poll():  # its last words
                self._take(event)
            self._leave(watched, ended=ended)
            self.alignment.forget(watched.number)
            if not ended:
                self._take_anew(watched)
            return
        watched.refresh(now)
        if watched.is_due(now):
            self._look(watched, first=False)
        if self._bpf.dropped > self._dropped:
            more, self._dropped = self._bpf.dropped - self._dropped, self._bpf.dropped
            for each in self.watched.values():
                each.miss("calls were not noted: the kernel's ring was full")
            if watched.writer is not None:
                watched.writer.add_losses(not_written=more)

    def _take_anew(self, watched: Watched) -> None:
        """Take a process up that runs another program now, as if it had just been found."""
        del self.watched[watched.pid]
        with contextlib.suppress(OSError):  # gone meanwhile
            self.add(watched.pid)

    def _leave(self, watched: Watched, *, ended: bool = False) -> None:
        if watched.ended:
            return
        watched.ended = True
        self._detach([watched])
        watched.finish(ended=ended)

    def _detach(self, all_watched: Collection[Watched]) -> None:
        """Take the probes of processes out at once; what they noted before may still come."""
        links = [link for watched in all_watched for link in watched.links]
        for watched in all_watched:
            watched.links.clear()
            watched.mark_ends = -1  # other files get its number
            watched.leaving = True
        self._bpf.detach(*links)

    def close(self) -> None:
        """Take every probe out; keep the rings."""
        self._detach(self.watched.values())
        for event in self._bpf.poll():
            self._take(event)
        for watched in self.watched.values():
            self._leave(watched)
        self._bpf.close()
        for found in self._files.values():
            if found is not None:
                found.library.close()

    # -- probes -------------------------------------------------------------------------------

    def _look(self, watched: Watched, *, first: bool) -> None:
        """Set probes on libraries that are newly mapped."""
        try:
            mappings = watched.process.mappings()
        except OSError:
            return
        bases: dict[str, int] = {}
        for mapping in mappings:
            if mapping.offset or mapping.path in watched.seen:
                continue
            if library_of(os.path.basename(mapping.path)) is not None:
                bases[mapping.path] = mapping.start
        # Torch first: where it has process groups, NCCL's own interface is not needed.
        for path, base in sorted(bases.items(), key=lambda b: "libtorch" not in b[0]):
            watched.maps(path)
            library = library_of(os.path.basename(path))
            try:
                self._set(watched, str(library), path, base)
            except (OSError, ElfError) as error:
                watched.miss(f"{os.path.basename(path)} could not be probed: {error}")
                continue
            if library == "torch_cpu":
                watched.facts["torch"] = watched.process.torch_version(path)
                watched.facts["device"] = watched.facts.get("device") or "cpu"
                if first:
                    watched.book.place.at_work()  # it may have trained for hours
                watched.tell()

    def _find(self, path: str) -> _Found | None:
        """Return the functions of a file, found once."""
        status = os.stat(path)
        key = (status.st_dev, status.st_ino)
        if key not in self._files:
            library = Library(path)
            name = library_of(os.path.basename(path))
            wanted = {n: p.symbol for n, p in enumerate(PROBES) if p.library == name}
            by_symbol = library.find(wanted.values())
            functions = {n: by_symbol[symbol] for n, symbol in wanted.items()}
            self._files[key] = _Found(library, functions)
        return self._files[key]

    def _set(self, watched: Watched, name: str, path: str, base: int) -> None:
        outside = watched.process.outside_path(path)
        found = self._find(outside)
        if found is None:
            return
        by_program: dict[tuple[str, int], list[tuple[int, int]]] = {}
        inside = []
        for number, function in self._wanted(watched, found):
            probe = PROBES[number]
            skip, cheap = cheap_offset(function.code)
            if not cheap:
                watched.steps_through.append(function.name)
            program = (probe.shape, probe.argument if probe.shape != "plain" else 0)
            start = base + function.address
            if probe.role == "mark":
                watched.marks.append(start)
            elif probe.role == "mark_end":  # in a link of its own: it is taken out again
                program = ("plain", 1)
            elif probe.role == "collective":
                inside.append((start, start + function.size))
            by_program.setdefault(program, []).append((function.offset + skip, number))
        if inside:
            watched.nested = Ranges([*watched.nested.spans, *inside])
        if name == "torch_cuda" and inside:
            watched.has_process_groups = True
        if not by_program and name.startswith("torch"):
            watched.miss(f"{os.path.basename(path)} has none of the functions looked for")
            return
        for (shape, argument), places in by_program.items():
            link = self._bpf.attach(
                self._bpf.program(shape, argument),
                outside,
                [offset for offset, _ in places],
                [watched.number << _TARGET_SHIFT | number for _, number in places],
                watched.pid,
            )
            watched.links.append(link)
            if PROBES[places[0][1]].role == "mark_end":
                watched.mark_ends = link
        watched.attached.append(os.path.basename(path))

    def _wanted(self, watched: Watched, found: _Found) -> Iterator[tuple[int, Function]]:
        for number, functions in found.functions.items():
            role = PROBES[number].role
            if role == "device_launch" and not self._launches:
                continue
            if role == "nccl" and watched.has_process_groups:
                continue  # the process group's method tells more
            for function in functions:
                yield number, function

    def _watch_return(self, watched: Watched, number: int, address: int) -> None:
        """Probe the instruction that a call returns to, where it is new and a file holds it."""
        if address in watched.sites or len(watched.sites) >= _MAX_RETURN_SITES:
            return
        watched.sites[address] = 1 << 62
        if watched.leaving:
            return
        try:
            for mapping in watched.process.mappings():
                if mapping.start <= address < mapping.end:
                    offset = address - mapping.start + mapping.offset
                    cookie = watched.number << _TARGET_SHIFT | _RETURNED | number
                    path = watched.process.outside_path(mapping.path)
                    program = self._bpf.program("plain", 0)
                    watched.links.append(
                        self._bpf.attach(program, path, [offset], [cookie], watched.pid)
                    )
                    watched.sites[address] = self._clock()
        except OSError:
            watched.miss(f"the end of {PROBES[number].role} calls could not be probed")

    # -- calls --------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        watched = self._by_number.get(event.cookie >> _TARGET_SHIFT)
        number = event.cookie & (_RETURNED - 1)
        if watched is None or watched.ended or number >= len(PROBES):
            return
        try:
            self._understand(watched, PROBES[number], number, event)
        except (struct.error, ValueError, IndexError, KeyError):
            if watched.writer is not None:
                watched.writer.add_losses(errors=1)

    def _understand(self, watched: Watched, probe: Probe, number: int, event: Event) -> None:
        returned = bool(event.cookie & _RETURNED)
        this = event.arguments[probe.this]
        if probe.role == "exit":
            watched.exit_code = event.arguments[0] & 0xFF
            return
        if probe.role == "group":
            watched.makes_group(this, event.arguments[2], event.arguments[3])
            return
        if probe.role == "collective" and event.caller in watched.nested:
            return  # one collective made of others
        if probe.role == "mark_end" and not returned and not watched.ends_mark(event.caller):
            return
        if probe.returns and not returned:
            self._watch_return(watched, number, event.caller)
            since = watched.sites.get(event.caller, event.time_ns)
            # Until one began after the place it returns to was watched, some are seen here alone.
            if probe.role == "mark_end" and watched.mark_ends >= 0 and since < event.time_ns:
                watched.links.remove(watched.mark_ends)
                self._bpf.detach(watched.mark_ends)
                watched.mark_ends = -1  # its number is given to the next link
        call: dict[str, Any] = {
            "probe": probe,
            "time_ns": event.time_ns,
            "thread": event.thread,
            "leads": event.thread == event.process,
            "stack": event.stack,
            "this": this,
            "returned": returned,
            "blind": event.time_ns < watched.sites.get(event.caller, 0),
        }
        if probe.role == "collective":
            group = watched.group(this)
            call |= decode.collective(probe, event, group)
            if group is not None:
                watched.shares(group, pairs=probe.name in ("send", "recv"))
        elif probe.role == "nccl":
            call |= decode.nccl(probe, event, watched.world_size)
        elif probe.role == "work":
            call["number"] = event.arguments[probe.argument]
        elif probe.role == "mark":
            call["text"] = decode.text(event.payload)
        elif probe.role == "device_copy":
            call["bytes"] = decode.size(event.arguments[probe.argument])
        try:
            watched.begin_record()
        except OSError as error:
            watched.failure = f"its ring cannot be made: {error.strerror or error}"
            self._leave(watched)
            return
        watched.book.see(Call(**call))

"""The ring of this process: when it is made, what stands in it besides spans, when it is closed.

One thread is observed: the first that joins a process group or trains.
"""

from __future__ import annotations

import atexit
import mmap
import os
import platform
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from kansoku.capture.payload.bootstrap import warn
from kansoku.capture.payload.gpus import gpu_facts
from kansoku.capture.payload.phases import Callbacks, Phases
from kansoku.capture.payload.phases import make as make_phases
from kansoku.model import ring

__all__ = ["RECORDER", "Recorder"]


def _anchor() -> tuple[int, int]:
    """Read both clocks within the same instant: the narrowest of five tries."""
    best = None
    for _ in range(5):
        before = time.monotonic_ns()
        unix = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, unix)
    assert best is not None  # noqa: S101 - five tries
    return best[1], best[2]


def _ring_folder() -> str:
    base = os.environ.get("KANSOKU_RING_DIR") or "/dev/shm/kansoku"  # noqa: S108 - memory
    return os.path.join(base, os.environ.get("KANSOKU_RUN_ID") or f"pid{os.getpid()}")


def _say_unobserved(why: str) -> None:
    """Leave a line for the report: this process trains and has no ring."""
    out = os.environ.get("KANSOKU_OUT")
    if not out:
        return
    rank = _integer("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    who = f"rank {rank}" if rank >= 0 else "a process"
    line = f"{who} (pid {os.getpid()} on {platform.node()}) was not observed: {why}"
    try:
        with open(
            os.path.join(out, f"unobserved-{platform.node()}-{os.getpid()}.txt"), "w"
        ) as file:
            file.write(line)
    except Exception:
        warn("the report will not know of this process")


def _process_start() -> int:
    """Return the start of this process in clock ticks since boot, 0 where /proc is not there."""
    try:
        with open("/proc/self/stat", "rb") as stream:
            return int(stream.read().rpartition(b")")[2].split()[19])
    except Exception:
        return 0


def _integer(*names: str) -> int:
    for name in names:
        try:
            return int(os.environ[name])
        except (KeyError, ValueError):
            continue
    return -1


class Recorder:
    """Everything this process records. One instance; forked children start with an empty one."""

    # Those of the phases while there is a ring, see Phases; else what stands in for them.
    open: Callable[..., int]
    close: Callable[..., None]
    inside: Callable[[int], bool]
    update_begins: Callable[..., None]
    update_ends: Callable[..., None]

    def __init__(self) -> None:
        self.on = True
        """The switch: hooks look at it first."""
        self.writer: ring.RingWriter | None = None
        self.thread = 0
        """Identity of the observed thread."""
        self.facts: dict[str, Any] = {"missing": [], "extra": {}, "groups": []}
        self.native: Any = None
        self.on_device = False
        """Whether this process uses a GPU; looked at in the first updates."""
        self.native_thread = 0
        self.before_end: list[Any] = []
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.phases: Phases
        """The phases and steps of the observed thread; there once ``writer`` is."""
        self.calls: Any = None
        """The hooks in C that go with compiled phases, None without."""
        self._failed = False
        self._child = False
        self._detach()

    def _attach(self, writer: ring.RingWriter, phases: Phases) -> None:
        """Let the hooks call the phases themselves: a call less in the training loop."""
        self.phases, self.writer = phases, writer
        self.calls = getattr(phases, "calls", None)
        self.open, self.close, self.inside = phases.open, phases.close, phases.inside
        self.update_begins, self.update_ends = phases.update_begins, phases.update_ends

    def _detach(self) -> None:
        """Let them call what stands in while there is no ring."""
        first = not self._failed
        self.open = self._first_open if first else _no_span
        self.update_begins = self._first_update if first else _nothing
        self.close = self.update_ends = _nothing
        self.inside = _none_inside
        if self.calls is not None:
            self.calls.stop()

    # -- life ---------------------------------------------------------------------------------

    def start(self, *, joins: bool = False) -> bool:
        """Make the ring if this process is one that trains; say whether there is one.

        A child of multiprocessing or of fork counts only once it joins a process group (``joins``):
        so a DataLoader worker never writes, forked or spawned.
        """
        if self.writer is not None:
            return True
        if self._failed or not self.on or (self._child and not joins):
            return False
        if not joins and "multiprocessing" in sys.modules:
            from multiprocessing import parent_process

            if parent_process() is not None:
                return False
        try:
            self._make_ring()
        except Exception as error:
            self._failed = True
            self.writer = None
            self._detach()
            warn("no ring: the job runs without a recorder")
            reason = getattr(error, "strerror", None) or str(error)
            _say_unobserved(f"no ring in {_ring_folder()}: {reason}")
        return self.writer is not None

    def _make_ring(self) -> None:
        run = os.environ.get("KANSOKU_RUN_ID") or f"pid{os.getpid()}"
        folder = _ring_folder()
        os.makedirs(folder, mode=0o700, exist_ok=True)
        node = os.environ.get("KANSOKU_NODE") or platform.node() or "unknown"
        size = _integer("KANSOKU_RING_BYTES")
        size = ring.DEFAULT_RING_BYTES if size < 1 else size
        start = _process_start()
        path = os.path.join(folder, f"{node}-{os.getpid()}.ring")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:  # the pid was used before in this run
            path = os.path.join(folder, f"{node}-{os.getpid()}-{start}.ring")
            descriptor = os.open(path, flags, 0o600)
        try:
            # Reserve the room now: a full disk must be an error here, not a SIGBUS later.
            os.posix_fallocate(descriptor, 0, size)
            # Every page now, where the system can: a page fault costs a step as much as a span.
            populate = getattr(mmap, "MAP_POPULATE", 0)
            buffer = mmap.mmap(descriptor, size, mmap.MAP_SHARED | populate)
        except Exception:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        ring.format_ring(buffer, pid=os.getpid(), process_start=start, anchor=_anchor())
        self.thread = threading.get_ident()
        self.native_thread = threading.get_native_id()
        writer = ring.RingWriter(buffer)
        now = time.monotonic_ns()
        writer.set_now(step=-1, phase=0, main_thread=self.native_thread, alive_ns=now)
        calls = Callbacks(
            template=self.template,
            optimizers=self._optimizers,
            anchor=self._refresh_anchor,
            late=self._late,
        )
        self._attach(writer, make_phases(writer, self.native_thread, calls))
        rank = _integer("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
        local = _integer("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
        world = _integer("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
        self.set_ranks(max(rank, 0), max(local, 0), max(world, 1))
        self.facts.update(run=run, node=node, recorder="in_process")
        self.facts["python"] = platform.python_version()
        self.facts["extra"].update(gpu_facts(os.environ))
        self.write_facts()
        atexit.register(self.finish)
        if "multiprocessing" in sys.modules:  # its children leave without atexit
            from multiprocessing.util import Finalize

            Finalize(None, self.finish, exitpriority=-100)
        out = os.environ.get("KANSOKU_OUT")
        if out and local <= 0 and node != os.environ.get("KANSOKU_LAUNCH_NODE"):
            self._start_drain(folder, out)

    def _start_drain(self, folder: str, out: str) -> None:
        """Start this node's drain: the launcher runs on another node."""
        package = os.path.dirname(os.path.abspath(__file__))
        try:
            subprocess.Popen(
                [sys.executable, "-S", "-m", f"{os.path.basename(package)}.drain", folder, out],
                env={"PYTHONPATH": os.path.dirname(package), "PATH": os.environ.get("PATH", "")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except Exception:
            self.miss("the drain of this node did not start; the rings keep only the newest")

    def set_ranks(self, rank: int, local_rank: int, world_size: int) -> None:
        """Write the ranks into the header."""
        if self.writer is not None:
            self.writer.set_ranks(rank, local_rank, world_size)

    def write_facts(self) -> None:
        """Write the facts; where they are too large, without the members of the groups."""
        if self.writer is None:
            return
        if not self.writer.set_facts(self.facts):
            small = dict(self.facts)
            small["groups"] = [dict(group, ranks=[]) for group in self.facts["groups"]]
            small["missing"] = [*small["missing"], "the members of the process groups did not fit"]
            if not self.writer.set_facts(small):
                self.writer.add_losses(errors=1)

    def miss(self, sentence: str) -> None:
        """Note something that cannot be seen."""
        if sentence not in self.facts["missing"]:
            self.facts["missing"].append(sentence)
            self.write_facts()

    def failed(self) -> None:
        """Count an error that was swallowed. Called in an except clause."""
        warn("swallowed")
        try:
            if self.writer is not None:
                self.writer.add_losses(errors=1)
        except Exception:
            pass

    def finish(self) -> None:
        """Close what is open: the process ends in order."""
        writer = self.writer
        if writer is None:
            return
        for last in self.before_end:
            try:
                last()
            except Exception:
                self.failed()
        try:
            self.phases.leave()
            if self.native is not None:
                self.native.stop()
                self.native = None
            writer.set_head()
            self.write_facts()
            writer.set_state(ring.CLOSED)
        except Exception:
            self.failed()
        self.writer, self._failed = None, True  # what comes after the end is not the job's
        self._detach()

    def switched(self, on: bool) -> None:  # noqa: FBT001 - it is a switch
        """Close what is open when recording stops; a later step starts at its first event."""
        if self.writer is None:
            return
        if not on:
            self.phases.leave()
        self.writer.set_state(ring.RECORDING if on else ring.OFF)

    def forget(self) -> None:
        """Drop everything in a forked child: it must not write its parent's ring."""
        on, native, torch = self.on, self.native, self.facts.get("torch")
        if native is not None:
            native.abandon()
        if self.calls is not None:
            self.calls.stop()
        self.__init__()  # type: ignore[misc]
        self.on = on
        self._child = True
        self.facts["torch"] = torch

    # -- spans --------------------------------------------------------------------------------

    def template(self, kind: int, name: str, flags: int = 0, attributes: str = "") -> bytes:
        """Return the known bytes of a record."""
        writer = self.writer
        assert writer is not None  # noqa: S101 - callers started the ring
        return ring.pack_template(
            kind,
            flags=flags,
            name=writer.intern(name),
            attributes=writer.intern(attributes),
            thread=self.native_thread & 0xFFFFFFFF,
        )

    def _late(  # noqa: PLR0913, PLR0917 - one argument a field
        self,
        span: int,
        template: bytes,
        step: int,
        parent: int,
        start_ns: int,
        end_ns: int,
        cpu_ns: int,
        peak_rss_bytes: int,
        value_a: float,
        value_b: float,
    ) -> None:
        """Complete a record whose slot was overwritten while the span was open."""
        writer = self.writer
        if writer is None:
            return
        writer.remember(span, template, step, parent)
        writer.set_values(span, peak_rss_bytes=peak_rss_bytes, value_a=value_a, value_b=value_b)
        writer.close(span, start_ns, end_ns, cpu_ns)

    def _refresh_anchor(self) -> None:
        if self.writer is not None:
            self.writer.set_anchor(*_anchor())

    def _optimizers(self) -> list[int]:
        return [id(o) for o in self.optimizers if getattr(o, "param_groups", None)]

    def _first_open(self, kind: int, name: str, flags: int = 0, attributes: str = "") -> int:
        """Stand for ``open`` until there is a ring."""
        return self.open(kind, name, flags, attributes) if self.start() else 0

    def _first_update(self, optimizer: Any, *_: Any) -> None:
        """Stand for ``update_begins`` until there is a ring."""
        if self.start():
            self.update_begins(optimizer)
        elif self.on and not self._failed:
            self.update_begins = _nothing  # until it joins a group
            _say_unobserved("a child of another process that trains in no process group")

    def add_closed(
        self, kind: int, name: str, start_ns: int, end_ns: int, attributes: str = ""
    ) -> None:
        """Record something that is already over, such as a collection of garbage."""
        writer = self.writer
        if writer is None or threading.get_ident() != self.thread:
            return
        phases = self.phases
        # Between two steps the time belongs to the one that comes; before the first, to none.
        step = phases.step if phases.step_span or phases.step < 0 else phases.step + 1
        template = self.template(kind, name, 0, attributes)
        span = writer.open(template, start_ns, step, phases.parent)
        writer.close(span, start_ns, end_ns, -1)
        writer.count(kind, 0)

    def count(self, kind: int, bytes_: int) -> None:
        """Count a span written past ``close``, such as a collective."""
        if self.writer is not None:
            self.writer.count(kind, bytes_)


def _nothing(*_: Any) -> None:
    """Stand for what closes, where nothing is open."""


def _none_inside(_: int) -> bool:
    return False


def _no_span(*_: Any) -> int:
    """Stand for ``open`` once the ring is closed."""
    return 0


RECORDER = Recorder()
os.register_at_fork(after_in_child=RECORDER.forget)

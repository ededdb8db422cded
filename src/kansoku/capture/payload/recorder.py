"""The ring of this process, its phases and its steps.

A step is one update by all optimizers. Step k + 1 starts at the nanosecond at which step k ended,
so the phases and the time between them sum to the step. One thread is observed: the first that
joins a process group or trains.
"""

from __future__ import annotations

import atexit
import collections
import mmap
import os
import platform
import resource
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from kansoku.capture.payload.bootstrap import warn
from kansoku.capture.payload.gpus import gpu_facts
from kansoku.model import ring

__all__ = ["RECORDER", "Recorder"]

_KIND = ring.KIND_CODES
_STEP = _KIND["step"]
_clock = time.monotonic_ns
_cpu_clock = time.thread_time_ns
_get_ident = threading.get_ident
_ANCHOR_EVERY_NS = 10_000_000_000
_RSS_EVERY = 8
"""Phases of every eighth step (and of the first eight) note the peak memory; steps always do."""


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


_QUEUED_MIN_NS = 20_000
"""The wait in the run queue is read anew where the thread was off the CPU for longer than this."""


class Recorder:
    """Everything this process records. One instance; forked children start with an empty one."""

    def __init__(self) -> None:
        self.on = True
        """The switch: hooks look at it first."""
        self.writer: ring.RingWriter | None = None
        self.thread = 0
        """Identity of the observed thread."""
        self.facts: dict[str, Any] = {"missing": [], "extra": {}, "groups": []}
        self.step = -1
        self.native: Any = None
        self._failed = False
        self._child = False
        self.native_thread = 0
        self._stack: list[tuple[int, bytes, int, int, int]] = []
        """Open phases: id, template, start, CPU time at the start, parent."""
        self._step_span = 0
        self._step_start = 0
        self._step_cpu = -1
        self._next_start = 0
        self.step_starts: collections.deque[tuple[int, int]] = collections.deque(maxlen=4096)
        self.before_end: list[Any] = []
        self._templates: dict[tuple[int, str, int, str], bytes] = {}
        self._anchored = 0
        self._path = ""
        self._queue_file = -1
        self._queued_ns = 0
        self._off_cpu = 0
        self._ended = (0, 0)
        self._late_spans: list[tuple[int, int]] | None = None
        self.tokens = 0.0
        self.flops = 0.0
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._expected: set[int] = set()
        self._stepped: set[int] = set()
        self._updated_at = self._updated_cpu = 0
        self._nesting: list[tuple[int, int]] = []
        self._ending = False

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
        except Exception:
            self._failed = True
            warn("no ring: the job runs without a recorder")
        return self.writer is not None

    def _make_ring(self) -> None:
        run = os.environ.get("KANSOKU_RUN_ID") or f"pid{os.getpid()}"
        base = os.environ.get("KANSOKU_RING_DIR") or "/dev/shm/kansoku"  # noqa: S108 - memory
        folder = os.path.join(base, run)
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
        self._path = path
        self.thread = threading.get_ident()
        self.native_thread = threading.get_native_id()
        self._open_queue_file()
        self._anchored = _clock()
        self.writer = ring.RingWriter(buffer)
        self.writer.set_now(
            step=-1, phase=0, main_thread=self.native_thread, alive_ns=self._anchored
        )
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
            now = _clock()
            while self._stack:
                self.close(self._stack[-1][0], flags=ring.FLAG_INCOMPLETE)
            if self._step_span:
                self._close_step(now, _cpu_clock(), complete=False)
            if self.native is not None:
                self.native.stop()
                self.native = None
            self._flush(now)
            self.write_facts()
            writer.set_state(ring.CLOSED)
        except Exception:
            self.failed()
        self.writer, self._failed = None, True  # what comes after the end is not the job's

    def switched(self, on: bool) -> None:  # noqa: FBT001 - it is a switch
        """Close what is open when recording stops; a later step starts at its first event."""
        if self.writer is None:
            return
        if not on:
            now = _clock()
            while self._stack:
                self.close(self._stack[-1][0], flags=ring.FLAG_INCOMPLETE)
            if self._step_span:
                self._close_step(now, _cpu_clock(), complete=False)
            self._next_start = 0
            self._nesting.clear()
            self._stepped = set()
        self.writer.set_state(ring.RECORDING if on else ring.OFF)

    def forget(self) -> None:
        """Drop everything in a forked child: it must not write its parent's ring."""
        on, native, torch = self.on, self.native, self.facts.get("torch")
        if native is not None:
            native.abandon()
        self.__init__()  # type: ignore[misc]
        self.on = on
        self._child = True
        self.facts["torch"] = torch

    def _open_queue_file(self) -> None:
        try:
            path = f"/proc/self/task/{self.native_thread}/schedstat"
            self._queue_file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except Exception:
            self._queue_file = -1

    def _queued(self, now: int, cpu: int) -> int:
        """Return how long the observed thread has stood in a run queue so far, ns; 0 unknown.

        One read of an open file of /proc: 1 µs with warm caches and 4 with cold ones.
        """
        if self._queue_file < 0:
            return self._queued_ns
        try:
            self._queued_ns = int(os.pread(self._queue_file, 64, 0).split()[1])
            self._off_cpu = now - cpu
        except Exception:
            self._queue_file = -1
            self._queued_ns = 0
        return self._queued_ns

    # -- phases -------------------------------------------------------------------------------

    def template(self, kind: int, name: str, flags: int = 0, attributes: str = "") -> bytes:
        """Return the known bytes of a record, made once."""
        key = (kind, name, flags, attributes)
        found = self._templates.get(key)
        if found is None:
            writer = self.writer
            assert writer is not None  # noqa: S101 - callers started the ring
            if len(self._templates) > 10_000:
                self._templates.clear()
            found = self._templates[key] = ring.pack_template(
                kind,
                flags=flags,
                name=writer.intern(name),
                attributes=writer.intern(attributes),
                thread=self.native_thread & 0xFFFFFFFF,
            )
        return found

    # What follows runs in the training loop, between kernels that have emptied the caches: every
    # call costs a microsecond or more there, so little is called.

    def open(self, kind: int, name: str, flags: int = 0, attributes: str = "") -> int:
        """Open a phase on the observed thread and return its id; 0 where nothing is recorded."""
        if (self.writer is None and not self.start()) or _get_ident() != self.thread:
            return 0
        writer = self.writer
        assert writer is not None  # noqa: S101 - just checked
        template = self._templates.get((kind, name, flags, attributes))
        if template is None:
            template = self.template(kind, name, flags, attributes)
        cpu = _cpu_clock()
        now = _clock()
        if not self._step_span:
            self._open_step(now, cpu)
        stack = self._stack
        parent = stack[-1][0] if stack else self._step_span
        span = writer.begin(template, now, self.step, parent)
        stack.append((span, template, now, cpu, parent))
        if self._late_spans is not None:
            self._late_spans.append((span, parent))
        return span

    def close(self, span: int, flags: int = 0) -> None:
        """Close a phase and whatever an exception left open above it."""
        writer = self.writer
        if not span or writer is None:
            return
        now = _clock()
        cpu = _cpu_clock()
        # A system call between two phases costs 3 µs with cold caches; a high-water mark can wait.
        sampled = self.step < _RSS_EVERY or self.step % _RSS_EVERY == 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 if sampled else -1
        # The run queue needs no look where the thread has hardly left the CPU since the last one.
        off_cpu = now - cpu - self._off_cpu
        queued = self._queued(now, cpu) if off_cpu >= _QUEUED_MIN_NS else self._queued_ns
        stack = self._stack
        while stack:
            top, template, start, started, parent = stack.pop()
            kind = template[0]
            mark = flags if top == span else flags | ring.FLAG_FAILED
            if mark:
                writer.set_kind(top, kind, (template[2] | template[3] << 8) | mark)
            phase = stack[-1][0] if stack else self._step_span
            if not writer.end(top, kind, start, now, cpu - started, peak, queued, 0.0, phase):
                writer.remember(top, template, self.step, parent)
                writer.set_values(top, peak_rss_bytes=peak, value_a=queued)
                writer.close(top, start, now, cpu - started)
            if top == span:
                break
        self._ended = (now, cpu)
        if self._ending and not stack:
            self._end_step(now, cpu)

    def inside(self, kind: int) -> bool:
        """Say whether a phase of this kind is open."""
        for entry in self._stack:  # noqa: SIM110 - mostly empty, and a generator costs
            if entry[1][0] == kind:
                return True
        return False

    def add_closed(
        self, kind: int, name: str, start_ns: int, end_ns: int, attributes: str = ""
    ) -> None:
        """Record something that is already over, such as a collection of garbage."""
        writer = self.writer
        if writer is None or threading.get_ident() != self.thread:
            return
        parent = self._stack[-1][0] if self._stack else self._step_span
        # Between two steps the time belongs to the one that comes; before the first, to none.
        step = self.step if self._step_span or self.step < 0 else self.step + 1
        span = writer.open(self.template(kind, name, 0, attributes), start_ns, step, parent)
        writer.close(span, start_ns, end_ns, -1)
        writer.count(kind, 0)

    def count(self, kind: int, bytes_: int) -> None:
        """Count a span written past ``close``, such as a collective."""
        if self.writer is not None:
            self.writer.count(kind, bytes_)

    @property
    def parent(self) -> int:
        """Return the id of the innermost open phase or step."""
        return self._stack[-1][0] if self._stack else self._step_span

    # -- steps --------------------------------------------------------------------------------

    def _open_step(self, now: int, cpu: int) -> None:
        writer = self.writer
        assert writer is not None  # noqa: S101 - callers started the ring
        self.step += 1
        self._step_start = start = self._next_start or now
        self._step_cpu = cpu
        self.step_starts.append((self.step, start))
        self._step_span = writer.begin(self.template(_STEP, "step"), start, self.step, 0)
        self.tokens = self.flops = 0.0
        writer.turn(self.step, self._step_span, now)

    def _close_step(self, end: int, cpu: int, *, complete: bool) -> None:
        writer = self.writer
        assert writer is not None  # noqa: S101 - callers started the ring
        span, start, used = self._step_span, self._step_start, cpu - self._step_cpu
        if not complete:
            writer.set_kind(span, _STEP, ring.FLAG_INCOMPLETE)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        kind = _STEP if complete else 0
        if not writer.end(span, kind, start, end, used, peak, self.tokens, self.flops, 0):
            flags = 0 if complete else ring.FLAG_INCOMPLETE
            writer.remember(span, self.template(_STEP, "step", flags), self.step, 0)
            writer.set_values(span, peak_rss_bytes=peak, value_a=self.tokens, value_b=self.flops)
            writer.close(span, start, end, used)
        self._step_span = 0
        self._next_start = end
        self._flush(end)

    def _flush(self, now: int) -> None:
        writer = self.writer
        assert writer is not None  # noqa: S101 - callers started the ring
        # Between two steps the next step's number stands: what comes now belongs to it.
        span = self._step_span
        writer.turn(self.step if span else self.step + 1, span, now)
        if now - self._anchored > _ANCHOR_EVERY_NS:
            self._anchored = now
            writer.set_anchor(*_anchor())

    def update_begins(self, optimizer: Any) -> None:
        """Note that an optimizer starts its update."""
        key = id(optimizer)
        nesting = self._nesting
        if nesting and any(
            key == known for known, _ in nesting
        ):  # the last one ended by an exception
            self._nesting.clear()
        if not nesting and key in self._stepped:
            # Again before all the others: the step was over after the update before.
            self._split_step()
        span = self.open(_KIND["optimizer"], type(optimizer).__name__)
        if span:
            nesting.append((key, span))

    def update_ends(self, optimizer: Any) -> None:
        """Note that an optimizer ended its update; the last one ends the step."""
        key = id(optimizer)
        while self._nesting:
            known, span = self._nesting.pop()
            if known == key:
                self.close(span)
                break
        else:
            return
        self._stepped.add(key)
        if self._nesting:
            return
        if not self._expected:
            self._expected = {id(o) for o in self.optimizers if getattr(o, "param_groups", None)}
        self._updated_at, self._updated_cpu = self._ended
        if self._stepped < self._expected or not self._step_span:
            self._late_spans = []
        elif self._stack:
            self._ending = True  # an update inside a backward ends the step with the backward
        else:
            self._end_step(self._updated_at, self._updated_cpu)

    def _end_step(self, end: int, cpu: int) -> None:
        self._expected, self._stepped = self._stepped, set()
        self._late_spans, self._ending = None, False
        self._close_step(end, cpu, complete=True)

    def _split_step(self) -> None:
        writer = self.writer
        if writer is None or not self._step_span or self._stack:
            return
        before, late = self._step_span, self._late_spans or []
        cpu = self._updated_cpu
        self._close_step(self._updated_at, cpu, complete=True)
        self._open_step(self._updated_at, cpu)
        self._expected, self._stepped, self._late_spans = self._stepped, set(), None
        for span, parent in late:
            writer.set_step(span, self.step, self._step_span if parent == before else parent)


RECORDER = Recorder()
os.register_at_fork(after_in_child=RECORDER.forget)

"""Phases and steps of the observed thread: which is open, what ends a step, what a phase cost.

A step is one update by all optimizers. Step k + 1 starts at the nanosecond at which step k ended,
so the phases and the time between them sum to the step.

``phases.c`` does the same, word for word, where a C compiler and Python's headers are: a phase
costs several times less there, because between the kernels of a step, which have emptied the
caches, every Python object touched costs a tenth of a microsecond. Tests hold the two together.
"""

from __future__ import annotations

import collections
import os
import resource
import sysconfig
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kansoku.capture.payload import building
from kansoku.capture.payload.bootstrap import warn
from kansoku.model import ring

__all__ = ["Callbacks", "Phases", "make"]

_OPTIMIZER = ring.KIND_CODES["optimizer"]
_STEP = ring.KIND_CODES["step"]
_clock = time.monotonic_ns
_cpu_clock = time.thread_time_ns
_get_ident = threading.get_ident
_SURE_NS = 20_000
"""The thread is taken to have kept its CPU for so long."""
_ANCHOR_EVERY_NS = 10_000_000_000
_STARTS = 4096
"""So many starts of steps are kept."""


class Callbacks(NamedTuple):
    """What phases ask of the rest of the recorder, seldom."""

    template: Callable[[int, str, int, str], bytes]
    """(kind, name, flags, attributes) -> the known bytes of a record."""
    optimizers: Callable[[], list[int]]
    """The ids of the optimizers that exist."""
    anchor: Callable[[], None]
    """Refresh the pair of clocks in the ring."""
    late: Callable[..., None]
    """Complete a record whose slot was overwritten: (id, template, step, parent, start, end,
    CPU time, peak memory, value a, value b)."""


def queue_file(native_thread: int) -> int:
    """Return an open file that tells how long the thread stood in run queues, -1 without."""
    try:
        path = f"/proc/self/task/{native_thread}/schedstat"
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def make(writer: ring.RingWriter, native_thread: int, callbacks: Callbacks) -> Phases:
    """Return the phases of the calling thread: compiled ones where that is possible."""
    queue = queue_file(native_thread)
    if os.environ.get("KANSOKU_NATIVE") != "0":
        try:
            made: Phases = _compiled(writer, queue, callbacks)
            return made
        except Exception:
            warn("phases are recorded by Python: no compiled ones")
    return Phases(writer, queue, callbacks)


def extension() -> Any:
    """Return the compiled module."""
    return building.extension("phases.c", "_kansoku_phases", "calls.c", "phases.h")


def _compiled(writer: ring.RingWriter, queue: int, callbacks: Callbacks) -> Any:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise OSError("the compiled part relies on the interpreter lock")
    module = extension()
    lane = ring.read_header(writer.buffer).lanes[0]
    made = module.Phases(
        writer.buffer, lane.offset, lane.capacity, threading.get_ident(), queue, *callbacks,
        writer._close_late,  # noqa: SLF001 - half of it
    )  # fmt: skip
    writer.delegate(made)
    return made


class Phases:
    """The open phases and the step of the thread that made it; calls of other threads do nothing.

    What is here runs in the training loop: every call costs a microsecond or more there, so little
    is called.
    """

    def __init__(self, writer: ring.RingWriter, queue: int, callbacks: Callbacks):
        self._writer = writer
        self._thread = threading.get_ident()
        self._call = callbacks
        self.step = -1
        """Number of the step that is open, else of the last one; -1 before the first."""
        self.step_span = 0
        """Id of the open step, 0 between two."""
        self.tokens = 0.0
        """Tokens of the open step."""
        self.flops = 0.0
        """Model FLOPs of the open step."""
        self._stack: list[tuple[int, bytes, int, int, int]] = []
        """Open phases: id, template, start, CPU time at the start, parent."""
        self._templates: dict[tuple[int, str, int, str], bytes] = {}
        self._step_start = 0
        self._step_cpu = -1
        self._next_start = 0
        self._starts: collections.deque[tuple[int, int]] = collections.deque(maxlen=_STARTS)
        self._anchored = _clock()
        self._queue_file = queue
        self._looked = self._cpu = self._told_cpu = self._queued_ns = 0
        self._slept = self._pushed = self._peak = -1
        self._ended = (0, 0)
        self._late_spans: list[tuple[int, int]] | None = None
        self._expected: set[int] = set()
        self._stepped: set[int] = set()
        self._updated = (0, 0)
        self._nesting: list[tuple[int, int]] = []
        self._ending = False

    @property
    def parent(self) -> int:
        """The id of the innermost open phase or step."""
        return self._stack[-1][0] if self._stack else self.step_span

    def inside(self, kind: int) -> bool:
        """Say whether a phase of this kind is open."""
        for entry in self._stack:  # noqa: SIM110 - mostly empty, and a generator costs
            if entry[1][0] == kind:
                return True
        return False

    def starts(self) -> list[tuple[int, int]]:
        """Return (number, start in monotonic ns) of the newest steps, 4,096 at most."""
        return list(self._starts)

    def work(self, flops: float, tokens: float) -> None:
        """Add what a forward computes and reads to the open step."""
        self.flops += flops
        self.tokens += tokens

    # -- phases -------------------------------------------------------------------------------

    def open(self, kind: int, name: str, flags: int = 0, attributes: str = "") -> int:
        """Open a phase and return its id; 0 on another thread."""
        if _get_ident() != self._thread:
            return 0
        template = self._templates.get((kind, name, flags, attributes))
        if template is None:
            template = self._template(kind, name, flags, attributes)
        now = _clock()
        cpu = self._look(now)
        if not self.step_span:
            self._open_step(now, cpu)
        stack = self._stack
        parent = stack[-1][0] if stack else self.step_span
        span = self._writer.begin(template, now, self.step, parent)
        stack.append((span, template, now, cpu, parent))
        if self._late_spans is not None:
            self._late_spans.append((span, parent))
        return span

    def close(self, span: int, flags: int = 0) -> None:
        """Close a phase and whatever an exception left open above it."""
        if not span:
            return
        writer = self._writer
        now = _clock()
        cpu = self._look(now)
        peak, queued = self._peak, self._queued_ns
        stack = self._stack
        while stack:
            top, template, start, started, parent = stack.pop()
            kind = template[0]
            mark = flags if top == span else flags | ring.FLAG_FAILED
            if mark:
                writer.set_kind(top, kind, (template[2] | template[3] << 8) | mark)
            phase = stack[-1][0] if stack else self.step_span
            used = cpu - started
            if not writer.end(top, kind, start, now, used, peak, queued, 0.0, phase):
                self._call.late(
                    top, template, self.step, parent, start, now, used, peak, queued, 0.0
                )
            if top == span:
                break
        self._ended = (now, cpu)
        if self._ending and not stack:
            self._end_step(now, cpu)

    def leave(self) -> None:
        """Close all that is open, incomplete; a later step starts at its first event."""
        while self._stack:
            self.close(self._stack[-1][0], ring.FLAG_INCOMPLETE)
        if self.step_span:
            now = _clock()
            self._close_step(now, self._look(now), complete=False)
        self._next_start = 0
        self._nesting.clear()
        self._stepped = set()

    def _template(self, kind: int, name: str, flags: int, attributes: str) -> bytes:
        if len(self._templates) > 10_000:
            self._templates.clear()
        found = self._call.template(kind, name, flags, attributes)
        self._templates[kind, name, flags, attributes] = found
        return found

    def _look(self, now: int) -> int:
        """Return the CPU time of the thread so far, ns; note its waiting and peak memory.

        The kernel, asked for the CPU time, first brings the books of the running thread up to date,
        and may end its time slice on the way. So it is asked only where the thread has slept. Where
        it was not off its CPU since the last look, all the time is its own; where others were let
        in, what it did not wait for. Where waiting is not counted, the kernel is asked each time.
        """
        own = now - self._looked
        if own < _SURE_NS:
            self._told_cpu = told = self._cpu + own
            return told
        # Of the process, though it asks for the thread: that spares the kernel a walk over all.
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        slept, queued = usage.ru_nvcsw != self._slept, self._queued_ns
        if slept or usage.ru_nivcsw != self._pushed:
            queued = self._read_queue()
        if self._queue_file < 0:
            slept, queued = True, 0
        own -= queued - self._queued_ns
        self._queued_ns = queued
        # Within _SURE_NS it may have lost its CPU all the same: no phase costs less than nothing.
        cpu = _cpu_clock() if slept else self._cpu + own
        self._cpu = self._told_cpu = max(cpu, self._told_cpu)
        self._looked, self._peak = now, usage.ru_maxrss << 10
        self._slept, self._pushed = usage.ru_nvcsw, usage.ru_nivcsw
        return self._cpu

    def _read_queue(self) -> int:
        """Return how long the thread has waited for a CPU so far, ns.

        Where the kernel does not count it, the file is missing or has three zeros.
        """
        try:
            _, queued, slices = os.pread(self._queue_file, 64, 0).split()
            if int(slices):
                return int(queued)
        except Exception:
            pass
        self._queue_file = -1
        return 0

    # -- steps --------------------------------------------------------------------------------

    def _open_step(self, now: int, cpu: int) -> None:
        self.step += 1
        self._step_start = start = self._next_start or now
        self._step_cpu = cpu
        self._starts.append((self.step, start))
        template = self._call.template(_STEP, "step", 0, "")
        self.step_span = self._writer.begin(template, start, self.step, 0)
        self.tokens = self.flops = 0.0
        self._writer.turn(self.step, self.step_span, now)

    def _close_step(self, end: int, cpu: int, *, complete: bool) -> None:
        writer, step = self._writer, self.step
        span, start, used = self.step_span, self._step_start, cpu - self._step_cpu
        if not complete:
            writer.set_kind(span, _STEP, ring.FLAG_INCOMPLETE)
        self.step_span = 0
        self._next_start = end
        peak = self._peak
        kind = _STEP if complete else 0
        if not writer.end(span, kind, start, end, used, peak, self.tokens, self.flops, 0):
            flags = 0 if complete else ring.FLAG_INCOMPLETE
            template = self._call.template(_STEP, "step", flags, "")
            self._call.late(
                span, template, step, 0, start, end, used, peak, self.tokens, self.flops
            )
        # Between two steps the next step's number stands: what comes now belongs to it.
        writer.turn(step + 1, 0, end)
        if end - self._anchored > _ANCHOR_EVERY_NS:
            self._anchored = end
            self._call.anchor()

    def update_begins(self, optimizer: Any, *_: Any) -> None:
        """Note that an optimizer starts its update; other arguments are ignored."""
        if _get_ident() != self._thread:
            return
        key = id(optimizer)
        nesting = self._nesting
        for known, span in list(nesting):
            if known == key:  # the last one ended by an exception
                nesting.clear()
                if any(entry[0] == span for entry in self._stack):
                    self.close(span, ring.FLAG_FAILED)
        if not nesting and key in self._stepped:
            # Again before all the others: the step was over after the update before.
            self._split_step()
        span = self.open(_OPTIMIZER, type(optimizer).__name__)
        if span:
            nesting.append((key, span))

    def update_ends(self, optimizer: Any, *_: Any) -> None:
        """Note that an optimizer ended its update; the last one ends the step."""
        if _get_ident() != self._thread:
            return
        key = id(optimizer)
        while self._nesting:
            known, span = self._nesting.pop()
            if known == key:
                self.close(span)
                break
        else:
            return
        self._stepped.add(key)
        self._updated = self._ended
        if self._nesting:
            return
        if not self._expected:
            self._expected = set(self._call.optimizers())
        if self._stepped < self._expected or not self.step_span:
            self._late_spans = []
        elif self._stack:
            self._ending = True  # an update inside a backward ends the step with the backward
        else:
            self._end_step(*self._updated)

    def _end_step(self, end: int, cpu: int) -> None:
        self._expected, self._stepped = self._stepped, set()
        self._late_spans, self._ending = None, False
        self._close_step(end, cpu, complete=True)

    def _split_step(self) -> None:
        if not self.step_span or self._stack:
            return
        before, late = self.step_span, self._late_spans or []
        self._close_step(*self._updated, complete=True)
        self._open_step(*self._updated)
        self._expected, self._stepped, self._late_spans = self._stepped, set(), None
        for span, parent in late:
            self._writer.set_step(span, self.step, self.step_span if parent == before else parent)

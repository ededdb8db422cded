"""Calls seen from outside become the spans that a recorder inside the process would have written.

Pure bookkeeping of one process: calls in, records out; it reads no clock, file or memory. Phases:

- data wait, optimizer and DDP's forward stand between a ``record_function`` mark, which torch sets
  whether or not anybody profiles, and its end;
- backward is ``Engine::execute``, from its entry to the instruction it returns to;
- a collective is the process group's method until the completion of the work it made;
- waits are ``Work::wait`` and DDP's ``finalize_backward``, until what they wait for is complete;
- a step ends at the end of the last of the updates that follow each other without a backward; what
  comes after the last one begins a step only if it is a phase, not by a collective or a wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from kansoku.capture.attach.align import Alignment
from kansoku.capture.attach.probes import Probe
from kansoku.model import ring

__all__ = ["Book", "Call"]

_KIND = ring.KIND_CODES
_STEP, _COLLECTIVE, _WAIT = _KIND["step"], _KIND["collective"], _KIND["collective_wait"]
_FORWARD, _BACKWARD, _EVALUATION = _KIND["forward"], _KIND["backward"], _KIND["evaluation"]
_OPTIMIZER, _DATA = _KIND["optimizer"], _KIND["data_wait"]
_OPTIMIZER_MARK = re.compile(r"Optimizer\.step#(.*)\.step$")
_DATA_MARK = re.compile(r"enumerate\(DataLoader\)#")
# GPipe's schedule; the schedules of many stages a rank. Backwards are seen as such anyway.
_PIPELINE_MARK = re.compile(r"Forward \d+$|PP:\d+F\d+$")
_MAX_WORKS = 100_000
_MAX_MARKS = 256
_SAME_CALL_NS = 1_000_000
_RETURN_BYTES = 8
"""What a return takes off the stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a probed function, its arguments understood."""

    probe: Probe
    time_ns: int
    thread: int
    leads: bool
    """The thread is the process's first."""
    stack: int
    this: int
    """The object, or a communicator."""
    number: int = -1
    """Sequence, count or peer, as the role asks."""
    group: str = ""
    peer: int = -1
    bytes: int = -1
    dtype: str = ""
    device: str = ""
    text: str = ""
    returned: bool = False
    """The call is over: this is where it returned to."""
    blind: bool = False
    """The place it returns to is only now being watched."""


@dataclass(slots=True)
class _Operation:
    """One collective on its way."""

    call: Call
    name: str
    start_ns: int
    span: int = 0
    pending: int = 0
    works: int = 0
    last_ns: int = 0
    closed: bool = False
    issued: bool = False
    """Its thread has gone on to something else: no more work will be added."""
    failed: bool = False


@dataclass(slots=True)
class _Open:
    """A phase that has begun."""

    span: int
    kind: int
    start_ns: int
    template: bytes
    stack: int = 0
    trains: bool = True
    blind: bool = False
    """Its return may not be seen: it is over when the next phase begins."""


@dataclass(slots=True)
class _Thread:
    marks: list[_Open | None] = field(default_factory=list)
    ended: tuple[int, int] = (0, 0)
    """Stack and time of the last end of a mark that was seen by its entry."""
    operation: _Operation | None = None


class Book:
    """The records of one process."""

    def __init__(
        self,
        writer: ring.RingWriter | None,
        *,
        peak_rss: Callable[[], int] = lambda: -1,
    ):
        if writer is not None:
            self.writer: ring.RingWriter = writer
            """To be there at the first call; nothing is written before."""
        self.place = Alignment().place(0)
        """Knows the next step's number; not yet, where it was at work before the first call."""
        self._peak_rss = peak_rss
        self._threads: dict[int, _Thread] = {}
        self._works: dict[int, _Operation] = {}
        self._waits: list[tuple[_Open, set[int]]] = []
        self._main = 0
        self._stack: list[_Open] = []
        self._step = -1
        self._step_span = 0
        self._step_start = 0
        self._next_start = 0
        self._over_ns = 0
        """End of the last update; the step is over unless another update follows."""
        self._boundary = 0
        self._forward_seen = False
        self._undecided: tuple[_Open, int] | None = None
        self._blocked: dict[tuple[int, str], tuple[int, Call]] = {}
        self._counts: dict[int, list[int]] = {}
        self._pairs: dict[tuple[str, int, str], int] = {}
        self._born: set[str] = set()
        self.last_ns = 0
        self.calls = 0
        self._roles: dict[str, Callable[[Call, _Thread], None]] = {
            "mark": self._mark,
            "mark_end": self._mark_end,
            "forward_trains": self._forward_trains,
            "forward_done": self._nothing,
            "backward": self._backward,
            "collective": self._collective,
            "nccl": self._nccl,
            "work": self._work,
            "work_done": self._work_done,
            "work_failed": self._work_done,
            "wait": self._wait,
            "finalize": self._finalize,
            "device_launch": self._device,
            "device_copy": self._device,
            "device_sync": self._device,
        }

    # -- what is called -----------------------------------------------------------------------

    def see(self, call: Call) -> None:
        """Take one call."""
        self.calls += 1
        self.last_ns = max(self.last_ns, call.time_ns)
        role = call.probe.role
        thread = self._threads.setdefault(call.thread, _Thread())
        if not self._main and (call.leads or role in ("backward", "mark")) and role != "mark_end":
            self._main = call.thread
        if role not in ("work", "work_done", "work_failed", "mark_end") and not call.returned:
            self._goes_on(thread)
        self._roles[role](call, thread)
        self.writer.set_now(
            step=self._step,
            phase=self._stack[-1].span if self._stack else self._step_span,
            main_thread=self._main,
            alive_ns=self.last_ns,
        )

    @property
    def step(self) -> int:
        """Return the current step; -1 before the first."""
        return self._step

    @property
    def late(self) -> bool:
        """Say whether it trained before its first call was seen, and its steps do not count yet."""
        return self.place.ahead is None

    def born(self, group: str) -> None:
        """Note that a group was made while we watched: its point-to-point counts are whole."""
        self._born.add(group)

    # -- phases of the main thread ------------------------------------------------------------

    def _template(self, kind: int, name: str, thread: int, flags: int = 0, text: str = "") -> bytes:
        intern = self.writer.intern
        return ring.pack_template(
            kind,
            flags=flags,
            name=intern(name),
            attributes=intern(text),
            thread=thread & 0xFFFFFFFF,
        )

    def _begin(self, kind: int, name: str, call: Call) -> _Open | None:
        if call.thread != self._main:
            return None
        now = call.time_ns
        self._settle(kind, now)
        if not self._step_span and not self.late:
            self._open_step(self._next_start or now)
        parent = self._stack[-1].span if self._stack else self._step_span
        template = self._template(kind, name, call.thread)
        span = self.writer.open(template, now, self._step, parent)
        self.writer.remember(span, template, self._step, parent)
        phase = _Open(span, kind, now, template, call.stack)
        self._stack.append(phase)
        return phase

    def _end(self, phase: _Open, now: int, flags: int = 0, *, undecided: bool = False) -> None:
        """Close a phase and whatever an exception left open above it.

        A forward that may be an evaluation stays open in the ring until the next phase tells.
        """
        if phase not in self._stack:
            return
        while self._stack:
            top = self._stack.pop()
            kind = top.kind
            if flags or top is not phase:
                self.writer.set_kind(top.span, kind, flags or ring.FLAG_FAILED)
            if top is phase and undecided:
                self._undecided = (phase, now)
            else:
                self._close(top, now)
            if top is phase:
                break
        if not self._stack:
            self._boundary = now
        if phase.kind == _OPTIMIZER and not self._stack and (self._step_span or self.late):
            self._over_ns = now

    def _settle(self, kind: int, now: int) -> None:
        """Decide what was left open until the next phase told."""
        if kind != _COLLECTIVE and self._stack and self._stack[-1].blind:
            self._end(self._stack[-1], now)
        if self._undecided is not None and kind != _COLLECTIVE:
            phase, end = self._undecided
            self._undecided = None
            if kind != _BACKWARD:
                phase.kind = _EVALUATION
                self.writer.set_kind(phase.span, _EVALUATION, 0)
            self._close(phase, end)
        if self._over_ns and kind != _OPTIMIZER:
            self._step_over()
        if kind == _BACKWARD:
            self.place.trains()

    def _step_over(self) -> None:
        """End the step with its last update; a rank at work may count from here on."""
        now, self._over_ns = self._over_ns, 0
        number = self.place.updates(now)
        if self._step_span:
            self._close_step(now, 0)
        elif number is not None:
            self._step, self._next_start = number - 1, now

    def _close(self, phase: _Open, now: int) -> None:
        self.writer.close(phase.span, phase.start_ns, max(now, phase.start_ns), -1)
        self.writer.forget(phase.span)
        self._count(phase.kind, 0)

    def _open_step(self, now: int) -> None:
        self._step += 1
        self._step_start = now
        template = self._template(_STEP, "step", self._main)
        self._step_span = self.writer.open(template, now, self._step, 0)
        self.writer.remember(self._step_span, template, self._step, 0)

    def _close_step(self, now: int, flags: int) -> None:
        span = self._step_span
        self._next_start = max(now, self._step_start)  # where the next one starts, if one comes
        if flags:
            self.writer.set_kind(span, _STEP, flags)
        self.writer.set_values(span, peak_rss_bytes=self._peak_rss())
        self.writer.close(span, self._step_start, max(now, self._step_start), -1)
        self.writer.forget(span)
        self._step_span = 0
        self._count(_STEP, 0)
        self.writer.set_head()

    def _count(self, kind: int, size: int) -> None:
        count = self._counts.setdefault(kind, [0, 0])
        count[0] += 1
        count[1] += max(size, 0)
        self.writer.set_count(kind, *count)

    # -- marks: optimizer, data, forward ------------------------------------------------------

    def _mark(self, call: Call, thread: _Thread) -> None:
        if len(thread.marks) >= _MAX_MARKS:  # ends were lost: start again
            thread.marks.clear()
        thread.marks.append(self._marked(call, thread))

    def _marked(self, call: Call, thread: _Thread) -> _Open | None:
        text = call.text
        found = _OPTIMIZER_MARK.match(text)
        if found:
            if any(
                m in self._stack and m.kind == _OPTIMIZER for m in thread.marks if m is not None
            ):
                return None  # a subclass that calls the class above: one update
            return self._begin(_OPTIMIZER, found[1], call)
        if _DATA_MARK.match(text):
            return self._begin(_DATA, "DataLoader", call)
        if text == "DistributedDataParallel.forward":
            self._forward_seen = True
            phase = self._begin(_FORWARD, "DistributedDataParallel", call)
            if phase is not None:
                phase.trains = False
            return phase
        if _PIPELINE_MARK.match(text):
            self._forward_seen = True
            return self._begin(_FORWARD, "micro-batch", call)
        if text == "FSDP::root_pre_forward" and call.thread == self._main and not self._stack:
            self._boundary = call.time_ns
        return None

    def _mark_end(self, call: Call, thread: _Thread) -> None:
        if call.returned:
            stack, seen_ns = thread.ended
            if stack == call.stack - _RETURN_BYTES and call.time_ns - seen_ns < _SAME_CALL_NS:
                thread.ended = (0, 0)
                return  # seen by its entry already
        else:
            thread.ended = (call.stack, call.time_ns)
        if not thread.marks:
            return
        phase = thread.marks.pop()
        if phase is None:
            return
        undecided = phase.kind == _FORWARD and not phase.trains and self._stack == [phase]
        self._end(phase, call.time_ns, undecided=undecided)

    def _forward_trains(self, _: Call, __: _Thread) -> None:
        for phase in self._stack:
            if phase.kind == _FORWARD:
                phase.trains = True

    def _nothing(self, _: Call, __: _Thread) -> None:
        """Only says that the thread goes on."""

    # -- backward -----------------------------------------------------------------------------

    def _backward(self, call: Call, _: _Thread) -> None:
        if call.thread != self._main:
            return
        if call.returned:
            for phase in self._stack:
                if phase.stack == call.stack - _RETURN_BYTES and phase.kind == _BACKWARD:
                    self._end_waits(call.time_ns, finalizing=True)
                    self._end(phase, call.time_ns)
                    return
            return
        # One that never came back ended by an exception, or its return is not watched yet.
        while (
            self._stack
            and self._stack[-1].kind == _BACKWARD
            and (0 < self._stack[-1].stack <= call.stack)
        ):
            self._end(self._stack[-1], call.time_ns)
        if not self._stack and not self._forward_seen and not self.late:
            self._derive_forward(call)
        begun = self._begin(_BACKWARD, "backward", call)
        if begun is not None:
            begun.blind = call.blind

    def _derive_forward(self, call: Call) -> None:
        """Book the time from the data, or the last update, to the backward as forward."""
        self._settle(_BACKWARD, call.time_ns)
        if not self._step_span:
            self._open_step(self._next_start or self._boundary or call.time_ns)
        start = max(self._boundary, self._step_start)
        if call.time_ns <= start:
            return
        template = self._template(_FORWARD, "until backward", call.thread, 0, '{"derived":true}')
        span = self.writer.open(template, start, self._step, self._step_span)
        self.writer.close(span, start, call.time_ns, -1)
        self._count(_FORWARD, 0)

    # -- collectives --------------------------------------------------------------------------

    def _goes_on(self, thread: _Thread) -> None:
        operation, thread.operation = thread.operation, None
        if operation is None:
            return
        operation.issued = True
        if not operation.span:
            self._open_operation(operation)
        if operation.works == 0:  # its end cannot be seen: on a device, or made no work
            self._close_operation(operation, operation.start_ns, ring.FLAG_NO_TIMES)
        elif operation.pending == 0:
            self._close_operation(operation, operation.last_ns, 0)

    def _collective(self, call: Call, thread: _Thread) -> None:
        if call.thread == self._main:
            self._settle(_COLLECTIVE, call.time_ns)
        self.place.collects()
        thread.operation = _Operation(call, call.probe.name, call.time_ns)

    def _nccl(self, call: Call, thread: _Thread) -> None:
        self._collective(call, thread)
        self._goes_on(thread)

    def _open_operation(self, operation: _Operation, sequence: int = -1) -> None:
        call, writer = operation.call, self.writer
        # Only the main thread's stand in the same step on every rank.
        if operation.name not in ("send", "recv") and call.thread == self._main:
            self.place.collects(call.group, sequence)
        if call.peer >= 0:
            sequence = -1
            if call.group in self._born:
                key = (call.group, call.peer, operation.name)
                sequence = self._pairs.get(key, 0)
                self._pairs[key] = sequence + 1
        template = ring.pack_template(
            _COLLECTIVE,
            flags=ring.FLAG_ASYNC,
            name=writer.intern(operation.name),
            group=writer.intern(call.group),
            dtype=writer.intern(call.dtype),
            device=writer.intern(call.device),
            peer=call.peer + 1 if 0 <= call.peer < 0xFFFF else 0,
            thread=call.thread & 0xFFFFFFFF,
            sequence=sequence,
            bytes_=call.bytes,
        )
        parent = 0
        if call.thread == self._main:
            parent = self._stack[-1].span if self._stack else self._step_span
        step = self._step_here()
        operation.span = writer.open(template, operation.start_ns, step, parent)
        writer.remember(operation.span, template, step, parent)

    def _step_here(self) -> int:
        """Return the current step; between two the next one, which nothing may have begun yet."""
        return self._step if self._step_span or self.late else self._step + 1

    def _close_operation(self, operation: _Operation, now: int, flags: int) -> None:
        if operation.closed:
            return
        operation.closed = True
        if operation.failed:
            flags |= ring.FLAG_FAILED
        if flags:
            self.writer.set_kind(operation.span, _COLLECTIVE, ring.FLAG_ASYNC | flags)
        start = operation.start_ns
        self.writer.close(operation.span, start, max(now, start), -1)
        self.writer.forget(operation.span)
        self._count(_COLLECTIVE, operation.call.bytes)

    def _work(self, call: Call, thread: _Thread) -> None:
        operation = thread.operation
        if operation is None:
            return
        if not operation.span:
            self._open_operation(operation, call.number - 1 if call.number > 0 else -1)
        if len(self._works) >= _MAX_WORKS:
            self._works.clear()
            self.writer.add_losses(errors=1)
        self._works[call.this] = operation
        operation.works += 1
        operation.pending += 1

    def _work_done(self, call: Call, _: _Thread) -> None:
        operation = self._works.pop(call.this, None)
        if operation is None:
            return
        operation.failed |= call.probe.role == "work_failed"
        operation.pending -= 1
        operation.last_ns = call.time_ns
        # Some collectives are made of several works: over when no more can come.
        if operation.pending == 0 and operation.issued:
            self._close_operation(operation, call.time_ns, 0)
        self._end_waits(call.time_ns, work=call.this)

    # -- waits --------------------------------------------------------------------------------

    def _wait(self, call: Call, _: _Thread) -> None:
        # A collective that is through already makes nobody wait: nothing to record.
        if call.thread == self._main and call.this in self._works:
            self._begin_wait("wait", {call.this}, call)

    def _finalize(self, call: Call, _: _Thread) -> None:
        works = {work for work, operation in self._works.items() if operation.call.peer < 0}
        if call.thread == self._main and works:
            self._begin_wait("DDP finalize backward", works, call)

    def _begin_wait(self, name: str, works: set[int], call: Call) -> None:
        parent = self._stack[-1].span if self._stack else self._step_span
        template, step = self._template(_WAIT, name, call.thread), self._step_here()
        span = self.writer.open(template, call.time_ns, step, parent)
        self.writer.remember(span, template, step, parent)
        self._waits.append((_Open(span, _WAIT, call.time_ns, template, call.stack), works))

    def _end_waits(self, now: int, *, work: int = 0, finalizing: bool = False) -> None:
        kept = []
        for phase, works in self._waits:
            works.discard(work)
            if works and not finalizing:
                kept.append((phase, works))
                continue
            self._close(phase, now)
        self._waits = kept

    # -- devices ------------------------------------------------------------------------------

    def _device(self, call: Call, _: _Thread) -> None:
        kind = _KIND[call.probe.role]
        if not call.probe.returns:
            parent = self._stack[-1].span if self._stack and call.thread == self._main else 0
            template = ring.pack_template(
                kind,
                flags=ring.FLAG_NO_TIMES,
                name=self.writer.intern(call.probe.name),
                thread=call.thread & 0xFFFFFFFF,
                bytes_=call.bytes,
            )
            span = self.writer.open(template, call.time_ns, self._step, parent)
            self.writer.close(span, call.time_ns, call.time_ns, -1)
            self._count(kind, call.bytes)
            return
        if not call.returned:
            template = ring.pack_template(
                kind,
                name=self.writer.intern(call.probe.name),
                thread=call.thread & 0xFFFFFFFF,
                bytes_=call.bytes,
            )
            parent = self._stack[-1].span if self._stack and call.thread == self._main else 0
            span = self.writer.open(template, call.time_ns, self._step, parent)
            self._blocked[call.thread, call.probe.name] = (span, call)
            return
        begun = self._blocked.pop((call.thread, call.probe.name), None)
        if begun is not None and begun[1].stack == call.stack - _RETURN_BYTES:
            self.writer.close(begun[0], begun[1].time_ns, call.time_ns, -1)
            self._count(kind, begun[1].bytes)

    # -- the end ------------------------------------------------------------------------------

    def idle(self, now: int) -> None:
        """Decide what waited for a next call that does not come."""
        for thread in self._threads.values():
            self._goes_on(thread)
        if self._over_ns and now - self._over_ns > 1_000_000_000:
            self._step_over()

    def stop(self) -> None:
        """Write down what is certain; what is open stays open: the process was killed."""
        for thread in self._threads.values():
            self._goes_on(thread)
        if self._over_ns and not self._stack:
            self._step_over()
        self.writer.set_head()

    def finish(self, now: int) -> None:
        """Close what is open: we leave, or the process has ended."""
        for thread in self._threads.values():
            self._goes_on(thread)
        now = max(now, self.last_ns)
        if self._undecided is not None:
            self._settle(_DATA, now)
        if self._over_ns and not self._stack:
            self._step_over()
        while self._stack:
            self._end(self._stack[-1], now, ring.FLAG_INCOMPLETE)
        if self._step_span:
            self._close_step(now, ring.FLAG_INCOMPLETE)
        self.writer.set_head()

"""Calls seen from outside become the spans that a recorder inside the process would have written.

Pure bookkeeping of one process: calls in, records out; it reads no clock, file or memory. Phases:

- data wait, optimizer and DDP's forward stand between a ``record_function`` mark, which torch sets
  whether or not anybody profiles, and its end;
- backward is ``Engine::execute``, from its entry to the instruction it returns to;
- a collective is the process group's method until the completion of the work it made;
- waits are ``Work::wait`` and DDP's ``finalize_backward``, until what they wait for is complete;
- a step ends at the end of the last of the updates that follow each other without a backward, or of
  the backward that the last one stands in; what comes after it begins a step only if it is a phase,
  not by a collective or a wait.

Of a process that had torch when we came, nothing is taken before a backward has told whether it is
the first one that the process ever made: then it is new, else it is at work.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kansoku.capture.attach.align import Alignment
from kansoku.capture.attach.calls import Call, Open, Operation, Thread
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
_MAX_WORKS, _MAX_MARKS = 100_000, 256
_SAME_CALL_NS = 1_000_000
_MAX_EARLY, _MAX_BETWEEN, _FEW_BACKWARDS = 10_000, 100, 3
_QUIET_NS = 5_000_000_000
_RETURN_BYTES = 8
"""What a return takes off the stack."""


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
        self._threads: dict[int, Thread] = {}
        self._works: dict[int, Operation] = {}
        self._waits: list[tuple[Open, set[int]]] = []
        self._main = 0
        self._stack: list[Open] = []
        self._step = -1
        self._step_span = 0
        self._step_start = self._next_start = 0
        self._over_ns = 0
        """End of the last update; the step is over unless another update follows."""
        self._updated = False
        """An update has ended in a phase that is still open."""
        self._after: list[tuple[int, tuple[str, int] | None]] = []
        """Operations after the last update: in the next step unless another update follows."""
        self._early: list[Call] | None = []
        """Calls before it is known whether the process is new; None: known."""
        self._boundary = 0
        self._forward_seen = False
        self._undecided: tuple[Open, int] | None = None
        self._blocked: dict[tuple[int, str], tuple[int, Call]] = {}
        self._counts: dict[int, list[int]] = {}
        self._pairs: dict[tuple[str, int, str], int] = {}
        self._born: set[str] = set()
        self.last_ns = 0
        self.calls = 0
        self._roles: dict[str, Callable[[Call, Thread], None]] = {
            "mark": self._mark,
            "mark_end": self._mark_end,
            "forward_trains": self._forward_trains,
            "forward_done": self._nothing,
            "backward": self._backward,
            "first_backward": self._nothing,
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
        if call.probe.role == "first_backward":
            self.place.starts()
        early = self._early
        if early is None:
            self._take(call)
        else:
            early.append(call)
            if not self.late or self._is_at_work(call, early):
                self._take_early()

    @staticmethod
    def _is_at_work(call: Call, early: list[Call]) -> bool:
        """Say whether a call tells that its process has trained before.

        The first backward that a process ever makes is followed by its engine's start.
        """
        if call.probe.role == "mark" and _OPTIMIZER_MARK.match(call.text):
            return True
        own = [each.probe.role for each in early[-_MAX_BETWEEN:] if each.thread == call.thread]
        return own[-2:-1] == ["backward"] or len(early) >= _MAX_EARLY

    def _take_early(self) -> None:
        early, self._early = self._early or [], None
        for call in early:
            self._take(call)

    def begins(self) -> None:
        """Note that a group is made: training begins, unless it was heard before."""
        heard = {call.probe.role for call in self._early or ()}
        if not heard & {"collective", "nccl", "backward"}:
            self.place.begins()

    def _take(self, call: Call) -> None:
        role = call.probe.role
        thread = self._threads.setdefault(call.thread, Thread())
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

    def _begin(self, kind: int, name: str, call: Call) -> Open | None:
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
        phase = Open(span, kind, now, template, call.stack)
        self._stack.append(phase)
        return phase

    def _end(self, phase: Open, now: int, flags: int = 0, *, undecided: bool = False) -> None:
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
        self._updated |= phase.kind == _OPTIMIZER
        if self._stack:
            return
        self._boundary = now
        if self._updated and not flags and (self._step_span or self.late):
            self._over_ns = now
        self._updated = False

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
        if self._over_ns and kind == _OPTIMIZER:
            self._step_goes_on()
        # One that counts waits for a phase: ranks may reduce something between two updates.
        elif self._over_ns and (kind != _COLLECTIVE or self.late):
            self._step_over()
        if kind == _BACKWARD:
            self.place.trains()

    def _step_goes_on(self) -> None:
        """Take what was put into the next step back: another update follows."""
        for span, collective in self._after:
            self.writer.set_step(span, self._step, self._step_span)
            if collective is not None:
                self.place.collects(*collective)
        self._after.clear()

    def _step_over(self) -> None:
        """End the step with its last update; a rank at work may count from here on."""
        now, self._over_ns = self._over_ns, 0
        self._after.clear()
        number = self.place.updates(now)
        if self._step_span:
            self._close_step(now, 0)
        elif number is not None:
            self._step, self._next_start = number - 1, now

    def _close(self, phase: Open, now: int) -> None:
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

    def _mark(self, call: Call, thread: Thread) -> None:
        if len(thread.marks) >= _MAX_MARKS:  # ends were lost: start again
            thread.marks.clear()
        thread.marks.append(self._marked(call, thread))

    def _marked(self, call: Call, thread: Thread) -> Open | None:
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

    def _mark_end(self, call: Call, thread: Thread) -> None:
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

    def _forward_trains(self, _: Call, __: Thread) -> None:
        for phase in self._stack:
            if phase.kind == _FORWARD:
                phase.trains = True

    def _nothing(self, _: Call, __: Thread) -> None:
        """Only says that the thread goes on."""

    # -- backward -----------------------------------------------------------------------------

    def _backward(self, call: Call, _: Thread) -> None:
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

    def _goes_on(self, thread: Thread) -> None:
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

    def _collective(self, call: Call, thread: Thread) -> None:
        if call.thread == self._main:
            self._settle(_COLLECTIVE, call.time_ns)
        self.place.collects()
        thread.operation = Operation(call, call.probe.name, call.time_ns)

    def _nccl(self, call: Call, thread: Thread) -> None:
        self._collective(call, thread)
        self._goes_on(thread)

    def _open_operation(self, operation: Operation, sequence: int = -1) -> None:
        call, writer = operation.call, self.writer
        # Only the main thread's stand in the same step on every rank.
        mine, collective = call.thread == self._main, None
        after = mine and self._over_ns > 0
        if operation.name not in ("send", "recv") and mine:
            collective = (call.group, sequence)
            self.place.collects(*collective, after=after)
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
        step, parent = self._step_here()
        parent = parent if mine else 0
        operation.span = writer.open(template, operation.start_ns, step, parent)
        writer.remember(operation.span, template, step, parent)
        if after:
            self._after.append((operation.span, collective))

    def _step_here(self) -> tuple[int, int]:
        """Return the current step and what is open in it.

        Between two it is the next one, which nothing may have begun yet.
        """
        if self._stack:
            return self._step, self._stack[-1].span
        if self.late or (self._step_span and not self._over_ns):
            return self._step, self._step_span
        return self._step + 1, 0

    def _close_operation(self, operation: Operation, now: int, flags: int) -> None:
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

    def _work(self, call: Call, thread: Thread) -> None:
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

    def _work_done(self, call: Call, _: Thread) -> None:
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

    def _wait(self, call: Call, _: Thread) -> None:
        # A collective that is through already makes nobody wait: nothing to record.
        if call.thread == self._main and call.this in self._works:
            self._begin_wait("wait", {call.this}, call)

    def _finalize(self, call: Call, _: Thread) -> None:
        works = {work for work, operation in self._works.items() if operation.call.peer < 0}
        if call.thread == self._main and works:
            self._begin_wait("DDP finalize backward", works, call)

    def _begin_wait(self, name: str, works: set[int], call: Call) -> None:
        template = self._template(_WAIT, name, call.thread)
        step, parent = self._step_here()
        span = self.writer.open(template, call.time_ns, step, parent)
        self.writer.remember(span, template, step, parent)
        if self._over_ns:
            self._after.append((span, None))
        self._waits.append((Open(span, _WAIT, call.time_ns, template, call.stack), works))

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

    def _device(self, call: Call, _: Thread) -> None:
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
        if self._early and now - self.last_ns > _QUIET_NS:
            self._take_early()  # a hang shall be seen while it lasts
        for thread in self._threads.values():
            self._goes_on(thread)
        if self._over_ns and now - self._over_ns > 1_000_000_000:
            self._step_over()

    def stop(self) -> None:
        """Write down what is certain; what is open stays open: the process was killed."""
        self._take_early()
        for thread in self._threads.values():
            self._goes_on(thread)
        if self._over_ns and not self._stack:
            self._step_over()
        self.writer.set_head()

    def finish(self, now: int) -> None:
        """Close what is open: we leave, or the process has ended."""
        self._take_early()
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

    def unseen(self) -> str:
        """Return why no step counts although it trained; empty where steps do."""
        backwards, updates = (self._counts.get(k, (0, 0))[0] for k in (_BACKWARD, _OPTIMIZER))
        if backwards >= _FEW_BACKWARDS and not updates:
            return (
                "seen from outside: backwards, but no update by a torch optimizer on their thread: "
                "a step ends with one, so none is counted"
            )
        if updates and self.late:
            return self.place.untold(self.last_ns)
        return ""

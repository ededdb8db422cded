"""The compiled phases and the Python ones write the same ring, whatever is opened and closed."""

import mmap
import os
import resource
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.labs.sanitizers import sanitized_environment
from tests.labs.training import CACHE

from kansoku.capture.payload import phases
from kansoku.model import ring

ROUNDS = int(os.environ.get("KANSOKU_FUZZ", "200"))
KINDS = ("data_wait", "forward", "backward", "checkpoint", "collective_wait")
NAMES = tuple(f"name {number}" for number in range(5))
SIZE = 16_384  # lanes of a few dozen records: they wrap
UNTIMED = (
    "id",
    "parent",
    "step",
    "kind",
    "flags",
    "name",
    "attributes",
    "thread",
    "origin",
    "id_again",
)


class Optimizer:
    pass


class Side:
    """One implementation over a small ring of its own."""

    def __init__(self, *, compiled):
        self.buffer = mmap.mmap(-1, SIZE)
        ring.format_ring(self.buffer, pid=1, process_start=0, anchor=(0, 0))
        self.writer = writer = ring.RingWriter(self.buffer)
        self.optimizers = [Optimizer() for _ in range(3)]
        self.anchors = 0

        def template(kind, name, flags, attributes):
            return ring.pack_template(
                kind, flags=flags, name=writer.intern(name), attributes=writer.intern(attributes)
            )

        def late(span, template, step, parent, *more):
            start, end, cpu, peak, a, b = more
            writer.remember(span, template, step, parent)
            writer.set_values(span, peak_rss_bytes=peak, value_a=a, value_b=b)
            writer.close(span, start, end, cpu)

        def anchor():
            self.anchors += 1

        callbacks = phases.Callbacks(
            template=template,
            optimizers=lambda: [id(o) for o in self.optimizers[:2]],
            anchor=anchor,
            late=late,
        )
        make = phases._compiled if compiled else phases.Phases
        self.phases = make(writer, -1, callbacks)
        self.spans = []

    def do(self, action, number, flags):
        one = self.phases
        if action == "open":
            name = NAMES[number % len(NAMES)]
            kind = ring.KIND_CODES[KINDS[number % len(KINDS)]]
            self.spans.append(one.open(kind, name, flags, "a" * (number % 2)))
        elif action == "close" and self.spans:
            one.close(self.spans[number % len(self.spans)], flags)
        elif action == "close_last" and self.spans:
            one.close(self.spans.pop())
        elif action == "write":
            template = ring.pack_template(15, name=1)
            parent = one.parent
            self.writer.close(self.writer.open(template, 5, one.step, parent), 5, 9, -1)
        elif action == "begin":
            one.update_begins(self.optimizers[number % 3])
        elif action == "end":
            one.update_ends(self.optimizers[number % 3], (), {})
        elif action == "update":
            one.update_begins(self.optimizers[number % 2])
            one.update_ends(self.optimizers[number % 2])
        elif action == "flops":
            one.flops += number
            one.work(2.0, float(number))
            one.tokens = float(number)
        elif action == "leave":
            one.leave()
        return one.step, one.step_span, one.parent, [one.inside(k) for k in range(12)]

    def rows(self):
        header = ring.read_header(self.buffer)
        lane = header.lanes[0]
        found = []
        for number in range(lane.capacity):
            at = lane.offset + number * ring.RECORD_BYTES
            row = {
                name: struct.unpack_from("=" + form, self.buffer, at + offset)[0]
                for name, offset, form in ring.RECORD_FIELDS
            }
            open_ = row["duration_ns"] == ring.OPEN
            assert open_ or row["duration_ns"] >= 0
            has_peak = row["peak_rss_bytes"] > 0
            is_step = row["kind"] == ring.KIND_CODES["step"]
            values = (row["value_a"], row["value_b"]) if is_step else None
            found.append(
                ([row[name] for name in UNTIMED], open_, has_peak, row["cpu_ns"] >= 0, values)
            )
        counters = self.buffer[384 : 384 + 256]
        step, phase = struct.unpack_from("=qQ", self.buffer, 144)
        losses = self.buffer[176:208]
        return found, counters, (step, phase), losses


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["open"] * 5 + ["close", "close_last", "close_last", "close_last", "write", "flops"]
            + ["begin", "end", "update", "update", "update", "leave"]
        ),
        st.integers(0, 30),
        st.sampled_from([0, 0, 0, ring.FLAG_RECOMPUTE, ring.FLAG_EVALUATES]),
    ),
    max_size=150,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    monkeypatch.setenv("KANSOKU_CACHE_DIR", str(CACHE))


def test_both_write_the_same_ring(monkeypatch):
    @settings(max_examples=ROUNDS, deadline=None)
    @given(ACTIONS)
    def compare(actions):
        compiled, plain = Side(compiled=True), Side(compiled=False)
        for action in actions:
            assert compiled.do(*action) == plain.do(*action), action
        assert compiled.rows() == plain.rows()
        starts = [number for number, _ in compiled.phases.starts()]
        assert starts == [number for number, _ in plain.phases.starts()]

    compare()


@pytest.mark.parametrize("compiled", [True, False])
def test_an_update_that_raised_does_not_hold_the_steps(compiled):
    """The next update of the same optimizer closes it; the steps after it are steps again."""
    side = Side(compiled=compiled)
    side.optimizers = side.optimizers[:1]
    one, optimizer = side.phases, side.optimizers[0]
    one.update_begins(optimizer)  # and no end
    for step in range(3):
        one.close(one.open(3, "forward"))
        one.update_begins(optimizer)
        one.update_ends(optimizer)
        assert (one.step, one.step_span, one.parent) == (step, 0, 0)
    flags = [row[0][UNTIMED.index("flags")] for row in side.rows()[0] if row[0][0]]
    assert flags.count(ring.FLAG_FAILED) == 1


@pytest.mark.parametrize("compiled", [True, False])
def test_a_phase_has_the_times_of_the_clocks(compiled):
    side = Side(compiled=compiled)
    before = phases._clock()
    span = side.phases.open(3, "forward")
    sum(range(200_000))
    side.phases.close(span)
    after = phases._clock()
    at = ring.read_header(side.buffer).lanes[0].offset + ring.RECORD_BYTES  # the step is first
    _, start, cpu, duration = struct.unpack_from("=Qqqq", side.buffer, at)
    assert before <= start < start + duration <= after
    assert 0 < cpu <= duration + 1_000_000  # the two clocks are read one after the other


def phase_times(side):
    """Return (CPU time, duration) of the records that are no steps."""
    lane = ring.read_header(side.buffer).lanes[0]
    rows = (lane.offset + number * ring.RECORD_BYTES for number in range(1, lane.capacity))
    found = (struct.unpack_from("=Qqqq12xH", side.buffer, at) for at in rows)
    step = ring.KIND_CODES["step"]
    return [(cpu, duration) for n, _, cpu, duration, kind in found if n and kind != step]


def spin(ns):
    until = phases._clock() + ns
    while phases._clock() < until:
        pass


def values_a(side):
    """Return the first value of each record that is no step."""
    lane = ring.read_header(side.buffer).lanes[0]
    rows = (lane.offset + number * ring.RECORD_BYTES for number in range(lane.capacity))
    kept = (at for at in rows if struct.unpack_from("=Q", side.buffer, at)[0])
    return [
        struct.unpack_from("=d", side.buffer, at + 96)[0]
        for at in kept
        if struct.unpack_from("=H", side.buffer, at + 44)[0] != ring.KIND_CODES["step"]
    ]


def waiting_side(compiled, queue):
    side = Side(compiled=compiled)
    make = phases._compiled if compiled else phases.Phases
    side.phases = make(side.writer, queue, phases.Callbacks(
        template=lambda kind, *_: ring.pack_template(kind), optimizers=list, anchor=int, late=int,
    ))  # fmt: skip
    return side


def switches():
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nivcsw, usage.ru_nvcsw


@pytest.mark.parametrize("compiled", [True, False])
def test_cpu_time_is_asked_for_after_a_sleep_only(compiled):
    """To ask may end the thread's time slice; who kept its CPU had all of the time."""
    queue = phases.queue_file(threading.get_native_id())
    kept, slept = [], []
    for _ in range(200):  # some phases keep their CPU on any machine, be it ever so busy
        side = waiting_side(compiled, queue)
        side.phases.close(side.phases.open(3, "forward"))
        before = switches()
        side.phases.close(side.phases.open(3, "forward"))
        span = side.phases.open(3, "forward")
        spin(300_000)
        side.phases.close(span)
        if switches() == before:
            kept.append(phase_times(side)[-1])
        asked = time.thread_time_ns()
        span = side.phases.open(3, "forward")
        spin(300_000)
        time.sleep(0.002)
        side.phases.close(span)
        asked = time.thread_time_ns() - asked
        slept.append((*phase_times(side)[-1], asked))
        if len(kept) >= 10 and len(slept) >= 10:
            break
    os.close(queue)
    assert len(kept) >= 10
    assert all(cpu == duration >= 300_000 for cpu, duration in kept)
    assert all(cpu < duration - 1_500_000 for cpu, duration, _ in slept)
    # A hypervisor's share counts as the thread's own until it sleeps: most, not all.
    close = [cpu == pytest.approx(clock, abs=200_000) for cpu, _, clock in slept]
    assert sum(close) > 0.7 * len(slept)


@contextmanager
def beside(work):
    """Share one core with a process that does a statement over and over."""
    before = os.sched_getaffinity(0)
    core = min(before)
    program = (
        f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: {work}"
    )
    peer = None
    try:
        os.sched_setaffinity(0, {core})
        peer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        peer.stdout.readline()
        yield
    finally:
        os.sched_setaffinity(0, before)
        if peer is not None:
            peer.kill()
            peer.communicate()


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_thread_that_lost_its_cpu_between_two_looks_used_no_negative_time(compiled, counted):
    """Within 20 us of a look it is taken to have kept its CPU; the next look knows better."""
    queue = phases.queue_file(threading.get_native_id()) if counted else -1
    used = []
    with beside("os.sched_yield()"):
        for _ in range(100):
            side = waiting_side(compiled, queue)
            for _ in range(10):
                side.phases.close(side.phases.open(3, "forward"))
                until = phases._clock() + 14_000
                while phases._clock() < until:
                    os.sched_yield()
                span = side.phases.open(3, "forward")
                spin(7_000)
                side.phases.close(span)
            used += [cpu for cpu, _ in phase_times(side)]
    if counted:
        os.close(queue)
    assert len(used) == 2000
    assert min(used) >= 0


@pytest.mark.parametrize("compiled", [True, False])
def test_the_run_queue_is_read(tmp_path, compiled):
    """The second number of schedstat, as the kernel writes it, where the thread went to sleep."""
    path = tmp_path / "schedstat"
    path.write_text("")
    queue = os.open(path, os.O_RDONLY)
    side = waiting_side(compiled, queue)
    for told in (7890123, 9890123, 9900000, 9950000):
        path.write_text(f"123456 {told} 45\n")
        span = side.phases.open(3, "forward")
        threading.Event().wait(0.005)
        side.phases.close(span)
    os.close(queue)
    assert values_a(side) == [7890123.0, 9890123.0, 9900000.0, 9950000.0]


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "kernel without counts"])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_wait_of_a_thread_that_shares_its_core_is_noted(compiled, counted, tmp_path):
    """It never gives up the CPU, yet is off it about half of the time: against the kernel's count."""
    queue = phases.queue_file(threading.get_native_id())
    zeros = tmp_path / "schedstat"
    zeros.write_text("0 0 0\n")
    read = queue if counted else os.open(zeros, os.O_RDONLY)
    with beside("pass"):
        side = waiting_side(compiled, read)
        told, begin, used = [], phases._clock(), time.thread_time_ns()
        for _ in range(4):
            span = side.phases.open(3, "forward")
            spin(60_000_000)
            side.phases.close(span)
            told.append(int(os.pread(queue, 64, 0).split()[1]))
        wall, used = phases._clock() - begin, time.thread_time_ns() - used
    os.close(queue)
    values = values_a(side)
    assert values == sorted(values)
    grew, kernel = values[-1] - values[0], told[-1] - told[0]
    assert kernel > 20_000_000  # they did share
    assert 0.8 * kernel < grew < wall if counted else grew == 0
    assert sum(cpu for cpu, _ in phase_times(side)) == pytest.approx(used, rel=0.1)


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.open(1),
        lambda one: one.open("1", "name"),
        lambda one: one.open(70_000, "name"),
        lambda one: one.open(1, b"name"),
        lambda one: one.close(),
        lambda one: one.close(-1),
        lambda one: one.update_begins(),
        lambda one: one.work(1.0),
        lambda one: one.work("1", 2.0),
        lambda one: one.record(b"short", 1, 1, 1),
        lambda one: one.complete(99, 1, 1, 1),
    ],
)
def test_wrong_calls_of_the_compiled_part_are_errors(call):
    side = Side(compiled=True)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        call(side.phases)
    assert side.phases.parent == 0


def test_a_lane_outside_its_ring_is_refused():
    module = phases.extension()
    nothing = (None,) * 5
    for offset, capacity in ((4096, 1 << 40), (1 << 60, 1), (4096, 0), (4097, 1), (0, 1)):
        with pytest.raises(ValueError, match="outside"):
            module.Phases(mmap.mmap(-1, SIZE), offset, capacity, 1, -1, *nothing)


def test_errors_of_callbacks_come_out_and_harm_nothing():
    def breaks(*_):
        raise RuntimeError("mine")

    for compiled in (True, False):
        side = Side(compiled=compiled)
        make = phases._compiled if compiled else phases.Phases
        one = make(side.writer, -1, phases.Callbacks(
            template=breaks, optimizers=breaks, anchor=breaks, late=breaks,
        ))  # fmt: skip
        for _ in range(3):
            with pytest.raises(RuntimeError, match="mine"):
                one.open(3, "forward")
        assert (one.step, one.parent) == (-1, 0)


def test_without_python_h_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"Python\.h"):
        phases.extension()


def test_the_same_under_sanitizers(tmp_path):
    """Address and undefined-behaviour sanitizers watch a run of the comparison above."""
    environment = sanitized_environment(
        KANSOKU_CACHE_DIR=str(tmp_path), KANSOKU_FUZZ="60", PYTHONPATH=os.pathsep.join(sys.path)
    )
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "compared"


_WATCHED = """
import os
from unittest import mock
from tests.unit.capture import test_phases
with mock.patch.object(test_phases, "CACHE", os.environ["KANSOKU_CACHE_DIR"]):
    test_phases.test_both_write_the_same_ring(None)
print("compared")
"""

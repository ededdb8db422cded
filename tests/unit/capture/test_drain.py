"""The drain: nothing lost while it follows, losses counted, restarts, a full disk."""

import errno
import mmap
import os

import pytest

from kansoku.capture.payload import drain as module
from kansoku.capture.payload.drain import Drain
from kansoku.formats.run_directory import read_run
from kansoku.model import ring

GONE = 999_999_998


class Writer:
    """A process that writes a small ring."""

    def __init__(self, folder, pid):
        folder.mkdir(exist_ok=True)
        path = folder / f"n1-{pid}.ring"
        path.write_bytes(bytes(40_960))
        with path.open("r+b") as stream:
            self.buffer = mmap.mmap(stream.fileno(), 0)
        ring.format_ring(
            self.buffer, pid=pid, process_start=0, anchor=(0, 10**18), lane_shares=(1,)
        )
        self.writer = ring.RingWriter(self.buffer)
        self.writer.set_facts({"node": "n1"})
        self.capacity = ring.read_header(self.buffer).lanes[0].capacity
        self.template = ring.pack_template(ring.KIND_CODES["collective"], bytes_=10)
        self.clock = 0

    def spans(self, count):
        for _ in range(count):
            self.clock += 10
            span = self.writer.open(self.template, self.clock, 0, 0)
            self.writer.close(span, self.clock, self.clock + 5, -1)


@pytest.fixture
def writer(tmp_path):
    return Writer(tmp_path / "rings", os.getpid())


@pytest.fixture
def drain(tmp_path, writer):
    made = Drain(str(tmp_path / "rings"), str(tmp_path / "out"))
    yield made
    made.release()


def closed(tmp_path):
    spans = read_run(tmp_path / "out").spans
    return spans.filter(spans["duration_ns"].is_not_null())


def test_wrapping_loses_nothing_that_was_drained(tmp_path, writer, drain):
    for _ in range(40):
        writer.spans(writer.capacity // 2)
        drain.poll()
    data = read_run(tmp_path / "out")
    assert len(data.spans) == 40 * (writer.capacity // 2)
    assert data.spans["bytes"].sum() == 10 * len(data.spans)
    assert data.processes[0].lost == 0


def test_what_was_overwritten_first_is_counted(tmp_path, writer, drain):
    writer.spans(10)
    drain.poll()
    writer.spans(3 * writer.capacity)
    drain.poll()
    writer.spans(5)
    drain.poll()
    data = read_run(tmp_path / "out")
    total = 10 + 3 * writer.capacity + 5
    assert len(data.spans) + data.processes[0].lost == total
    assert data.processes[0].lost >= 2 * writer.capacity - 10
    assert any("overwritten" in text for text in data.missing)


def test_an_open_span_is_kept_when_it_closes(tmp_path, writer, drain):
    span = writer.writer.open(writer.template, 7, 0, 0)
    drain.poll()
    writer.spans(3)
    drain.poll()
    assert len(closed(tmp_path)) == 3
    writer.writer.close(span, 7, 99, -1)
    drain.poll()
    assert len(closed(tmp_path)) == 4


def test_killed_and_started_again(tmp_path, writer, drain):
    span = writer.writer.open(writer.template, 7, 0, 0)
    writer.spans(20)
    drain.poll()
    writer.spans(writer.capacity // 2)
    writer.writer.close(span, 7, 99, -1)  # closed while nobody looked
    ring_dir, out = drain.ring_dir, drain.out
    drain.release()  # as the kernel does
    again = Drain(ring_dir, out)
    again.poll()
    writer.spans(4)
    again.poll()
    data = read_run(tmp_path / "out")
    assert len(data.spans) == 1 + 20 + writer.capacity // 2 + 4
    assert data.spans["duration_ns"].null_count() == 0
    assert data.processes[0].lost == 0


def test_of_two_drains_one_copies_and_the_other_takes_over(tmp_path, writer, drain):
    other = Drain(drain.ring_dir, drain.out)
    for _ in range(3):
        writer.spans(7)
        drain.poll()
        writer.spans(5)
        other.poll()
    assert other.held == {f"n1-{os.getpid()}.ring"}
    assert not other.copies
    writer.spans(2)
    drain.release()  # as the kernel does for one that was killed
    other.poll()
    assert not other.held
    data = read_run(tmp_path / "out")
    assert len(data.spans) == 3 * 12 + 2
    assert data.processes[0].lost == 0


def test_what_is_written_while_the_drain_looks_is_no_hole(tmp_path, writer, drain, monkeypatch):
    """The block was copied before, the look for a hole is at the ring as it is now."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    look = module._Copy._hole
    total = 0

    def hole(copy, number, n):
        writer.spans(3)
        return look(copy, number, n)

    for _ in range(20):
        writer.spans(50)
        with monkeypatch.context() as patch:
            patch.setattr(module._Copy, "_hole", hole)
            drain.poll()
        total += 53
        clock[0] += 0.5
    drain.poll()
    data = read_run(tmp_path / "out")
    assert len(data.spans) == total
    assert data.processes[0].lost == 0


def test_a_record_that_is_never_written_costs_itself_after_a_second(
    tmp_path, writer, drain, monkeypatch
):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    writer.spans(4)
    drain.poll()
    span = writer.writer.open(writer.template, 1, 0, 0)
    lane = ring.read_header(writer.buffer).lanes[0]
    at = lane.offset + (span - 1) % lane.capacity * ring.RECORD_BYTES
    writer.buffer[at : at + ring.RECORD_BYTES] = bytes(ring.RECORD_BYTES)  # a thread died in it
    writer.spans(6)
    for now in (0.1, 0.6, 1.1):
        clock[0] = now
        drain.poll()
    assert len(closed(tmp_path)) == 4
    clock[0] = 1.2
    drain.poll()
    assert len(closed(tmp_path)) == 10
    assert read_run(tmp_path / "out").processes[0].lost == 1


def test_a_full_disk_costs_nothing_while_the_ring_holds_it(tmp_path, writer, drain, monkeypatch):
    writer.spans(5)
    drain.poll()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pwrite", full)
        writer.spans(7)
        assert drain.poll() == 0
    drain.poll()
    assert len(closed(tmp_path)) == 12


def test_half_a_write_is_written_again(tmp_path, writer, drain, monkeypatch):
    drain.poll()
    whole = os.pwrite

    def half(file, data, at):
        return whole(file, data[: len(data) // 2], at)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pwrite", half)
        writer.spans(7)
        drain.poll()
    drain.poll()
    assert len(closed(tmp_path)) == 7


@pytest.mark.parametrize("which", range(4))
def test_half_a_write_of_a_dead_writers_last_words_is_written_again(tmp_path, monkeypatch, which):
    """Of the records, of the head, of what it was in: the ring stays until all is kept."""
    gone = Writer(tmp_path / "rings", 2**22 + 5)  # beyond pid_max: nobody
    gone.spans(3)
    gone.writer.open(gone.template, 500, 4, 0)
    drain = Drain(str(tmp_path / "rings"), str(tmp_path / "out"))
    whole, calls = os.pwrite, []

    def half(file, data, at):
        calls.append(at)
        return whole(file, data[: len(data) // 2] if len(calls) == which + 1 else data, at)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pwrite", half)
        drain.poll()
    assert len(calls) >= min(which + 1, 3)
    drain.poll()
    data = read_run(tmp_path / "out")
    assert len(data.spans) == 4
    assert data.spans["duration_ns"].null_count() == 1
    assert not list((tmp_path / "rings").iterdir())


def test_a_dead_writers_open_spans_are_kept_and_its_ring_removed(tmp_path):
    gone = Writer(tmp_path / "rings", 2**22 + 5)  # beyond pid_max: nobody
    gone.spans(3)
    gone.writer.open(gone.template, 500, 4, 0)
    drain = Drain(str(tmp_path / "rings"), str(tmp_path / "out"))
    drain.poll()
    data = read_run(tmp_path / "out")
    assert len(data.spans) == 4
    assert data.spans["duration_ns"].null_count() == 1
    assert not list((tmp_path / "rings").iterdir())


def test_a_ring_that_somebody_removed_ends_with_its_writer(tmp_path, monkeypatch):
    """Another drain or a cleaner took the file away: this one keeps its copy and can end."""
    writer = Writer(tmp_path / "rings", os.getpid())
    writer.spans(3)
    drain = Drain(str(tmp_path / "rings"), str(tmp_path / "out"))
    drain.poll()
    (tmp_path / "rings" / f"n1-{os.getpid()}.ring").unlink()
    monkeypatch.setattr(module, "_alive", lambda *_: False)
    drain.poll()
    assert drain.copies == {}
    assert len(drain.finished) == 1
    assert len(closed(tmp_path)) == 3


def test_foreign_files_are_left_alone(tmp_path, writer, drain):
    for name, content in (("a.ring", b""), ("b.ring", b"x" * 9_000), ("c.txt", b"")):
        (tmp_path / "rings" / name).write_bytes(content)
    writer.spans(2)
    drain.poll()
    drain.poll()
    assert len(closed(tmp_path)) == 2
    assert (tmp_path / "rings" / "b.ring").exists()


NOBODY = "999999999"
"""Beyond any process number."""


@pytest.fixture
def hurried(monkeypatch):
    """A drain in this process, which keeps its priority."""
    monkeypatch.setattr(module, "give_way", int)
    monkeypatch.setattr(module, "_IDLE_S", 0.0)


@pytest.mark.parametrize("left", [None, "refused.ring"])
def test_the_folder_of_a_launcher_that_was_killed_goes_with_the_drain(
    tmp_path, monkeypatch, hurried, left
):
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    rings = tmp_path / "rings"
    rings.mkdir()
    if left:
        (rings / left).write_bytes(b"of somebody else")
    assert module.main([str(rings), str(tmp_path / "out"), "--parent", NOBODY]) == 0
    assert rings.exists() == bool(left)


def test_a_launcher_killed_before_the_first_ring_leaves_the_drain_to_wait_for_it(
    tmp_path, monkeypatch, hurried
):
    """The job may still import torch."""
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            Writer(tmp_path / "rings", GONE).spans(5)

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert module.main([str(tmp_path / "rings"), str(tmp_path / "out"), "--parent", NOBODY]) == 0
    assert len(closed(tmp_path)) == 5
    assert not (tmp_path / "rings").exists()

"""The drain: nothing lost while it follows, losses counted, restarts, a full disk."""

import errno
import mmap
import os

import pytest

from kansoku.capture.payload import drain as module
from kansoku.capture.payload.drain import Drain
from kansoku.formats.run_directory import read_run
from kansoku.model import ring


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
    return Drain(str(tmp_path / "rings"), str(tmp_path / "out"))


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
    again = Drain(drain.ring_dir, drain.out)
    again.poll()
    writer.spans(4)
    again.poll()
    data = read_run(tmp_path / "out")
    assert len(data.spans) == 1 + 20 + writer.capacity // 2 + 4
    assert data.spans["duration_ns"].null_count() == 0
    assert data.processes[0].lost == 0


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

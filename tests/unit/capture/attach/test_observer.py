"""How often a watched process's libraries are looked at, on this very process."""

import importlib.util
import mmap
import os
import subprocess
import time
from pathlib import Path

import pytest

from kansoku.capture.attach import observer
from kansoku.capture.attach.bpf import Event
from kansoku.capture.attach.observer import Watched
from kansoku.capture.attach.probes import PROBES
from kansoku.capture.attach.process import Memory, Process
from kansoku.model import ring

MILLISECOND = 1_000_000


@pytest.fixture
def watched(tmp_path):
    made = Watched(1, Process(os.getpid()), str(tmp_path), "run", "node", 1 << 20)
    yield made
    made.finish(ended=False)


def looks(watched, begin_ms, end_ms):
    """Return how many of the ticks look; there is one every 50 ms."""
    ticks = range(begin_ms * MILLISECOND, end_ms * MILLISECOND, 50 * MILLISECOND)
    return sum(watched.is_due(now) for now in ticks)


def test_libraries_are_looked_for_ever_more_rarely(watched):
    """Reading some 700 lines of a process twenty times a second cost 1.5 % of a core each."""
    assert looks(watched, 1_000, 1_200) == 4  # every tick of the first fifth of a second
    assert looks(watched, 1_200, 10_000) < 40
    assert looks(watched, 10_000, 20_000) == 20  # two a second: torch may come
    watched.facts["torch"] = "2.13.0"
    assert looks(watched, 20_000, 30_000) == 10


def test_a_library_that_was_found_brings_the_next_soon(watched):
    assert looks(watched, 1_000, 20_000) > 0
    watched.maps("/lib/libtorch_cpu.so")
    assert looks(watched, 20_000, 20_200) == 4


def test_a_ring_is_made_at_the_first_call_alone(watched, tmp_path):
    """What was learnt before stands in it: a rank of 2, a group, something that cannot be seen."""
    watched.makes_group(0x1000, 1, 2)
    watched.miss("something")
    assert list(tmp_path.iterdir()) == []
    watched.begin_record()
    watched.begin_record()
    assert [path.name for path in tmp_path.iterdir()] == [f"node-{os.getpid()}.ring"]
    with open(watched.path, "rb") as stream:
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    header = ring.read_header(buffer)
    assert (header.pid, header.rank, header.world_size) == (os.getpid(), 1, 2)
    assert "something" in ring.read_facts(buffer, header)["missing"]


def test_a_process_that_never_called_leaves_nothing(tmp_path):
    made = Watched(1, Process(os.getpid()), str(tmp_path), "run", "node", 1 << 20)
    made.finish(ended=True)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_while_it_is_taken_up_leaves_nothing(tmp_path, monkeypatch):
    """Its files in /proc go one after the other; no ring and no open file may stay."""

    def gone(_):
        raise FileNotFoundError("gone")

    monkeypatch.setattr(Process, "python_version", gone)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        Watched(1, Process(os.getpid()), str(tmp_path), "run", "node", 1 << 20)
    assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == before


class Kernel:
    """Sets no probe; a link gets the lowest free number, as descriptors do."""

    dropped = 0

    def __init__(self):
        self.links = set()

    def program(self, *_):
        return 0

    def attach(self, *_):
        link = next(n for n in range(100) if n not in self.links)
        self.links.add(link)
        return link

    def detach(self, *links):
        self.links -= set(links)

    def poll(self):
        return []

    def close(self):
        pass


def test_ends_of_marks_are_seen_at_their_entry_until_they_are_where_they_return_to(
    tmp_path, monkeypatch
):
    """Two places they return to, one after the other; the entry's link is given up once."""
    monkeypatch.setattr(observer, "Bpf", Kernel)
    made = observer.Observer(ring_dir=str(tmp_path), run="run", node="node", clock=lambda: 1000)
    watched = made.add(os.getpid())
    kernel = made._bpf
    code = next(m for m in watched.process.mappings() if "libc.so" in m.path and m.offset)
    watched.marks = [code.start]
    watched.mark_ends = entry = kernel.attach()
    watched.links.append(entry)
    number = next(n for n, probe in enumerate(PROBES) if probe.role == "mark_end")
    others = kernel.links - {entry}

    def end(time_ns, place):
        cookie = watched.number << 16 | number
        caller = code.start + place
        made._take(Event(time_ns, watched.pid, watched.pid, cookie, (0,) * 6, 5000, caller, b""))
        return kernel.links - others

    try:
        assert len(end(10, 16)) == 2  # the entry, and the place that it returns to
        assert len(end(20, 32)) == 3  # noted before that: it may be from elsewhere
        assert entry not in end(2000, 16)
        assert entry in end(3000, 48)  # of a third place; the kernel gives its number again
        assert entry in end(4000, 48)
    finally:
        made.close()


def test_what_was_noted_before_we_left_is_taken_without_new_probes(tmp_path, monkeypatch):
    """Ends of marks that the kernel's ring still held when the probes were out were lost."""
    noted = []

    class Full(Kernel):
        def poll(self):
            events = noted[:]
            noted.clear()
            return events

        def close(self):
            assert self.links == set()

    monkeypatch.setattr(observer, "Bpf", Full)
    made = observer.Observer(ring_dir=str(tmp_path), run="run", node="node", clock=lambda: 15)
    watched = made.add(os.getpid())
    kernel = made._bpf
    code = next(m for m in watched.process.mappings() if "libc.so" in m.path and m.offset)
    watched.marks = [code.start]
    watched.mark_ends = kernel.attach()
    watched.links.append(watched.mark_ends)
    ends = next(n for n, probe in enumerate(PROBES) if probe.role == "mark_end")
    marks = next(n for n, probe in enumerate(PROBES) if probe.role == "mark")

    def event(number, time_ns, payload=b""):
        cookie = watched.number << 16 | number
        caller = code.start + 16
        return Event(time_ns, watched.pid, watched.pid, cookie, (0,) * 6, 5000, caller, payload)

    text = b"Optimizer.step#SGD.step"
    mark = len(text).to_bytes(8, "little") + text
    noted += [event(marks, 5, mark), event(ends, 10)]
    made.poll()
    noted += [event(marks, 20, mark), event(ends, 30), event(marks, 40, mark), event(ends, 50)]
    made.close()
    with open(watched.path, "rb") as stream:
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    header = ring.read_header(buffer)
    assert header.errors == 0
    assert watched.book.calls == 6
    assert watched.mark_ends == -1


def wait_for_program(pid, name):
    """Wait until a process runs a program: it gets its places in memory one after the other."""
    deadline = time.monotonic() + 30
    while not any(m.path.endswith(f"/{name}") for m in Process(pid).mappings()):
        assert time.monotonic() < deadline
    time.sleep(0.1)


def test_a_process_that_runs_another_program_is_taken_up_anew(tmp_path, monkeypatch):
    """A shell that waits and then becomes the rank: its memory, environment and files are others."""
    monkeypatch.setattr(observer, "Bpf", Kernel)
    shell = subprocess.Popen(
        ["bash", "-c", "echo; read; RANK=1 WORLD_SIZE=2 exec sleep 60"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    shell.stdout.readline()  # it is a shell now
    now = iter(range(0, 10**12, 10**9))
    made = observer.Observer(
        ring_dir=str(tmp_path), run="run", node="node", clock=lambda: next(now)
    )
    try:
        before = made.add(shell.pid)
        made.poll()
        assert made.watched[shell.pid] is before
        assert (before.rank, before.process.replaced(before.memory)) == (-1, False)
        shell.stdin.write(b"\n")
        shell.stdin.close()
        deadline = time.monotonic() + 30
        while not before.process.replaced(before.memory):
            assert time.monotonic() < deadline
        wait_for_program(shell.pid, "sleep")
        made.poll()
        after = made.watched[shell.pid]
        assert after is not before
        assert before.ended
        assert (after.rank, after.world_size) == (1, 2)
        assert not after.process.replaced(after.memory)
        assert after.book.late is False  # it did not train before
        code = next(m for m in after.process.mappings() if m.path.endswith("/sleep"))
        assert after.memory.read(code.start, 4) == b"\x7fELF"
        assert len(made._bpf.links) == len(after.links)
    finally:
        shell.kill()
        shell.wait()
        shell.stdout.close()
        made.close()


def test_a_second_program_of_a_process_has_a_ring_of_its_own(watched, tmp_path):
    watched.begin_record()
    second = Watched(2, Process(os.getpid()), str(tmp_path), "run", "node", 1 << 20)
    second.begin_record()
    second.finish(ended=False)
    assert second.path != watched.path
    assert len(list(tmp_path.iterdir())) == 2


def test_a_process_that_is_ending_runs_no_other_program():
    """Its memory goes first, the process later; read between the two."""
    shell = subprocess.Popen(["bash", "-c", "read"], stdin=subprocess.PIPE)
    process, memory = Process(shell.pid), Memory(shell.pid)
    shell.stdin.close()
    deadline = time.monotonic() + 30
    while not memory.gone():
        assert time.monotonic() < deadline
    assert not process.replaced(memory)
    shell.wait()
    memory.close()


def test_ends_of_marks_are_probed_before_marks(tmp_path, monkeypatch):
    """A mark seen to begin but not to end would stay open, and no later step would end."""
    places = []

    def attach(self, program, path, offsets, cookies, pid):
        places.extend(PROBES[cookie & 0x7FFF].role for cookie in cookies)
        return Kernel.attach(self)

    monkeypatch.setattr(observer, "Bpf", type("Noting", (Kernel,), {"attach": attach}))
    made = observer.Observer(ring_dir=str(tmp_path), run="run", node="node")
    library = Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so"
    try:
        made._set(made.add(os.getpid()), "torch_cpu", str(library), 0)
    finally:
        made.close()
    assert places.index("mark_end") < places.index("mark")

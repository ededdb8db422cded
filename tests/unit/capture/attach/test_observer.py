"""How often a watched process's libraries are looked at, on this very process."""

import mmap
import os

import pytest

from kansoku.capture.attach import observer
from kansoku.capture.attach.bpf import Event
from kansoku.capture.attach.observer import Watched
from kansoku.capture.attach.probes import PROBES
from kansoku.capture.attach.process import Process
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

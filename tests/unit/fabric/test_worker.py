"""One RNIC without a network: what it refuses to send, and what counts as lost."""

import dataclasses
import errno
import os
import struct
import time

import pytest

from kansoku.fabric.edge.transport import Received
from kansoku.fabric.edge.worker import Worker
from kansoku.fabric.messages import Pinglist, Tuples, packed_address
from kansoku.fabric.probe import Kind, StampSource, decode, encode
from kansoku.fabric.settings import Settings
from kansoku.fabric.window import rows_of

EMPTY = Tuples(b"", b"", b"", b"", b"", b"")


class Wire:
    """A transport that keeps what is sent, and fails as told."""

    address, qpn, stamps = "10.0.0.1", 11, StampSource.KERNEL

    def __init__(self):
        self.sent = []
        self.coming = []
        self.error = None

    def send(self, data, peer, source_port, *, token=None, hops=0):
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self.sent.append((decode(data).kind, peer.address, source_port))

    def fileno(self):
        return 0

    def poll(self):
        coming, self.coming = self.coming, []
        return coming


@pytest.fixture
def worker():
    return Worker("a/0", Wire(), Settings(), seed=1)


def pinglist(version="1", **columns):
    one = Tuples(
        target=struct.pack("<i", 1), port=struct.pack("<i", 50000), kind=b"\0",
        interval_s=struct.pack("<f", 0.001), address=packed_address("10.0.0.2"),
        qpn=struct.pack("<I", 22),
    )  # fmt: skip
    changed = {name: getattr(one, name) for name in one.__struct_fields__} | columns
    return Pinglist(version, dataclasses.asdict(Settings()), Tuples(**changed), EMPTY)


def came_in(worker, kind, port):
    data = encode(kind, source_port=port, target_qpn=11, source_qpn=9, sequence=1, hop=1)
    now = time.time_ns()
    worker.transport.coming.append(Received(decode(data), "10.0.0.9", now, now, StampSource.KERNEL))
    worker.handle()


@pytest.mark.parametrize("kind", [Kind.PROBE, Kind.TRACE])
@pytest.mark.parametrize("port", [0, 53, 2049, 47910, 49151])
def test_nobody_makes_it_send_from_a_port_of_another_service(worker, kind, port):
    came_in(worker, kind, port)
    assert worker.transport.sent == []
    assert worker.foreign == 1


@pytest.mark.parametrize(("kind", "answer"), [(Kind.PROBE, Kind.ACK1),
                                              (Kind.TRACE, Kind.TRACE_REPLY)])  # fmt: skip
def test_roce_ports_are_answered_from(worker, kind, answer):
    for port in (49152, 65535):
        came_in(worker, kind, port)
    assert worker.transport.sent == [(answer, "10.0.0.9", 49152), (answer, "10.0.0.9", 65535)]


def fire_into(worker, error):
    now = time.monotonic_ns()
    worker.take(pinglist(), now)
    worker.transport.error = error
    worker.fire(now + 2_000_000)


@pytest.mark.parametrize("error", [errno.EADDRINUSE, errno.EMFILE, errno.ENOBUFS])
def test_what_this_host_could_not_send_is_no_loss_of_the_network(worker, error):
    fire_into(worker, error)
    assert worker.send_errors > 0
    assert len(worker.prober) == 0


def test_a_way_that_is_gone_is_a_loss(worker):
    fire_into(worker, errno.ENETUNREACH)
    assert len(worker.prober) == 1


def test_a_pinglist_that_cannot_be_read_changes_nothing(worker):
    now = time.monotonic_ns()
    worker.take(pinglist(), now)
    with pytest.raises(ValueError, match="zip"):
        worker.take(pinglist("2", qpn=b""), now)
    assert worker.version == "1"
    worker.fire(now + 2_000_000)
    assert (Kind.PROBE, "10.0.0.2", 50000) in worker.transport.sent


def test_who_has_nobody_to_probe_is_not_silent(worker):
    now = time.time_ns()
    assert worker.reports(now, 1, {}) == []  # nothing is known of windows yet
    worker.take(Pinglist("1", dataclasses.asdict(Settings()), EMPTY, EMPTY), time.monotonic_ns())
    assert worker.reports(now, 1, {}) == []
    (report,) = worker.reports(now + 30_000_000_000, 1, {})
    assert report.window_start_ns == now // 20_000_000_000 * 20_000_000_000
    assert len(rows_of([(0, report.rows)])) == 0

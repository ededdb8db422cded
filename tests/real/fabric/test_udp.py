"""The UDP transport and a pair of workers on the loopback interface: real sockets, real stamps."""

import dataclasses
import select
import socket
import struct
import subprocess
import sys
import time

import pytest

from kansoku.errors import PlatformError
from kansoku.fabric.edge.transport import Peer, Received, Stamped
from kansoku.fabric.edge.udp import UdpTransport
from kansoku.fabric.edge.worker import Worker
from kansoku.fabric.messages import Pinglist, Tuples, packed_address
from kansoku.fabric.probe import Kind, StampSource, decode, encode
from kansoku.fabric.settings import Settings

pytestmark = pytest.mark.real


def free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def pair(request):
    family, stamps = getattr(request, "param", ("127.0.0.1", StampSource.KERNEL))
    port = free_port()
    made = UdpTransport(family, port, 7, stamps=stamps)
    yield made, port
    made.close()


def gather(transport, wanted, timeout_s=5):
    found = []
    poller = select.epoll()
    poller.register(transport.fileno(), select.EPOLLIN)
    deadline = time.monotonic() + timeout_s
    while len(found) < wanted and time.monotonic() < deadline:
        poller.poll(0.1)
        found += transport.poll()
    poller.close()
    return found


def warm_up(transport):
    """Send until receive stamps come: the kernel switches them on a little after it was asked."""
    for _ in range(500):
        transport.send(packet(), Peer(transport.address, 7), 50000, token=0)
        for event in gather(transport, 1):
            if isinstance(event, Received) and event.source is not StampSource.APPLICATION:
                gather(transport, 1, timeout_s=0.05)  # whatever is left of it
                return
    raise AssertionError("no receive stamp came")


def packet(sequence=1, port=50001):
    return encode(Kind.PROBE, source_port=port, target_qpn=7, source_qpn=7, sequence=sequence)


@pytest.mark.parametrize(
    "pair", [("127.0.0.1", StampSource.KERNEL), ("::1", StampSource.KERNEL)], indirect=True
)
def test_kernel_stamps_both_ways_and_the_port_asked_for(pair):
    transport, _ = pair
    warm_up(transport)
    before = time.time_ns()
    stamp = transport.send(packet(), Peer(transport.address, 7), 50001, token=42)
    events = gather(transport, 1 if stamp else 2)
    stamp = stamp or next(e for e in events if isinstance(e, Stamped))
    (received,) = [e for e in events if isinstance(e, Received)]
    assert (stamp.token, stamp.source) == (42, "kernel")
    assert received.source == "kernel"
    # ② ≤ receive stamp ≤ when the application had it, all on one clock here.
    assert before <= stamp.nic_ns <= received.nic_ns <= received.now_ns
    assert received.packet == decode(packet())
    assert received.address == transport.address


@pytest.mark.parametrize(
    "pair", [("127.0.0.1", StampSource.KERNEL), ("::1", StampSource.KERNEL)], indirect=True
)
def test_packets_read_one_by_one_are_those_read_by_the_batch(pair):
    transport, _ = pair
    assert transport._batch is not None
    warm_up(transport)
    batch, transport._batch = transport._batch, None
    for number in range(200):
        transport.send(packet(number), Peer(transport.address, 7), 50001)
    singly = [e for e in gather(transport, 200) if isinstance(e, Received)]
    transport._batch = batch
    for number in range(200):
        transport.send(packet(number), Peer(transport.address, 7), 50001)
    together = [e for e in gather(transport, 200) if isinstance(e, Received)]
    seen = [[(e.packet, e.address, e.source) for e in part] for part in (singly, together)]
    assert seen[0] == seen[1]
    assert len(singly) == 200
    assert all(e.nic_ns <= e.now_ns for e in singly + together)


@pytest.mark.parametrize("pair", [("127.0.0.1", StampSource.APPLICATION)], indirect=True)
def test_application_stamps_say_so(pair):
    transport, _ = pair
    assert transport.send(packet(), Peer("127.0.0.1", 7), 50001, token=1) is None
    (received,) = gather(transport, 1)
    assert (received.nic_ns, received.source) == (None, "application")


@pytest.mark.parametrize("pair", [("127.0.0.1", StampSource.HARDWARE)], indirect=True)
def test_asking_for_hardware_falls_back_to_the_kernel_and_says_so(pair):
    transport, _ = pair
    warm_up(transport)
    transport.send(packet(), Peer("127.0.0.1", 7), 50001, token=1)
    received = [e for e in gather(transport, 1) if isinstance(e, Received)]
    assert received[0].source == "kernel"


def test_many_ports_many_stamps(pair):
    transport, _ = pair
    tokens = set()
    for n in range(500):
        stamp = transport.send(packet(n), Peer("127.0.0.1", 7), 51000 + n % 50, token=n)
        if stamp:
            tokens.add(stamp.token)
    for event in gather(transport, 500 + 500 - len(tokens)):
        if isinstance(event, Stamped):
            tokens.add(event.token)
    assert tokens == set(range(500))


def test_nobody_at_home_is_counted_and_hurts_nothing(pair):
    transport, _ = pair
    # 127.0.0.9 answers with ICMP: no socket there.
    for n in range(5):
        transport.send(packet(n), Peer("127.0.0.9", 7), 50001, token=n)
    deadline = time.monotonic() + 5
    while transport.refused < 5 and time.monotonic() < deadline:
        transport.poll()
    assert transport.refused >= 4
    stamp = transport.send(packet(9), Peer("127.0.0.1", 7), 50001, token=99)
    assert stamp is None or stamp.token == 99
    assert any(isinstance(e, Received) for e in gather(transport, 1))


def test_a_port_in_use_is_an_error_with_a_remedy(pair):
    _, port = pair
    with pytest.raises(PlatformError, match="other fabric agent"):
        UdpTransport("127.0.0.1", port, 8)


def pinglist(settings, *, qpn, source_port=50010):
    one = Tuples(
        target=struct.pack("<i", 1), port=struct.pack("<i", source_port), kind=b"\0",
        interval_s=struct.pack("<f", 0.005), address=packed_address("127.0.0.2"),
        qpn=struct.pack("<I", qpn),
    )  # fmt: skip
    empty = Tuples(b"", b"", b"", b"", b"", b"")
    return Pinglist("1", dataclasses.asdict(settings), one, empty)


@pytest.fixture
def workers():
    port = free_port()
    settings = Settings(
        port=port, window_s=0.5, timeout_s=0.2, hold_s=0.2, grace_s=0.2, traces_per_s=20
    )
    a = Worker("a/0", UdpTransport("127.0.0.1", port, 11), settings, seed=1)
    b = Worker("b/0", UdpTransport("127.0.0.2", port, 22), settings, seed=2)
    yield a, b, settings
    a.transport.close()
    b.transport.close()


def turn(workers, done, timeout_s=20):
    """Let both workers run until ``done`` returns something."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for worker in workers:
            worker.fire(time.monotonic_ns())
            worker.handle()
        answer = done()
        if answer:
            return answer
    raise AssertionError("nothing came")


def test_two_workers_measure_each_other(workers):
    a, b, settings = workers
    a.take(pinglist(settings, qpn=22), time.monotonic_ns())
    from kansoku.fabric.window import rows_of

    def whole():  # the first window may have begun when it was nearly over
        reports = [r for r in a.reports(time.time_ns(), 1, {}) if r.rtt]
        return [r for r in reports if rows_of([(0, r.rows)]).probes[0] > 3]

    report = turn((a, b), whole)[0]
    assert report.rnic == "a/0"
    rows = rows_of([(0, report.rows)])
    assert rows.stamps[0] == 1
    assert 0 < rows.rtt_p50_ns[0] < 50_000_000
    assert rows.responder_p50_ns[0] > 0
    # The tuple was traced too: on loopback no switch is in between.
    traces = turn((a, b), lambda: a._known)
    assert traces == {(1, 50010): ()}


def test_probes_to_an_older_queue_pair_are_not_answered(workers):
    a, b, settings = workers
    a.take(pinglist(settings, qpn=21), time.monotonic_ns())
    turn((a, b), lambda: b.responder.stale > 3)
    report = turn((a, b), lambda: a.reports(time.time_ns(), 1, {}))[0]
    from kansoku.fabric.window import rows_of

    rows = rows_of([(0, report.rows)])
    assert rows.lost[0] == rows.probes[0] > 0
    assert rows.qpn[0] == 21
    assert rows.stamps[0] == -1


def test_a_changed_pinglist_keeps_nothing_of_the_old_queue_pair(workers):
    a, b, settings = workers
    a.take(pinglist(settings, qpn=21), time.monotonic_ns())
    turn((a, b), lambda: b.responder.stale > 3)
    a.take(pinglist(settings, qpn=22), time.monotonic_ns())
    reports = turn((a, b), lambda: [r for r in a.reports(time.time_ns(), 1, {}) if r.rtt])
    from kansoku.fabric.window import rows_of

    rows = rows_of([(0, reports[-1].rows)])
    assert rows.qpn[0] == 22


def test_hostile_packets_change_nothing(workers):
    a, b, settings = workers
    a.take(pinglist(settings, qpn=22), time.monotonic_ns())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for data in (b"", b"x" * 50, b"kRP1" + bytes(46), packet()[:-1], packet() + b"!",
                     b"kRP1\x02" + b"\xff" * 45, b"kRP1\x05" + b"\xff" * 45):  # fmt: skip
            sock.sendto(data, ("127.0.0.1", settings.port))
            sock.sendto(data, ("127.0.0.2", settings.port))
    assert turn((a, b), lambda: [r for r in a.reports(time.time_ns(), 1, {}) if r.rtt])


def test_fewer_descriptors_than_ports_lose_no_probe():
    """With more source ports than open files the sockets take turns."""
    code = """
import resource, sys
from kansoku.fabric.edge.transport import Peer
from kansoku.fabric.edge.udp import UdpTransport
transport = UdpTransport("127.0.0.1", int(sys.argv[1]), 7)
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
for port in range(50000, 50040):
    transport.send(b"x" * 50, Peer("127.0.0.2", 1), port, token=port)
print("sent")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(free_port())], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("sent\n", "")

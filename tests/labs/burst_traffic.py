"""Programs for the burst lab's hosts: bursts of known size and period, and fabric workers.

    burst_traffic.py send ADDRESS BYTES PERIOD_S COUNT     prints Unix ns of each burst's start
    burst_traffic.py worker OWN QPN [PEER PEER_QPN]        probes the peer, answers probes

A worker ends with its stdin and then prints one JSON line per probe: time and RTT.
"""

import dataclasses
import json
import select
import socket
import struct
import sys
import time

PAYLOAD = 1400


def send(address: str, size: int, period_s: float, count: int) -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    data = bytes(PAYLOAD)
    due = time.monotonic()
    for _ in range(count):
        time.sleep(max(due - time.monotonic(), 0))
        print(time.time_ns(), flush=True)
        for _ in range(size // PAYLOAD):
            sock.sendto(data, (address, 9))
        due += period_s


def worker(own: str, qpn: int, peer: str | None = None, peer_qpn: int = 0) -> None:
    from kansoku.fabric.edge.udp import UdpTransport
    from kansoku.fabric.edge.worker import Worker
    from kansoku.fabric.messages import Pinglist, Tuples, packed_address
    from kansoku.fabric.probe import Result
    from kansoku.fabric.settings import Settings

    results: list[Result] = []

    class Recording(Worker):
        def _count(self, result: Result) -> None:
            results.append(result)
            super()._count(result)

    settings = Settings(traces_per_s=1.0)
    one = Recording("lab/nic", UdpTransport(own, settings.port, qpn), settings, seed=1)
    if peer is not None:
        empty = Tuples(b"", b"", b"", b"", b"", b"")
        probes = Tuples(
            target=struct.pack("<i", 1), port=struct.pack("<i", 50010), kind=b"\0",
            interval_s=struct.pack("<f", 0.003), address=packed_address(peer),
            qpn=struct.pack("<I", peer_qpn),
        )  # fmt: skip
        one.take(Pinglist("1", dataclasses.asdict(settings), probes, empty), time.monotonic_ns())
    print("ready", flush=True)
    poller = select.epoll()
    poller.register(one.transport.fileno(), select.EPOLLIN)
    poller.register(0, select.EPOLLIN | select.EPOLLHUP)
    while all(fd != 0 for fd, _ in poller.poll(0.001)):
        one.fire(time.monotonic_ns())
        one.handle()
    for result in results:
        print(json.dumps({"t1_ns": result.t1_ns, "rtt_ns": result.rtt_ns, "lost": result.lost}))


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "send":
        send(words[0], int(words[1]), float(words[2]), int(words[3]))
    else:
        worker(words[0], int(words[1]), *words[2:3], *map(int, words[3:4]))

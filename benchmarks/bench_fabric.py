"""The fabric watch at scale: pinglists, analyser, prober and responder.

Peers of the same run: NumPy's own pass over the analyser's data, and a bare Python UDP echo with
both kernel stamps, against which prober and responder are measured.
"""

import multiprocessing
import resource
import secrets
import socket
import struct
import time

import msgspec
import numpy as np
from tests.labs import fabric_sim as sim
from tests.labs import fabric_trials as trials

from benchmarks.table import Row, print_table
from kansoku.fabric.analyser import analyse
from kansoku.fabric.controller import Controller
from kansoku.fabric.edge.agent import Loop, calm_collector
from kansoku.fabric.edge.udp import UdpTransport
from kansoku.fabric.edge.worker import Worker
from kansoku.fabric.messages import Pinglist, Register, RnicAddress, Tuples, packed_address
from kansoku.fabric.pinglist import make_plan
from kansoku.fabric.settings import Settings
from kansoku.fabric.window import Rows, Window

TARGETS = 1000
SECONDS = 10
TRIALS = 3


def bench_pinglists(topology):
    controller = Controller(topology, Settings(), now_ns=0)
    for number, name in enumerate(topology.rnics):
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        controller.register(Register(name, 1, [RnicAddress(name, address, number + 2)]), 0)
    encode = msgspec.msgpack.Encoder().encode
    begin = time.process_time()
    plan = controller.plan(0)
    planned = time.process_time() - begin
    size = sum(len(encode(controller.pinglist(name, 0))) for name in topology.rnics)
    return planned, time.process_time() - begin, len(plan), size


def bench_analyser(clos, topology):
    # 30 M probes in 20 s from 10,000 RNICs: 150 a second each, 10 of them under the ToR.
    settings = Settings(link_per_s=140 * 50 * 2 / 16)
    plan = make_plan(topology, settings)
    from kansoku.fabric.paths import PathBook

    book = PathBook(topology, {})
    trials.teach(book, topology, clos, plan)
    rng = np.random.default_rng(5)
    faults = sim.draw_faults(clos, rng, count=12)
    probes, lost, late, delay = sim.probe(
        clos, faults, rng, plan.source, plan.target, plan.port, 20 / plan.interval_s
    )
    nothing = np.full(len(plan), np.nan)
    rows = Rows(
        source=plan.source, target=plan.target, port=plan.port, kind=plan.kind,
        probes=probes, lost=lost, late=late, qpn=np.ones(len(plan), dtype=np.int64),
        rtt_p50_ns=nothing, rtt_p99_ns=nothing, responder_p50_ns=delay, responder_p99_ns=delay,
        prober_p99_ns=nothing, stamps=np.ones(len(plan), dtype=np.int8),
        slow=np.zeros(len(plan), dtype=np.int64),
    )  # fmt: skip
    window = Window(start_ns=0, end_ns=20_000_000_000, rows=rows, reporting=len(topology.rnics))
    analyse(window, topology, book, settings)  # tables of paths are made once
    begin = time.process_time()
    answer = analyse(window, topology, book, settings)
    taken = time.process_time() - begin
    begin = time.process_time()
    for column in (plan.source, plan.target):
        np.bincount(column, weights=probes)
        np.bincount(column, weights=lost)
    floor = time.process_time() - begin
    return taken, floor, int(probes.sum()), len(plan), len(answer.anomalies), len(faults.truth)


def bench_accuracy():
    """Precision and recall over faults that nobody has seen: the seed is new every time."""
    seed = secrets.randbelow(1 << 31)
    fabric, score = trials.make_fabric(), trials.Score()
    for number in range(TRIALS):
        trials.run_trial(fabric, seed + number, score)
    return seed, score


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def worker(address, name, entries=()):
    transport = UdpTransport(address, 47911, 7)
    settings = Settings(port=47911, traces_per_s=0.001)
    made = Worker(name, transport, settings, seed=1)
    if entries:
        import dataclasses

        columns = list(zip(*entries, strict=True))
        tuples = Tuples(
            target=struct.pack(f"<{TARGETS}i", *columns[0]),
            port=struct.pack(f"<{TARGETS}i", *columns[1]),
            kind=bytes(TARGETS),
            interval_s=struct.pack(f"<{TARGETS}f", *[0.1] * TARGETS),
            address=packed_address("127.0.0.2") * TARGETS,
            qpn=struct.pack(f"<{TARGETS}I", *[7] * TARGETS),
        )
        empty = Tuples(b"", b"", b"", b"", b"", b"")
        made.take(Pinglist("1", dataclasses.asdict(settings), tuples, empty), time.monotonic_ns())
    return made


def loop(made, stop_at):
    turns = Loop([made])
    calm_collector()
    while time.monotonic() < stop_at:
        if turns.turn():
            made.handle()
    turns.close()
    made.handle()


def responder(pipe):
    made = worker("127.0.0.2", "b/0")
    pipe.send("ready")
    begin, wall = cpu(), time.monotonic()
    loop(made, wall + SECONDS + 1)
    pipe.send((cpu() - begin) / SECONDS)


def bench_prober():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=responder, args=(there,))
    process.start()
    here.recv()
    # 1,000 targets from 200 source ports, as a pinglist would have.
    made = worker("127.0.0.1", "a/0", [(n, 50000 + n % 200) for n in range(TARGETS)])
    begin = cpu()
    loop(made, time.monotonic() + SECONDS)
    used = (cpu() - begin) / SECONDS
    other = here.recv()
    process.join()
    cells = [cell for summary in made._windows.values() for cell in summary._cells.values()]
    probes, lost = sum(c.probes for c in cells), sum(c.lost for c in cells)
    kernel = {c.stamps for c in cells}
    made.transport.close()
    return used, other, probes / SECONDS, lost, kernel


def bench_bare():
    """The least Python can do: send, read its stamp, receive two ACKs with theirs."""
    flags = (1 << 1) | (1 << 3) | (1 << 4) | (1 << 7) | (1 << 11)
    a, b = socket.socket(2, 2), socket.socket(2, 2)
    for sock, host in ((a, "127.0.0.1"), (b, "127.0.0.2")):
        sock.bind((host, 0))
        sock.setsockopt(socket.SOL_SOCKET, 37, flags)
    data, batch = bytes(50), 50
    to_b, to_a = b.getsockname(), a.getsockname()
    costs = [0.0, 0.0]

    def step(side, sock, *calls):
        begin = cpu()
        for method, *arguments in calls:
            for _ in range(batch):
                getattr(sock, method)(*arguments)
        costs[side] += cpu() - begin

    errors = ("recvmsg", 50, 256, socket.MSG_ERRQUEUE)
    for _ in range(200):
        step(0, a, ("sendto", data, to_b), errors)
        step(1, b, ("recvmsg", 50, 128), ("sendto", data, to_a), ("sendto", data, to_a), errors,
             errors)  # fmt: skip
        step(0, a, ("recvmsg", 50, 128), ("recvmsg", 50, 128))
    a.close()
    b.close()
    probes = 200 * batch
    return costs[0] / probes * TARGETS * 10, costs[1] / probes * TARGETS * 10


def main():
    clos, topology = trials.big_fabric()
    planned, total, tuples, size = bench_pinglists(topology)
    taken, floor, probes, rows, found, truth = bench_analyser(clos, topology)
    used, other, rate, lost, stamps = bench_prober()
    bare, bare_other = bench_bare()
    seed, score = bench_accuracy()
    # A machine that cannot send at the rate says nothing about what the rate costs.
    at_rate = rate >= 0.95 * TARGETS * 10
    label = "both kernel stamps" if stamps == {1} else f"stamps {sorted(stamps)}"
    print_table(
        "Fabric watch (CPU time, which a busy machine blurs less than the clock)",
        [
            Row(
                what=f"pinglists of 10,000 RNICs, {tuples / 1e6:.1f} M tuples", measured=total,
                unit="s", target="≤ 5", met=total <= 5,
                peer=f"plan alone {planned:.2f} s; {size / 1e6:.0f} MB encoded",
            ),
            Row(
                what=f"analyser, {probes / 1e6:.0f} M probes in {rows / 1e6:.1f} M rows",
                measured=taken, unit="s", target="≤ 2", met=taken <= 2,
                peer=f"four NumPy bincounts {floor:.2f} s, ratio {taken / floor:.1f}; "
                f"{found} anomalies of {truth} faults",
            ),
            Row(
                what=f"prober, 1,000 targets at 10/s, {label}", measured=used * 100,
                unit="% of a core", target="≤ 25", met=used <= 0.25 if at_rate else None,
                peer=f"bare sockets {bare:.1%}, ratio {used / bare:.2f}; {rate:.0f}/s, {lost} lost",
            ),
            Row(
                what="responder beside it", measured=other * 100, unit="% of a core", target="",
                peer=f"bare sockets {bare_other:.1%}, ratio {other / bare_other:.2f}",
            ),
            *(
                Row(
                    what=f"{kind} verdicts right, {TRIALS} trials from seed {seed}",
                    measured=score.precision(kind), unit="", target="≥ 0.95, recall ≥ 0.9",
                    met=score.precision(kind) >= 0.95 and score.recall(kind) >= 0.9,
                    peer=score.line(kind),
                )
                for kind in sim.KINDS
            ),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()

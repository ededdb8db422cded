"""The fabric agent of one host: a loop over the transports of its RNICs."""

import contextlib
import gc
import logging
import os
import resource
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kansoku.fabric.edge.uplink import Line, Uplink
from kansoku.fabric.edge.worker import Worker
from kansoku.fabric.messages import Pinglist, RnicAddress
from kansoku.fabric.probe import StampSource
from kansoku.fabric.summary import Report

__all__ = ["Agent", "Loop", "calm_collector", "more_descriptors"]

_log = logging.getLogger(__name__)
_REST_PER_PACKET = 0.4e-6  # s of rest between turns for every packet per second
_LONGEST_REST_S = 0.004
_RATE_NS = 100_000_000  # the rate is measured anew this often
_LONGEST_WAIT_S = 0.05


def calm_collector() -> None:
    """Let the garbage collector walk seldom: packets and results are freed by their counts.

    It took a twelfth of a busy agent's CPU. What is alive by now stays, and is not walked again.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def more_descriptors() -> None:
    """Take as many open files as this process may: every source port is a socket.

    The usual 1,024 are too few for a host of eight RNICs.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Loop:
    """Sends what is due, waits for what comes in, and rests where that comes too fast.

    Without rest an agent of thousands of probes a second wakes for every packet, and most of its
    CPU is waking. So it rests longer the more packets come: 0.2 ms at 500 a second, 4 ms from
    10,000 on. Stamps of the NIC and the kernel are not touched by it; the delays of prober and
    responder hold the rest. Where the application stamps there is none: the RTT would hold it.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        """Watch the transports of these workers."""
        self._workers = workers
        self._by_fd = {worker.transport.fileno(): worker for worker in workers}
        self._poller = select.epoll()
        for fd in self._by_fd:
            self._poller.register(fd, select.EPOLLIN)
        self._may_rest = all(
            worker.transport.stamps is not StampSource.APPLICATION for worker in workers
        )
        self._rest_s = 0.0
        self._counted = (time.monotonic_ns(), 0)

    def turn(self) -> list[Worker]:
        """Let every worker send; return those for which something came in, none after a while."""
        now = time.monotonic_ns()
        due = now + 1_000_000_000
        for worker in self._workers:
            due = min(due, worker.fire(now))
        if self._may_rest:
            then, count = self._counted
            if now - then >= _RATE_NS:
                packets = sum(worker.packets for worker in self._workers)
                rate = (packets - count) * 1e9 / (now - then)
                self._rest_s = min(rate * _REST_PER_PACKET, _LONGEST_REST_S)
                self._counted = (now, packets)
            time.sleep(self._rest_s)
        wait_s = min(max(due - time.monotonic_ns(), 0) / 1e9, _LONGEST_WAIT_S)
        return [self._by_fd[fd] for fd, _ in self._poller.poll(wait_s)]

    def close(self) -> None:
        """Give the descriptor back."""
        self._poller.close()


class Agent:
    """Probes, answers and reports for every RNIC of one host, until stopped."""

    def __init__(
        self, node: str, workers: Sequence[Worker], line: Line, *, incarnation: int
    ) -> None:
        """``workers`` carry the names NODE/DEV of the cluster file."""
        self.workers = list(workers)
        self._by_name: Mapping[str, Worker] = {worker.name: worker for worker in workers}
        self._incarnation = incarnation
        self._new: dict[str, Pinglist] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.uplink = Uplink(
            line,
            node,
            incarnation,
            [RnicAddress(w.name, w.transport.address, w.transport.qpn) for w in workers],
            on_pinglist=self._keep,
        )
        self._cpu_at = (time.monotonic_ns(), time.process_time_ns())
        self._cpu_ratio = 0.0
        self.errors = 0

    def _keep(self, rnic: str, pinglist: Pinglist) -> None:
        with self._lock:
            self._new[rnic] = pinglist

    def stop(self) -> None:
        """End :meth:`run`; safe from a signal handler."""
        self._stop.set()

    def run(self, *, heartbeat: Callable[[], None] | None = None) -> None:
        """Work until stopped, then send what is left and say goodbye."""
        more_descriptors()
        loop = Loop(self.workers)
        calm_collector()
        self.uplink.start()
        next_second = 0
        try:
            while not self._stop.is_set():
                self._handle(loop.turn())
                now = time.monotonic_ns()
                if now >= next_second:
                    next_second = now + 100_000_000
                    self._housekeeping(now)
                    if heartbeat:
                        heartbeat()
        finally:
            self.uplink.send(self._reports(everything=True))
            self.uplink.stop()
            loop.close()
            for worker in self.workers:
                worker.transport.close()

    def _handle(self, ready: Sequence[Worker]) -> None:
        for worker in ready:
            try:
                worker.handle()
            except Exception:  # noqa: BLE001 - an agent loop, counted and logged
                # Whatever comes in from the network must not end the agent.
                self.errors += 1
                _log.exception("fabric agent: input of %s", worker.name)

    def _housekeeping(self, now_ns: int) -> None:
        with self._lock:
            new, self._new = self._new, {}
        for name, pinglist in new.items():
            try:
                self._by_name[name].take(pinglist, now_ns)
            except Exception:  # noqa: BLE001 - an agent loop, counted and logged
                # The last pinglist stays in force: a controller's mistake must not end the agent.
                self.errors += 1
                _log.exception("fabric agent: pinglist of %s", name)
        self._handle(self.workers)
        self._throttle(now_ns)
        self.uplink.send(self._reports())

    def _throttle(self, now_ns: int) -> None:
        """Stretch every interval while the agent takes more CPU than it may."""
        then, cpu = self._cpu_at
        if now_ns - then < 1_000_000_000:
            return
        used = time.process_time_ns()
        self._cpu_ratio = (used - cpu) / (now_ns - then)
        self._cpu_at = (now_ns, used)
        for worker in self.workers:
            limit = worker.settings.cpu_ratio
            if self._cpu_ratio > limit:
                worker.stretch = min(worker.stretch * 2, 16.0)
            elif self._cpu_ratio < limit / 2:
                worker.stretch = max(worker.stretch / 1.2, 1.0)

    def _reports(self, *, everything: bool = False) -> list[Report]:
        now = time.time_ns()
        facts = {
            "cpu_ratio": round(self._cpu_ratio, 4),
            "resident_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
            "dropped_reports": float(self.uplink.dropped),
            "send_errors": float(sum(w.send_errors for w in self.workers)),
            "stale_probes": float(sum(w.responder.stale for w in self.workers)),
            "stretch": max((w.stretch for w in self.workers), default=1.0),
            "errors": float(self.errors),
            "pid": float(os.getpid()),
        }
        return [
            report
            for worker in self.workers
            for report in worker.reports(now, self._incarnation, facts, everything=everything)
        ]

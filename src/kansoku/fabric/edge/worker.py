"""One RNIC of an agent: probes, answers, traces and sums up, over any transport."""

import errno
import heapq
import logging
import random
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kansoku.fabric.ecmp import is_source_port
from kansoku.fabric.edge.transport import HopAnswer, Peer, Received, Stamped, Transport
from kansoku.fabric.messages import Pinglist, decode_settings
from kansoku.fabric.probe import (
    Kind,
    Late,
    Packet,
    Prober,
    Responder,
    Result,
    decode,
    encode,
    encode_probe,
)
from kansoku.fabric.settings import Settings
from kansoku.fabric.summary import (
    MOST_TRACES,
    Report,
    RowColumns,
    TraceRow,
    WindowSummary,
)

__all__ = ["Worker"]

_log = logging.getLogger(__name__)
_SERVICE = 2
# What hinders a probe on this host alone: its port is taken, descriptors or memory are short.
_OURS = {errno.EADDRINUSE, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
# Names of the module: an enumeration's members are slow to look up, and these are for every packet.
_PROBE, _ACK1, _ACK2, _TRACE = Kind.PROBE, Kind.ACK1, Kind.ACK2, Kind.TRACE
_RESPONSE = 1 << 62  # tokens of ACK1 stamps, apart from sequence numbers of probes
_BURST = 256  # probes sent in a row before the socket is looked at again


@dataclass(slots=True)
class _Target:
    peer: Peer
    target: int
    port: int
    kind: int
    interval_ns: int


@dataclass(slots=True)
class _Trace:
    target: int
    port: int
    started_ns: int
    answers: dict[int, str] = field(default_factory=dict)
    slow: set[int] = field(default_factory=set)
    reached: int | None = None
    limit: int = 0


class Worker:
    """Prober and responder of one RNIC."""

    def __init__(self, name: str, transport: Transport, settings: Settings, *, seed: int) -> None:
        """``name`` is NODE/DEV. The worker never blocks; its owner polls ``transport``."""
        self.name = name
        self.transport = transport
        self.settings = settings
        self.version = ""
        self.send_errors = 0
        self.foreign = 0
        """Packets that asked for an answer from a port that RoCE never sends from."""
        self.packets = 0
        """Packets taken so far."""
        self.stretch = 1.0
        """Factor on every interval: the agent's own throttle."""
        self._random = random.Random(seed)  # noqa: S311 - spreads probes, guards nothing
        self.responder = Responder(transport.qpn)
        self.prober = Prober(
            timeout_ns=int(settings.timeout_s * 1e9), hold_ns=int(settings.hold_s * 1e9)
        )
        self._apply(settings)
        self._targets: dict[int, _Target] = {}
        self._ids: dict[tuple[int, int, int], int] = {}
        self._heap: list[tuple[int, int]] = []
        self._service: list[int] = []
        self._service_order: deque[int] = deque()
        self._service_due = 0
        self._windows: dict[int, WindowSummary] = {}
        self._tracing: list[tuple[int, Peer, int]] = []
        self._trace_order: deque[tuple[int, Peer, int]] = deque()
        self._trace_due = 0
        self._traces: OrderedDict[int, _Trace] = OrderedDict()
        self._trace_number = 0
        self._known: dict[tuple[int, int], tuple[str | None, ...]] = {}
        self._known_sent: dict[tuple[int, int], int] = {}
        self._lossy: dict[tuple[int, int], int] = {}
        self._trace_rows: list[TraceRow] = []
        self._awaiting: OrderedDict[int, Peer] = OrderedDict()

    def _apply(self, settings: Settings) -> None:
        self.settings = settings
        self._window_ns = int(settings.window_s * 1e9)
        timeout = int(settings.timeout_s * 1e9)
        self._timeout_ns = timeout
        # Late answers are waited for, but not past what the controller waits for reports.
        self._publish_ns = timeout + int(min(settings.hold_s, settings.grace_s * 0.4) * 1e9)
        self._publish_ns += int(self._random.random() * settings.grace_s * 0.2e9)

    # -- pinglist ---------------------------------------------------------------------------

    def take(self, pinglist: Pinglist, now_ns: int) -> None:
        """Replace what is probed; tuples that stay keep their rhythm."""
        # All of it is read first: what cannot be read must change nothing.
        settings = decode_settings(pinglist.settings)
        probes, acks = pinglist.probes.entries(), pinglist.traces.entries()
        self.version = pinglist.version
        if settings != self.settings:
            self.prober.configure(int(settings.timeout_s * 1e9), int(settings.hold_s * 1e9))
            self._apply(settings)
        before, self._targets = self._targets, {}
        self._service = []
        for entry in probes:
            key = (entry.target, entry.port, entry.kind)
            number = self._ids.setdefault(key, len(self._ids) + 1)
            interval = max(int(entry.interval_s * 1e9), 1_000_000)
            peer = Peer(entry.address, entry.qpn)
            self._targets[number] = _Target(peer, entry.target, entry.port, entry.kind, interval)
            if entry.kind == _SERVICE:
                self._service.append(number)
            elif number not in before:
                due = now_ns + int(self._random.random() * interval)
                heapq.heappush(self._heap, (due, number))
        self._service_order = deque()
        seen: dict[tuple[int, int], Peer] = {}
        for target in self._targets.values():
            seen[target.target, target.port] = target.peer
        for ack in acks:
            seen.setdefault((ack.target, ack.port), Peer(ack.address, 0))
        self._tracing = [(target, peer, port) for (target, port), peer in seen.items()]
        self._trace_order = deque()
        if len(self._ids) > 4 * len(self._targets) + 1000:
            alive = set(self._targets)
            self._ids = {key: number for key, number in self._ids.items() if number in alive}

    # -- sending ----------------------------------------------------------------------------

    def fire(self, now_ns: int) -> int:
        """Send what is due; return when the next one is (monotonic nanoseconds)."""
        heap, targets, random = self._heap, self._targets, self._random.random
        for _ in range(_BURST):
            if not heap or heap[0][0] > now_ns:
                break
            due, number = heap[0]
            target = targets.get(number)
            if target is None or target.kind == _SERVICE:
                heapq.heappop(heap)
                continue
            self._probe(number, target)
            # Jitter keeps agents from falling into step with each other.
            pause = target.interval_ns * self.stretch * (0.9 + 0.2 * random())
            # From when it was due, or a late turn would lower the rate; not from long ago.
            begin = due if now_ns - due < pause else now_ns
            heapq.heapreplace(heap, (begin + int(pause), number))
        due = heap[0][0] if heap else now_ns + 1_000_000_000
        due = min(due, self._fire_service(now_ns))
        return min(due, self._fire_trace(now_ns))

    def _fire_service(self, now_ns: int) -> int:
        if not self._service:
            return now_ns + 1_000_000_000
        if self._service_due <= now_ns:
            if not self._service_order:
                order = list(self._service)
                self._random.shuffle(order)
                self._service_order = deque(order)
            number = self._service_order.popleft()
            self._probe(number, self._targets[number])
            pause = int(self.settings.service_interval_s * self.stretch * 1e9)
            self._service_due = max(self._service_due + pause, now_ns)
        return self._service_due

    def _probe(self, number: int, target: _Target) -> None:
        prober, transport, peer = self.prober, self.transport, target.peer
        t1 = time.time_ns()
        sequence = prober.start(number, t1, peer.qpn)
        data = encode_probe(target.port, peer.qpn, transport.qpn, sequence, number & 0xFFFFFFFF)
        try:
            stamp = transport.send(data, peer, target.port, token=sequence)
        except OSError as error:
            self.send_errors += 1
            if error.errno in _OURS:
                prober.cancel(sequence)
            return  # any other runs into its timeout and counts as lost
        if stamp is not None:
            prober.stamped(sequence, stamp.nic_ns, stamp.source)

    def _fire_trace(self, now_ns: int) -> int:
        if not self._tracing:
            return now_ns + 1_000_000_000
        if self._trace_due <= now_ns:
            self._trace(*self._next_trace())
            pause = int(self.stretch * 1e9 / self.settings.traces_per_s)
            self._trace_due = max(self._trace_due + pause, now_ns)
        return self._trace_due

    def _next_trace(self) -> tuple[int, Peer, int]:
        """Return whose path to trace: every other turn a tuple in trouble."""
        self._trace_number += 1
        if self._lossy and self._trace_number % 2:
            key = self._random.choice(list(self._lossy))
            for target, peer, port in self._tracing:
                if (target, port) == key:
                    return target, peer, port
            del self._lossy[key]
        if not self._trace_order:
            order = list(self._tracing)
            self._random.shuffle(order)
            self._trace_order = deque(order)
        return self._trace_order.popleft()

    def _trace(self, target: int, peer: Peer, port: int) -> None:
        known = self._known.get((target, port))
        limit = len(known) + 1 if known is not None else self.settings.max_hops + 1
        number = self._trace_number
        trace = _Trace(target, port, time.time_ns(), limit=limit)
        self._traces[number] = trace
        for hop in range(1, limit + 1):
            data = encode(
                Kind.TRACE, source_port=port, target_qpn=peer.qpn, source_qpn=self.transport.qpn,
                sequence=number, hop=hop,
            )  # fmt: skip
            try:
                self.transport.send(data, peer, port, hops=hop)
            except OSError:
                self.send_errors += 1
                return

    # -- receiving --------------------------------------------------------------------------

    def handle(self) -> None:
        """Take everything that came in, then time out what did not."""
        events = self.transport.poll()
        self.packets += len(events)
        for event in events:
            if type(event) is Received:
                self._packet(event.packet, event)
            elif type(event) is Stamped:
                if event.token & _RESPONSE:
                    self._acknowledge(event.token ^ _RESPONSE, event, None)
                else:
                    self.prober.stamped(event.token, event.nic_ns, event.source)
            elif isinstance(event, HopAnswer):
                self._hop(event)
        for result in self.prober.expire(time.time_ns()):
            self._count(result)
        self._finish_traces(time.time_ns())

    def _packet(self, packet: Packet, event: Received) -> None:
        kind = packet.kind
        if kind is _ACK1 or kind is _ACK2:
            if packet.target_qpn == self.transport.qpn:
                outcome = self.prober.receive(packet, event.nic_ns, event.now_ns, event.source)
                if isinstance(outcome, Result):
                    self._count(outcome)
                elif isinstance(outcome, Late):
                    self._window(outcome.t1_ns).add_late(outcome)
        elif kind is _PROBE or kind is _TRACE:
            if not is_source_port(packet.source_port):
                self.foreign += 1  # answering would bind a port that belongs to somebody else
            elif kind is _PROBE:
                self._answer(packet, event)
            else:
                self._answer_trace(packet, event)
        else:
            self._reached(packet)

    def _reached(self, packet: Packet) -> None:
        trace = self._traces.get(packet.sequence)
        if trace is not None and (trace.reached is None or packet.hop < trace.reached):
            trace.reached = packet.hop

    def _answer(self, packet: Packet, event: Received) -> None:
        answer = self.responder.receive(packet, event.nic_ns, event.now_ns, event.source)
        if answer is None:
            return
        data, token = answer
        peer = Peer(event.address, packet.source_qpn)
        try:
            stamp = self.transport.send(data, peer, packet.source_port, token=token | _RESPONSE)
        except OSError:
            self.send_errors += 1
            return
        if stamp is not None:
            self._acknowledge(token, stamp, peer)
        elif event.nic_ns is None:
            # No NIC stamps at all: the application's clock stands for ③ and ④ alike.
            self._acknowledge(token, None, peer)
        else:
            self._await(token, peer)

    def _await(self, token: int, peer: Peer) -> None:
        self._awaiting[token] = peer
        if len(self._awaiting) > 65536:
            self._awaiting.popitem(last=False)

    def _acknowledge(self, token: int, stamp: Stamped | None, peer: Peer | None) -> None:
        now = time.time_ns()
        if stamp is None:
            answer = self.responder.stamped(token, None, now)
        else:
            answer = self.responder.stamped(token, stamp.nic_ns, now, stamp.source)
        peer = peer or self._awaiting.pop(token, None)
        if answer is None or peer is None:
            return
        data, packet = answer
        try:
            self.transport.send(data, peer, packet.source_port)
        except OSError:
            self.send_errors += 1

    def _answer_trace(self, packet: Packet, event: Received) -> None:
        data = encode(
            Kind.TRACE_REPLY, source_port=packet.source_port, target_qpn=packet.source_qpn,
            source_qpn=self.transport.qpn, sequence=packet.sequence, hop=packet.hop,
        )  # fmt: skip
        try:
            self.transport.send(data, Peer(event.address, packet.source_qpn), packet.source_port)
        except OSError:
            self.send_errors += 1

    def _hop(self, event: HopAnswer) -> None:
        packet = decode(event.data)
        if packet is not None and packet.kind is Kind.TRACE:
            trace = self._traces.get(packet.sequence)
            if trace is not None:
                trace.answers[packet.hop] = event.address
                if time.time_ns() - trace.started_ns > self.settings.slow_rtt_ns:
                    trace.slow.add(packet.hop)

    def _finish_traces(self, now_ns: int) -> None:
        while self._traces:
            number, trace = next(iter(self._traces.items()))
            if 0 <= now_ns - trace.started_ns <= self._timeout_ns:
                return  # begun in the future: the clock was set back, it would never end
            del self._traces[number]
            self._trace_done(trace)

    def _trace_done(self, trace: _Trace) -> None:
        last = trace.reached - 1 if trace.reached else max(trace.answers, default=0)
        hops = tuple(trace.answers.get(hop) for hop in range(1, last + 1))
        key = (trace.target, trace.port)
        reached = trace.reached is not None
        whole = reached and None not in hops
        news = whole and self._known.get(key) != hops
        if whole:
            self._known[key] = hops
        elif not reached and key in self._known and len(hops) > len(self._known[key]):
            del self._known[key]  # the path grew: look farther next time
        self._known_sent[key] = self._known_sent.get(key, 0) + 1
        slow = [hop in trace.slow for hop in range(1, last + 1)]
        # Unchanged paths travel seldom; everything about tuples in trouble travels.
        again = self._known_sent[key] % 16 == 0
        if (news or not whole or key in self._lossy or again or any(slow)) and len(
            self._trace_rows
        ) < MOST_TRACES:
            self._trace_rows.append(TraceRow(trace.target, trace.port, list(hops), reached, slow))

    # -- windows ----------------------------------------------------------------------------

    def _window(self, t1_ns: int) -> WindowSummary:
        start = t1_ns // self._window_ns * self._window_ns
        summary = self._windows.get(start)
        if summary is None:
            summary = self._windows[start] = WindowSummary(
                slow_rtt_ns=self.settings.slow_rtt_ns, slow_host_ns=self._timeout_ns // 2
            )
        return summary

    def _count(self, result: Result) -> None:
        target = self._targets.get(result.tuple_id)
        if target is None or result.target_qpn != target.peer.qpn:
            return  # sent to a queue pair that is gone: says nothing about the network
        scope = "service" if target.kind == _SERVICE else "cluster"
        self._window(result.t1_ns).add(result, scope)
        slow = result.rtt_ns is not None and result.rtt_ns > self.settings.slow_rtt_ns
        if result.lost or slow:
            self._lossy[target.target, target.port] = result.t1_ns

    def reports(
        self, now_ns: int, incarnation: int, agent: dict[str, float], *, everything: bool = False
    ) -> list[Report]:
        """Return the windows that are over (Unix nanoseconds).

        Whoever has nobody to probe reports as well: silence would say that its host is dead.
        """
        if self.version:
            self._window(now_ns)
        done = [
            start for start in sorted(self._windows)
            if everything or start + self._window_ns + self._publish_ns <= now_ns
        ]  # fmt: skip
        if not done:
            return []
        tuples = {n: (t.target, t.port, t.kind) for n, t in self._targets.items()}
        reports = []
        for start in done:
            summary = self._windows.pop(start)
            reports.append(
                Report(
                    rnic=self.name,
                    incarnation=incarnation,
                    window_start_ns=start,
                    window_ns=self._window_ns,
                    rows=RowColumns.pack(summary.rows(tuples)),
                    traces=self._trace_rows,
                    rtt=summary.histograms("rtt"),
                    responder=summary.histograms("responder"),
                    prober=summary.histograms("prober"),
                    agent=agent,
                )
            )
            self._trace_rows = []
        old = now_ns - 2 * self._window_ns
        self._lossy = {key: t for key, t in self._lossy.items() if t > old}
        return reports

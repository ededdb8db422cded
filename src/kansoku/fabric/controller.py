"""The controller's mind: registry, pinglists, windows, verdicts. No socket, no clock.

Times come in as Unix nanoseconds; :mod:`kansoku.fabric.edge.http` gives it a listener and a clock.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kansoku.errors import InputError
from kansoku.fabric.analyser import Analysis, analyse
from kansoku.fabric.ecmp import FIRST_PORT, PORTS, is_source_port
from kansoku.fabric.ledger import Change, Ledger
from kansoku.fabric.messages import (
    Pinglist,
    Register,
    RnicAddress,
    ServiceTuple,
    Tuples,
    packed_address,
)
from kansoku.fabric.paths import PathBook
from kansoku.fabric.pinglist import SERVICE, Plan, make_plan
from kansoku.fabric.settings import Settings
from kansoku.fabric.summary import MOST_BUCKETS, Report, TraceRow
from kansoku.fabric.topology import Topology
from kansoku.fabric.window import Window, check_rows, merge, merge_reports, rows_of

__all__ = ["Controller", "Outcome"]

_MAPPED = b"\0" * 10 + b"\xff\xff"  # IPv4 inside IPv6
_INCARNATIONS = 4  # reports of one RNIC in one window: an agent may be started anew
_JOBS = 10_000
_AHEAD_NS = 3_600_000_000_000  # how far the clock of an agent that starts may be ahead
_LONGEST_WINDOW_NS = 86_400_000_000_000
_HISTORY = 180  # windows kept for the views: an hour of 20 s windows


@dataclass(slots=True)
class _Member:
    address: str
    qpn: int
    incarnation: int
    since_ns: int
    first_ns: int
    report_ns: int | None = None
    """End of the newest window reported."""
    heard_ns: int | None = None
    ahead_ns: int = 0
    """How far the windows reported are ahead of our clock, where they are of no use."""
    left: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One window with its verdict, what opened and closed, and its rows."""

    window: Window
    analysis: Analysis
    changes: list[Change]


class Controller:
    """State of the fabric watch of one cluster."""

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        *,
        now_ns: int,
        switch_of_address: Mapping[str, str] | None = None,
    ) -> None:
        """Plan for the topology; hop addresses without a name keep their address."""
        self.topology = topology
        self.settings = settings
        self.book = PathBook(topology, switch_of_address or {})
        self.ledger = Ledger(settings)
        self.history: deque[Outcome] = deque(maxlen=_HISTORY)
        self.events: deque[Change] = deque(maxlen=10_000)
        self._members: dict[int, _Member] = {}
        count = len(topology.rnics)
        self._alive = np.zeros(count, dtype=bool)
        self._addresses = np.zeros((count, 16), dtype=np.uint8)
        self._is_ipv4 = np.zeros(count, dtype=bool)
        self._qpns = np.zeros(count, dtype=np.uint32)
        self._settings = dataclasses.asdict(settings)
        self._services: dict[str, list[tuple[int, int, int]]] = {}
        self._leases: dict[str, int] = {}
        self._service_table = np.zeros((0, 3), dtype=np.int32)  # source, target, port; by source
        self._service_answers = self._service_table  # the same by target
        self._degraded: set[str] = set()
        self._reports: dict[int, dict[str, dict[int, Report]]] = {}
        """By window, RNIC and incarnation of its agent."""
        self._window_ns = int(settings.window_s * 1e9)
        self._next_start = (now_ns // self._window_ns) * self._window_ns
        self._epoch = now_ns  # a restarted controller counts its revisions anew
        self._revision = 0
        self._plan: Plan | None = None
        self._turn = -1
        self.agents: dict[str, dict[str, float]] = {}
        self.strangers = 0

    # -- registry ---------------------------------------------------------------------------

    def register(self, message: Register, now_ns: int) -> None:
        """Take the newest address and QPN of an agent's RNICs: of all, or of none of them.

        Two agents under one name would take it from each other for ever, and every pinglist
        would change each time: the one that was started first is refused while the other speaks.
        """
        taken = [(rnic, *self._check(rnic, message.incarnation, now_ns)) for rnic in message.rnics]
        for rnic, number, packed in taken:
            self._alive[number] = True
            self._addresses[number] = np.frombuffer(packed, dtype=np.uint8)
            self._qpns[number] = rnic.qpn
            self._is_ipv4[number] = packed.startswith(_MAPPED)
            before = self._members.get(number)
            if before and (before.qpn, before.address) == (rnic.qpn, rnic.address):
                self._revision += before.left
                before.left = False
                continue
            self._members[number] = _Member(
                address=rnic.address,
                qpn=rnic.qpn,
                incarnation=message.incarnation,
                since_ns=now_ns,
                first_ns=before.first_ns if before else now_ns,
                report_ns=before.report_ns if before else None,
            )
            self._revision += 1

    def _check(self, rnic: RnicAddress, incarnation: int, now_ns: int) -> tuple[int, bytes]:
        """Return an RNIC's index and its packed address."""
        number = self.topology.index.get(rnic.name)
        if number is None:
            self.strangers += 1
            raise InputError(
                f"RNIC {rnic.name} is not in the cluster file",
                remedy="name it NODE/DEVICE with a fabric NIC of the cluster file",
            )
        if not 0 <= rnic.qpn < 1 << 32:
            raise InputError(f"RNIC {rnic.name}: QPN {rnic.qpn} is out of range")
        packed = packed_address(rnic.address)
        if incarnation > now_ns + _AHEAD_NS:
            raise InputError(
                f"RNIC {rnic.name}: its agent was started in the future",
                remedy="set the clock of its host",
            )
        holder = self._members.get(number)
        if holder is None or holder.left or incarnation >= holder.incarnation:
            return number, packed
        spoke = max(holder.since_ns, holder.report_ns or 0)
        if now_ns - spoke < int(self._silence_s * 1e9):
            raise InputError(
                f"RNIC {rnic.name} is held by an agent started later, at {holder.address}",
                remedy="stop one of the two, or give this one its own --node",
            )
        return number, packed

    @property
    def _silence_s(self) -> float:
        # A report of window w ends at w's end: one missed window has the age of a window.
        return max(self.settings.silent_s, self.settings.window_s)

    def knows(self, rnic: str, qpn: str) -> bool:
        """Return whether an RNIC is registered with this QPN and has not left."""
        member = self._members.get(self.topology.index.get(rnic, -1))
        return member is not None and str(member.qpn) == qpn and not member.left

    def leave(self, names: Iterable[str]) -> None:
        """Take an agent's goodbye: nobody probes its RNICs until it comes back."""
        for name in names:
            member = self._members.get(self.topology.index.get(name, -1))
            if member:
                member.left = True
                self._alive[self.topology.index[name]] = False
                self._revision += 1

    # -- services ---------------------------------------------------------------------------

    def set_service(
        self, job: str, tuples: Iterable[ServiceTuple], *, until_ns: int | None = None
    ) -> int:
        """Probe the paths of a running job; return how many tuples are known here.

        ``until_ns`` is when it counts as ended unless it is set again: whoever follows a job may
        die before it.
        """
        found = []
        for one in tuples:
            a, b = self.topology.index.get(one.source), self.topology.index.get(one.target)
            if a is not None and b is not None and a != b and is_source_port(one.port):
                found.append((a, b, one.port))
        if job not in self._services and len(self._services) >= _JOBS:
            raise InputError(f"more than {_JOBS} jobs at once", remedy="end those that are over")
        if until_ns is None:
            self._leases.pop(job, None)
        else:
            self._leases[job] = until_ns
        if self._services.get(job) != found:
            self._services[job] = found
            self._tabulate()
        return len(found)

    def end_service(self, job: str) -> None:
        """Stop probing the paths of a job that ended."""
        if self._services.pop(job, None) is not None:
            self._tabulate()
        self._leases.pop(job, None)
        self._degraded.discard(job)

    def _tabulate(self) -> None:
        tuples = sorted({one for tuples in self._services.values() for one in tuples})
        self._service_table = np.array(tuples, dtype=np.int32).reshape(-1, 3)
        by_target = np.argsort(self._service_table[:, 1], kind="stable")
        self._service_answers = self._service_table[by_target]
        self._revision += 1

    def set_degraded(self, job: str, *, degraded: bool) -> None:
        """Note that a job is known to run slowly or to stand: what is on its paths is P0."""
        (self._degraded.add if degraded else self._degraded.discard)(job)

    # -- pinglists --------------------------------------------------------------------------

    def plan(self, now_ns: int) -> Plan:
        """Return the tuples of the current hour."""
        turn = int(now_ns / 1e9 // self.settings.rotation_s)
        if self._plan is None or turn != self._turn:
            self._plan = make_plan(self.topology, self.settings, time_s=now_ns / 1e9)
            self._turn = turn
        return self._plan

    def version(self, now_ns: int) -> str:
        """Return what changes whenever a pinglist may have changed."""
        self.plan(now_ns)
        return f"{self._epoch}.{self._revision}.{self._turn}"

    def pinglist(self, rnic: str, now_ns: int) -> Pinglist:
        """Return what an RNIC probes and traces."""
        number = self.topology.index.get(rnic)
        if number is None:
            raise InputError(f"RNIC {rnic} is not in the cluster file")
        plan = self.plan(now_ns)
        mine = slice(int(plan.offsets[number]), int(plan.offsets[number + 1]))
        rows = plan.by_target[plan.target_offsets[number] : plan.target_offsets[number + 1]]
        sent = _rows_of(self._service_table, 0, number)
        answered = _rows_of(self._service_answers, 1, number)
        pace = self.settings.service_interval_s
        return Pinglist(
            version=self.version(now_ns),
            settings=self._settings,
            probes=self._tuples(
                number,
                np.concatenate([plan.target[mine], sent[:, 1]]),
                np.concatenate([plan.port[mine], sent[:, 2]]),
                np.concatenate([plan.kind[mine], np.full(len(sent), SERVICE, dtype=np.int8)]),
                np.concatenate([plan.interval_s[mine], np.full(len(sent), pace, dtype="f4")]),
            ),
            traces=self._tuples(
                number,
                np.concatenate([plan.source[rows], answered[:, 0]]),
                np.concatenate([plan.port[rows], answered[:, 2]]),
                np.concatenate([plan.kind[rows], np.full(len(answered), SERVICE, dtype=np.int8)]),
                np.concatenate([plan.interval_s[rows], np.full(len(answered), pace, dtype="f4")]),
            ),
        )

    def _tuples(
        self,
        number: int,
        rnic: npt.NDArray[np.int32],
        port: npt.NDArray[np.int32],
        kind: npt.NDArray[np.int8],
        interval_s: npt.NDArray[np.float32],
    ) -> Tuples:
        """Return the columns of the tuples whose other end is there, in our address family."""
        same_family = self._is_ipv4[rnic] == self._is_ipv4[number]
        there = np.flatnonzero(self._alive[rnic] & same_family)
        rnic = rnic[there]
        return Tuples(
            target=rnic.astype("<i4").tobytes(),
            port=port[there].astype("<i4").tobytes(),
            kind=kind[there].astype("i1").tobytes(),
            interval_s=interval_s[there].astype("<f4").tobytes(),
            address=self._addresses[rnic].tobytes(),
            qpn=self._qpns[rnic].astype("<u4").tobytes(),
        )

    # -- windows ----------------------------------------------------------------------------

    def report(self, report: Report, now_ns: int) -> None:
        """Take what an RNIC saw in one window."""
        number = self.topology.index.get(report.rnic)
        if number is None:
            self.strangers += 1
            return
        self._check_report(report, number)
        member = self._members.get(number)
        if member:
            self._hear(member, report, now_ns)
        if report.agent:
            self.agents[report.rnic.split("/")[0]] = dict(report.agent)
        start = (report.window_start_ns // self._window_ns) * self._window_ns
        # An agent that was cut off sends old windows later: they teach paths, not verdicts.
        if start < self._next_start or start > now_ns + self._window_ns:
            self._learn([(number, trace) for trace in report.traces])
            return
        taken = self._reports.setdefault(start, {}).setdefault(report.rnic, {})
        if len(taken) < _INCARNATIONS or report.incarnation in taken:
            taken[report.incarnation] = report

    def _hear(self, member: _Member, report: Report, now_ns: int) -> None:
        """Note when an agent last reported, by its own clock, and whether that clock is off."""
        end = report.window_start_ns + report.window_ns
        ahead = end - now_ns
        if ahead <= self._window_ns:  # else nothing would ever be silent again
            member.report_ns = max(member.report_ns or 0, end)
        member.heard_ns = now_ns
        usual = self._next_start <= report.window_start_ns and ahead <= self._window_ns
        # Of one that was away and sends its old windows the newest counts.
        member.ahead_ns = 0 if usual else ahead

    def _check_report(self, report: Report, number: int) -> None:
        """Raise InputError for a report that is torn or untrue: it would spoil the window."""
        if not 0 < report.window_ns <= _LONGEST_WINDOW_NS:
            raise InputError(f"a window of {report.window_ns} ns")
        check_rows(rows_of([(number, report.rows)]), len(self.topology.rnics))
        targets, ports = [t.target for t in report.traces], {t.port for t in report.traces}
        if targets and not (
            min(targets) >= 0
            and max(targets) < len(self.topology.rnics)
            and all(is_source_port(port) for port in ports)
        ):
            raise InputError("a trace's target or port is outside the plan")
        for scopes in (report.rtt, report.responder, report.prober):
            for histogram in filter(None, scopes.values()):
                if min(histogram) < 0 or max(histogram) >= MOST_BUCKETS:
                    raise InputError("a histogram has buckets of no value")
                if min(histogram.values()) < 0:
                    raise InputError("a histogram has counts below zero")

    def _learn(self, traces: Iterable[tuple[int, TraceRow]]) -> None:
        for source, trace in traces:
            if trace.reached:
                self.book.learn(source, trace.target, trace.port, trace.hops)

    def step(self, now_ns: int) -> list[Outcome]:
        """Close every window whose reports are due and return their verdicts.

        Ends services whose lease is over.
        """
        for job in [job for job, until in self._leases.items() if until < now_ns]:
            self.end_service(job)
        wait = int((self.settings.timeout_s + self.settings.grace_s) * 1e9)
        outcomes: list[Outcome] = []
        if now_ns + 2 * self._window_ns < self._next_start:
            # The clock was set back: go on from where it is, or nothing is judged until then.
            self._next_start = now_ns // self._window_ns * self._window_ns
            self._reports = {}
            for member in self._members.values():
                member.since_ns, member.report_ns = now_ns, None
        while self._next_start + self._window_ns + wait <= now_ns:
            outcomes.append(self._close(self._next_start))
            self._next_start += self._window_ns
            behind = (now_ns - wait - self._next_start) // self._window_ns
            if behind > 2:  # the machine slept: nothing was watched meanwhile
                self._next_start += (behind - 1) * self._window_ns
                self._reports = {s: r for s, r in self._reports.items() if s >= self._next_start}
        return outcomes

    def _close(self, start: int) -> Outcome:
        end = start + self._window_ns
        reports = [one for own in self._reports.pop(start, {}).values() for one in own.values()]
        rows, traces = merge_reports(reports, self.topology.index)
        window = Window(
            start_ns=start,
            end_ns=end,
            rows=rows,
            traces=traces,
            silent_hosts=self._silent(end),
            clocks_off=self._clocks_off(end),
            gone=frozenset(n for n, m in self._members.items() if m.left),
            qpns={n: m.qpn for n, m in self._members.items()},
            changed=frozenset(n for n, m in self._members.items() if m.since_ns >= start),
            reporting=len({r.rnic for r in reports}),
            rtt=merge(r.rtt for r in reports),
            responder=merge(r.responder for r in reports),
            prober=merge(r.prober for r in reports),
            degraded_jobs=frozenset(self._degraded & set(self._services)),
        )
        # Paths from before first: a trace that a failure rerouted must not teach the new path
        # before the losses of this window were laid to the old one.
        unknown = [(n, t) for n, t in traces if t.reached and not self._known(n, t.target, t.port)]
        self._learn(unknown)
        analysis = analyse(window, self.topology, self.book, self.settings)
        self._learn(traces)
        changes = self.ledger.update(analysis)
        self.events.extend(changes)
        outcome = Outcome(window=window, analysis=analysis, changes=changes)
        self.history.append(outcome)
        return outcome

    def _known(self, source: int, target: int, port: int) -> int:
        count = len(self.topology.rnics)
        return self.book.known((source * count + target) * PORTS + port - FIRST_PORT)

    def _silent(self, end_ns: int) -> dict[str, float | None]:
        silent: dict[str, float | None] = {}
        spoke: dict[int, int] = {}
        waiting: dict[int, int] = {}
        for number, member in self._members.items():
            if member.left:
                continue
            host = int(self.topology.rnic_host[number])
            spoke[host] = max(spoke.get(host, 0), member.report_ns or 0)
            waiting[host] = max(waiting.get(host, 0), member.since_ns)
        for host, last in spoke.items():
            age = (end_ns - max(last, waiting[host])) / 1e9
            if age >= self._silence_s * 0.999:
                silent[self.topology.hosts[host]] = (end_ns - last) / 1e9 if last else None
        return silent

    def _clocks_off(self, end_ns: int) -> dict[str, float]:
        """Return how many seconds the clocks of hosts are ahead that report and are not of use."""
        return {
            self.topology.hosts[int(self.topology.rnic_host[number])]: member.ahead_ns / 1e9
            for number, member in self._members.items()
            if member.ahead_ns and end_ns - (member.heard_ns or 0) < int(self._silence_s * 1e9)
        }

    def members(self) -> dict[str, dict[str, object]]:
        """Return the registry for views."""
        return {
            self.topology.rnics[n]: {
                "address": m.address, "qpn": m.qpn, "since_ns": m.since_ns,
                "report_ns": m.report_ns, "left": m.left,
            }
            for n, m in sorted(self._members.items())
        }  # fmt: skip

    def services(self) -> dict[str, int]:
        """Return running jobs and how many tuples each has."""
        return {job: len(tuples) for job, tuples in self._services.items()}

    def matrix(self, *, by_tor: bool = True) -> dict[str, np.ndarray]:
        """Return loss ratio and median RTT of the last window, ``(n, n)``, NaN without probes."""
        count = len(self.topology.tors if by_tor else self.topology.rnics)
        cells = count * count
        probes, lost, weighted, answered = (np.zeros(cells) for _ in range(4))
        if self.history:
            rows = self.history[-1].window.rows
            place = self.topology.rnic_tor if by_tor else np.arange(count)
            cell = place[rows.source].astype(np.int64) * count + place[rows.target]
            good = ~np.isnan(rows.rtt_p50_ns)
            weight = (rows.probes - rows.lost)[good].astype(np.float64)
            probes += np.bincount(cell, weights=rows.probes, minlength=cells)
            lost += np.bincount(cell, weights=rows.lost, minlength=cells)
            weighted += np.bincount(
                cell[good], weights=rows.rtt_p50_ns[good] * weight, minlength=cells
            )
            answered += np.bincount(cell[good], weights=weight, minlength=cells)
        with np.errstate(divide="ignore", invalid="ignore"):
            shape = (count, count)
            return {
                "probes": probes.reshape(shape),
                "loss_ratio": (lost / probes).reshape(shape),
                "rtt_us": (weighted / answered / 1e3).reshape(shape),
            }


def _rows_of(table: npt.NDArray[np.int32], column: int, number: int) -> npt.NDArray[np.int32]:
    """Return the rows of a table, sorted by a column, that have this number there."""
    first, last = np.searchsorted(table[:, column], (number, number + 1))
    return table[first:last]

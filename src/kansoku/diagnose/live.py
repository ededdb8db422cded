"""Incidents as rows arrive: steps, events, findings, signs of life.

Pure: rows and the time go in, changed incidents come out. Signals become the same observations that
a folder gives; each open incident holds those that belong together and is reasoned over again when
one arrives. What opens and closes an incident is apart (hysteresis):

=========  ==================================================  ==============================
kind       opens                                               closes
=========  ==================================================  ==============================
hang       no step for longer than the run ever took, while    a step ends
           its processes give signs of life
slow       the median of the last steps is above all before    ten steps at the old pace
silence    a node gives no sign of life, its peers do          it gives signs again
event      a fatal code, a critical finding                    quiet for ten minutes
=========  ==================================================  ==============================
"""

import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import polars as pl

from kansoku.diagnose.context import Context, Progress
from kansoku.diagnose.observation import FABRIC_KINDS, Observation
from kansoku.diagnose.policy import Policy
from kansoku.diagnose.reason import diagnose
from kansoku.diagnose.recognise import recognise
from kansoku.errors import InputError
from kansoku.model import Domain, Incident, Subject, Verdict

__all__ = ["Change", "Detector", "LivePolicy"]

_SECOND = 1_000_000_000
_PHASES = ("data_wait", "forward", "backward", "optimizer", "checkpoint", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePolicy:
    """When a stream becomes an incident."""

    first_steps: int = 3
    """Steps at the start that are no measure of anything (allocation, compilation)."""
    least_steps: int = 8
    """Before so many, nothing is called late."""
    stall_ratio: float = 3.0
    """A step is late after this many times the longest one (without the first)."""
    stall_least_ns: int = 5 * _SECOND
    sign_of_life_ns: int = 90 * _SECOND
    """A run without one for so long has ended; only a run that lives can hang."""
    slow_ratio: float = 1.06
    slow_score: float = 6.0
    """Slow-down in standard errors of the medians."""
    slow_steps: int = 10
    """Steps whose median is compared with all before."""
    baseline_steps: int = 20
    recovered_ratio: float = 1.03
    culprit_share: float = 0.5
    """Share of the slow-down that one rank's own work must explain to be named."""
    silent_ratio: float = 4.0
    """A node is silent after this many times its longest pause."""
    silent_least_ns: int = 30 * _SECOND
    quiet_ns: int = 600 * _SECOND
    """An incident of events closes after so long without another."""
    join_ns: int = 900 * _SECOND
    """Signals of one node or run within this time belong to one incident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A new version of an incident."""

    incident: Incident
    time_ns: int
    observations: tuple[Observation, ...]
    run: str | None
    hang: bool
    """It is a stall that has just begun: time to look from outside."""


@dataclass(slots=True)
class _Run:
    name: str
    nodes: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    open_steps: dict[int, dict[int, tuple[int, int, dict[str, int]]]] = field(default_factory=dict)
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=400))
    own: deque[dict[int, dict[str, int]]] = field(default_factory=lambda: deque(maxlen=40))
    seen: int = 0
    longest_ns: int = 0
    last_end_ns: int = 0
    last_step: int = -1
    alive_ns: int = 0
    baseline: float | None = None


@dataclass(slots=True)
class _Open:
    id: str
    kind: str
    run: str | None
    nodes: set[str]
    observations: dict[str, Observation]
    opened_ns: int
    last_ns: int
    told: tuple[object, ...] = ()
    incident: Incident | None = None
    calm: int = 0


class Detector:
    """Keeps what it needs of the stream; bounded by runs and nodes that live."""

    def __init__(
        self, *, policy: LivePolicy | None = None, reasoning: Policy | None = None
    ) -> None:
        self._policy = policy or LivePolicy()
        self._reasoning = reasoning or Policy()
        self._runs: dict[str, _Run] = {}
        self._node_seen: dict[str, int] = {}
        self._node_gap: dict[str, int] = {}
        self._open: list[_Open] = []
        self._count = 0

    # What arrives

    def steps(self, rows: pl.DataFrame, now_ns: int) -> list[Change]:
        """Take rows of the ``steps`` table."""
        changes: list[Change] = []
        wanted = ["run", "rank", "step", "start_ns", "duration_ns", *(f"{p}_ns" for p in _PHASES)]
        usable = rows.filter(pl.col("duration_ns").is_not_null()).select(wanted).sort("step")
        touched: set[str] = set()
        for run_name, rank, step, start, duration, *phases in usable.iter_rows():
            run = self._runs.setdefault(run_name, _Run(name=run_name))
            run.ranks.add(rank)
            own = {p: v or 0 for p, v in zip(_PHASES, phases, strict=True)}
            run.open_steps.setdefault(step, {})[rank] = (start, duration, own)
            run.alive_ns = max(run.alive_ns, now_ns)
            touched.add(run_name)
        for name in touched:
            changes += self._finish_steps(self._runs[name], now_ns)
        return changes

    def signs_of_life(self, rows: pl.DataFrame, now_ns: int) -> list[Change]:
        """Take rows of the ``metrics`` table: who is there."""
        label = pl.col("labels")
        seen = (
            rows.select(
                node=label.str.extract(r'"host\.name":"([^"]+)"'),
                run=label.str.extract(r'"kansoku\.run":"([^"]+)"'),
                time_ns=pl.col("time_ns"),
            )
            .group_by("node", "run")
            .agg(pl.col("time_ns").max())
        )
        changes = []
        for node, run_name, time_ns in seen.iter_rows():
            if run_name is not None:
                run = self._runs.setdefault(run_name, _Run(name=run_name))
                run.alive_ns = max(run.alive_ns, time_ns)
                if node is not None:
                    run.nodes.add(node)
            if node is None:
                continue
            before = self._node_seen.get(node)
            if before is not None and time_ns > before:
                gap = max(self._node_gap.get(node, 0), time_ns - before)
                silent = self._find("silence", nodes={node})
                if silent is not None:
                    changes.append(self._close(silent, now_ns))
                else:
                    self._node_gap[node] = gap
            self._node_seen[node] = max(before or 0, time_ns)
        return changes

    def events(self, rows: pl.DataFrame, now_ns: int) -> list[Change]:
        """Take rows of the ``events`` table: what the kernel and Slurm say."""
        bad = rows.filter(pl.col("severity").is_in(["error", "critical", "fatal"]))
        changes = []
        for row in bad.iter_rows(named=True):
            found = recognise(row["body"] or "")
            if found is None or found.role not in {"root", "either"}:
                continue
            node, device, target = _place(row["subject"])
            seen = Observation(
                rule=found.rule, text=row["body"], source=f"events {row['source']}", kind="kernel",
                domain=found.domain, component=found.component, role=found.role,
                strength=found.strength, meaning=found.meaning, action=found.action,
                time_ns=row["time_ns"], last_ns=row["time_ns"], node=node,
                device=device or found.device, target=target or found.target,
            )  # fmt: skip
            changes += self._join(seen, "event", now_ns)
        return changes

    def findings(self, rows: pl.DataFrame, now_ns: int) -> list[Change]:
        """Take rows of the ``findings`` table: verdicts of fabric, jobs and trace."""
        bad = rows.filter(
            pl.col("domain").is_not_null()
            & (pl.col("verdict") == "found")
            & pl.col("severity").is_in(["critical", "warning"])
        )
        changes = []
        for row in bad.iter_rows(named=True):
            try:
                domain = Domain(row["domain"])
            except ValueError:
                continue
            node, device, target = _place(row["subject"])
            serious = row["severity"] == "critical"
            seen = Observation(
                rule=f"finding.{row['id']}", text=row["sentence"] or row["id"],
                source=f"findings of {row['source']}", kind="trace", domain=domain,
                component=str(row["id"]).rpartition(".")[2].replace("_", " "),
                role="root" if serious else "either", strength=row["confidence"] or 0.5,
                meaning="", action="", time_ns=row["onset_ns"] or row["time_ns"], node=node,
                device=device, target=target,
            )  # fmt: skip
            changes += self._join(seen, "event", now_ns)
        return changes

    def more(self, run: str, seen: Iterable[Observation], now_ns: int) -> list[Change]:
        """Take what was collected from outside for a run that hangs."""
        one = self._find("hang", run=run)
        if one is None:
            return []
        for observation in seen:
            one.observations[_key(observation)] = observation
        return self._told(one, now_ns)

    # What time alone says

    def tick(self, now_ns: int) -> list[Change]:
        """Look at what did not arrive."""
        changes: list[Change] = []
        for run in list(self._runs.values()):
            changes += self._stalled(run, now_ns)
            if now_ns - run.alive_ns > 10 * self._policy.sign_of_life_ns:
                hang = self._find("hang", run=run.name)
                if hang is not None:
                    changes.append(self._close(hang, now_ns))
                del self._runs[run.name]
        changes += self._silent_nodes(now_ns)
        for one in list(self._open):
            if one.kind == "event" and now_ns - one.last_ns > self._policy.quiet_ns:
                changes.append(self._close(one, now_ns))
        return changes

    @property
    def open_incidents(self) -> list[Incident]:
        """Incidents that are open now."""
        return [one.incident for one in self._open if one.incident is not None]

    # Steps

    def _finish_steps(self, run: _Run, now_ns: int) -> list[Change]:
        changes: list[Change] = []
        for step in sorted(run.open_steps):
            rows = run.open_steps[step]
            # A step is whole when every rank has sent it, or when later ones have arrived.
            if len(rows) < len(run.ranks) and step > max(run.open_steps) - 3:
                break
            del run.open_steps[step]
            if step <= run.last_step:
                continue
            run.last_step = step
            run.seen += 1
            end = max(start + duration for start, duration, _ in rows.values())
            run.last_end_ns = max(run.last_end_ns, end)
            if run.seen <= self._policy.first_steps:
                continue
            longest = max(duration for _, duration, _ in rows.values())
            run.longest_ns = max(run.longest_ns, longest)
            run.durations.append(statistics.median(d for _, d, _ in rows.values()))
            run.own.append({rank: own for rank, (_, _, own) in rows.items()})
            hang = self._find("hang", run=run.name)
            if hang is not None:
                changes.append(self._close(hang, now_ns))
            changes += self._pace(run, now_ns)
        return changes

    def _pace(self, run: _Run, now_ns: int) -> list[Change]:
        policy = self._policy
        values = list(run.durations)
        slow = self._find("slow", run=run.name)
        recent = values[-policy.slow_steps :]
        if slow is not None and run.baseline is not None:
            # Closing asks for ten steps at the old pace, in a row.
            at_pace = values[-1] <= run.baseline * policy.recovered_ratio
            slow.calm = slow.calm + 1 if at_pace else 0
            if slow.calm >= policy.slow_steps:
                run.durations = deque(recent, maxlen=run.durations.maxlen)
                return [self._close(slow, now_ns)]
            return []
        before = values[: -policy.slow_steps]
        if len(before) < policy.baseline_steps:
            return []
        middle, last = statistics.median(before), statistics.median(recent)
        spread = 1.4826 * statistics.median(abs(v - middle) for v in before)
        spread = max(spread, 0.002 * middle)
        error = 1.2533 * spread * (1 / len(before) + 1 / len(recent)) ** 0.5
        lasting = sum(v > middle + 1.5 * spread for v in recent) >= 0.8 * len(recent)
        if last < policy.slow_ratio * middle or last - middle < policy.slow_score * error:
            return []
        if not lasting:
            return []
        run.baseline = middle
        return self._join(self._slow(run, middle, last), "slow", now_ns, run=run.name)

    def _slow(self, run: _Run, before: float, last: float) -> Observation:
        count = self._policy.slow_steps
        steps = list(run.own)[-count:]
        ranks = sorted(set.intersection(*(set(s) for s in steps))) if steps else []
        excess: dict[int, float] = {}
        phase_of: dict[int, str] = {}
        if len(ranks) > 1:
            totals = {r: statistics.median(sum(s[r].values()) for s in steps) for r in ranks}
            usual = statistics.median(totals.values())
            excess = {r: t - usual for r, t in totals.items()}
            worst = max(excess, key=lambda r: excess[r])
            by_phase = {
                p: statistics.median(s[worst][p] for s in steps)
                - statistics.median(statistics.median(s[r][p] for s in steps) for r in ranks)
                for p in _PHASES
            }
            phase_of[worst] = max(by_phase, key=lambda p: by_phase[p])
        text = f"steps take {last / 1e6:.1f} ms where they took {before / 1e6:.1f} ms"
        rank, phase = None, None
        if excess:
            worst = max(excess, key=lambda r: excess[r])
            if excess[worst] >= self._policy.culprit_share * (last - before):
                rank, phase = worst, phase_of[worst]
                text += f"; rank {rank} is late by {excess[worst] / 1e6:.1f} ms in {phase}"
        storage = phase in {"data_wait", "checkpoint"}
        domain = (
            Domain.STORAGE if storage else Domain.HOST if rank is not None else Domain.FRAMEWORK
        )
        component = "data loading" if phase == "data_wait" else phase or "step time"
        return Observation(
            rule="finding.slow", text=text, source=f"steps of {run.name}", kind="trace",
            domain=domain, component=component,
            role="either" if rank is not None else "symptom",
            strength=0.5 if rank is not None else 0.4, meaning="", action="",
            time_ns=run.last_end_ns, last_ns=run.last_end_ns, rank=rank,
            locates=rank is not None and not storage,
        )  # fmt: skip

    def _stalled(self, run: _Run, now_ns: int) -> list[Change]:
        policy = self._policy
        if run.seen < policy.least_steps or now_ns - run.alive_ns > policy.sign_of_life_ns:
            return []
        allowed = max(policy.stall_least_ns, int(policy.stall_ratio * run.longest_ns))
        late = now_ns - run.last_end_ns
        if late <= allowed or self._find("hang", run=run.name) is not None:
            return []
        partial = max(run.open_steps, default=None)
        missing = sorted(run.ranks - set(run.open_steps[partial])) if partial is not None else []
        text = (
            f"no step for {late / 1e9:.1f} s; the longest took {run.longest_ns / 1e9:.2f} s, "
            f"step {run.last_step} was the last"
        )
        seen = Observation(
            rule="hang.stall", text=text, source=f"steps of {run.name}", kind="trace",
            domain=Domain.FRAMEWORK, component="no progress", role="symptom", strength=0.4,
            meaning="", action="look at the ranks' stacks and dumps", time_ns=run.last_end_ns,
            rank=missing[0] if len(missing) == 1 else None, locates=True,
        )  # fmt: skip
        return self._join(seen, "hang", now_ns, run=run.name)

    def _silent_nodes(self, now_ns: int) -> list[Change]:
        policy = self._policy
        if len(self._node_seen) < 3:
            return []
        newest = max(self._node_seen.values())
        changes = []
        limits = {
            node: max(
                policy.silent_least_ns, int(policy.silent_ratio * self._node_gap.get(node, 0))
            )
            for node in self._node_seen
        }
        silent = [n for n, seen in self._node_seen.items() if newest - seen > limits[n]]
        if len(silent) > len(self._node_seen) // 3:
            return []  # the way to us is cut, not that many nodes
        for node in silent:
            if self._find("silence", nodes={node}) is not None or node not in self._node_gap:
                continue
            last = self._node_seen[node]
            seen = Observation(
                rule="silence.node", text=f"{node} gives no sign of life for "
                f"{(newest - last) / 1e9:.0f} s, its peers do", source="metrics", kind="metric",
                domain=Domain.HOST, component="node lost", role="either", strength=0.7,
                meaning="a node that falls silent alone is down or cut off",
                action="look at its console and power", time_ns=last, last_ns=last, node=node,
            )  # fmt: skip
            changes += self._join(seen, "silence", now_ns)
        return changes

    # Incidents

    def _find(
        self, kind: str, *, run: str | None = None, nodes: set[str] | None = None
    ) -> _Open | None:
        for one in self._open:
            same = one.kind == kind and (run is None or one.run == run)
            if same and (nodes is None or one.nodes & nodes):
                return one
        return None

    def _belongs(self, one: _Open, seen: Observation, run: str | None, now_ns: int) -> bool:
        if now_ns - one.last_ns > self._policy.join_ns:
            return False
        if run is not None and one.run == run:
            return True
        if seen.node is not None and seen.node in one.nodes:
            return True
        if run is not None and one.run is None and run in self._runs:
            return bool(one.nodes & self._runs[run].nodes)
        return False

    def _join(
        self, seen: Observation, kind: str, now_ns: int, *, run: str | None = None
    ) -> list[Change]:
        nodes = {seen.node} if seen.node else set()
        nodes |= self._runs[run].nodes if run is not None and run in self._runs else set()
        one = next((o for o in self._open if self._belongs(o, seen, run, now_ns)), None)
        fresh = one is None
        if one is None:
            self._count += 1
            subject = run or seen.node or seen.target or "fleet"
            one = _Open(
                id=f"{kind}-{subject}-{seen.time_ns or now_ns}", kind=kind, run=run, nodes=nodes,
                observations={}, opened_ns=now_ns, last_ns=now_ns,
            )  # fmt: skip
            self._open.append(one)
        hang = kind == "hang" and (fresh or one.kind != "hang")
        if one.kind == "event" and kind in {"hang", "slow", "silence"}:
            one.kind, one.run = kind, run or one.run  # the job feels it now
        one.nodes |= nodes
        one.last_ns = now_ns
        one.observations[_key(seen)] = seen
        return [replace(c, hang=hang) for c in self._told(one, now_ns)]

    def _told(self, one: _Open, now_ns: int) -> list[Change]:
        run = self._runs.get(one.run or "")
        seen = tuple(one.observations.values())
        context = Context(
            progress=Progress(last_ns={}), ranks=frozenset(run.ranks) if run else frozenset(),
            ended=False,
        )  # fmt: skip
        found = diagnose(seen, context, self._reasoning)
        kind = {"hang": "hang", "slow": "slow"}.get(one.kind, "stop")
        onset = min((o.time_ns for o in seen if o.time_ns), default=now_ns)
        if found is None:
            found = Incident(
                id=one.id, onset_ns=onset, kind=kind, subject=None, verdict=Verdict.UNKNOWN,
                hypotheses=(), cascades=(), state="open",
            )  # fmt: skip
        subject = found.subject
        if subject is None and one.run is not None:
            subject = Subject(kind="job", name=one.run)
        lead = found.hypotheses[0] if found.hypotheses else None
        told = (str(subject), lead.domain if lead else None, len(seen))
        if told == one.told:
            return []
        state = "open" if not one.told else "updated"
        one.told = told
        one.incident = replace(
            found, id=one.id, kind=kind, subject=subject, onset_ns=onset, state=state
        )
        return [
            Change(
                incident=one.incident, time_ns=now_ns, observations=seen, run=one.run, hang=False
            )
        ]

    def _close(self, one: _Open, now_ns: int) -> Change:
        self._open.remove(one)
        assert one.incident is not None  # noqa: S101 - every open incident was told
        return Change(
            incident=replace(one.incident, state="closed"),
            time_ns=now_ns,
            observations=tuple(one.observations.values()),
            run=one.run,
            hang=False,
        )


def _key(seen: Observation) -> str:
    return f"{seen.rule}|{seen.node}|{seen.rank}|{seen.device}|{seen.target}"


_NODE_KINDS = {"gpu", "nic", "node"}


def _place(text: str | None) -> tuple[str | None, str | None, str | None]:
    """Return node, device and target of a subject."""
    try:
        subject = Subject.parse(text or "")
    except InputError:
        return None, None, None
    if subject.kind in _NODE_KINDS:
        node, _, device = subject.name.partition("/")
        return node, device or None, None
    if subject.kind == "storage":
        return None, None, subject.name
    if subject.kind in FABRIC_KINDS:
        return None, None, f"{subject.kind}:{subject.name}"
    return None, None, re.sub(r"\s", "", subject.name)


# Named for the type of ``publish`` functions that the application passes on.
Publish = Callable[[Sequence[Change]], None]

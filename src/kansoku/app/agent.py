"""The node agent: collectors, capture rings and profiles of this node, sent as they come."""

import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import polars as pl

from kansoku.app.agent_bursts import BurstCollector
from kansoku.app.agent_resources import NodeSampling, SamplingPolicy
from kansoku.app.agent_rings import RingFollower
from kansoku.app.resources import sampling_interval_s
from kansoku.catalog.metrics import metrics
from kansoku.errors import ConfigurationError, KansokuError
from kansoku.node import CollectorStatus, Host, Round, Rounds, Sample, labels, load_collectors
from kansoku.node.edge.fast import FastSampler
from kansoku.node.edge.machine import Machine
from kansoku.node.rows import SeriesText, event_rows, sample_rows
from kansoku.node.switch import SwitchTarget, read_switches
from kansoku.view import Column, Sentence, Table, Tone, View

if TYPE_CHECKING:
    from kansoku.telemetry import ExporterCounts

__all__ = [
    "Agent",
    "AgentSettings",
    "AgentSink",
    "agent_once",
    "check_endpoint",
    "default_spool",
    "run_agent",
]

_log = logging.getLogger(__name__)
DEFAULT_ENDPOINT = "http://127.0.0.1:4318"
_PROFILE_EVERY_S = 60.0
_TREES = ("proc", "sys")


class AgentSink(Protocol):
    """Where rows go; :class:`kansoku.telemetry.Exporter` is one."""

    def put_tables(self, tables: Mapping[str, pl.DataFrame], *, durable: bool = True) -> None:
        """Take rows of several tables; raise nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What the agent reads and how often."""

    only: tuple[str, ...] = ()
    """Collector names; empty for all."""
    interval_s: float = 10.0
    node: str | None = None
    """Node name; None for the host's short name."""
    root: str = "/"
    """Root of /proc and /sys: another one for a recorded tree or a container's host mount."""
    dcgm_url: str | None = None
    slurm_node: str | None = None
    switches_file: Path | None = None
    from_boot: bool = False
    """Read the kernel log from boot on, not from now on."""
    ring_folder: Path | None = Path("/dev/shm/kansoku")  # noqa: S108 - the rings' documented home
    """Where the capture rings of jobs are; None to leave them alone."""
    sample_every: int = 100
    """Send the full spans of each so many steps of a rank."""
    samples_folder: Path | None = None
    """While a recorded job runs, sample this node fast into here and join that with its steps."""
    sampling_interval_s: float = 0.05
    """Time between those samples, 0.01 or more."""
    profile_to: str | None = None
    """Pyroscope address; py-spy profiles of the ranks on this node go there."""
    burst_interval_s: float | None = None
    """Read the ports' byte counters so often and send microbursts; None to leave it."""
    collector_settings: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments of collectors, such as those of a plug-in."""


def default_spool() -> Path:
    """Return the folder of the spool when none is named: the XDG state folder."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "kansoku" / "agent-spool"


def check_endpoint(to: str, protocol: str) -> None:
    """Raise ConfigurationError for an address nothing can be sent to, or with a secret in it."""
    bare = protocol == "grpc" and "://" not in to
    try:
        parts = urlsplit(f"http://{to}" if bare else to)
        web = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        parts, web = urlsplit(""), False
    if "@" in parts.netloc or parts.query or parts.fragment:
        # The address is not repeated: it stands in logs.
        raise ConfigurationError(
            "the address has a user, a query or a fragment",
            where="--to",
            remedy="http://HOST:PORT; the token is read from KANSOKU_TOKEN",
        )
    if not web:
        raise ConfigurationError(
            f"{to!r} is no address of a receiver", where="--to", remedy="http://HOST:PORT"
        )


class Agent:
    """Wires the machine, the collectors, the rings and the sink together."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        host: Host | None = None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Make the collectors; raise ConfigurationError for a setting that is wrong."""
        self.settings = settings
        if host is None and not any((Path(settings.root) / name).is_dir() for name in _TREES):
            raise ConfigurationError(
                "neither proc nor sys is there", where=f"--root {settings.root}",
                remedy="give the folder where the host's /proc and /sys are mounted",
            )  # fmt: skip
        self.host = host or Machine(root=settings.root, name=settings.node)
        switches: tuple[SwitchTarget, ...] = ()
        if settings.switches_file is not None:
            switches = _switches(settings.switches_file)
        given = {
            "dcgm_url": settings.dcgm_url,
            "slurm_node": settings.slurm_node,
            "switches": switches,
            "from_boot": settings.from_boot,
            **settings.collector_settings,
        }
        collectors = load_collectors(settings.only, settings=given)
        self._rounds = Rounds(collectors, self.host, monotonic_ns=monotonic_ns)
        self._sampling = (
            NodeSampling(
                settings.samples_folder,
                node=self.host.name,
                policy=SamplingPolicy(interval_s=settings.sampling_interval_s),
                start=partial(FastSampler, root=settings.root),
            )
            if settings.samples_folder is not None
            else None
        )
        self._rings = (
            RingFollower(
                settings.ring_folder,
                sample_every=settings.sample_every,
                sampling=self._sampling,
            )
            if settings.ring_folder is not None and not settings.only
            else None
        )
        self._bursts = (
            BurstCollector(self.host.name, settings.burst_interval_s)
            if settings.burst_interval_s is not None
            else None
        )
        self._text = SeriesText(self.host.name)
        self._handed_on = 0
        self._dropped = 0
        self._exported: Callable[[], ExporterCounts] | None = None

    @property
    def statuses(self) -> list[CollectorStatus]:
        """What became of each collector."""
        return self._rounds.statuses

    def round(self) -> tuple[Round, dict[str, pl.DataFrame]]:
        """Collect once; return what came, and the same as rows of tables."""
        result = self._rounds.run()
        result.samples.extend(self._self_samples())
        tables: dict[str, pl.DataFrame] = {}
        if self._rings is not None:
            from_rings = self._rings.read()
            tables.update(from_rings.tables)
            result.samples.extend(from_rings.samples)
        tables["metrics"] = sample_rows(result.samples, result.time_ns, self._text)
        if self._bursts is not None:
            for name, rows in self._bursts.take().items():
                tables[name] = pl.concat([tables[name], rows]) if name in tables else rows
        if result.events:
            tables["events"] = event_rows(result.events)
        return result, tables

    def run(
        self,
        sink: AgentSink,
        stop: threading.Event,
        *,
        after_round: Callable[["Agent"], None] = lambda _: None,
        exported: "Callable[[], ExporterCounts] | None" = None,
    ) -> None:
        """Collect every ``interval_s`` until ``stop``; a round late is skipped, not made up for.

        ``exported`` tells what became of the rows that the sink took, for the agent's own samples.
        """
        self._exported = exported
        profiler = _Profiler(self) if self.settings.profile_to else None
        due = time.monotonic()
        while not stop.is_set():
            result, tables = self.round()
            try:
                sink.put_tables(tables)
                self._handed_on += len(result.samples)
            except (KansokuError, OSError):
                self._dropped += len(result.samples)
                _log.exception("a round was not taken by the sink")
            for event in result.events:
                _log.info("%s %s: %s", event.kind, event.subject, event.body)
            after_round(self)
            if profiler is not None:
                profiler.maybe(sink)
            now = time.monotonic()
            due = max(due + self.settings.interval_s, now)
            stop.wait(due - now)

    def running_ranks(self) -> list[tuple[str, int, int]]:
        """Return (run, rank, pid) of recorded processes on this node that live."""
        return self._rings.running() if self._rings is not None else []

    def _self_samples(self) -> list[Sample]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pages = (self.host.read("/proc/self/statm") or "").split()
        found = [
            Sample("kansoku.agent.cpu.time", (), usage.ru_utime + usage.ru_stime),
            Sample("kansoku.agent.samples", (), float(self._handed_on)),
        ]
        if len(pages) > 1 and self.settings.root == "/":
            resident = int(pages[1]) * resource.getpagesize()
            found.append(Sample("kansoku.agent.memory.usage", (), float(resident)))
        over = sum(status.dropped for status in self.statuses)
        for cause, count in (("sink", self._dropped), ("too_many_series", over)):
            series = labels(("kansoku.cause", cause))
            found.append(Sample("kansoku.agent.dropped", series, float(count)))
        return found if self._exported is None else [*found, *_export_samples(self._exported())]

    def close(self) -> None:
        """Close the collectors."""
        if self._bursts is not None:
            self._bursts.close()
        if self._sampling is not None:
            self._sampling.close()
        self._rounds.close()


def _export_samples(counts: "ExporterCounts") -> list[Sample]:
    """Return what became of the rows that were handed on, and the state of the spool."""
    found = [
        Sample("kansoku.agent.export.delivered", (), float(counts.rows_delivered)),
        Sample("kansoku.agent.export.pending", (), float(counts.rows_pending)),
        Sample("kansoku.agent.export.retries", (), float(counts.retries)),
        Sample("kansoku.agent.spool.disk.usage", (), float(counts.spool_bytes)),
        Sample("kansoku.agent.spool.failures", (), float(counts.spool_failures)),
    ]
    if counts.last_success_ns is not None:
        found.append(Sample("kansoku.agent.export.last_success", (), counts.last_success_ns / 1e9))
    lost = {
        ("kansoku.agent.dropped", "spool_full"): counts.rows_dropped,
        ("kansoku.agent.dropped", "refused"): counts.rows_refused,
        ("kansoku.agent.dropped", "rejected"): counts.rows_rejected,
        ("kansoku.agent.spool.lost", "full"): counts.segments_dropped,
        ("kansoku.agent.spool.lost", "damaged"): counts.segments_damaged,
    }
    for (name, cause), count in lost.items():
        found.append(Sample(name, labels(("kansoku.cause", cause)), float(count)))
    return found


def _switches(file: Path) -> tuple[SwitchTarget, ...]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot be read: {error}", where=f"--switches {file}") from None
    return tuple(read_switches(text, where=str(file)))


class _Profiler:
    """Profiles one rank after another in a thread of its own, so that no round waits for it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._thread: threading.Thread | None = None
        self._due = 0.0
        self._next = 0

    def maybe(self, sink: AgentSink) -> None:
        """Start a profile when one is due and none runs."""
        ranks = self._agent.running_ranks()
        busy = self._thread is not None and self._thread.is_alive()
        if not ranks or busy or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _PROFILE_EVERY_S
        target = ranks[self._next % len(ranks)]
        self._next += 1
        self._thread = threading.Thread(target=self._profile, args=(sink, *target), daemon=True)
        self._thread.start()

    def _profile(self, sink: AgentSink, run: str, rank: int, pid: int) -> None:
        from kansoku.node.edge.profiles import profile_process, push_profile

        agent = self._agent
        try:
            profile = profile_process(pid, start_ns=agent.host.now_ns())
            if agent.settings.profile_to is not None:
                names = {"run": run, "rank": str(rank), "host": agent.host.name}
                push_profile(agent.settings.profile_to, profile, names)
        except (KansokuError, OSError) as error:
            _log.warning("no profile of process %d: %s", pid, error)
            return
        rows = [
            {
                "run": run,
                "rank": rank,
                "start_ns": profile.start_ns,
                "end_ns": profile.end_ns,
                "stack": stack,
                "value": count,
                "unit": "samples",
            }
            for stack, count in profile.stacks.items()
        ]
        sink.put_tables({"profiles": pl.DataFrame(rows)})


def run_agent(
    settings: AgentSettings,
    *,
    to: str = DEFAULT_ENDPOINT,
    protocol: str = "arrow",
    token: str | None = None,
    spool: Path | None = None,
    stop: threading.Event | None = None,
    after_round: Callable[[Agent], None] = lambda _: None,
) -> None:
    """Run until ``stop``; rows wait in ``spool`` while ``to`` does not answer.

    Fast samples stand beside the spool; ``KANSOKU_SAMPLING_MS`` says how often, 0 for none.
    """
    from kansoku.telemetry import Exporter, MetricInfo

    check_endpoint(to, protocol)
    known = metrics()

    def describe(name: str) -> MetricInfo | None:
        entry = known.get(name)
        if entry is None:
            return None
        return MetricInfo(unit=entry.unit, kind=entry.kind.value, description=entry.meaning)

    spool = spool or default_spool()
    agent = Agent(_with_sampling(settings, spool))
    exporter = Exporter(
        to,
        protocol=protocol,
        token=token,
        spool=spool,
        resource={"host.name": agent.host.name, "service.name": "kansoku-agent"},
        describe=describe,
    )
    try:
        agent.run(
            exporter, stop or threading.Event(), after_round=after_round,
            exported=lambda: exporter.counts,
        )  # fmt: skip
    finally:
        agent.close()
        exporter.close()


def _with_sampling(settings: AgentSettings, spool: Path) -> AgentSettings:
    try:
        interval_s = sampling_interval_s()
    except ValueError:
        raise ConfigurationError(
            "KANSOKU_SAMPLING_MS is no number", remedy="milliseconds, 10 or more; 0 for none"
        ) from None
    if interval_s <= 0 or settings.samples_folder is not None:
        return settings
    folder = spool.with_name(f"{spool.name}-samples")
    return replace(settings, samples_folder=folder, sampling_interval_s=interval_s)


def agent_once(settings: AgentSettings) -> tuple[dict[str, Any], View]:
    """Collect once; return the JSON answer and a View. Nothing is sent."""
    agent = Agent(settings)
    try:
        result, tables = agent.round()
    finally:
        agent.close()
    return _answer(agent, result, tables), _view(agent, result)


def _answer(agent: Agent, result: Round, tables: Mapping[str, pl.DataFrame]) -> dict[str, Any]:
    known = metrics()
    return {
        "schema": "kansoku.agent/1",
        "node": agent.host.name,
        "time_ns": result.time_ns,
        "collectors": [
            {
                "name": status.name,
                "state": _state(status),
                "reason": status.absent or status.last_error,
                "samples": status.samples,
                "duration_ms": round(status.duration_ns / 1e6, 3),
            }
            for status in agent.statuses
        ],
        "samples": [
            {
                "metric": sample.metric,
                "unit": known[sample.metric].unit if sample.metric in known else None,
                "labels": dict(sample.labels),
                "value": sample.value,
            }
            for sample in result.samples
        ],
        "events": [
            {
                "time_ns": event.time_ns,
                "source": event.source,
                "subject": event.subject,
                "severity": event.severity,
                "kind": event.kind,
                "body": event.body,
                "attributes": event.attributes,
            }
            for event in result.events
        ],
        "rows": {name: len(rows) for name, rows in tables.items()},
    }


def _state(status: CollectorStatus) -> str:
    if status.absent is not None:
        return "absent"
    return "failed" if status.last_error is not None else "ok"


_TONES = {"ok": Tone.GOOD, "absent": Tone.MUTED, "failed": Tone.BAD}


def _view(agent: Agent, result: Round) -> View:
    states = [_state(status) for status in agent.statuses]
    rows = [
        (s.name, state, s.samples or None, round(s.duration_ns / 1e6, 2), s.absent or s.last_error)
        for s, state in zip(agent.statuses, states, strict=True)
    ]
    blocks: list[Table | Sentence] = [
        Table(
            title="Collectors",
            columns=[
                Column(title="collector"),
                Column(title="state"),
                Column(title="samples", numeric=True),
                Column(title="ms", numeric=True),
                Column(title="why"),
            ],
            rows=rows,
            tones=[_TONES[state] for state in states],
        )
    ]
    for event in result.events:
        if event.kind in {"collector_absent", "collector_failed"}:
            continue  # they stand in the table
        tone = {"error": Tone.BAD, "warning": Tone.NOTICE}.get(event.severity, Tone.PLAIN)
        text = f"{event.kind} {event.subject}"
        blocks.append(Sentence(text=text, tone=tone, detail=event.body))
    title = f"{agent.host.name}: {len(result.samples)} samples in one round"
    return View(title=title, blocks=blocks)

"""Rounds of collection: who is due, who is absent, who failed, what came out.

No effects of its own: the machine and the clocks come in through :class:`Host` and arguments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Event, Sample, labels

__all__ = ["CollectorStatus", "Round", "Rounds"]

# Hardware does not come and go by the second; NIC and GPU drivers may be loaded late, though.
_LOOK_AGAIN_NS = 300 * 1_000_000_000
_MAX_SAMPLES = 50_000
"""Of one collector in one round: what is beyond is dropped and counted, so that labels that
explode (a thousand mounts, a broken tree) cannot take the node's memory."""


@dataclass(slots=True, kw_only=True)
class CollectorStatus:
    """What became of one collector so far."""

    name: str
    title: str
    absent: str | None = None
    """Why there is nothing to read; None where there is, or before the first look."""
    looked_ns: int | None = None
    due_ns: int = 0
    last_success_ns: int | None = None
    duration_ns: int = 0
    failures: int = 0
    last_error: str | None = None
    samples: int = 0
    """Of the last run."""
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round gave."""

    time_ns: int
    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Rounds:
    """Runs collectors; survives any of them."""

    def __init__(
        self, collectors: Sequence[Collector], host: Host, *, monotonic_ns: Callable[[], int]
    ) -> None:
        """Take the collectors, the machine they read, and a clock for durations."""
        self._collectors = collectors
        self._host = host
        self._monotonic_ns = monotonic_ns
        self.statuses = [CollectorStatus(name=c.name, title=c.title) for c in collectors]
        self._said: set[str] = set()

    def run(self) -> Round:
        """Run every collector that is due, then the statistics on all of them."""
        now_ns = self._host.now_ns()
        result = Round(time_ns=now_ns)
        for collector, status in zip(self._collectors, self.statuses, strict=True):
            # The monotonic clock decides who is due, so a clock set back stops nobody.
            if self._monotonic_ns() >= status.due_ns:
                self._run_one(collector, status, result)
        for status in self.statuses:
            result.samples.extend(_self_samples(status))
        return result

    def _run_one(self, collector: Collector, status: CollectorStatus, result: Round) -> None:
        start = self._monotonic_ns()
        status.due_ns = start + round(collector.interval_s * 1e9)
        samples: list[Sample] = []
        events: list[Event] = []
        try:
            if not self._is_there(collector, status, result, start):
                return
            for item in collector.collect(self._host):
                if len(samples) + len(events) >= _MAX_SAMPLES:
                    status.dropped += 1
                elif isinstance(item, Sample):
                    samples.append(item)
                else:
                    events.append(item)
        except Exception as error:  # noqa: BLE001 - one sick collector must not stop the agent
            status.failures += 1
            message = f"{type(error).__name__}: {error}"[:500]
            if message != status.last_error:  # once for each new trouble, not every round
                status.last_error = message
                events.append(self._event(result, "warning", "collector_failed", status, message))
        else:
            status.last_success_ns = result.time_ns
            status.last_error = None
        status.duration_ns = self._monotonic_ns() - start
        status.samples = len(samples)
        result.samples.extend(samples)
        result.events.extend(events)

    def _is_there(
        self, collector: Collector, status: CollectorStatus, result: Round, now: int
    ) -> bool:
        fresh = status.looked_ns is not None and now - status.looked_ns < _LOOK_AGAIN_NS
        if fresh:
            return status.absent is None
        before = status.absent
        status.looked_ns = now
        status.absent = collector.absent(self._host)
        if status.absent is not None and status.name not in self._said:
            self._said.add(status.name)
            result.events.append(
                self._event(result, "info", "collector_absent", status, status.absent)
            )
        elif before is not None and status.absent is None:
            self._said.discard(status.name)
            result.events.append(
                self._event(result, "info", "collector_present", status, f"{status.title}: found")
            )
        return status.absent is None

    def _event(
        self, result: Round, severity: str, kind: str, status: CollectorStatus, body: str
    ) -> Event:
        return Event(
            time_ns=result.time_ns,
            source="agent",
            subject=f"node:{self._host.name}",
            severity=severity,
            kind=kind,
            body=body,
            attributes={"kansoku.collector": status.name},
        )

    def close(self) -> None:
        """Close every collector."""
        for collector in self._collectors:
            collector.close()


def _self_samples(status: CollectorStatus) -> list[Sample]:
    who = labels(("kansoku.collector", status.name))
    if status.absent is not None:
        return [Sample("kansoku.agent.collector.absent", who, 1.0)]
    found = [
        Sample("kansoku.agent.collector.failures", who, float(status.failures)),
        Sample("kansoku.agent.collector.duration", who, status.duration_ns / 1e9),
    ]
    if status.last_success_ns is not None:
        success_s = status.last_success_ns / 1e9
        found.append(Sample("kansoku.agent.collector.last_success", who, success_s))
    return found

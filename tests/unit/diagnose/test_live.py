"""The live detector on streams with known numbers: when it speaks, of what, and when it is quiet."""

import random

import polars as pl
import pytest

from kansoku.diagnose.live import Detector
from kansoku.model import Domain, Verdict, table_schema

MS, S = 1_000_000, 1_000_000_000
T = 1_790_000_000 * S


class Stream:
    """Eight ranks in step, 500 ms a step with one per cent of noise."""

    def __init__(self, ranks=8, seed=1, base=500.0, noise=0.01):
        self.random = random.Random(seed)
        self.ranks, self.base, self.noise = ranks, base, noise
        self.step, self.now = 0, T
        self.detector = Detector()
        self.changes = []

    def alive(self, nodes=("n1", "n2", "n3", "n4"), run=',"kansoku.run":"r1"'):
        rows = pl.DataFrame(
            {
                "labels": [f'{{"host.name":"{n}"{run}}}' for n in nodes],
                "metric": "kansoku.run.ring.records",
                "time_ns": self.now,
                "value": 1.0,
            }
        )
        self.changes += self.detector.signs_of_life(rows, self.now)

    def run(self, steps, *, factor=1.0, late=None, phase="forward"):
        for _ in range(steps):
            self.step += 1
            duration = self.base * factor * (1 + self.random.gauss(0, self.noise))
            rows = []
            for rank in range(self.ranks):
                row = dict.fromkeys(table_schema("steps"))
                row |= {"run": "r1", "rank": rank, "step": self.step, "start_ns": self.now,
                        "duration_ns": round(duration * MS), "complete": True}  # fmt: skip
                own = self.base * 0.8
                row["forward_ns"] = round(own * MS)
                if rank == late:
                    row[f"{phase}_ns"] = (row[f"{phase}_ns"] or 0) + round(
                        self.base * (factor - 1) * MS
                    )
                rows.append(row)
            self.now += round(duration * MS)
            frame = pl.DataFrame(rows, schema=table_schema("steps"))
            self.changes += self.detector.steps(frame, self.now)
            self.changes += self.detector.tick(self.now)
            if self.step % 10 == 0:
                self.alive()
        return self.changes

    def wait(self, seconds):
        """Let time go by with signs of life but no step; return when it was first told."""
        end = self.now + round(seconds * S)
        start = self.now
        while self.now < end:
            self.now += S
            self.alive()
            before = len(self.changes)
            self.changes += self.detector.tick(self.now)
            if len(self.changes) > before:
                return (self.now - start) / S
        return None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("base", [80.0, 500.0, 12_000.0])
def test_ten_per_cent_slower_is_told_within_twenty_steps_with_the_rank(seed, base):
    stream = Stream(seed=seed, base=base)
    assert stream.run(100) == []
    stream.run(20, factor=1.1, late=5)
    assert stream.changes, "not told within twenty steps"
    incident = stream.changes[0].incident
    assert (incident.kind, incident.state) == ("slow", "open")
    assert "rank 5 is late" in stream.changes[0].observations[0].text


def test_ten_per_cent_slower_for_all_is_told_and_names_no_rank():
    stream = Stream()
    stream.run(100)
    stream.run(20, factor=1.1)
    assert [c.incident.kind for c in stream.changes] == ["slow"]
    assert stream.changes[0].observations[0].rank is None


def test_a_slow_loader_is_the_storages():
    stream = Stream()
    stream.run(60)
    stream.run(20, factor=1.3, late=2, phase="data_wait")
    first = stream.changes[0].incident.hypotheses[0]
    assert (first.domain, str(first.subject)) == (Domain.STORAGE, "rank:2")


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_run_is_quiet(seed):
    """2,000 steps each with two per cent of noise, and a checkpoint of three steps' length."""
    stream = Stream(seed=seed, noise=0.02)
    for _ in range(20):
        stream.run(99)
        stream.run(1, factor=3.0)
    assert stream.changes == []


def test_back_at_the_old_pace_it_closes_once_not_at_the_first_good_step():
    stream = Stream()
    stream.run(60)
    stream.run(30, factor=1.2)
    assert [c.incident.state for c in stream.changes] == ["open"]
    stream.run(5)
    assert len(stream.changes) == 1
    stream.run(15)
    assert [c.incident.state for c in stream.changes] == ["open", "closed"]


@pytest.mark.parametrize("base", [50.0, 500.0, 3000.0])
def test_a_stall_is_told_within_ten_seconds_and_closed_by_the_next_step(base):
    stream = Stream(base=base)
    stream.run(50)
    took = stream.wait(60)
    assert took is not None
    assert took <= 10
    change = stream.changes[0]
    assert (change.incident.kind, change.hang) == ("hang", True)
    stream.run(3)
    assert stream.changes[-1].incident.state == "closed"


def test_a_run_that_ended_does_not_hang():
    """Its processes give no sign of life any more."""
    stream = Stream()
    stream.run(50)
    stream.now += 200 * S
    assert stream.detector.tick(stream.now) == []


def event(time_ns, body, subject="gpu:n2/3", severity="error"):
    row = {"time_ns": time_ns, "source": "kernel", "subject": subject, "severity": severity,
           "kind": "xid", "body": body, "attributes": None}  # fmt: skip
    return pl.DataFrame([row], schema=table_schema("events"))


def test_a_fatal_xid_and_the_stall_of_its_job_are_one_incident_of_the_gpu():
    stream = Stream()
    stream.run(50)
    xid = event(stream.now, "NVRM: Xid (PCI:0000:3a:00): 79, GPU has fallen off the bus.")
    stream.changes += stream.detector.events(xid, stream.now)
    assert [str(c.incident.subject) for c in stream.changes] == ["gpu:n2/3"]
    stream.wait(30)
    assert len({c.incident.id for c in stream.changes}) == 1
    last = stream.changes[-1].incident
    assert (last.kind, last.state) == ("hang", "updated")
    assert last.hypotheses[0].domain is Domain.GPU_HARDWARE
    assert stream.changes[-1].hang


def test_events_that_stay_away_close_their_incident():
    stream = Stream()
    xid = event(T, "NVRM: Xid (PCI:0000:3a:00): 79, GPU has fallen off the bus.")
    opened = stream.detector.events(xid, T)
    again = stream.detector.events(xid, T + S)
    assert (len(opened), again) == (1, [])
    assert stream.detector.tick(T + 300 * S) == []
    closed = stream.detector.tick(T + 602 * S)
    assert [c.incident.state for c in closed] == ["closed"]


def test_a_silent_node_is_told_and_closed_when_it_speaks_again():
    stream = Stream()
    for _ in range(10):
        stream.now += 10 * S
        stream.alive(run="")
    for _ in range(8):
        stream.now += 10 * S
        stream.alive(("n1", "n2", "n3"), run="")
        stream.changes += stream.detector.tick(stream.now)
    assert [str(c.incident.subject) for c in stream.changes] == ["node:n4"]
    stream.now += S
    stream.alive(run="")
    assert [c.incident.state for c in stream.changes] == ["open", "closed"]


def test_a_node_that_goes_with_its_job_is_the_cause_of_the_stall():
    stream = Stream()
    for _ in range(20):
        stream.run(20)
    for _ in range(6):
        stream.now += 10 * S
        stream.alive(("n1", "n2", "n3"))
        stream.changes += stream.detector.tick(stream.now)
    assert len({c.incident.id for c in stream.changes}) == 1
    assert str(stream.changes[-1].incident.subject) == "node:n4"


def test_more_from_outside_makes_an_unknown_stall_a_cause():
    from kansoku.diagnose.observation import Observation

    stream = Stream()
    stream.run(30)
    stream.wait(20)
    seen = Observation(
        rule="stack.outlier", text="reads data", source="py-spy", kind="trace",
        domain=Domain.STORAGE, component="data loading", role="either", strength=0.75, meaning="",
        action="", rank=6, time_ns=stream.now,
    )  # fmt: skip
    changes = stream.detector.more("r1", [seen], stream.now)
    assert changes[0].incident.verdict is Verdict.FOUND
    assert str(changes[0].incident.subject) == "rank:6"

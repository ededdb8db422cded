"""Rounds survive sick collectors, say what is absent once, and bound what comes out."""

import pytest

from kansoku.errors import ConfigurationError
from kansoku.node import Collector, Rounds, Sample, labels, load_collectors
from kansoku.node.counters import Counters
from kansoku.node.edge.machine import Machine


class Clock:
    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns


class Fine(Collector):
    name, title, metrics = "fine", "works", ("system.uptime",)
    there = True

    def absent(self, host):
        return None if self.there else "not here"

    def collect(self, host):
        yield Sample("system.uptime", (), 1.0)


class Sick(Fine):
    name = "sick"
    message = "broken"

    def collect(self, host):
        yield Sample("system.uptime", (), 2.0)
        raise ValueError(self.message)


class Endless(Fine):
    name = "endless"

    def collect(self, host):
        for number in range(60_000):
            yield Sample("system.uptime", labels(("n", str(number))), 1.0)


def rounds(tmp_path, *collectors):
    clock = Clock()
    host = Machine(root=tmp_path, name="n", now_ns=lambda: 5)
    return Rounds(collectors, host, monotonic_ns=clock), clock


def kinds(result):
    return [event.kind for event in result.events]


def test_a_sick_collector_costs_only_itself(tmp_path):
    sick = Sick()
    run, _ = rounds(tmp_path, sick, Fine())
    first = run.run()
    assert {s.value for s in first.samples if s.metric == "system.uptime"} == {1.0, 2.0}
    assert kinds(first) == ["collector_failed"]
    assert kinds(run.run()) == [], "the same trouble is not said again"
    sick.message = "broken otherwise"
    assert kinds(run.run()) == ["collector_failed"]
    assert run.statuses[0].failures == 3
    assert run.statuses[1].last_success_ns == 5


def test_absence_is_said_once_and_looked_at_again(tmp_path):
    fine = Fine()
    fine.there = False
    run, clock = rounds(tmp_path, fine)
    assert kinds(run.run()) == ["collector_absent"]
    for _ in range(100):
        clock.ns += 10_000_000_000
        assert kinds(run.run()) == []
    fine.there = True
    clock.ns += 301_000_000_000
    assert kinds(run.run()) == ["collector_present"]


def test_labels_without_end_are_bounded_and_counted(tmp_path):
    run, _ = rounds(tmp_path, Endless())
    result = run.run()
    assert sum(s.metric == "system.uptime" for s in result.samples) == 50_000
    assert run.statuses[0].dropped == 10_000


def test_intervals_follow_the_monotonic_clock(tmp_path):
    class Slow(Fine):
        interval_s = 60.0

    run, clock = rounds(tmp_path, Slow())
    found = []
    for _ in range(13):
        found.append(sum(s.metric == "system.uptime" for s in run.run().samples))
        clock.ns += 10_000_000_000
    assert found == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_unknown_collectors_are_refused_with_the_known_names():
    with pytest.raises(ConfigurationError, match="known: cpu, memory"):
        load_collectors(["gpus"])


def test_a_bad_plug_in_is_named_with_the_expected_signature(monkeypatch):
    monkeypatch.setattr("kansoku.node.collector.BUILT_IN", {"bad": "kansoku.node.sample:Sample"})
    with pytest.raises(ConfigurationError, match=r"bad .*expected class X"):
        load_collectors(["bad"])


@pytest.mark.parametrize(
    ("bits", "raws", "total"),
    [
        (64, [10, 15, 15], 15),
        (64, [100, 3], 103),  # a reset: 3 since
        (32, [2**32 - 6, 4], 2**32 + 4),  # a wrap
        (32, [1000, 4], 1004),  # far from its limit: a reset
        (64, [2**63, 5], 2**63 + 5),
    ],
)
def test_counters_only_grow(bits, raws, total):
    counters = Counters()
    for raw in raws:
        grown = counters.grow("s", raw, bits=bits)
    assert grown == total

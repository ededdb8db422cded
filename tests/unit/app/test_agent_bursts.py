"""The agent's burst collector: rows each window, and an agent that goes on without ports."""

import time

import polars as pl

from kansoku.app.agent_bursts import BurstCollector
from kansoku.burst.policy import BurstPolicy
from kansoku.errors import InputError


def test_windows_come_with_the_rounds(monkeypatch):
    from kansoku.app import burst

    made = burst.make_sampler

    def quick(node, *, ports, interval_s):
        return made(
            node, ports=ports or ["lo"], rates_bits_per_s={"lo": 1e9},
            interval_s=interval_s, policy=BurstPolicy(window_s=0.2),
        )  # fmt: skip

    monkeypatch.setattr(burst, "make_sampler", quick)
    monkeypatch.setattr("kansoku.app.agent_bursts._POLL_S", 0.02)
    monkeypatch.setattr("kansoku.burst.edge.ports._interfaces", _loopback)
    collector = BurstCollector("n", 0.001)
    try:
        deadline = time.monotonic() + 20
        rows = {}
        while not rows:
            assert time.monotonic() < deadline
            rows = collector.take()
            time.sleep(0.02)
    finally:
        collector.close()
    names = set(rows["metrics"]["metric"])
    assert {"kansoku.burst.window.samples", "kansoku.burst.window.missed"} <= names
    assert collector.error is None


def _loopback(root, rates):
    import socket

    from kansoku.burst.edge.ports import Port

    port = Port(name="lo", line_rate_bits_per_s=rates["lo"], rate_source="given",
                index=socket.if_nametoindex("lo"))  # fmt: skip
    return [("lo", port, "")]


def test_a_node_without_ports_says_so_once():
    collector = BurstCollector("n", 0.001, ports=["nope*"])
    assert collector.take() == {} == collector.take()
    assert "no port 'nope*'" in collector.error
    collector.close()


class Sampler:
    """A sampler whose port goes away when told."""

    def __init__(self, number):
        self.number = number
        self.gone = {}
        self.closed = False

    def start(self):
        pass

    def poll(self):
        return {}

    def windows(self, *, final=False):
        return ["final"] if final else []

    def tables(self, windows):
        return {"metrics": pl.DataFrame({"sampler": [self.number]})} if windows else {}

    def close(self):
        self.closed = True


def test_a_port_that_went_away_is_said_once_and_looked_for_again(monkeypatch, caplog):
    made = []

    def make(_node, **_options):
        if len(made) == 1 and not back:
            raise InputError("no port 'nic'")
        made.append(Sampler(len(made)))
        return made[-1]

    back = False
    now = 100.0
    monkeypatch.setattr("kansoku.app.burst.make_sampler", make)
    collector = BurstCollector("n", 0.001, ports=["nic"], clock=lambda: now)
    assert collector.take() == {}
    made[0].gone = {"nic": 5}
    for _ in range(3):
        assert collector.take() == {}  # not there yet: the old one stays
    assert caplog.messages == ["no microbursts of nic: it went away"]
    assert not made[0].closed
    back = True
    assert collector.take() == {}  # it looks every half a minute only
    now += 31
    assert collector.take()["metrics"]["sampler"].to_list() == [0]  # what the old one still had
    assert made[0].closed
    assert len(made) == 2
    collector.close()
    assert made[1].closed

"""The agent's burst collector: rows each window, and an agent that goes on without ports."""

import time

from kansoku.app.agent_bursts import BurstCollector
from kansoku.burst.policy import BurstPolicy


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

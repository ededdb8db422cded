"""Controller, analyser and ledger on a fabric of 2 ToRs × 2 spines, window by window."""

import itertools
import re

import numpy as np
import pytest

from kansoku.errors import ConfigurationError, InputError
from kansoku.fabric.analyser import Analysis, Anomaly
from kansoku.fabric.controller import Controller
from kansoku.fabric.ledger import Ledger
from kansoku.fabric.messages import Register, RnicAddress, ServiceTuple, decode_settings
from kansoku.fabric.pinglist import SERVICE
from kansoku.fabric.settings import Settings
from kansoku.fabric.summary import Report, Row, RowColumns, TraceRow
from kansoku.fabric.topology import Topology
from kansoku.fabric.window import rows_of

S = 1_000_000_000
POLICY = Settings(window_s=20, grace_s=2)


def topology():
    """Hosts a b under t0, c d under t1; host e has an RNIC under each."""
    return Topology(
        rnics=("a/0", "b/0", "c/0", "d/0", "e/0", "e/1"),
        hosts=("a", "b", "c", "d", "e"),
        tors=("t0", "t1"),
        spines=("s0", "s1"),
        rnic_host=np.array([0, 1, 2, 3, 4, 4], dtype=np.int32),
        rnic_tor=np.array([0, 0, 1, 1, 0, 1], dtype=np.int32),
        parallel_paths=2,
        rail_optimised=False,
        tor_rail=np.array([-1, -1], dtype=np.int32),
    )


class Fabric:
    """Feeds a controller with windows whose losses a function decides."""

    def __init__(self):
        self.c = Controller(topology(), POLICY, now_ns=0)
        self.start = 0
        for n, name in enumerate(self.c.topology.rnics):
            self.c.register(Register(name[0], 1, [RnicAddress(name, f"10.0.0.{n}", 100 + n)]), -S)
        self.plan = self.c.plan(0)

    def path(self, source, target, port):
        tor = self.c.topology.rnic_tor
        a, b = (f"t{tor[i]}" for i in (source, target))
        return [a] if a == b else [a, f"s{port % 2}", b]

    def window(self, lost=lambda *_: 0.0, *, skip=(), late=0, delay=100_000, service=(), stop=None):
        names = self.c.topology.rnics
        tuples = [
            (int(s), int(t), int(p), int(k))
            for s, t, p, k in zip(
                self.plan.source, self.plan.target, self.plan.port, self.plan.kind, strict=True
            )
        ] + [(s, t, p, SERVICE) for s, t, p in service]
        for source, name in enumerate(names):
            if name[0] in skip:
                continue
            rows, traces = [], []
            for s, t, port, kind in tuples:
                if t == source:  # the way back of a peer's tuple
                    way = self.path(t, s, port)
                    cut = stop(way) if stop else len(way)
                    traces.append(TraceRow(s, port, way[:cut], cut == len(way)))
                if s != source:
                    continue
                forward, back = self.path(s, t, port), self.path(t, s, port)
                ratio = lost(names[s], names[t], forward, back)
                gone = round(20 * ratio)
                slow = delay(names[t]) if callable(delay) else delay
                rows.append(Row(t, port, kind, 20, gone, late if gone else 0, 100 + t,
                                *((15_000, 40_000, slow, slow, 9_000) if gone < 20 or late else
                                  (None,) * 5), 1))  # fmt: skip
                cut = stop(forward) if stop else len(forward)
                traces.append(TraceRow(t, port, forward[:cut], cut == len(forward)))
            self.c.report(
                Report(name, 1, self.start, 20 * S, RowColumns.pack(rows), traces,
                       rtt={"cluster": {40: 10}}, responder={}, prober={}), self.start + 21 * S
            )  # fmt: skip
        self.start += 20 * S
        (outcome,) = self.c.step(self.start + 3 * S)
        return outcome.analysis

    def found(self):
        return [(e.anomaly.kind, e.anomaly.subject) for e in self.c.ledger.open()]


@pytest.fixture
def fabric():
    f = Fabric()
    assert f.window().verdict == "clear"
    return f


def crosses(path, a, b):
    return any(pair == (a, b) for pair in itertools.pairwise(path))


def test_clear_says_so_aloud(fabric):
    analysis = fabric.window()
    assert analysis.reason.startswith("network cleared: ")
    assert "6 of 6 RNICs" in analysis.reason


def test_no_report_is_unknown_not_clear():
    c = Controller(topology(), POLICY, now_ns=0)
    (outcome,) = c.step(23 * S)
    assert outcome.analysis.verdict == "unknown"
    assert c.ledger.open() == []


def test_dead_rnic(fabric):
    analysis = fabric.window(lambda s, t, f, b: "b/0" in (s, t))
    assert [(a.kind, a.subject) for a in analysis.anomalies] == [("rnic", "nic:b/0")]


def test_silent_host(fabric):
    analysis = fabric.window(lambda s, t, f, b: t[0] == "b", skip=("b",))
    assert [(a.kind, a.subject) for a in analysis.anomalies] == [("host", "node:b")]
    assert "has not reported for 20.0 s" in analysis.anomalies[0].evidence[0]


def test_stopped_responder_is_the_host_because_its_own_probes_arrive(fabric):
    analysis = fabric.window(lambda s, t, f, b: t == "b/0")
    assert [(a.kind, a.subject) for a in analysis.anomalies] == [("host", "node:b")]
    assert "its responder does not" in analysis.anomalies[0].evidence[-1]


def test_a_host_that_answers_its_neighbours_is_acquitted(fabric):
    """Few tuples may all come back over a lossy link while none of its own goes out over it."""
    analysis = fabric.window(lambda s, t, f, b: 0.5 if t == "b/0" and f[0] == "t1" else 0.0)
    assert "host" not in [a.kind for a in analysis.anomalies]


def test_late_answers_are_the_host_not_the_network(fabric):
    analysis = fabric.window(lambda s, t, f, b: 0.4 if "b/0" in (s, t) else 0, late=8)
    assert ("host", "node:b") in [(a.kind, a.subject) for a in analysis.anomalies]
    assert "rnic" not in [a.kind for a in analysis.anomalies]


def test_high_responder_delay_without_loss_is_the_host(fabric):
    analysis = fabric.window(delay=lambda t: 80_000_000 if t == "b/0" else 100_000)
    assert [(a.kind, a.subject) for a in analysis.anomalies] == [("host", "node:b")]


def test_every_rnic_of_a_host_is_the_host(fabric):
    analysis = fabric.window(lambda s, t, f, b: 1.0 if "e" in (s[0], t[0]) else 0.0)
    assert [(a.kind, a.subject) for a in analysis.anomalies] == [("host", "node:e")]


def test_dead_tor(fabric):
    analysis = fabric.window(lambda s, t, f, b: "t1" in f)
    assert [(a.kind, a.subject) for a in analysis.anomalies] == [("switch", "switch:t1")]


def test_what_probes_cannot_tell_apart_all_lead_until_traces_decide(fabric):
    def lost(s, t, f, b):
        return crosses(f, "t0", "s1") or crosses(b, "t0", "s1")

    tied = fabric.window(lost)
    assert {a.subject for a in tied.anomalies} >= {"link:s1-t0", "link:s1-t1"}
    assert all(a.tied_with for a in tied.anomalies)
    decided = fabric.window(lost, stop=lambda f: 1 if crosses(f, "t0", "s1") else
                            2 if crosses(f, "s1", "t0") else len(f))  # fmt: skip
    assert [a.subject for a in decided.anomalies] == ["link:s1-t0"]


def test_dead_spine_when_traces_stop_on_both_sides(fabric):
    analysis = fabric.window(
        lambda s, t, f, b: "s0" in f or "s0" in b, stop=lambda f: 1 if "s0" in f else len(f)
    )
    assert [(a.kind, a.subject) for a in analysis.anomalies] == [("switch", "switch:s0")]


def test_probes_to_an_old_queue_pair_say_nothing(fabric):
    fabric.c.register(Register("b", 2, [RnicAddress("b/0", "10.0.0.1", 999)]), fabric.start + 5 * S)
    analysis = fabric.window(lambda s, t, f, b: t == "b/0")
    assert analysis.verdict == "clear"
    assert analysis.excluded["stale QPN"] > 0


def test_goodbye_is_no_fault(fabric):
    fabric.c.leave(["b/0"])
    analysis = fabric.window(lambda s, t, f, b: t == "b/0", skip=("b",))
    assert analysis.verdict == "clear"
    assert analysis.excluded["agent left"] > 0
    assert all(
        entry.target != 1 for entry in fabric.c.pinglist("a/0", fabric.start).probes.entries()
    )


def test_impact_follows_running_jobs(fabric):
    def lost(s, t, f, b):
        return "b/0" in (s, t)

    tuples = [(0, 2, 50000), (0, 2, 50001)]
    assert fabric.window(lost, service=tuples).anomalies[0].impact == "P2"
    tuples = [(1, 2, 50000), (1, 2, 50001)]
    analysis = fabric.window(lost, service=tuples)
    assert {a.impact for a in analysis.anomalies} == {"P0"}
    assert {a.scope for a in analysis.anomalies} == {"cluster", "service"}

    def weak(s, t, f, b):  # the cluster loses there, the job does not (yet)
        return "b/0" in (s, t) and "t1" not in f

    analysis = fabric.window(weak, service=tuples)
    assert {(a.scope, a.impact) for a in analysis.anomalies} == {("cluster", "P1")}


def test_a_degraded_job_makes_it_p0(fabric):
    fabric.c.set_service("42", [ServiceTuple("b/0", "c/0", 50000)])
    fabric.c.set_degraded("42", degraded=True)
    analysis = fabric.window(
        lambda s, t, f, b: "b/0" in (s, t) and "t1" not in f, service=[(1, 2, 50000)]
    )
    assert {a.impact for a in analysis.anomalies} == {"P0"}


def test_service_tuples_come_and_go_with_the_job(fabric):
    version = fabric.c.version(fabric.start)
    assert fabric.c.set_service("42", [ServiceTuple("a/0", "c/0", 50000)]) == 1
    assert fabric.c.version(fabric.start) != version
    kinds = [e.kind for e in fabric.c.pinglist("a/0", fabric.start).probes.entries()]
    assert kinds.count(SERVICE) == 1
    # The target traces the way back of the same tuple.
    assert (0, 50000) in [(t.target, t.port) for t in fabric.c.pinglist("c/0", 0).traces.entries()]
    fabric.c.end_service("42")
    assert SERVICE not in [e.kind for e in fabric.c.pinglist("a/0", fabric.start).probes.entries()]


def test_strangers_are_refused(fabric):
    with pytest.raises(InputError, match="not in the cluster file"):
        fabric.c.register(Register("x", 1, [RnicAddress("x/0", "10.9.9.9", 1)]), 0)
    with pytest.raises(InputError):
        fabric.c.pinglist("x/0", 0)
    fabric.c.report(Report("x/0", 1, fabric.start, 20 * S, RowColumns.pack([])), fabric.start)
    assert fabric.c.strangers == 2


def test_torn_and_foreign_reports_are_refused(fabric):
    row = Row(2, 50123, 1, 20, 20, 0, 102, None, None, None, None, None, 1)
    good = RowColumns.pack([row]).columns
    for bad in ([], [*good[:-1], good[-1][:-1]], [*good[:-1], b""], RowColumns.pack(
        [Row(99, 50123, 1, 20, 20, 0, 102, None, None, None, None, None, 1)]
    ).columns):  # fmt: skip
        with pytest.raises(InputError):
            fabric.c.report(Report("a/0", 1, fabric.start, 20 * S, RowColumns(bad)), fabric.start)
    assert fabric.window().verdict == "clear"


def test_columns_round_trip():
    rows = [Row(3, 65535, 2, 9, 4, 1, 2**24, 1, 2, None, 4, 5, -1, 6)]
    back = rows_of([(7, RowColumns.pack(rows))])
    assert [int(getattr(back, n)[0]) for n in ("source", "target", "port", "kind", "qpn")] == [
        7, 3, 65535, 2, 2**24,
    ]  # fmt: skip
    assert np.isnan(back.responder_p50_ns[0])
    assert (back.slow[0], back.stamps[0], back.late[0], back.rtt_p99_ns[0]) == (6, -1, 1, 2)


def test_a_machine_that_slept_does_not_judge_the_past(fabric):
    outcomes = fabric.c.step(fabric.start + 3600 * S)
    assert len(outcomes) <= 4


def test_reports_of_closed_windows_teach_paths_only(fabric):
    fabric.window()
    row = Row(2, 50123, 1, 20, 20, 0, 102, None, None, None, None, None, 1)
    trace = TraceRow(2, 50123, ["t0", "s1", "t1"], True)
    fabric.c.report(Report("a/0", 1, 0, 20 * S, RowColumns.pack([row]), [trace]), fabric.start)
    assert fabric.window().verdict == "clear"
    number = fabric.c._known(0, 2, 50123)
    assert fabric.c.book.hops_of(number) == ["t0", "s1", "t1"]


# -- hysteresis ---------------------------------------------------------------------------------


def analysis_of(number, *anomalies):
    return Analysis(
        start_ns=number * 20 * S, end_ns=(number + 1) * 20 * S,
        verdict="rnic" if anomalies else "clear", reason="", anomalies=anomalies, sla={},
        probes=1, lost=0,
    )  # fmt: skip


def anomaly(strong):
    return Anomaly(kind="rnic", subject="nic:a/0", scope="cluster", loss_ratio=0.5, votes=9,
                   probes=18, evidence=("x",), strong=strong, confidence=0.9)  # fmt: skip


def test_weak_signs_need_two_windows_strong_ones_do_not():
    ledger = Ledger(POLICY)
    assert ledger.update(analysis_of(0, anomaly(strong=False))) == []
    (change,) = ledger.update(analysis_of(1, anomaly(strong=False)))
    assert (change.state, change.entry.onset_ns) == ("open", 0)
    ledger = Ledger(POLICY)
    assert [c.state for c in ledger.update(analysis_of(0, anomaly(strong=True)))] == ["open"]


def test_two_weak_windows_apart_are_not_two_in_a_row():
    ledger = Ledger(POLICY)
    for number, seen in enumerate([True, False, True, False]):
        found = [anomaly(strong=False)] if seen else []
        assert ledger.update(analysis_of(number, *found)) == []


def test_it_closes_after_two_clean_windows():
    ledger = Ledger(POLICY)
    ledger.update(analysis_of(0, anomaly(strong=True)))
    assert ledger.update(analysis_of(1)) == []
    assert len(ledger.open()) == 1
    assert [c.state for c in ledger.update(analysis_of(2))] == ["closed"]
    assert ledger.open() == []


def test_settings_travel_and_are_checked():
    assert decode_settings({"window_s": 2.0, "minimum_lost": 3, "from_the_future": 1}) == Settings(
        window_s=2.0, minimum_lost=3
    )
    with pytest.raises(ConfigurationError, match="4791"):
        Settings(port=4791)
    with pytest.raises(ConfigurationError, match="window_s"):
        Settings(window_s=0)


def test_a_service_ends_when_nobody_follows_it_any_more():
    c = Fabric().c
    told = [ServiceTuple("b/0", "c/0", 50000)]
    c.set_service("42", told, until_ns=30 * S)
    c.set_service("43", told)
    version = c.version(0)
    c.step(20 * S)
    c.set_service("42", told, until_ns=50 * S)  # renewed: nothing to fetch for the agents
    assert c.version(0) == version
    c.step(50 * S)
    assert set(c.services()) == {"42", "43"}
    c.step(51 * S)
    assert set(c.services()) == {"43"}
    assert c.version(0) != version


def test_a_pinglist_holds_the_services_of_both_ends():
    c = Fabric().c
    told = [("b/0", "c/0", 50000), ("a/0", "c/0", 50001), ("b/0", "d/0", 50002)]
    c.set_service("42", [ServiceTuple(*one) for one in told])
    index = c.topology.index
    for name in c.topology.rnics:
        pinglist = c.pinglist(name, 0)
        for tuples, mine, other in ((pinglist.probes, 0, 1), (pinglist.traces, 1, 0)):
            found = {(e.target, e.port) for e in tuples.entries() if e.kind == SERVICE}
            assert found == {(index[one[other]], one[2]) for one in told if one[mine] == name}


ROW = {
    "target": 2, "port": 50123, "kind": 1, "probes": 20, "lost": 0, "late": 0, "qpn": 102,
    "rtt_p50_ns": 1, "rtt_p99_ns": 2, "responder_p50_ns": 3, "responder_p99_ns": 4,
    "prober_p99_ns": 5, "stamps": 1, "slow": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"probes": 0}, {"probes": -5}, {"lost": 21}, {"lost": -1}, {"late": 1}, {"slow": 21},
        {"probes": 1 << 62, "lost": 1 << 62}, {"kind": 3}, {"kind": -1}, {"stamps": 3},
        {"rtt_p50_ns": float("inf")}, {"prober_p99_ns": -1e300}, {"target": -1}, {"target": 6},
    ],
)  # fmt: skip
def test_a_report_that_cannot_be_true_does_not_spoil_the_window(fabric, wrong):
    rows = RowColumns.pack([Row(**ROW | wrong)])
    with pytest.raises(InputError):
        fabric.c.report(Report("a/0", 9, fabric.start, 20 * S, rows), fabric.start)
    fabric.c.report(
        Report("a/0", 9, fabric.start, 20 * S, RowColumns.pack([Row(**ROW)])), fabric.start
    )
    assert fabric.window().verdict == "clear"


@pytest.mark.parametrize(
    "wrong",
    [
        {"traces": [TraceRow(6, 50123, [], True)]}, {"traces": [TraceRow(-1, 50123, [], True)]},
        {"traces": [TraceRow(2, 80, [], True)]}, {"rtt": {"cluster": {-1: 1}}},
        {"responder": {"cluster": {5000: 1}}}, {"prober": {"cluster": {3: -1}}},
    ],
)  # fmt: skip
def test_traces_and_histograms_are_checked_too(fabric, wrong):
    rows = RowColumns.pack([Row(**ROW)])
    with pytest.raises(InputError):
        fabric.c.report(Report("a/0", 9, 0, 20 * S, rows, **wrong), fabric.start)


def test_one_rnic_cannot_fill_the_memory_with_incarnations(fabric):
    for incarnation in range(100):
        rows = RowColumns.pack([Row(**ROW)])
        fabric.c.report(Report("a/0", incarnation, fabric.start, 20 * S, rows), fabric.start)
    (outcome,) = fabric.c.step(fabric.start + 23 * S)
    assert len(outcome.window.rows) == 4


def rnic(incarnation, *names, qpn=900):
    return Register("a", incarnation, [RnicAddress(n, "10.0.0.77", qpn) for n in names])


def test_two_agents_under_one_name_do_not_take_it_from_each_other(fabric):
    now = fabric.start
    fabric.c.register(rnic(5, "a/0"), now)
    version = fabric.c.version(now)
    with pytest.raises(InputError, match=r"started later, at 10\.0\.0\.77"):
        fabric.c.register(rnic(4, "a/0", qpn=901), now + S)
    assert fabric.c.version(now) == version
    assert fabric.c.knows("a/0", "900")
    # Whoever holds it has gone silent: its clock may have been ahead, and it is dead.
    fabric.c.register(rnic(4, "a/0", qpn=901), now + 21 * S)
    assert fabric.c.knows("a/0", "901")


def test_a_name_is_free_after_the_goodbye(fabric):
    fabric.c.register(rnic(5, "a/0"), fabric.start)
    fabric.c.leave(["a/0"])
    fabric.c.register(rnic(4, "a/0", qpn=901), fabric.start)
    assert fabric.c.knows("a/0", "901")


def test_a_registration_is_taken_whole_or_not_at_all(fabric):
    with pytest.raises(InputError, match="x/9"):
        fabric.c.register(rnic(5, "a/0", "x/9"), fabric.start)
    assert fabric.c.knows("a/0", "100")


def test_a_clock_that_was_set_back_does_not_end_the_watch(fabric):
    fabric.c.step(fabric.start + 3600 * S)  # an hour ahead, and put right
    fabric.start += 40 * S
    fabric.c.step(fabric.start)
    assert fabric.window().verdict == "clear"
    assert fabric.c.history[-1].window.start_ns == fabric.start - 20 * S


def test_jobs_are_bounded(fabric, monkeypatch):
    monkeypatch.setattr("kansoku.fabric.controller._JOBS", 3)
    for number in range(3):
        fabric.c.set_service(str(number), [])
    with pytest.raises(InputError, match="3 jobs"):
        fabric.c.set_service("one more", [])
    fabric.c.set_service("2", [])


def test_an_rnic_is_no_peer_of_itself(fabric):
    assert fabric.c.set_service("42", [ServiceTuple("a/0", "a/0", 50000)]) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window_s", "20"), ("window_s", float("nan")), ("window_s", 1e300), ("grace_s", -1),
        ("port", True), ("port", 1.5), ("seed", "a"), ("rnic_loss", 7), ("max_hops", 0),
        ("max_hops", 1000), ("clear_after", 0), ("probes_per_s", float("inf")),
    ],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_named_with_its_value(name, value):
    with pytest.raises(
        ConfigurationError, match=rf"fabric setting {name} = {re.escape(repr(value))} must be"
    ):
        Settings(**{name: value})


@pytest.mark.parametrize(
    "address", ["224.0.0.1", "255.255.255.255", "0.0.0.0", "::", "ff02::1", "fe80::1%eth0", "a"]
)
def test_only_the_address_of_one_rnic_is_probed(fabric, address):
    with pytest.raises(InputError, match=re.escape(repr(address))):
        fabric.c.register(Register("a", 1, [RnicAddress("a/0", address, 1)]), fabric.start)


def test_nobody_holds_a_name_by_a_start_in_the_future(fabric):
    with pytest.raises(InputError, match="started in the future"):
        fabric.c.register(rnic(1 << 63, "a/0"), fabric.start)


@pytest.mark.parametrize(
    ("off_s", "says"), [(300, "its clock is 300 s ahead of"), (-300, "its clock is 300 s behind")]
)
def test_a_clock_that_is_off_is_said_and_no_silence(fabric, off_s, says):
    for _ in range(20):
        fabric.window()
    for _ in range(3):
        start = fabric.start + off_s * S
        rows = RowColumns.pack([Row(**ROW)])
        fabric.c.report(Report("a/0", 1, start, 20 * S, rows), fabric.start + 20 * S)
        analysis = fabric.window(skip=("a",))
    (found,) = analysis.anomalies
    assert found.subject == "node:a"
    assert says in found.evidence[0]


def test_a_report_of_the_far_future_does_not_end_silence(fabric):
    rows = RowColumns.pack([Row(**ROW)])
    fabric.c.report(Report("a/0", 1, 1 << 63, 20 * S, rows), fabric.start)
    with pytest.raises(InputError, match="a window of"):
        fabric.c.report(Report("a/0", 1, fabric.start, 1 << 62, rows), fabric.start)
    for _ in range(2):
        analysis = fabric.window(skip=("a",))
    assert [one.subject for one in analysis.anomalies] == ["node:a"]


def test_agents_without_peers_are_no_fault(fabric):
    for _ in range(3):
        for name in fabric.c.topology.rnics:
            report = Report(name, 1, fabric.start, 20 * S, RowColumns.pack([]))
            fabric.c.report(report, fabric.start + 21 * S)
        fabric.start += 20 * S
        (outcome,) = fabric.c.step(fabric.start + 3 * S)
    assert (outcome.analysis.verdict, outcome.analysis.anomalies) == ("unknown", ())
    assert "6 of 6 RNICs report, none of which knows another one" in outcome.analysis.reason

"""Faults injected into real fabrics of network namespaces, each to be located by real agents.

Three fabrics stand at once and go through their faults side by side: 4 hosts on 2 ToRs of two, a
ToR of eight beside one of four, and 8 hosts on a rail-optimised fabric. Windows are 2 s long.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl
import pytest
from tests.labs import fabric as labs

from kansoku.app.fabric import follow, service_end, service_start
from kansoku.app.store import open_store
from kansoku.model import ProcessGroup, RankFacts, RunFacts, ring

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


@contextlib.contextmanager
def stopped(lab, host):
    lab.signal(host, signal.SIGSTOP)
    try:
        yield
    finally:
        lab.signal(host, signal.SIGCONT)


@contextlib.contextmanager
def congested(lab, tor, spine, source, target):
    with lab.bursts(source, target), lab.rate_limit(tor, spine):
        yield


# Fabric, fault, subjects that may be blamed (all found must be among them, one at least).
FAULTS = {
    "small": [
        ("lossy link", lambda lab: lab.lossy_link("tor0", "spine1", 30), ["link:spine1-tor0"]),
        ("dead link", lambda lab: lab.dead_link("tor1", "spine0"), ["link:spine0-tor1"]),
        ("dead spine", lambda lab: lab.dead_spine("spine0"), ["switch:spine0"]),
        # The spine that lost its route is at fault, seen as itself or as its link to the ToR.
        ("null route", lambda lab: lab.null_route("tor1", "spine0"),
         ["switch:spine0", "link:spine0-tor1"]),
        ("dead RNIC of two", lambda lab: lab.dead_rnic("h1/nic0"), ["nic:h1/nic0"]),
    ],
    "wide": [
        ("dead RNIC of eight", lambda lab: lab.dead_rnic("h3/nic0"), ["nic:h3/nic0"]),
        ("dead RNIC of four", lambda lab: lab.dead_rnic("h9/nic0"), ["nic:h9/nic0"]),
        ("starved host", lambda lab: lab.starved("h5"), ["node:h5"]),
        ("stopped responder", lambda lab: stopped(lab, "h8"), ["node:h8"]),
        ("rate-limited link", lambda lab: congested(lab, "tor0", "spine1", "h0/nic0", "h10/nic0"),
         ["link:spine1-tor0"]),
    ],
    "rail": [
        ("lossy link of a rail", lambda lab: lab.lossy_link("leaf01", "spine0", 30),
         ["link:leaf01-spine0"]),
        ("lossy flows", lambda lab: lab.lossy_flows("leaf00", "spine1"), ["link:leaf00-spine1"]),
        ("dead RNIC of a rail", lambda lab: lab.dead_rnic("h6/nic1"), ["nic:h6/nic1"]),
        ("dead leaf", lambda lab: lab.dead_spine("leaf10"), ["switch:leaf10"]),
    ],
}  # fmt: skip
NAMES = [(fabric, name) for fabric, faults in FAULTS.items() for name, _, _ in faults]


def build(kind):
    prefix = labs.unique_prefix(kind[0])
    if kind == "small":
        return labs.classic(prefix, {"tor0": 2, "tor1": 2})
    if kind == "wide":
        return labs.classic(prefix, {"tor0": 8, "tor1": 4})
    return labs.rail_optimised(prefix, pods=2, hosts=4, rails=2)


@pytest.fixture(scope="module")
def fabrics():
    made = {}
    try:
        for kind in FAULTS:
            made[kind] = build(kind)
            made[kind].build().start()
        for lab in made.values():
            lab.wait_clear(40)
        yield made
    finally:
        for lab in made.values():
            lab.close()


def in_parallel(function, fabrics):
    with concurrent.futures.ThreadPoolExecutor(len(fabrics)) as pool:
        futures = {kind: pool.submit(function, kind, lab) for kind, lab in fabrics.items()}
        return {kind: future.result() for kind, future in futures.items()}


# What the evidence says where it was this machine that starved an agent, not a fault of ours.
STARVED = (
    "has not reported", "has never reported", "responder delay", "answered after the timeout",
    "its responder does not",
)  # fmt: skip


def is_starvation(anomaly):
    return anomaly["kind"] == "host" and any(
        text in line for line in anomaly["evidence"] for text in STARVED
    )


def subjects(status):
    return {anomaly["subject"] for anomaly in status["anomalies"]}


@dataclass
class Located:
    """What was seen from the injection of a fault on, and when."""

    statuses: list[dict]
    begin_ns: int
    end_ns: int = 0

    def story(self):
        """What each window said, for the message of a test that fails."""
        return [
            (
                s["verdict"],
                s["window"]["lost"],
                [(a["subject"], a["evidence"]) for a in s["anomalies"]],
            )
            for s in self.statuses
        ]

    def judged(self, expected):
        """The windows in which no agent was starved by a busy machine."""
        return [
            status
            for status in self.statuses
            if not any(
                is_starvation(a) for a in status["anomalies"] if a["subject"] not in expected
            )
        ]


def go_through(kind, lab):
    """Inject every fault of a fabric; return what was seen until a third window or later had it."""
    seen = {}
    for name, fault, expected in FAULTS[kind]:
        lab.wait_clear()
        found = seen[name] = Located([], time.time_ns())
        with fault(lab):
            # The window of the injection is only partly ill; a busy machine spoils others, and a
            # host that starves may have a window of little to do.
            for status in lab.windows(15):
                found.statuses.append(status)
                located = subjects(status) and subjects(status) <= set(expected)
                if located and len(found.statuses) >= 3:
                    break
        found.end_ns = time.time_ns()
    lab.wait_clear()
    return seen


def quiet_windows(lab):
    """Return ten windows in which no agent was starved, of forty at most, and how many were."""
    judged, starved = [], 0
    for status in lab.windows(40):
        if status["anomalies"] and all(is_starvation(a) for a in status["anomalies"]):
            starved += 1
        else:
            judged.append(status)
        if len(judged) == 10:
            break
    return judged, starved


@pytest.fixture(scope="module")
def healthy(fabrics):
    return in_parallel(lambda _, lab: quiet_windows(lab), fabrics)


@pytest.fixture(scope="module")
def outcomes(fabrics, healthy):
    return in_parallel(go_through, fabrics)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_healthy_fabric_stays_quiet_for_ten_windows(healthy, kind):
    statuses, starved = healthy[kind]
    assert len(statuses) == 10, f"{starved} windows in which this machine starved an agent"
    assert {s["verdict"] for s in statuses} == {"clear"}, [s["anomalies"] for s in statuses]
    last = statuses[-1]
    assert last["schema"] == "kansoku.fabric.status/1"
    assert last["reason"].startswith("network cleared: ")
    assert last["sla"]["cluster"]["stamp_source"] == "kernel"
    assert last["sla"]["cluster"]["drop_ratio"] < 0.05
    # Medians only: tails belong to the scheduler of a shared machine.
    assert 1 < last["sla"]["cluster"]["rtt_us"]["p50"] < 2000
    # The rates as planned, in a window in which no agent throttled itself.
    assert max(s["fabric"]["coverage"]["least_link_per_s"] for s in statuses) > 10


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_every_fault_is_located_within_two_windows(outcomes, kind, name):
    (expected,) = [set(subjects) for n, _, subjects in FAULTS[kind] if n == name]
    statuses = outcomes[kind][name].judged(expected)
    # The first is at most partly ill, two whole ones follow.
    located = [subjects(s) and subjects(s) <= expected for s in statuses[:3]]
    assert any(located), outcomes[kind][name].story()
    # And it still says so at the end.
    assert subjects(statuses[-1]) <= expected, outcomes[kind][name].story()
    prefix = {"nic": "rnic", "node": "host"}
    kinds = {prefix.get(s.split(":")[0], s.split(":")[0]) for s in expected}
    assert statuses[-1]["verdict"] in kinds, outcomes[kind][name].story()


def test_the_starved_host_shows_late_answers(outcomes):
    lines = [
        line
        for status in outcomes["wide"]["starved host"].statuses
        for anomaly in status["anomalies"]
        for line in anomaly["evidence"]
    ]
    assert any("responder delay" in line or "after the timeout" in line or
               "has not reported" in line for line in lines)  # fmt: skip


def test_an_agent_restart_is_no_fault(fabrics, outcomes):
    lab = fabrics["small"]
    lab.wait_clear()
    before = lab.get()["fabric"]["self"]["h3"]["pid"]
    begin = time.time_ns()
    lab.stop_process("h3", signal.SIGKILL)
    lab.start_agent("h3")
    statuses = []
    for status in lab.windows(30):
        statuses.append(status)
        back = status["fabric"]["self"]["h3"]["pid"] != before
        if back and len(statuses) >= 3:
            break
    assert back
    # A start that took longer than the policy allows an agent to be silent is called that.
    assert [a for s in statuses for a in s["anomalies"] if not is_starvation(a)] == []
    stale = [s["window"]["excluded"].get("stale QPN", 0) for s in statuses]
    silent = [a for s in statuses for a in s["anomalies"] if a["subject"] == "node:h3"]
    assert any(stale) or silent
    assert lab.wait_clear()["window"]["end_ns"] > begin


@dataclass
class Away:
    """What happened while the controller of the small fabric was away."""

    sent: int
    seconds: float
    findings: pl.DataFrame
    diagnosis: dict
    code: int


@pytest.fixture(scope="module")
def away(fabrics, outcomes):
    """Stop the controller, read its store by `kansoku diagnose`, start it again."""
    lab, fault = fabrics["small"], outcomes["small"]["lossy link"]
    lab.stop_process("controller", signal.SIGINT)

    def sent():
        path = "/sys/class/net/nic0/statistics/tx_packets"
        return int(labs.run("ip", "netns", "exec", lab.ns("h0"), "cat", path))

    first, begin = sent(), time.monotonic()
    since, until = (
        datetime.fromtimestamp(ns / 1e9, UTC).isoformat() for ns in (fault.begin_ns, fault.end_ns)
    )
    answer = subprocess.run(
        [sys.executable, "-m", "kansoku", "diagnose", "live", "--store", str(lab.folder / "store"),
         "--since", since, "--until", until, "--json"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    store = open_store(lab.folder / "store")
    try:
        findings = store.table("findings", fault.begin_ns, fault.end_ns)
    finally:
        store.close()
    time.sleep(max(2 - (time.monotonic() - begin), 0))  # a span is what is measured
    taken = sent() - first
    seconds = time.monotonic() - begin
    made = Away(taken, seconds, findings, json.loads(answer.stdout), answer.returncode)
    lab.start_controller()
    return made


def test_agents_work_on_while_the_controller_is_away(fabrics, away):
    # Of each of the two paths' probes two packets are h0's own, and agents may be starved a while.
    assert away.sent > away.seconds * labs.SETTINGS["link_per_s"] / 2
    status = fabrics["small"].wait_clear()
    assert status["fabric"]["registered"] == 4


def test_a_lossy_link_ends_as_a_diagnosed_incident(away):
    """From the probes to the stored finding to the answer of `kansoku diagnose`."""
    (found,) = away.findings.filter(pl.col("id") == "fabric.link").filter(
        pl.col("verdict") == "found"
    ).to_dicts()  # fmt: skip
    assert (found["subject"], found["domain"]) == ("link:spine1-tor0", "network")
    assert away.code == 1
    (incident,) = away.diagnosis["incidents"]
    links = [h for h in incident["hypotheses"] if h["component"] == "link"]
    assert (links[0]["domain"], links[0]["subject"]) == ("network", "link:spine1-tor0")
    assert "link:spine1-tor0" in links[0]["evidence_for"][0]["sentence"]
    # Before it only hosts that a busy machine starved.
    assert {h["component"] for h in incident["hypotheses"]} <= {"link", "host"}


def test_findings_and_windows_are_in_the_store(fabrics, outcomes):
    lab = fabrics["wide"]
    command = [sys.executable, "-m", "kansoku", "fabric"]
    answer = subprocess.run(
        [*command, "status", "--controller", lab.socket, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    status = json.loads(answer.stdout)
    assert status["schema"] == "kansoku.fabric.status/1"
    assert answer.returncode == bool(status["anomalies"]), answer.stderr
    answer = subprocess.run(
        [*command, "matrix", "--controller", lab.socket, "--source", "tor0", "--target", "tor1",
         "--json"], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    pair = json.loads(answer.stdout)["pair"]
    assert {tuple(t["path"]) for t in pair["tuples"]} == {
        ("tor0", "spine0", "tor1"), ("tor0", "spine1", "tor1"),
    }  # fmt: skip
    lab.stop_process("controller", signal.SIGINT)
    store = open_store(lab.folder / "store")
    try:
        findings = store.table("findings")
        probes = store.table("probes")
    finally:
        store.close()
    lab.start_controller()
    opened = findings.filter(findings["verdict"] == "found")["subject"].to_list()
    assert set(opened) >= {"nic:h3/nic0", "nic:h9/nic0", "node:h8", "link:spine1-tor0"}
    assert findings.filter(findings["verdict"] == "none").height >= 4
    assert set(probes["stamp_source"].drop_nulls().to_list()) == {"kernel"}
    assert probes["lost"].sum() > 0
    assert "tor0>spine1>tor1" in set(probes["path"].to_list())


def test_service_tracing_follows_a_job_and_raises_the_impact(fabrics, outcomes):
    lab = fabrics["rail"]
    ranks = tuple(
        RankFacts(
            rank=n, local_rank=0, world_size=2, node=node, pid=1, device=None,
            torch_version=None, python_version=None,
            groups=(ProcessGroup(name="0", description="dp", ranks=(0, 1)),),
        )
        for n, node in enumerate(("h0", "h7"))
    )  # fmt: skip
    run = RunFacts(
        run="r1", command=("train",), start_ns=0, end_ns=None, exit_code=None, slurm_job="42",
        nodes=("h0", "h7"), ranks=ranks,
    )  # fmt: skip
    assert service_start(lab.socket, run, lab.cluster) == 2 * 8  # two directions, k(2 paths) = 8
    lab.wait(
        lambda s: (s["sla"]["service"] or {}).get("probes", 0) > 200 and s["verdict"] == "clear",
        windows=30,
    )  # fmt: skip
    with lab.lossy_link("leaf00", "spine1", 50):
        status = lab.wait(
            lambda s: any(a["impact"] == "P0" for a in s["anomalies"] if not is_starvation(a)),
        )  # fmt: skip
    (subject,) = {a["subject"] for a in status["anomalies"] if not is_starvation(a)}
    assert subject == "link:leaf00-spine1"
    service_end(lab.socket, "42")
    no_service(lab)


def no_service(lab):
    lab.wait(lambda s: s["sla"]["service"] is None and s["verdict"] == "clear", windows=30)


def save_run(folder, end_ns):
    """A run of two ranks as `kansoku run` writes it, one ring a rank."""
    folder.mkdir(exist_ok=True)
    facts = {"schema": "kansoku.run/1", "run": "r2", "command": ["train"], "start_ns": 0,
             "end_ns": end_ns, "exit_code": None if end_ns is None else 0,
             "nodes": ["h1", "h6"]}  # fmt: skip
    new = folder / "new"
    new.write_text(json.dumps(facts))
    new.rename(folder / "run.json")
    if end_ns is not None:
        return
    for rank, node in enumerate(("h1", "h6")):
        buffer = bytearray(1 << 17)
        ring.format_ring(
            buffer, pid=rank + 1, process_start=9, anchor=(1, 10**18), lane_shares=(1,)
        )
        writer = ring.RingWriter(buffer)
        writer.set_ranks(rank, 0, 2)
        writer.set_facts({"node": node, "run": "r2", "groups": [{"name": "0", "ranks": [0, 1]}]})
        (folder / f"{node}.ring").write_bytes(buffer)


def test_service_tracing_pauses_by_itself_when_the_run_ends(fabrics, outcomes, tmp_path):
    lab = fabrics["rail"]
    save_run(tmp_path / "run", None)
    said, over = [], []
    following = threading.Thread(
        target=lambda: over.append(
            follow(tmp_path / "run", lab.socket, lab.cluster, say=said.append, every_s=0.2)
        )
    )
    following.start()
    lab.wait(lambda s: (s["sla"]["service"] or {}).get("probes", 0) > 50, windows=30)
    assert lab.get()["fabric"]["jobs"] == {"r2": 16}
    save_run(tmp_path / "run", time.time_ns())
    following.join(timeout=60)
    assert over == ["the run ended with exit code 0"]
    assert said == ["r2: probing 16 paths"]
    assert lab.get()["fabric"]["jobs"] == {}
    no_service(lab)

"""A Clos of 10,000 RNICs with random faults of every kind, several at once."""

import numpy as np
import pytest
from tests.labs import fabric_sim as sim

from kansoku.catalog import load_cluster
from kansoku.fabric.analyser import analyse
from kansoku.fabric.ledger import Ledger
from kansoku.fabric.paths import PathBook
from kansoku.fabric.pinglist import make_plan, tuple_keys
from kansoku.fabric.settings import Settings
from kansoku.fabric.topology import topology_of
from kansoku.fabric.window import Rows, Window

TRIALS = 7
SETTINGS = Settings(tuples_per_rnic=60, window_s=20)


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    clos = sim.Clos(pods=25, hosts=50, rails=8, spines=16)
    path = tmp_path_factory.mktemp("sim") / "cluster.toml"
    path.write_text(clos.toml())
    topology = topology_of(load_cluster(path))
    assert len(topology.rnics) == 10_000
    plan = make_plan(topology, SETTINGS)
    book = PathBook(topology, {})
    teach(book, topology, clos, plan)
    return clos, topology, plan, book


def teach(book, topology, clos, plan):
    """Give the analyser the paths that the agents' traces would have brought."""
    source = np.concatenate([plan.source, plan.target])
    target = np.concatenate([plan.target, plan.source])
    port = np.concatenate([plan.port, plan.port])
    keys, first = np.unique(
        tuple_keys(source, target, port, len(topology.rnics)), return_index=True
    )
    source, target, port = source[first], target[first], port[first]
    spine = sim.paths_of(clos, source, target, port)
    a, b = clos.leaf[source], clos.leaf[target]
    code = (a * clos.leaves + b) * (clos.spines + 1) + spine + 1
    codes, place = np.unique(code, return_inverse=True)
    numbers = []
    for one in codes.tolist():
        pair, s = divmod(one, clos.spines + 1)
        x, y = divmod(pair, clos.leaves)
        hops = [clos.leaf_name(x)]
        if s:
            hops += [clos.spine_name(s - 1), clos.leaf_name(y)]
        numbers.append(book.path(tuple(book.names.switch(h) for h in hops)))
    book.load(keys, np.array(numbers, dtype=np.int32)[place])


def window_of(clos, topology, plan, faults, rng, number):
    mean = SETTINGS.window_s / plan.interval_s
    probes, lost, late, delay = sim.probe(
        clos, faults, rng, plan.source, plan.target, plan.port, mean
    )
    sent = probes > 0
    nothing = np.full(int(sent.sum()), np.nan)
    rows = Rows(
        source=plan.source[sent], target=plan.target[sent], port=plan.port[sent],
        kind=plan.kind[sent], probes=probes[sent], lost=lost[sent], late=late[sent],
        qpn=np.ones(int(sent.sum()), dtype=np.int64), rtt_p50_ns=nothing, rtt_p99_ns=nothing,
        responder_p50_ns=delay[sent], responder_p99_ns=delay[sent], prober_p99_ns=nothing,
        stamps=np.ones(int(sent.sum()), dtype=np.int8),
        slow=np.zeros(int(sent.sum()), dtype=np.int64),
    )  # fmt: skip
    start = number * 20_000_000_000
    silent = {topology.hosts[h]: 20.0 for h in np.flatnonzero(faults.host_silent)}
    return Window(start_ns=start, end_ns=start + 20_000_000_000, rows=rows, silent_hosts=silent,
                  reporting=len(topology.rnics))  # fmt: skip


@pytest.mark.real
def test_random_faults_in_a_clos_of_10000(fabric, capsys):
    clos, topology, plan, book = fabric
    hits, false, missed = (dict.fromkeys(sim.KINDS, 0) for _ in range(3))
    wrong = []
    for trial in range(TRIALS):
        rng = np.random.default_rng(1000 + trial)
        faults = sim.draw_faults(clos, rng, count=int(rng.integers(8, 24)))
        ledger = Ledger(SETTINGS)
        for number in range(2):
            window = window_of(clos, topology, plan, faults, rng, number)
            ledger.update(analyse(window, topology, book, SETTINGS))
        found = {(e.anomaly.kind, e.anomaly.subject) for e in ledger.open()}
        for kind, _ in found & faults.truth:
            hits[kind] += 1
        for kind, subject in found - faults.truth:
            false[kind] += 1
            wrong.append((trial, "false", kind, subject))
        for kind, subject in faults.truth - found:
            missed[kind] += 1
            wrong.append((trial, "missed", kind, subject, faults.described))
    with capsys.disabled():
        print(f"\n{TRIALS} trials, 10,000 RNICs, {len(plan)} tuples")
        for kind in sim.KINDS:
            precision = hits[kind] / max(hits[kind] + false[kind], 1)
            recall = hits[kind] / max(hits[kind] + missed[kind], 1)
            print(f"  {kind:6} {hits[kind]:3} found, {false[kind]} false, {missed[kind]} missed: "
                  f"precision {precision:.3f}, recall {recall:.3f}")  # fmt: skip
    for kind in sim.KINDS:
        assert hits[kind] + missed[kind] >= 10
        assert hits[kind] / (hits[kind] + false[kind]) >= 0.95, wrong
        assert hits[kind] / (hits[kind] + missed[kind]) >= 0.9, wrong


@pytest.mark.real
def test_a_healthy_clos_is_cleared(fabric):
    clos, topology, plan, book = fabric
    rng = np.random.default_rng(7)
    faults = sim.draw_faults(clos, rng, count=0)
    for number in range(2):
        window = window_of(clos, topology, plan, faults, rng, number)
        analysis = analyse(window, topology, book, SETTINGS)
        assert analysis.lost > 0
        assert analysis.verdict == "clear"
        assert analysis.reason.startswith("network cleared")

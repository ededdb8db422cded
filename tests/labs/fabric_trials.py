"""Random faults in a simulated Clos of 10,000 RNICs, judged by the analyser, and counted."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tests.labs import fabric_sim as sim

from kansoku.catalog import load_cluster
from kansoku.fabric.analyser import analyse
from kansoku.fabric.ledger import Ledger
from kansoku.fabric.paths import PathBook
from kansoku.fabric.pinglist import Plan, make_plan, tuple_keys
from kansoku.fabric.settings import Settings
from kansoku.fabric.topology import Topology, topology_of
from kansoku.fabric.window import Rows, Window

SETTINGS = Settings(tuples_per_rnic=60, window_s=20)


@dataclass
class Fabric:
    """The Clos, its plan, and the paths that the agents' traces would have brought."""

    clos: sim.Clos
    topology: Topology
    plan: Plan
    book: PathBook


def big_fabric() -> tuple[sim.Clos, Topology]:
    """Return 25 pods × 50 hosts × 8 rails, and its topology as a cluster file gives it."""
    clos = sim.Clos(pods=25, hosts=50, rails=8, spines=16)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(clos.toml())
        return clos, topology_of(load_cluster(path))


def make_fabric(settings: Settings = SETTINGS) -> Fabric:
    clos, topology = big_fabric()
    plan = make_plan(topology, settings)
    book = PathBook(topology, {})
    teach(book, topology, clos, plan)
    return Fabric(clos, topology, plan, book)


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


def window_of(fabric: Fabric, faults: sim.Faults, rng, number: int) -> Window:
    """Return what the agents of a whole window would have reported."""
    plan = fabric.plan
    probes, lost, late, delay = sim.probe(
        fabric.clos, faults, rng, plan.source, plan.target, plan.port,
        SETTINGS.window_s / plan.interval_s,
    )  # fmt: skip
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
    hosts = fabric.topology.hosts
    silent = {hosts[h]: 20.0 for h in np.flatnonzero(faults.host_silent)}
    return Window(start_ns=start, end_ns=start + 20_000_000_000, rows=rows, silent_hosts=silent,
                  reporting=len(fabric.topology.rnics))  # fmt: skip


@dataclass
class Score:
    """Verdicts by kind, and every wrong one."""

    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(sim.KINDS, 0))
    false: dict[str, int] = field(default_factory=lambda: dict.fromkeys(sim.KINDS, 0))
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(sim.KINDS, 0))
    wrong: list[tuple] = field(default_factory=list)

    def precision(self, kind: str) -> float:
        return self.hits[kind] / max(self.hits[kind] + self.false[kind], 1)

    def recall(self, kind: str) -> float:
        return self.hits[kind] / max(self.hits[kind] + self.missed[kind], 1)

    def line(self, kind: str) -> str:
        return (
            f"{self.hits[kind]} found, {self.false[kind]} false, {self.missed[kind]} missed: "
            f"precision {self.precision(kind):.3f}, recall {self.recall(kind):.3f}"
        )


def run_trial(fabric: Fabric, seed: int, score: Score) -> None:
    """Draw 8 to 23 faults at once, let two windows pass, and count the verdicts."""
    rng = np.random.default_rng(seed)
    faults = sim.draw_faults(fabric.clos, rng, count=int(rng.integers(8, 24)))
    ledger = Ledger(SETTINGS)
    for number in range(2):
        window = window_of(fabric, faults, rng, number)
        ledger.update(analyse(window, fabric.topology, fabric.book, SETTINGS))
    found = {(e.anomaly.kind, e.anomaly.subject) for e in ledger.open()}
    for kind, _ in found & faults.truth:
        score.hits[kind] += 1
    for kind, subject in sorted(found - faults.truth):
        score.false[kind] += 1
        score.wrong.append((seed, "false", kind, subject))
    for kind, subject in sorted(faults.truth - found):
        score.missed[kind] += 1
        score.wrong.append((seed, "missed", kind, subject, faults.described))

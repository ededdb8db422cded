"""Real trainings over Gloo between network namespaces: a cut link, lost packets; network, and whose."""

import threading
import time

import pytest
from tests.labs.faulty_training import BAD, RANKS, Lab
from tests.labs.parted import Parted

from kansoku.app.diagnose import diagnose_folder, diagnosis_json
from kansoku.model import Domain

pytestmark = pytest.mark.real

NODE = f"n{BAD}"
# What node_exporter says of an interface and of TCP, read where it reads it.
HEAD = "time_ns,node,device,node_network_carrier,node_netstat_Tcp_RetransSegs\n"


@pytest.fixture
def net():
    try:
        net = Parted(RANKS)
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield net
    net.close()


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path / "lab")
    yield lab
    lab.close()


class Nodes(threading.Thread):
    """Samples every node's counters, and does the fault when the training asks for it."""

    def __init__(self, net, folder, fault):
        super().__init__(daemon=True)
        self.net, self.folder, self.fault = net, folder, fault
        self.over = threading.Event()
        self.rows = []

    def _sample(self, node):
        text = self.net.inside(node, "cat", "/sys/class/net/eth0/carrier", "/proc/net/snmp")
        names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
        sent_again = dict(zip(names, values, strict=True))["RetransSegs"]
        self.rows.append(f"{time.time_ns()},{node},eth0,{text.splitlines()[0]},{sent_again}\n")

    def run(self):
        while not self.over.wait(0.1):
            for node in self.net.nodes:
                self._sample(node)
            if (self.folder / "now").exists() and not (self.folder / "done").exists():
                self.fault()
                (self.folder / "done").touch()

    def end(self):
        self.over.set()
        self.join(60)
        (self.folder / "metrics.csv").write_text(HEAD + "".join(self.rows))


def still(folder, seconds=6, timeout=120):
    """Wait until no rank has made a step for some seconds."""
    end = time.monotonic() + timeout
    while time.time() - max(b.stat().st_mtime for b in folder.glob("beat.*")) < seconds:
        assert time.monotonic() < end, "the training goes on"
        time.sleep(0.2)


def train(lab, net, fault, do, **more):
    nodes = Nodes(net, lab.folder / fault, do)
    nodes.start()
    try:
        folder = lab.run(fault, FAULT_NETNS=net.prefix, **more)
        if fault == "cut":
            still(folder)
    finally:
        nodes.end()
    return folder


def first(folder):
    answer = diagnose_folder(folder)
    assert answer.incidents, diagnosis_json(answer)
    incident = answer.incidents[0]
    assert incident.hypotheses, diagnosis_json(answer)
    return incident, incident.hypotheses[0]


def test_a_cut_link_between_ranks(lab, net):
    """All ranks hang in one collective; one node's interface has no carrier."""
    folder = train(lab, net, "cut", lambda: net.cut(NODE))
    try:
        incident, cause = first(folder)
    finally:
        lab.end()
    assert (incident.kind, cause.domain) == ("hang", Domain.NETWORK)
    assert str(cause.subject) in {f"nic:{NODE}/eth0", f"node:{NODE}"}


def test_a_link_that_loses_packets(lab, net):
    """The training goes on, each lost packet costs it a timeout of TCP's."""
    folder = train(lab, net, "lose", lambda: net.lose(NODE, 0.2), FAULT_STEPS="40")
    incident, cause = first(folder)
    assert (incident.kind, cause.domain) == ("slow", Domain.NETWORK)
    assert str(cause.subject) in {f"nic:{NODE}/eth0", f"node:{NODE}"}

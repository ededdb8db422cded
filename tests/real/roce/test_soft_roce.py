"""Soft-RoCE in a QEMU guest: probing over verbs, faults located, queue pairs learned by kprobes.

One boot; ``tests/labs/roce_guest.py`` runs inside and writes what it saw.
"""

import json
import shlex

import pytest
from tests.labs import roce

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SCRIPT = """#!/bin/sh
for module in crc32_generic veth rdma_rxe rdma_ucm ib_uverbs sch_netem sch_tbf; do
    modprobe $module || exit 3
done
"""


@pytest.fixture(scope="module")
def guest(tmp_path_factory):
    results = tmp_path_factory.mktemp("roce")
    words = [f"export {name}={shlex.quote(value)}" for name, value in roce.environment().items()]
    run = f"exec {roce.ROOT}/.venv/bin/python {roce.ROOT}/tests/labs/roce_guest.py"
    (results / "script").write_text(SCRIPT + "\n".join([*words, run]) + "\n")
    # Seconds on a machine of its own; minutes where it shares one: the guest's clock is virtual.
    roce.run_guest("/results/script", results, timeout_s=560)
    return json.loads((results / "answer.json").read_text())


def only(status):
    return [(entry["kind"], entry["subject"]) for entry in status["anomalies"]]


def test_source_ports_of_the_pool_are_those_on_the_wire(guest):
    """Observed on the interface; the formula was read from Linux 6.1 (rxe_qp.c)."""
    for pool in guest["pool"]:
        assert pool["source"] == "observed"
        assert pool["ports"] == pool["formula"]
        assert len(set(pool["ports"])) == len(pool["ports"]) == 12
        assert pool["stamps"] == "application"


def test_a_healthy_fabric_is_cleared_and_its_stamps_are_labelled(guest):
    healthy = guest["healthy"]
    assert healthy["verdict"] == "clear"
    assert healthy["window"]["probes"] > 100
    assert healthy["window"]["lost"] == 0
    assert healthy["sla"]["cluster"]["stamp_source"] == "application"
    assert guest["stamps"] == ["application"]
    assert guest["probes"] > 200
    # Three switches and Python on both ends: half a millisecond alone, a few when it is busy.
    assert 50_000 < guest["rtt_p50_ns"] < 8_000_000


def test_every_path_is_traced_and_the_pool_uses_both_spines(guest):
    spines = {"0": 0, "1": 0}
    for name, hops in guest["paths"].items():
        source, target = name[1], name.split(">")[1][0]
        same_tor = int(source) // 2 == int(target) // 2
        tors = {"0": "10.1.1.1", "1": "10.1.2.1", "2": "10.2.1.1", "3": "10.2.2.1"}
        assert hops[0] == tors[source], name
        assert len(hops) == (1 if same_tor else 3), name
        if not same_tor:
            spines["0" if hops[1] in {"10.200.16.2", "10.200.32.2"} else "1"] += 1
    assert len(guest["paths"]) > 10
    assert min(spines.values()) > 2


def test_loss_on_one_link_is_located_within_two_windows(guest):
    """netem, 40 % from spine1 to torb."""
    assert guest["loss"]["seen"] <= 2
    assert only(guest["loss"]) == [("link", "link:spine1-torb")]
    (entry,) = guest["loss"]["anomalies"]
    assert entry["loss_ratio"] > 0.2  # of a probe any of three packets may cross it
    assert guest["after_loss"]["verdict"] == "clear"


def test_delay_on_one_link_is_located_as_congestion(guest):
    """netem, 25 ms from tora to spine0; which direction cannot be told from round trips."""
    assert guest["delay"]["seen"] <= 3
    subjects = {subject for _, subject in only(guest["delay"])}
    assert subjects
    assert subjects <= {"link:tora-spine0", "link:spine0-tora"}
    assert any("congested" in text for e in guest["delay"]["anomalies"] for text in e["evidence"])


def test_kprobes_learn_the_tuples_of_perftest(guest):
    """Two queue pairs on each side of ib_send_bw, which knows nothing of kansoku."""
    service = guest["service"]
    pids = service["pids"]
    pairs = service["pairs"]
    assert sorted(pair["device"] for pair in pairs) == ["rxe0", "rxe0", "rxe2", "rxe2"]
    by_qpn = {(pair["device"], pair["qpn"]): pair for pair in pairs}
    for pair in pairs:
        other = "rxe2" if pair["device"] == "rxe0" else "rxe0"
        address = "10.2.1.2" if other == "rxe2" else "10.1.1.2"
        assert pids[str(pair["pid"])] == pair["device"]
        assert pair["peer_gid"] == f"::ffff:{address}"
        assert by_qpn[other, pair["peer_qpn"]]["peer_qpn"] == pair["qpn"]
    assert sorted(map(tuple, service["gone"])) == sorted(by_qpn)
    assert service["left_probes"] == ""  # nothing of ours stays in the kernel


def test_the_service_is_probed_over_its_tuples(guest):
    service = guest["service"]
    assert len(service["tuples"]) == 4
    assert {(source, target) for source, target, _ in service["tuples"]} == {
        ("h0/rxe0", "h2/rxe2"), ("h2/rxe2", "h0/rxe0"),
    }  # fmt: skip
    assert service["status"]["sla"]["service"]["probes"] > 0


def test_learning_tells_the_job_and_ends_it_with_its_queue_pairs(guest):
    """What `fabric agent --learn` does on each host, from the kernel's events to the controller."""
    service = guest["service"]
    assert service["jobs"] == {"4711.h0": 2, "4711.h2": 2}
    assert service["jobs_after"] == {}


def test_loss_under_rc_traffic_moves_the_rdma_counters(guest):
    """The responder sees a gap, the requester retries: the receiving and the sending device."""
    counters = guest["service"]["counters"]
    assert counters["rxe2"]["out_of_seq_request"] > 0
    assert counters["rxe0"]["completer_retry_err"] > 0
    assert counters["rxe1"]["completer_retry_err"] == 0


def test_the_extended_completion_queue_works_without_its_stamps(guest):
    extended = guest["extended"]
    assert (extended["sent"], extended["received"], extended["failed"]) == (200, 200, 0)
    assert extended["senders"] == ["10.1.1.2"]
    assert (extended["stamps"], extended["sources"]) == ("application", ["application"])


def test_wrong_devices_and_addresses_say_what_there_is(guest):
    assert "there are: rxe0, rxe1, rxe2, rxe3" in guest["errors"]["device"]
    assert "no RoCE v2 GID of 10.9.9.9" in guest["errors"]["gid"]

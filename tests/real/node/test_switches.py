"""SNMP against Debian's snmpd; gNMI against a wire-level stand-in for SONiC (labelled so)."""

import json
import shutil
import socket
import subprocess
import time
from concurrent import futures
from pathlib import Path

import pytest

from kansoku.node.counters import Counters
from kansoku.node.edge.switch_client import NetworkSwitchClient
from kansoku.node.switch import SwitchTarget, from_sai, from_snmp

pytestmark = pytest.mark.real


def free_port(kind):
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def snmpd(tmp_path_factory):
    """Debian's snmpd on a port of its own; it serves this machine's interfaces."""
    program = shutil.which("snmpd") or "/usr/sbin/snmpd"
    folder = tmp_path_factory.mktemp("snmpd")
    port = free_port(socket.SOCK_DGRAM)
    (folder / "snmpd.conf").write_text(f"agentAddress udp:127.0.0.1:{port}\nrocommunity planted\n")
    command = [program, "-f", "-C", "-c", str(folder / "snmpd.conf"), "-Lf", str(folder / "log")]
    # snmpd keeps state in SNMP_PERSISTENT_DIR, else in /var/lib/snmp
    child = subprocess.Popen(command, env={"SNMP_PERSISTENT_DIR": str(folder), "PATH": "/usr/sbin"})
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and "NET-SNMP" not in (
        (folder / "log").read_text() if (folder / "log").exists() else ""
    ):
        assert child.poll() is None, (folder / "log").read_text()
        time.sleep(0.05)
    yield port
    child.kill()
    child.wait()


def target(port, community="planted"):
    return SwitchTarget(
        name="leaf0", protocol="snmp", host="127.0.0.1", port=port, community=community
    )


def test_snmp_counters_are_the_kernels(snmpd):
    def kernel():
        return int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text())

    before = kernel()
    columns = NetworkSwitchClient().snmp(target(snmpd))
    samples = list(from_snmp("leaf0", columns, Counters()))
    after = kernel()
    io = {
        dict(s.labels)["network.interface.name"]: s.value
        for s in samples
        if s.metric == "kansoku.switch.port.io" and ("network.io.direction", "receive") in s.labels
    }
    # snmpd caches its interface table for some seconds
    assert 0 < io["lo"] <= after
    assert io["lo"] >= before - 50_000_000
    up = {s.value for s in samples if s.metric == "kansoku.switch.port.up"}
    assert 1.0 in up


def test_a_wrong_community_is_an_error_not_an_empty_switch(snmpd, monkeypatch):
    monkeypatch.setattr("kansoku.node.edge.switch_client._TIMEOUT_S", 0.3)
    with pytest.raises(OSError, match="SNMP: "):
        NetworkSwitchClient().snmp(target(snmpd, "wrong"))


PORTS = {
    "Ethernet0": {
        "SAI_PORT_STAT_IF_IN_OCTETS": "1000",
        "SAI_PORT_STAT_PFC_3_RX_PKTS": "42",
        "SAI_PORT_STAT_IF_OUT_DISCARDS": "N/A",
    },
    "Ethernet8": {"SAI_PORT_STAT_IF_IN_OCTETS": "18446744073709551615"},
}
QUEUES = {
    "Ethernet0:3": {
        "SAI_QUEUE_STAT_WRED_ECN_MARKED_PACKETS": "7",
        "SAI_QUEUE_STAT_DROPPED_PACKETS": "1",
    }
}
WATERMARKS = {"Ethernet0:3": {"SAI_QUEUE_STAT_SHARED_WATERMARK_BYTES": "2097152"}}
GROUPS = {
    "Ethernet0:3": {
        "SAI_INGRESS_PRIORITY_GROUP_STAT_SHARED_WATERMARK_BYTES": "65536",
        "SAI_INGRESS_PRIORITY_GROUP_STAT_XOFF_ROOM_WATERMARK_BYTES": "9216",
    },
    "Ethernet0:4": {"SAI_INGRESS_PRIORITY_GROUP_STAT_SHARED_WATERMARK_BYTES": "N/A"},
}


@pytest.fixture
def sonic():
    """Wire-level only: messages built by pygnmi's compiled gnmi.proto, not a SONiC switch."""
    import grpc
    from pygnmi.spec.v080 import gnmi_pb2

    seen = []

    def get(request, context):
        metadata = dict(context.invocation_metadata())
        names = tuple(elem.name for elem in request.path[0].elem)
        seen.append((request.prefix.target, names, request.encoding, metadata.get("username")))
        answers = {
            "COUNTERS": QUEUES if "Queues" in names else PORTS,
            "USER_WATERMARKS": GROUPS if "PriorityGroups" in names else WATERMARKS,
        }
        answer = gnmi_pb2.GetResponse()
        update = answer.notification.add(timestamp=1).update.add()
        update.val.json_ietf_val = json.dumps(answers[names[0]]).encode()
        return answer

    handler = grpc.method_handlers_generic_handler(
        "gnmi.gNMI",
        {
            "Get": grpc.unary_unary_rpc_method_handler(
                get,
                request_deserializer=gnmi_pb2.GetRequest.FromString,
                response_serializer=gnmi_pb2.GetResponse.SerializeToString,
            )
        },
    )
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port, seen
    server.stop(0).wait()


def test_gnmi_wire(sonic, tmp_path):
    port, seen = sonic
    (tmp_path / "password").write_text("secret\n")
    where = SwitchTarget(
        name="spine0", protocol="gnmi", host="127.0.0.1", port=port, user="admin",
        password_file=str(tmp_path / "password"),
    )  # fmt: skip
    samples = list(from_sai("spine0", NetworkSwitchClient().gnmi(where), Counters()))
    found = {(s.metric, dict(s.labels).get("network.interface.name")): s.value for s in samples}
    assert found["kansoku.switch.port.pause.frames", "Ethernet0"] == 42
    assert found["kansoku.switch.port.io", "Ethernet8"] == float(2**64 - 1)
    assert found["kansoku.switch.queue.ecn.marked", "Ethernet0"] == 7
    assert found["kansoku.switch.queue.watermark", "Ethernet0"] == 2097152
    groups = {
        (labels["kansoku.priority_group"], labels["kansoku.buffer"]): sample.value
        for sample in samples
        if "kansoku.priority_group" in (labels := dict(sample.labels))
    }
    assert groups == {("3", "shared"): 65536, ("3", "headroom"): 9216}
    assert ("kansoku.switch.port.discards", "Ethernet0") not in found, "N/A is missing"
    # 4 is JSON_IETF in gnmi.proto
    assert seen[0] == ("COUNTERS_DB", ("COUNTERS", "Ethernet*"), 4, "admin")


def test_gnmi_nobody_there(monkeypatch):
    monkeypatch.setattr("kansoku.node.edge.switch_client._TIMEOUT_S", 0.3)
    where = SwitchTarget(
        name="s", protocol="gnmi", host="127.0.0.1", port=free_port(socket.SOCK_STREAM)
    )
    with pytest.raises(OSError, match="gNMI "):
        NetworkSwitchClient().gnmi(where)

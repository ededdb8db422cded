"""Lines of trace_pipe and type information, by hand; the ports of soft-RoCE."""

import struct

import pytest

from kansoku.errors import PlatformError
from kansoku.fabric.edge.verbs import _source_of_packet, rxe_source_port
from kansoku.fabric.edge.verbs_learner import parse_line, structure_offsets

# As a 6.1 kernel printed it for ib_send_bw; the mask has bit 20, the destination QPN.
CONNECT = (
    "      ib_send_bw-159     [000] .....     9.123456: modify_qp: "
    "(ib_modify_qp_with_udata+0x0/0x40 [ib_core]) mask=0x121181 qpn=29 "
    'device="rxe0" peer=30 gid0=0x0 gid1=0x201020affff0000 label=0 tclass=8'
)


def test_a_connected_queue_pair():
    pair = parse_line(CONNECT, "n1")
    assert (pair.node, pair.device, pair.qpn, pair.peer_qpn, pair.pid) == (
        "n1",
        "rxe0",
        29,
        30,
        159,
    )
    assert pair.peer_gid == "::ffff:10.2.1.2"
    assert (pair.flow_label, pair.traffic_class, pair.gone) == (0, 8, False)
    assert pair.source_port == rxe_source_port(29)


def test_hardware_leaves_the_port_to_the_flow_label():
    pair = parse_line(CONNECT.replace("rxe0", "mlx5_0").replace("label=0", "label=70000"), "n1")
    assert (pair.source_port, pair.flow_label) == (None, 70000)


def test_other_changes_and_junk_are_passed_over():
    assert parse_line(CONNECT.replace("mask=0x121181", "mask=0x21181"), "n") is None  # no bit 20
    assert parse_line(CONNECT.replace("qpn=29 ", ""), "n") is None
    assert parse_line(CONNECT.replace("gid0=0x0", "gid0=(fault)"), "n") is None
    assert parse_line("CPU:0 [LOST 12 EVENTS]", "n") is None
    assert parse_line("", "n") is None


def test_a_destroyed_queue_pair():
    line = (
        "     python3-my-job-77 [001] d..1. 10.5: destroy_qp: (ib_destroy_qp_user+0x0/0x1 [ib_core])"
        ' qpn=31 device="mlx5_1"'
    )
    pair = parse_line(line, "n")
    assert (pair.device, pair.qpn, pair.pid, pair.gone) == ("mlx5_1", 31, 77, True)


# hash_32(qpn, 14) by hand: 17 * 0x61C88647 mod 2^32 = 0x7E50EAB7, >> 18 = 0x1F94; so it was on the wire
def test_soft_roce_ports():
    assert rxe_source_port(17) == 0xC000 + 0x1F94
    assert rxe_source_port(0) == 0xC000


def test_the_port_of_a_packet_on_the_wire():
    ip = bytes([0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2])
    udp = struct.pack("!HHHH", 50001, 4791, 0, 0)
    bth = bytes([0x64]) + bytes(11)
    deth = struct.pack("!II", 0x6B52504D, 29)
    assert _source_of_packet(ip + udp + bth + deth) == (29, 50001)
    assert _source_of_packet(ip + udp + b"\x04" + bytes(11) + deth) is None  # RC, not UD
    assert _source_of_packet(ip[:9] + b"\x06" + ip[10:] + udp + bth + deth) is None  # TCP
    assert _source_of_packet(b"") is None


def btf(types, strings):
    head = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return head + types + strings


def test_offsets_of_a_module_whose_strings_follow_the_kernels():
    base = 1000  # strings of the kernel proper come first
    names = ["", "ib_qp", "device", "qp_num", "ib_device", "name"]
    at, text = {}, b""
    for name in names:
        at[name] = base + len(text)
        text += name.encode() + b"\0"
    member = struct.Struct("=III").pack
    types = member(at["ib_qp"], 4 << 24 | 2, 300)  # struct with two members
    types += member(at["device"], 5, 0) + member(at["qp_num"], 5, 212 * 8)
    types += member(0, 1 << 24, 4) + bytes(4)  # an int to step over
    types += member(0, 13 << 24 | 1, 0) + bytes(8)  # a function prototype to step over
    types += member(at["ib_device"], 1 << 31 | 4 << 24 | 1, 99)  # with bit fields
    types += member(at["name"], 5, 7 << 24 | 64 * 8)
    assert structure_offsets(btf(types, text), base) == {
        "ib_qp": {"device": 0, "qp_num": 212},
        "ib_device": {"name": 64},
    }


def test_what_is_no_type_information_is_refused():
    with pytest.raises(PlatformError, match="cannot be read"):
        structure_offsets(b"\x7fELF" + bytes(40))

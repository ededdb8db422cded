"""Ports found in recorded trees: RDMA before interfaces, rates given and unknown."""

import socket

import pytest

from kansoku.burst.edge.ports import find_ports
from kansoku.errors import InputError, PlatformError

ETHERNET = "ens1f0"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Two RDMA ports (one counts no bytes, like soft-RoCE), their interfaces, and a tunnel."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    port = "sys/class/infiniband/mlx5_0/ports/1"
    write(f"{port}/counters/port_rcv_data", "250\n")
    write(f"{port}/counters/port_xmit_data", "1000\n")
    write(f"{port}/hw_counters/np_cnp_sent", "3\n")
    write(f"{port}/rate", "400 Gb/sec (4X NDR)\n")
    write("sys/class/infiniband/mlx5_0/device/net/ib0/x", "")
    write("sys/class/infiniband/rxe0/ports/1/rate", "2.5 Gb/sec (1X SDR)\n")
    for name, speed, physical in (("ib0", "400000", True), (ETHERNET, "25000", True),
                                  ("tun0", "-1", False), ("veth9", "10000", False)):  # fmt: skip
        write(f"sys/class/net/{name}/speed", f"{speed}\n")
        if physical:
            write(f"sys/class/net/{name}/device/vendor", "")
    names = ("lo", "ib0", ETHERNET, "tun0", "veth9")
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    return tmp_path


def test_physical_ports_each_once(tree):
    found = find_ports(root=tree)
    assert [port.name for port in found] == ["mlx5_0", ETHERNET]
    rdma, ethernet = found
    assert (rdma.line_rate_bits_per_s, rdma.rate_source, rdma.index) == (400e9, "sysfs", None)
    assert rdma.files["transmit"].name == "port_xmit_data"
    assert list(rdma.beside) == ["np_cnp_sent"]
    assert (ethernet.line_rate_bits_per_s, ethernet.index) == (25e9, 3)


def test_names_patterns_and_given_rates(tree):
    given = {"tun0": 1e9, "mlx5_0": 100e9}
    found = find_ports(["tun*", "mlx5_0"], line_rates_bits_per_s=given, root=tree)
    assert [(p.name, p.line_rate_bits_per_s, p.rate_source) for p in found] == [
        ("tun0", 1e9, "given"), ("mlx5_0", 100e9, "given"),
    ]  # fmt: skip


def test_what_cannot_be_watched_says_why(tree):
    with pytest.raises(InputError, match=r"unknown to the kernel.*--line-rate tun0=GBPS"):
        find_ports(["tun0"], root=tree)
    with pytest.raises(InputError, match="counts no bytes"):
        find_ports(["rxe0"], root=tree)
    with pytest.raises(InputError, match="no port 'nope'; there are ens1f0, ib0"):
        find_ports(["nope"], root=tree)


def test_a_machine_without_ports_names_the_remedy(tmp_path):
    with pytest.raises(PlatformError, match="--port NAME --line-rate"):
        find_ports(root=tmp_path)

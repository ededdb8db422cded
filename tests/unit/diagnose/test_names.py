"""Hosts that only a file's name or NCCL's prefix tells."""

import pytest

from kansoku.diagnose.names import addresses_of_nodes, host_of_nccl, node_of_name


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("dmesg_ac-22", "ac-22"),
        ("rack4/ice-08_console.log", "ice-08"),
        ("tor2a-ibstat.txt", "tor2a"),
        ("nvidia-smi_q_b31.txt", "b31"),
        ("ethtool_S_ens8_pod2-n3.txt", "pod2-n3"),
        ("leaf7_switch.log", "leaf7"),
        ("node-07.dmesg.gz", "node-07"),
        ("hosts/x12/kern.log", "x12"),
        # Digits that are no host's.
        ("dmesg.1", None),
        ("journal-20260304.log", None),
        ("ethtool_ens4f0np0.txt", None),
        ("ibstat_mlx5_0.txt", None),
        ("dmesg_job4411.txt", None),
        ("nvidia-smi_h100.txt", None),
        # No tool's output: a name that sites do not give their nodes stays unread.
        ("stdout-b31.log", None),
    ],
)
def test_the_node_of_a_files_name(name, node):
    assert node_of_name(name) == node


def test_the_host_before_process_and_thread_is_nccls():
    assert host_of_nccl("w-02:411:955 [0] misc/ibvwrap.cc:190 NCCL WARN Call failed") == "w-02"
    assert host_of_nccl("3: w-02:411:955 [0] NCCL INFO x") == "w-02"
    assert host_of_nccl("12:00:01:955 nothing") is None


def test_addresses_are_those_that_nccl_prints_when_it_starts():
    text = (
        "w-02:411:901 [0] NCCL INFO Bootstrap : Using eth0:10.2.0.12<0>\n"
        "w-03:402:900 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.2.0.13<0>\n"
    )
    assert addresses_of_nodes(text) == {"10.2.0.12": "w-02", "10.2.0.13": "w-03"}

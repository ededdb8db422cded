"""Kernel log lines as drivers print them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kansoku.formats.kernel_log import KernelRecord, classify, parse_kmsg, split_dmesg


def known(text):
    return classify(split_dmesg(f"[   12.345678] {text}"))


@pytest.mark.parametrize(
    ("text", "kind", "severity", "device"),
    [
        ("NVRM: Xid (PCI:0000:0f:00): 31, pid=1234, name=python, Ch 00000008", "xid", "error", None),
        ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 41 sourcetrack timeout",
         "sxid", "error", "nvswitch0"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 11012, Non-fatal, Link 1 single bit",
         "sxid", "warning", "nvswitch3"),
        ("NVRM: GPU at PCI:0000:3b:00.0: fallen off the bus", "gpu_lost", "error", None),
        ("pcieport 0000:00:1c.5: AER: Corrected error received: 0000:01:00.0", "aer", "warning", None),
        ("pcieport 0000:3a:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
         "aer", "error", None),
        ("Out of memory: Killed process 1234 (python3) total-vm:100kB", "oom_kill", "error", "python3"),
        ("Memory cgroup out of memory: Killed process 77 (pt data_worker) total-vm:1kB",
         "oom_kill", "error", "pt data_worker"),
        ("Lustre: lfs-OST0003-osc-ffff: Connection to lfs-OST0003 (at 10.0.0.1@o2ib) was lost; in",
         "lustre", "warning", "lfs-OST0003"),
        ("Lustre: lfs-OST0003-osc: Connection restored to 10.0.0.1@o2ib", "lustre", "info", "lfs-OST0003"),
        ("LustreError: 167-0: lfs-MDT0000-mdc: This client was evicted by lfs-MDT0000; in",
         "lustre", "error", "lfs-MDT0000"),
        ("mlx5_core 0000:3b:00.0 ens3f0np0: Link down", "link_down", "warning", "ens3f0np0"),
        ("mlx5_core 0000:3b:00.0 ens3f0np0: Link up", "link_up", "info", "ens3f0np0"),
        ("e1000e: eth0 NIC Link is Down", "link_down", "warning", "eth0"),
        ("INFO: task python:123 blocked for more than 120 seconds.", "hung_task", "warning", "python"),
        ("nfs: server fs1 not responding, still trying", "nfs", "warning", "fs1"),
        ("nfs: server fs1 OK", "nfs", "info", "fs1"),
        ("blk_update_request: I/O error, dev sda, sector 12", "disk_error", "error", "sda"),
    ],
)  # fmt: skip
def test_lines(text, kind, severity, device):
    message = known(text)
    assert (message.kind, message.severity, message.device) == (kind, severity, device)


def test_an_xid_keeps_code_address_and_process():
    message = known("NVRM: Xid (PCI:0000:0f:00): 31, pid=1234, name=python, Ch 00000008")
    assert (message.code, message.pci) == (31, "0000:0f:00")
    assert message.attributes == {"process.pid": "1234", "process.executable.name": "python"}


@pytest.mark.parametrize(
    "text", ["random: crng init done", "IPv6: eth0: thinking", "Linux version 6.1"]
)
def test_lines_of_no_interest(text):
    assert known(text) is None


def test_kmsg_records():
    record = parse_kmsg("6,339,5140900,-;NET: Registered protocol family 10\n SUBSYSTEM=net")
    assert record == KernelRecord(
        sequence=339, boot_us=5140900, severity="info", text="NET: Registered protocol family 10"
    )
    assert parse_kmsg("no semicolon") is None
    assert parse_kmsg("a,b,c,-;x") is None
    # facility 1, level 2 (critical): 8 + 2
    assert parse_kmsg("10,1,2,-;x").severity == "critical"


@settings(deadline=None)
@given(
    st.text() | st.from_regex(r"(NVRM: Xid|Lustre|AER: |Out of memory|ink|nvme).*", fullmatch=True)
)
def test_any_text_is_survived(text):
    classify(split_dmesg(text))
    parse_kmsg(text)
    parse_kmsg(f"6,1,1,-;{text}")


def test_hostile_lines_are_fast():
    """Every pattern is linear: a line of 2,000 characters made to backtrack ends at once."""
    for start in (
        "mlx5_core 0000:3b:00.0 ",
        "Lustre: ",
        "Out of memory: Killed process 1 (",
        "NVRM: ",
    ):
        classify(split_dmesg(start + "a ink:" * 100_000))

"""Stacks and device texts: the one that differs from all others."""

import pytest

from kansoku.diagnose.device_text import compare_facts, facts_of_text
from kansoku.diagnose.stacks import looks_like_stacks, outliers, stacks_of_text
from kansoku.model import Domain

WAITS = "    wait (torch/distributed/distributed_c10d.py:2900)\n    step (train.py:90)\n"
READS = "    read (fsspec/local.py:30)\n    __getitem__ (corpus.py:71)\n    step (train.py:80)\n"


def spy(rank, frames):
    text = f'Process {40 + rank}: python train.py\nPython v3.11\n\nThread 1 (idle): "MainThread"\n'
    return stacks_of_text((text + frames).splitlines(), name=f"r{rank}", node=None, rank=rank)


def test_the_rank_that_reads_while_all_others_wait():
    stacks = [s for r in range(8) for s in spy(r, READS if r == 5 else WAITS)]
    (seen,) = outliers(stacks)
    assert (seen.rank, seen.domain) == (5, Domain.STORAGE)


def test_equal_stacks_tell_nothing():
    assert outliers([s for r in range(8) for s in spy(r, WAITS)]) == []


def test_faulthandlers_dump_names_the_main_thread_last():
    text = (
        'Thread 0x1 (most recent call first):\n  File "threading.py", line 324 in wait\n\n'
        'Current thread 0x2 (most recent call first):\n  File "corpus.py", line 7 in fetch\n'
    )
    assert looks_like_stacks(text)
    (stack,) = stacks_of_text(text.splitlines(), name="x", node=None, rank=1)
    assert stack.frames == ("fetch (corpus.py)",)


def test_a_port_that_is_down_and_lanes_that_are_missing():
    ib = "CA 'mlx5_3'\n\tPort 1:\n\t\tState: Down\n\t\tPhysical state: Polling\n"
    smi = (
        "GPU 00000000:18:00.0\n    PCI\n        GPU Link Info\n            Link Width\n"
        "                Max                       : 16x\n"
        "                Current                   : 8x\n"
    )
    facts = facts_of_text(ib.splitlines(), node="n1", name="ibstat")
    facts += facts_of_text(smi.splitlines(), node="n1", name="smi")
    found = compare_facts(facts)
    assert {(o.domain, o.device) for o in found} == {
        (Domain.NETWORK, "mlx5_3"), (Domain.GPU_HARDWARE, "00000000:18:00.0"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "domain", "subject"),
    [
        ("3D controller: NVIDIA Corporation GH100", Domain.GPU_HARDWARE, "gpu:n1/18:00.0"),
        ("Infiniband controller: Mellanox MT2910", Domain.NETWORK, "nic:n1/18:00.0"),
        ("Non-Volatile memory controller: Samsung", Domain.STORAGE, "node:n1"),
        ("PCI bridge: Broadcom PEX890xx", Domain.HOST, "node:n1"),
    ],
)
def test_a_narrow_link_is_first_the_devices_at_its_end(device, domain, subject):
    text = (
        f"18:00.0 {device}\n\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16\n"
        "\t\tLnkSta:\tSpeed 32GT/s, Width x8 (downgraded)\n"
    )
    (seen,) = compare_facts(facts_of_text(text.splitlines(), node="n1", name="lspci"))
    assert (seen.domain, str(seen.subject)) == (domain, subject)


def test_the_node_whose_driver_differs():
    facts = []
    for n in range(6):
        version = "535.129.03" if n == 4 else "550.54.15"
        text = f"driver version: {version}\nuuid: {n}\n"
        facts += facts_of_text(text.splitlines(), node=f"n{n}", name="versions")
    (seen,) = compare_facts(facts)
    assert (seen.node, seen.component) == ("n4", "configuration")


def test_a_port_switched_off_everywhere_is_no_fault_but_one_off_alone_is():
    off = "CA 'mlx5_6'\n\tPort 1:\n\t\tState: Down\n\t\tPhysical state: Disabled\n"
    on = "CA 'mlx5_6'\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n"
    first = facts_of_text(off.splitlines(), name="ibstat", node="n1")
    other = facts_of_text(on.splitlines(), name="ibstat", node="n2")
    assert {(o.role, o.strength) for o in compare_facts(first)} == {("symptom", 0.3)}
    assert any(o.role == "root" for o in compare_facts([*first, *other]) if o.node == "n1")

"""The node guard on a recorded node: what blocks, what only warns, what is skipped."""

import pytest
from tests.labs.node_tree import make_node, write

from kansoku.app.guard import guard
from kansoku.errors import ConfigurationError
from kansoku.node.edge.machine import Machine
from kansoku.node.guard import CHECKS, GuardPolicy, guard_policy

GOOD = {
    "lost": 0.0, "ecc_uncorrected": 0.0, "remap_pending": 0, "remap_failed": 0, "pcie_width": 16.0,
    "pcie_width_max": 16.0, "recovery_action": 0.0,
}  # fmt: skip


class Told:
    def __init__(self, *, gpus=None, clock=(True, 0.01), log=()):
        self._gpus, self._clock, self._log = gpus, clock, log

    def gpus(self):
        return self._gpus

    def clock(self):
        return self._clock

    def kernel_log(self):
        return list(self._log)

    def hardware_codes(self):
        return frozenset({("xid", 79), ("xid", 48)})


def checks(root, policy=None, told=None):
    host = Machine(root=root, name="n1")
    found = {}
    for _, functions, _ in CHECKS:
        for function in functions:
            for check in function(host, policy or GuardPolicy(), told or Told()):
                found[check.name] = check
    return found


@pytest.fixture
def node(tmp_path):
    return make_node(tmp_path)


def test_a_node_without_gpus_and_policy_is_fit(node):
    found = checks(node)
    assert {c.status for c in found.values()} <= {"ok", "skipped"}
    assert found["gpus"].status == "skipped"


def test_a_gpu_that_the_driver_does_not_show_blocks(node):
    for slot in range(8):
        write(node, f"/sys/bus/pci/devices/0000:{slot:02x}:00.0/vendor", "0x10de\n")
        write(node, f"/sys/bus/pci/devices/0000:{slot:02x}:00.0/class", "0x030200\n")
    write(node, "/sys/bus/pci/devices/0000:99:00.0/vendor", "0x10de\n")
    write(node, "/sys/bus/pci/devices/0000:99:00.0/class", "0x068000\n")  # an NVSwitch is no GPU
    assert checks(node, told=Told(gpus=[GOOD] * 8))["gpus"].status == "ok"
    seven = checks(node, told=Told(gpus=[GOOD] * 7))["gpus"]
    assert (seven.status, seven.sentence) == ("block", "7 of 8 GPUs answer")
    lost = checks(node, told=Told(gpus=[*[GOOD] * 7, {"lost": 1.0}]))["gpus"]
    assert lost.sentence == "7 of 8 GPUs answer"
    assert checks(node, told=Told(gpus=None))["gpus"].status == "block"


@pytest.mark.parametrize(
    ("name", "reading", "words"),
    [
        ("ecc", {"ecc_uncorrected": 2.0}, "2 uncorrected"),
        ("ecc", {"remap_failed": 1}, "replaced"),
        ("ecc", {"remap_pending": 1}, "reset"),
        ("ecc", {"recovery_action": 2.0}, "recovery action 2"),
        ("pcie", {"pcie_width": 8.0}, "8 of 16"),
    ],
)
def test_a_sick_gpu_blocks_and_is_named(node, name, reading, words):
    found = checks(node, told=Told(gpus=[GOOD, GOOD | reading]))[name]
    assert found.status == "block"
    assert "GPU 1" in found.sentence
    assert words in found.sentence


def test_what_a_gpu_does_not_offer_is_no_fault(node):
    found = checks(node, told=Told(gpus=[dict.fromkeys(GOOD)]))
    assert {found[n].status for n in ("gpus", "ecc", "pcie")} == {"ok"}


def kmsg(seconds, text):
    return f"4,1,{seconds * 1_000_000},-;{text}"


def test_only_fatal_hardware_xids_of_the_look_back_block(node):
    write(node, "/proc/uptime", "100000.0 1.0\n")
    old = kmsg(1000, "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.")
    user = kmsg(99_000, "NVRM: Xid (PCI:0000:18:00): 31, pid=1, MMU Fault")
    new = kmsg(99_900, "NVRM: Xid (PCI:0000:3a:00): 48, pid=7, DBE")
    assert checks(node, told=Told(log=[old, user]))["xid"].status == "ok"
    found = checks(node, told=Told(log=[old, user, new]))["xid"]
    assert (found.status, found.sentence) == ("block", "XID 48 on 0000:3a:00")


def test_links_of_the_policy_must_be_up_and_fast(node):
    policy = GuardPolicy(nics=("mlx5_0", "mlx5_1", "ens0f0"), nic_rate_gbits=400)
    assert checks(node, policy)["nics"].status == "ok"
    write(node, "/sys/class/infiniband/mlx5_1/ports/1/rate", "200 Gb/sec (4X HDR)\n")
    assert "mlx5_1 runs at 200 of 400" in checks(node, policy)["nics"].sentence
    write(node, "/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    assert "mlx5_1 is down" in checks(node, policy)["nics"].sentence
    gone = checks(node, GuardPolicy(nics=("mlx5_77",)))["nics"]
    assert gone.sentence == "mlx5_77 is not there"


def test_mounts_disks_and_memory(node):
    (node / "home").mkdir()
    assert checks(node, GuardPolicy(mounts=("/home",)))["mounts"].status == "ok"
    found = checks(node, GuardPolicy(mounts=("/scratch",)))["mounts"]
    assert found.sentence == "/scratch is not mounted"
    write(node, "/proc/mounts", "/dev/nvme0n1p1 / ext4 ro,relatime 0 0\n")
    assert "/ is read-only" in checks(node)["disk"].sentence
    found = checks(node, GuardPolicy(memory_bytes=2**30))["memory"]
    assert found.status == "block"


def test_the_clock_only_warns(node):
    assert checks(node, told=Told(clock=(False, 16.0)))["clock"].status == "warn"
    assert checks(node, told=Told(clock=(True, 3.0)))["clock"].status == "warn"


def test_a_policy_with_an_unknown_key_is_refused():
    with pytest.raises(ConfigurationError, match="gpu_count"):
        guard_policy({"gpu_count": 8}, "guard.toml")
    with pytest.raises(ConfigurationError, match="must be a number"):
        guard_policy({"gpus": "eight"}, "guard.toml")
    with pytest.raises(ConfigurationError, match="list of names"):
        guard_policy({"nics": "mlx5_0"}, "guard.toml")
    assert guard_policy({"gpus": 8, "nics": ["a"]}, "x") == GuardPolicy(gpus=8, nics=("a",))


def test_a_refused_policy_is_told_once_and_blocks_nothing():
    answer = guard(
        lambda: guard_policy({"gpus": "many"}, "g.toml"), occasion="prolog", budget_s=60.0
    )
    assert not answer.blocked
    assert answer.broken == "ConfigurationError: g.toml: gpus must be a number, not 'many'"

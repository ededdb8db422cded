"""Collectors on damaged files: a broken line costs itself, never the round."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.labs.node_tree import MLX5_COUNTERS, make_node

from kansoku.errors import InputError
from kansoku.formats.kernel_log import classify, parse_kmsg
from kansoku.node import Event, Sample, load_collectors
from kansoku.node.collectors.dcgm import Dcgm
from kansoku.node.edge.machine import Machine

NOW = 1_795_961_000_000_000_000
FUZZ = settings(
    max_examples=300, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
FROM_FILES = (
    "cpu", "memory", "pressure", "numa", "disk", "network", "energy", "ethtool", "rdma", "lustre",
    "nfs", "filesystem",
)  # fmt: skip
PIECES = st.sampled_from(
    ["", "\0", " ", "\n", ":", "-1", "=", "nan", "inf", "1e999", "99999999999999999999", "٣", "x"]
)


class Damaged:
    """A recorded machine whose files are changed on their way."""

    def __init__(self, machine, damage):
        self._machine = machine
        self._damage = damage

    def __getattr__(self, name):
        return getattr(self._machine, name)

    def read(self, path):
        text = self._machine.read(path)
        return None if text is None else self._damage(text)

    def read_bytes(self, path):
        data = self._machine.read_bytes(path)
        return None if data is None else self._damage(data.decode("latin-1")).encode("utf-8")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(root=make_node(tmp_path_factory.mktemp("n")), name="c001", now_ns=lambda: NOW)


def damage(places):
    def change(text):
        for place, piece, gone in places:
            at = place % (len(text) + 1)
            text = text[:at] + piece + text[at + gone :]
        return text

    return change


@FUZZ
@given(
    st.sampled_from(FROM_FILES),
    st.lists(st.tuples(st.integers(0, 5000), PIECES, st.integers(0, 40)), max_size=4),
    st.integers(0, 2**64 - 1),
)
def test_damaged_files_are_survived(machine, name, places, odd):
    """Twice, so that counters meet what they remember."""
    given = {"ethtool_statistics": lambda _: {**MLX5_COUNTERS, "rx_prio3_pause": odd, "": odd}}
    (collector,) = load_collectors([name], settings=given)
    host = Damaged(machine, damage(places))
    if collector.absent(host) is None:
        for _ in range(2):
            for item in collector.collect(host):
                assert isinstance(item, Sample | Event)
                assert isinstance(item, Event) or item.value == item.value  # not NaN


EXPOSITION = """# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100"} 97
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1",err_code="79"} 79
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-2",GPU_I_ID="3"} 612.5
"""


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 400), PIECES, st.integers(0, 30)), max_size=6))
def test_a_damaged_exposition_is_survived(machine, places):
    text = damage(places)(EXPOSITION)
    with contextlib.suppress(InputError):  # every name of a metric may be gone
        list(Dcgm(dcgm_url="http://x", fetch=lambda _: text).collect(machine))


KMSG = (
    "3,100,5000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
    "4,101,5001,-;mlx5_core 0000:5e:00.0 eth2: Link down",
    "3,102,5002,-;pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
    "6,103,5003,-;Out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:2kB",
    "3,104,5004,-;LustreError: 11-0: lfs-OST0001-osc: operation ost_read failed: rc = -107",
)


@FUZZ
@given(
    st.sampled_from(KMSG),
    st.lists(st.tuples(st.integers(0, 120), PIECES, st.integers(0, 30)), max_size=4),
)
def test_a_damaged_kernel_line_is_survived(line, places):
    record = parse_kmsg(damage(places)(line))
    if record is not None:
        classify(record)

"""Transfer times by hand."""

from dataclasses import replace

import numpy as np
import pytest

from kansoku.catalog.calibration import Calibration
from kansoku.plan.hardware import generic_hardware
from kansoku.plan.network import SCALE_UP_CALL_S, SWITCH_S, Network

IDEAL = Calibration.from_constants(
    "h100-sxm",
    {
        "gemm_efficiency": 1.0, "gemm_fp8_efficiency": 1.0, "attention_efficiency": 1.0,
        "memory_efficiency": 1.0, "scale_up_efficiency": 1.0, "scale_out_efficiency": 1.0,
        "kernel_gap_s": 0.0, "hop_latency_s": 5e-6,
    },
    attention="flash",
    source="made up",
)  # fmt: skip


def network(**changes):
    hardware = replace(generic_hardware("h100", 64), **changes)
    return Network(hardware=hardware, calibration=IDEAL, nic=50e9)


def one(value):
    return np.array([value])


def test_gather_inside_a_node():
    """8 GPUs, 450 MB: 7/8 of it at 450 GB/s one way."""
    net = network()
    got = net.gather(net.group(one(8), one(1)), one(450e6))
    assert got[0] == pytest.approx(0.875e-3 + SCALE_UP_CALL_S)


def test_gather_over_nodes_uses_every_rail():
    """16 GPUs on 2 nodes, 800 MB: half crosses, over eight NICs of 50 GB/s: 1 ms."""
    net = network()
    group = net.group(one(16), one(1))
    hop = 5e-6 + SWITCH_S
    within = 800e6 * 15 / 16 / 450e9
    assert net.gather(group, one(800e6))[0] == pytest.approx(
        max(1e-3, within) + SCALE_UP_CALL_S + hop
    )


def test_rail_only_groups_use_one_nic_each():
    """Data parallel of stride 8 over 4 nodes: 3/4 of the bytes through one NIC."""
    net = network()
    group = net.group(one(4), one(8))
    assert (group.members[0], group.nodes[0], group.tier[0]) == (1, 4, 2)
    expected = 100e6 * 0.75 / 50e9 + 3 * (5e-6 + SWITCH_S)
    assert net.gather(group, one(100e6))[0] == pytest.approx(expected)


def test_pod_crossing_takes_three_switches_and_the_thinner_up_links():
    net = network(pod_gpus=32, oversubscription=2.0)
    near, far = net.group(one(4), one(8)), net.group(one(8), one(8))
    assert (near.tier[0], far.tier[0]) == (2, 4)
    assert net.latency(far)[0] - net.latency(near)[0] == pytest.approx(2 * SWITCH_S)
    assert net.send(far, one(1e9))[0] == pytest.approx(1e9 / 25e9 + 5e-6 + 3 * SWITCH_S)


def test_exchange_by_hand():
    """All-to-all of 16 ranks on two nodes: half leaves the node over the rank's own NIC."""
    net = network()
    got = net.exchange(net.group(one(16), one(1)), one(100e6))
    assert got[0] == pytest.approx(50e6 / 50e9 + SCALE_UP_CALL_S + 5e-6 + SWITCH_S)


def test_single_rank_sends_nothing():
    net = network()
    group = net.group(one(1), one(1))
    assert net.gather(group, one(1e9))[0] == 0
    assert net.exchange(group, one(1e9))[0] == 0
    assert net.send(group, one(1e9))[0] == 0

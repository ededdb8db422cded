"""RDMA and ethtool counters: side, unit, width."""

import pytest

from kansoku.catalog.metrics import metrics
from kansoku.catalog.nic_counters import match_ethtool, rdma_counter, rdma_counters


# NVIDIA "Understanding mlx5 Linux counters"; Linux Documentation/ABI/stable/sysfs-class-infiniband.
@pytest.mark.parametrize(
    ("folder", "name", "side", "factor", "bits", "saturates"),
    [
        ("counters", "port_xmit_data", "both", 4, 64, False),
        ("counters", "symbol_error", "port", 1, 16, True),
        ("hw_counters", "out_of_sequence", "responder", 1, 32, False),
        ("hw_counters", "packet_seq_err", "requester", 1, 32, False),
        ("hw_counters", "np_cnp_sent", "notification_point", 1, 64, False),
        ("hw_counters", "rp_cnp_handled", "reaction_point", 1, 64, False),
    ],
)
def test_meaning(folder, name, side, factor, bits, saturates):
    found = rdma_counter(folder, name)
    assert (found.side, found.factor, found.bits, found.saturates) == (
        side,
        factor,
        bits,
        saturates,
    )


def test_a_setting_is_no_counter():
    assert rdma_counter("hw_counters", "lifespan") is None


def test_metrics_exist():
    for counter in rdma_counters().values():
        metric = counter.metric
        if metric.startswith("hw.network."):
            metric = metric.rpartition(".")[0]
        assert metric in {*metrics(), ""}
        assert counter.source


@pytest.mark.parametrize(
    ("driver", "counter", "metric", "labels"),
    [
        ("mlx5_core", "tx_prio5_pause", "kansoku.nic.pause.frames",
         {"kansoku.priority": "5", "network.io.direction": "transmit"}),
        ("bnxt_en", "rx_pfc_ena_frames_pri3", "kansoku.nic.pause.frames",
         {"kansoku.priority": "3", "network.io.direction": "receive"}),
        ("ice", "rx_priority_3_xoff.nic", "kansoku.nic.pause.frames",
         {"kansoku.priority": "3", "network.io.direction": "receive"}),
        ("mlx5_core", "rx_corrected_bits_phy", "kansoku.nic.fec.blocks",
         {"kansoku.fec": "corrected_bits"}),
    ],
)  # fmt: skip
def test_ethtool(driver, counter, metric, labels):
    found = match_ethtool(driver, counter)
    assert (found.metric, dict(found.labels)) == (metric, labels)
    assert found.metric in metrics()


def test_a_name_of_another_driver_means_nothing():
    assert match_ethtool("virtio_net", "rx_prio3_pause") is None
    assert match_ethtool("mlx5_core", "rx3_packets") is None

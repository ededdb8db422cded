"""Calibration data: few constants, sourced; unknown GPUs are refused."""

import pytest

from kansoku.catalog.accelerators import accelerators
from kansoku.catalog.calibration import calibration, calibrations
from kansoku.catalog.reference_nodes import reference_node, reference_nodes
from kansoku.errors import ConfigurationError


def test_at_most_eight_constants_each_physical():
    for entry in calibrations().values():
        constants = entry.constants()
        assert len(constants) <= 8
        assert all(
            0 < value <= 1 for name, value in constants.items() if name.endswith("efficiency")
        )
        assert entry.source


def test_borrowed_constants_claim_no_points():
    h200 = calibration("h200")
    assert (h200.measured, h200.mean_error_ratio) == (0, None)
    assert "h100" in h200.source


def test_unmeasured_gpus_are_refused():
    with pytest.raises(ConfigurationError, match="no measured point"):
        calibration("mi300x")


def test_reference_nodes():
    assert set(reference_nodes()) <= set(accelerators())
    assert reference_node("h100").nic_bits_per_s_per_gpu == 400e9
    assert reference_node("mi300x").nic_bits_per_s_per_gpu is None

"""Official results of MLPerf Training submissions, from their published logs."""

import pytest

from kansoku.app.bench_mfu import Hardware, mfu_of_run
from kansoku.app.bench_score import score


def test_eos_32_nodes(corpus):
    """96.665 min in mlcommons/training_results_v4.1."""
    (result,) = score([corpus / "mlperf" / "eos_n32_v4.1"], mfu=mfu_of_run(Hardware()))
    assert result.score_minutes == pytest.approx(96.665, abs=0.001)
    assert result.label == "published"
    assert result.rcp.verdict == "pass"


def test_gaudi2_converges_within_the_reference(corpus):
    from mlperf_logging.rcp_checker import rcp_checker

    folder = corpus / "mlperf" / "gaudi2_n32_v3.1"
    (result,) = score([folder], mfu=mfu_of_run(Hardware()), ruleset="3.1.0")
    # The official checker would write into the folder only with set_scaling.
    passed, _, _ = rcp_checker.check_directory(
        str(folder), "training", "3.1.0", False, False, rcp_pass="pruned_rcps"
    )
    assert (result.rcp.verdict == "pass") == passed
    # Middle of three, from the logs' own stamps: 1696489467750 − 1696476033158 ms.
    assert result.score_minutes == pytest.approx(13_434_592 / 60_000)

"""The CPUs' peak: cores, quotas and sources by hand, one product for real."""

import subprocess

import pytest

from kansoku.app.cpu_peak import core_seconds, measure_cpu_peak, usable_cores


def test_the_peak_is_one_cores_times_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr("kansoku.app.cpu_peak._siblings", str)
    monkeypatch.setattr("kansoku.app.cpu_peak.core_seconds", lambda: None)
    found = measure_cpu_peak(run=lambda _: (200_000, 900))
    # 2 x 256^3 in 0.2 ms are 167.77 GFLOP/s, on three cores 503.3.
    assert found["flops"] == pytest.approx(503.31648e9)
    assert found["source"] == (
        "measured: float32 matrix product of 256×256 on one core, best of 900, times 3 cores"
    )


def test_threads_of_one_core_count_once():
    """Two cores of two threads each, as Linux lists them; three of the four CPUs may be used."""
    lists = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    assert usable_cores({0, 1, 2}, lists.__getitem__) == 2
    assert usable_cores({0, 2}, lists.__getitem__) == 1
    assert usable_cores({0, 1}, lists.__getitem__, quota=0.5) == 0.5


@pytest.mark.parametrize(
    ("above", "own", "allowed"),
    [("max 100000", "150000 100000", 1.5), ("50000 100000", "150000 100000", 0.5),
     ("max 100000", "max 100000", None), ("damaged", "", None)],
)  # fmt: skip
def test_quotas_of_every_group_above_count(tmp_path, above, own, allowed):
    (tmp_path / "cgroup").write_text("0::/slurm/job7\n")
    folder = tmp_path / "fs" / "slurm" / "job7"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text(own)
    (folder.parent / "cpu.max").write_text(above)
    assert core_seconds(tmp_path / "fs", tmp_path / "cgroup") == allowed


def test_no_control_groups_no_limit(tmp_path):
    assert core_seconds(tmp_path, tmp_path / "none") is None


def test_what_cannot_be_measured_has_a_reason():
    def fails(_):
        raise subprocess.CalledProcessError(1, "python")

    found = measure_cpu_peak(run=fails)
    assert found["flops"] is None
    assert "was not measured" in found["source"]


def test_a_real_product_is_measured():
    found = measure_cpu_peak(seconds=0.02)
    assert found["flops"] > 1e9
    assert found["source"].startswith("measured")

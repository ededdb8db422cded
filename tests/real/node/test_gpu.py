"""The NVML collector and the fast sampler against a compiled stand-in for libnvidia-ml.so.1.

The library is loaded by nvidia-ml-py as the real one is; only its answers are made up.
"""

import json
import subprocess
import sys
import textwrap

import polars as pl
import pytest
from tests.labs.nvml import FakeNvml

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    return FakeNvml(tmp_path_factory.mktemp("nvml"))


def agent(nvml, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "agent", "--once", "--json", "--node", "c001", *arguments],
        env=nvml.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def values(answer, metric, **wanted):
    wanted = {k.replace("__", "."): v for k, v in wanted.items()}
    return [
        s["value"]
        for s in answer["samples"]
        if s["metric"] == metric and wanted.items() <= s["labels"].items()
    ]


def test_a_healthy_node_of_eight(nvml):
    nvml.set(process=1234, nvlink_error_4_1={5: 17}, field_138=2048, memory_total=85520809984)
    answer = agent(nvml, "--only", "nvml")
    assert answer["collectors"][0]["state"] == "ok"
    assert len(values(answer, "kansoku.gpu.info")) == 8
    (info,) = [
        s
        for s in answer["samples"]
        if s["metric"] == "kansoku.gpu.info" and s["labels"]["hw.name"] == "gpu3"
    ]
    assert info["labels"]["kansoku.pci.address"] == "00000000:4B:00.0"
    assert info["labels"]["hw.driver_version"] == "570.86.15"
    gpu = {"hw__name": "gpu5"}
    assert values(answer, "hw.power", **gpu) == [612.345]
    assert values(answer, "hw.energy", **gpu) == [123456.789]
    assert values(answer, "hw.gpu.utilization", hw__gpu__task="general", **gpu) == [0.97]
    assert values(answer, "hw.temperature", hw__sensor_location="memory", **gpu) == [71]
    assert values(answer, "kansoku.gpu.clock.frequency", kansoku__gpu__clock="sm", **gpu) == [
        1.755e9
    ]
    assert values(
        answer, "kansoku.gpu.nvlink.errors", kansoku__nvlink="4", error__type="recovery", **gpu
    ) == [17]
    assert values(answer, "kansoku.gpu.nvlink.io", network__io__direction="transmit", **gpu) == [
        2048 * 1024
    ]
    assert values(answer, "kansoku.gpu.process.memory", process__pid="1234", **gpu) == [68e9]
    assert not [e for e in answer["events"] if e["source"] == "nvml"]


def test_faults(nvml):
    """A lost GPU costs only itself; throttling and a wanted reset are events."""
    nvml.set(
        lost={2: 1}, clock_reasons={1: 0x40}, field_230={6: 4}, rows_pending={6: 1},
        ecc_uncorrected={6: 3}, pcie_width={4: 8}, power_mw={7: "unsupported"},
    )  # fmt: skip
    answer = agent(nvml, "--only", "nvml")
    events = {(e["kind"], e["subject"]): e for e in answer["events"]}
    assert events["gpu_lost", "gpu:c001/2"]["severity"] == "error"
    assert events["gpu_throttled", "gpu:c001/1"]["body"] == "hw_thermal: hardware thermal limit"
    assert events["gpu_recovery_action", "gpu:c001/6"]["severity"] == "error"
    assert "drain_and_reset" in events["gpu_recovery_action", "gpu:c001/6"]["body"]
    assert values(answer, "kansoku.gpu.lost") == [0, 0, 1, 0, 0, 0, 0, 0]
    assert values(answer, "kansoku.gpu.rows.pending", hw__name="gpu6") == [1]
    assert values(answer, "hw.errors", hw__name="gpu6", error__type="ecc_uncorrected") == [3]
    assert values(answer, "kansoku.gpu.pcie.width", hw__name="gpu4", kansoku__limit="current") == [
        8
    ]
    assert values(answer, "hw.power", hw__name="gpu7") == [], "not offered is missing, not zero"
    assert len(values(answer, "hw.power")) == 6


def test_mig(nvml):
    nvml.set(gpus=1, mig=1)
    answer = agent(nvml, "--only", "nvml")
    assert values(answer, "kansoku.gpu.mig.enabled") == [1]
    assert values(answer, "kansoku.gpu.mig.memory.usage", kansoku__mig="8") == [2**30]


def test_no_driver_is_said_once_with_the_reason(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "agent", "--once", "--json", "--only", "nvml"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["collectors"][0]["state"] in {"absent", "ok"}  # ok on a machine with a GPU
    if answer["collectors"][0]["state"] == "absent":
        assert [e["kind"] for e in answer["events"]] == ["collector_absent"]


SAMPLER = """
import sys, time
from pathlib import Path
from kansoku.node.edge.fast import FastSampler
values, folder = Path(sys.argv[1]), Path(sys.argv[2])
energy = 1_000_000
def plant():
    part = values.with_suffix(".part")
    part.write_text(f"gpus -1 2\\nenergy_mj 0 {energy}\\n")
    part.replace(values)
plant()  # before the first sample, which is taken at once
with FastSampler(folder, node="n", interval_s=0.02) as sampler:
    end = time.monotonic() + 1.0
    while time.monotonic() < end:  # 20 J every 40 ms: 500 W
        energy += 20_000
        plant()
        time.sleep(0.04)
print(energy - 1_000_000, sampler.late)
"""


def test_fast_sampling_measures_the_energy_planted(nvml, tmp_path):
    """The fake GPU uses energy in steps; what was sampled agrees to within one renewal."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SAMPLER), str(nvml.values), str(tmp_path)],
        env=nvml.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    planted_mj = int(done.stdout.split()[0])
    rows = pl.concat([pl.read_parquet(f) for f in sorted(tmp_path.glob("resources-*.parquet"))])
    energy = rows.filter((pl.col("device") == "gpu0") & (pl.col("quantity") == "energy_j"))
    grown_j = energy["value"].max() - energy["value"].min()
    assert grown_j == pytest.approx(planted_mj / 1e3, abs=41)
    assert energy["time_ns"].is_sorted()
    assert {"sm_activity", "memory_activity"} <= set(rows["quantity"])

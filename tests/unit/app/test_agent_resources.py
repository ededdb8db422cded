"""What the agent's own samples say of the steps of jobs on its node: by hand, and never twice."""

import os
from pathlib import Path

import polars as pl
import pytest

from kansoku.app.agent_resources import NodeSampling, SamplingPolicy
from kansoku.app.agent_rings import RingFollower
from kansoku.model import ring
from kansoku.node.resources import SAMPLES_SCHEMA

MS = 1_000_000
T0 = 1_700_000_000_000_000_000
START = int(Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19])
DEAD = 2**22 + 9
UUIDS = {"GPU-aaaa-0": "gpu0", "GPU-bbbb-1": "gpu1"}


def train(folder, run, durations_ms, *, start_ms=0, pid=None, device="NVIDIA H100", **said):
    """Write the ring of a job's only rank: steps of these durations, one after another."""
    buffer = bytearray(1 << 18)
    ring.format_ring(
        buffer, pid=pid or os.getpid(), process_start=START, lane_shares=(1,),
        anchor=(start_ms * MS, T0 + start_ms * MS),
    )  # fmt: skip
    writer = ring.RingWriter(buffer)
    writer.set_ranks(0, 0, 1)
    writer.set_facts({"node": "elsewhere", "run": run, "device": device, "extra": said})
    now = start_ms * MS
    for number, duration in enumerate(durations_ms, 1):
        span = writer.open(ring.pack_template(ring.KIND_CODES["step"]), now, number, 0)
        now += round(duration * MS)
        writer.close(span, now - round(duration * MS), now, -1)
    writer.set_now(step=-1, phase=0, main_thread=1, alive_ns=now)
    (folder / run).mkdir(parents=True, exist_ok=True)
    (folder / run / "n-1.ring").write_bytes(buffer)


class Planted:
    """Stands in for the fast sampler: writes what was planted, once."""

    def __init__(self, folder, *, node, interval_s):
        self.folder, self.node, self.interval_s = folder, node, interval_s
        self.uuids, self.cpu_s, self.late = UUIDS, 0.0, 0
        self.rows, self.closed, self.cost_s = self.planted, False, 0.0
        Planted.last = self

    def start(self):
        pass

    def read_once(self):
        self.cpu_s += self.cost_s

    def flush(self):
        if self.rows:
            rows = [(self.node, d, q, T0 + t * MS, float(v)) for d, q, t, v in self.rows]
            rows += [(self.node, u, "index", T0, float(d[3:])) for u, d in UUIDS.items()]
            frame = pl.DataFrame(rows, schema=SAMPLES_SCHEMA, orient="row")
            frame.write_parquet(self.folder / "resources-00000.parquet")
            self.rows = ()

    def close(self):
        self.closed = True
        self.flush()


@pytest.fixture
def follower(tmp_path):
    sampling = NodeSampling(tmp_path / "own", node="c001", start=Planted)
    return RingFollower(tmp_path / "rings", sampling=sampling)


def plant(*series):
    """Plant constant powers, and counters that grow evenly, read every 10 ms for a second."""
    rows = []
    for device, quantity, value in series:
        grows = quantity not in {"power_w", "sm_activity", "memory_activity"}
        rows += [(device, quantity, 10 * n, value * n if grows else value) for n in range(101)]
    Planted.planted = tuple(rows)


def steps(found):
    return found.tables["steps"].sort("run", "step")


def test_joules_bytes_and_activity_of_each_step_by_hand(tmp_path, follower):
    """500 W over 20 and 40 ms; 1,000 bytes received in 10 ms; one GPU at 75 %."""
    plant(
        ("gpu0", "power_w", 500), ("gpu0", "sm_activity", 0.75), ("gpu0", "memory_activity", 0.5),
        ("gpu0", "nvlink_receive_bytes", 300), ("mlx5_0", "receive_bytes", 1000),
        ("gpu1", "power_w", 90),
    )  # fmt: skip
    train(tmp_path / "rings", "a", [20, 40])
    rows = steps(follower.read())
    assert rows["energy_j"].to_list() == pytest.approx([10, 20])
    assert rows["energy_error_j"].to_list() == pytest.approx([0, 0], abs=1e-9)
    assert rows["nic_bytes"].to_list() == [2000, 4000]
    assert rows["nvlink_bytes"].to_list() == [600, 1200]
    assert rows["sm_activity"].to_list() == pytest.approx([0.75, 0.75])
    assert rows["memory_activity"].to_list() == pytest.approx([0.5, 0.5])


def test_it_samples_while_a_job_runs_into_a_folder_of_its_own(tmp_path, follower):
    plant(("gpu0", "power_w", 500))
    found = follower.read()
    assert not (tmp_path / "own").exists()
    assert {s.metric: s.value for s in found.samples}["kansoku.agent.sampling.interval"] == 0
    train(tmp_path / "rings", "a", [20])
    found = {s.metric: s.value for s in follower.read().samples}
    assert found["kansoku.agent.sampling.interval"] == 0.05
    assert found["kansoku.agent.sampling.disk.usage"] > 0
    assert {p.parent for p in tmp_path.rglob("*.parquet")} == {tmp_path / "own"}
    assert (tmp_path / "own").stat().st_mode & 0o077 == 0
    train(tmp_path / "rings", "a", [20, 30], pid=DEAD)
    rows = steps(follower.read())
    assert Planted.last.closed
    assert rows.select("step", "energy_j").rows() == [(2, pytest.approx(15))]


def test_two_jobs_on_one_gpu_are_not_charged_twice(tmp_path, follower):
    """a for 400 ms; b from 200 ms on: a has 100 J alone, then both half of 500 W."""
    plant(("gpu0", "power_w", 500), ("gpu0", "sm_activity", 0.5), ("eth0", "receive_bytes", 100))
    train(tmp_path / "rings", "a", [200, 200])
    train(tmp_path / "rings", "b", [200, 200], start_ms=200)
    rows = steps(follower.read())
    assert rows["energy_j"].to_list() == pytest.approx([100, 50, 50, 50], abs=1e-3)
    assert rows["nic_bytes"].to_list() == [2000, 1000, 1000, 1000]
    assert rows["sm_activity"].to_list() == [pytest.approx(0.5), None, None, None]


def test_a_job_gets_the_gpu_that_its_environment_names(tmp_path, follower):
    plant(("gpu0", "power_w", 100), ("gpu1", "power_w", 700))
    train(tmp_path / "rings", "a", [100], CUDA_VISIBLE_DEVICES="0")
    train(tmp_path / "rings", "b", [100], CUDA_VISIBLE_DEVICES="GPU-bbbb")
    train(tmp_path / "rings", "c", [100], CUDA_VISIBLE_DEVICES="0", SLURM_STEP_GPUS="1", pid=DEAD)
    rows = steps(follower.read()).select("run", "energy_j").rows()
    # c, confined to the node's second GPU, calls it 0 and shares it with b
    assert rows == [("a", pytest.approx(10)), ("b", pytest.approx(35)), ("c", pytest.approx(35))]


def test_where_a_gpu_is_not_known_nobody_gets_its_joules(tmp_path, follower):
    plant(("gpu0", "power_w", 100), ("gpu1", "power_w", 700))
    train(tmp_path / "rings", "a", [100], CUDA_VISIBLE_DEVICES="0")
    train(tmp_path / "rings", "b", [100], CUDA_VISIBLE_DEVICES="GPU-unheard-of")
    assert steps(follower.read())["energy_j"].to_list() == [None, None]


def test_the_budget_thins_out_the_samples_and_old_ones_go(tmp_path):
    plant(("gpu0", "power_w", 500))
    policy = SamplingPolicy(keep_bytes=0, cpu_ratio=1e-9)
    sampling = NodeSampling(tmp_path, node="n", policy=policy, start=Planted)
    sampling.watch(job_runs=True)
    Planted.last.cost_s = 1.0
    assert len(sampling.samples(0)) > 0
    sampling.watch(job_runs=True)
    assert Planted.last.interval_s == policy.longest_interval_s
    assert sampling.cpu_s == 1.0
    assert list(tmp_path.glob("*.parquet")) == []


def test_a_sampler_that_fails_costs_joules_only(tmp_path):
    def broken(*_, **__):
        raise RuntimeError("no")

    sampling = NodeSampling(tmp_path / "own", node="n", start=broken)
    train(tmp_path / "rings", "a", [20])
    found = RingFollower(tmp_path / "rings", sampling=sampling).read()
    assert found.tables["steps"]["energy_j"].to_list() == [None]
    failures = {s.metric: s.value for s in found.samples}["kansoku.agent.sampling.failures"]
    assert failures == 1

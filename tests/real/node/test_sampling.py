"""The agent's fast samples of a job on its node, against a compiled stand-in for NVML."""

import json
import subprocess
import sys
import textwrap

import pytest
from tests.labs.nvml import FakeNvml

pytestmark = pytest.mark.real

AGENT = """
import functools, json, os, sys, time
from pathlib import Path
from kansoku.app.agent_resources import NodeSampling
from kansoku.app.agent_rings import RingFollower
from kansoku.model import ring
from kansoku.node.edge.fast import FastSampler

folder = Path(sys.argv[1])
start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
buffer = bytearray(1 << 18)
ring.format_ring(buffer, pid=os.getpid(), process_start=start, lane_shares=(1,),
                 anchor=(time.monotonic_ns(), time.time_ns()))
writer = ring.RingWriter(buffer)
writer.set_ranks(0, 0, 1)
writer.set_facts({"run": "a", "device": "NVIDIA H100",
                  "extra": {"CUDA_VISIBLE_DEVICES": "GPU-00000000-0000-0000-0000-000000000001"}})
file = folder / "rings" / "a" / "n-1.ring"
file.parent.mkdir(parents=True)
file.write_bytes(buffer)
sampling = NodeSampling(
    folder / "own", node="n", start=functools.partial(FastSampler, root=str(folder))
)
follower = RingFollower(folder / "rings", sampling=sampling)
follower.read()
time.sleep(0.2)
step = ring.pack_template(ring.KIND_CODES["step"])
now = time.monotonic_ns()
for number, seconds in enumerate((0.3, 0.6), 1):
    span = writer.open(step, now, number, 0)
    end = now + int(seconds * 1e9)
    writer.close(span, now, end, -1)
    now = end
time.sleep(1.4)
file.write_bytes(buffer)
rows = follower.read().tables["steps"]
cost = sampling.cpu_s
writer.set_state(ring.CLOSED)
file.write_bytes(buffer)
follower.read()
print(json.dumps({"rows": rows.to_dicts(), "cpu_s": cost, "running": sampling.running}))
"""


def test_joules_of_each_step_are_power_times_time(tmp_path):
    """The job's GPU takes 500 W, the others 90 W: 150 J in 0.3 s, 300 J in 0.6 s."""
    nvml = FakeNvml(tmp_path / "nvml")
    nvml.set(gpus=2, energy_mj="unsupported", power_mw={0: 90_000, 1: 500_000})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AGENT), str(tmp_path)],
        env=nvml.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    rows = answer["rows"]
    assert [row["energy_j"] for row in rows] == pytest.approx([150, 300])
    assert all(0 <= row["energy_error_j"] <= 500 for row in rows)
    assert all(0 <= row["sm_activity"] <= 1 for row in rows)
    assert answer["cpu_s"] > 0
    assert not answer["running"], "it ends with the job"

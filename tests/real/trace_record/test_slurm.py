"""``trace record --slurm-job`` on a live Slurm: the ranks are found by the job's number alone."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kansoku.trace.edge.kineto_daemon import KinetoEndpoint

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).parents[2] / "labs" / "plain_training.py"


@pytest.fixture
def sockets():
    """Return a folder for the endpoint, short enough for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="kr-") as name:
        yield name


@pytest.fixture
def job(slurm, tmp_path, sockets):
    """Start two ranks by srun; give the job's number once both train."""
    number = slurm.sbatch(
        "export KINETO_USE_DAEMON=1 WORLD_SIZE=2 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1\n"
        f"export KINETO_IPC_SOCKET_DIR={sockets}\n"
        f"srun -n2 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec {sys.executable} "
        f"{SCRIPT} {tmp_path}' > {tmp_path}/log 2>&1",
        f"--nodelist={slurm.nodes[0]}",
        "-n2",
        "--mem=2000",
        "-t10",
    )
    try:
        slurm.wait(number, "RUNNING")
        deadline = time.monotonic() + 120
        # While nobody answers, a process waits ever longer between its attempts to ask.
        with KinetoEndpoint(Path(sockets)) as endpoint:
            while not all((tmp_path / f"started-{rank}").exists() for rank in range(2)):
                assert slurm.state(number) == "RUNNING", (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                endpoint.serve(lambda _pid, _message: "", 0.2)
        yield number
        (tmp_path / "stop").touch()
        assert slurm.wait(number, timeout=60) == "COMPLETED", (tmp_path / "log").read_text()
    finally:
        slurm.run("scancel", str(number), check=False)


def test_the_ranks_of_a_job_are_recorded_by_its_number(slurm, job, tmp_path):
    command = [sys.executable, "-m", "kansoku", "trace", "record", "--slurm-job", str(job)]
    done = subprocess.run(
        [*command, "--duration-ms", "300", "--out", str(tmp_path / "out"), "--json"],
        env=slurm.env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert [trace["rank"] for trace in answer["traces"]] == [0, 1]
    assert all(trace["rows"] > 100 for trace in answer["traces"])
    assert answer["missing"] == []
    assert answer["overlap_ratio"] > 0.5

"""``kansoku attach --slurm-job`` on a live Slurm: root on the node names a job that knows nothing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kansoku.app.report import report

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).parents[2] / "labs" / "plain_training.py"
SECONDS = 3


def started(slurm, job, folder):
    """Wait until both ranks train."""
    deadline = time.monotonic() + 180
    while not all((folder / f"started-{rank}").exists() for rank in range(2)):
        assert slurm.state(job) in {"PENDING", "RUNNING"}, (folder / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_job_is_watched_by_its_number(slurm, tmp_path):
    """Two steps of one job: the first undisturbed, the second watched; the same losses."""
    folders = [tmp_path / "undisturbed", tmp_path / "watched"]
    for folder in folders:
        folder.mkdir()
        folder.chmod(0o777)
    tmp_path.chmod(0o755)
    lines = [
        "set -e",
        "export WORLD_SIZE=2 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1",
        *(
            f"srun -n2 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec {sys.executable} "
            f"{SCRIPT} {folder}' > {folder}/log 2>&1"
            for folder in folders
        ),
    ]
    options = (f"--nodelist={slurm.nodes[0]}", "-n2", "--mem=2000", "-t10")
    job = slurm.sbatch("\n".join(lines), *options)
    try:
        started(slurm, job, folders[0])
        time.sleep(0.5)
        (folders[0] / "stop").touch()
        started(slurm, job, folders[1])
        done = subprocess.run(
            [sys.executable, "-m", "kansoku", "attach", "--slurm-job", str(job), "--duration",
             str(SECONDS), "--out", str(tmp_path / "run"), "--json"],
            env=slurm.env, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        (folders[1] / "stop").touch()
        assert done.returncode == 0, done.stdout + done.stderr
        assert slurm.wait(job, timeout=60) == "COMPLETED", (folders[1] / "log").read_text()
    finally:
        slurm.run("scancel", str(job), check=False)
    slurm.wait_accounted([job])
    state = slurm.sacct("-X", "-n", "-P", "-o", "State,ExitCode", "-j", str(job)).strip()
    assert state == "COMPLETED|0:0"

    told = json.loads(done.stdout)
    assert told["reason"] == "duration"
    assert {process["rank"] for process in told["processes"]} >= {0, 1}
    seen = report(tmp_path / "run")
    assert seen.run.facts.slurm_job == str(job)
    assert {rank.rank for rank in seen.run.facts.ranks} == {0, 1}
    assert seen.run.layout.dp == 2
    trained = int((folders[1] / "log").read_text().split()[0])
    assert 10 < seen.throughput.complete_steps < trained
    for rank in range(2):
        undisturbed, watched = (
            (folder / f"losses-{rank}").read_text().split() for folder in folders
        )
        common = min(len(undisturbed), len(watched))
        assert common > 20
        assert watched[:common] == undisturbed[:common]


def test_a_step_that_starts_later_is_watched(slurm, tmp_path):
    """Attached while the batch script waits: the step's tasks are no children of the script."""
    tmp_path.chmod(0o777)
    command = f"{sys.executable} {SCRIPT} {tmp_path} at-once"
    rank = f"RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec {command}"
    lines = [
        "export WORLD_SIZE=2 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1",
        f"until [ -e {tmp_path}/go ]; do sleep 0.1; done",
        f"srun -n2 bash -c '{rank}' > {tmp_path}/log 2>&1",
    ]
    options = (f"--nodelist={slurm.nodes[0]}", "-n2", "--mem=2000", "-t10")
    job = slurm.sbatch("\n".join(lines), *options)
    watching = None
    try:
        deadline = time.monotonic() + 60
        while slurm.state(job) != "RUNNING":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.5)
        watching = subprocess.Popen(
            [sys.executable, "-m", "kansoku", "attach", "--slurm-job", str(job),
             "--out", str(tmp_path / "run"), "--json"],
            env=slurm.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        while not (tmp_path / "run" / "run.json").exists():
            assert watching.poll() is None, watching.communicate()
            time.sleep(0.05)
        time.sleep(0.5)
        (tmp_path / "go").touch()
        started(slurm, job, tmp_path)
        time.sleep(SECONDS)
        (tmp_path / "stop").touch()
        assert slurm.wait(job, timeout=60) == "COMPLETED", (tmp_path / "log").read_text()
        answer, said = watching.communicate(timeout=60)
    finally:
        slurm.run("scancel", str(job), check=False)
        if watching is not None and watching.poll() is None:
            watching.kill()
    told = json.loads(answer)
    assert told["reason"] == "ended", said
    codes = {p["rank"]: p["exit_code"] for p in told["processes"] if p["calls"]}
    assert codes == {0: 0, 1: 0}
    trained = int((tmp_path / "log").read_text().split()[0])
    # The ranks agree to stop after the last update: that begins no other step.
    throughput = report(tmp_path / "run").throughput
    assert 10 < throughput.complete_steps <= throughput.steps <= trained

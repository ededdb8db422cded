"""The Slurm scripts run as slurmd runs them: environment in, exit code and output out."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kansoku.app.deploy import DeployOptions, deploy_render

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deploy") / "out"
    options = DeployOptions(dashboards=False, prefix=str(folder))
    deploy_render("sakuraone-h100", folder, options=options)
    return folder


class Slurmd:
    """A PATH whose guard, scontrol and logger answer and write down what they were asked."""

    def __init__(self, folder, rendered):
        self.bin, self.said, self.scripts = folder / "bin", folder / "said", rendered / "slurm"
        self.bin.mkdir()
        self.said.write_text("")
        self.guard("exit 0")
        self.program("logger", 'echo "logger $*" >> "$SAID"')
        self.program("scontrol", 'echo "scontrol $*" >> "$SAID"')

    def program(self, name, body):
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def guard(self, body):
        self.program("guard", f'echo "guard $*" >> "$SAID"\n{body}')

    def run(self, script, **environment):
        started = time.monotonic()
        done = subprocess.run(
            [self.scripts / script], capture_output=True, text=True, timeout=30,
            env={"PATH": f"{self.bin}:{os.environ['PATH']}", "SAID": str(self.said),
                 "KANSOKU_GUARD": str(self.bin / "guard"), "SLURM_JOB_ID": "417",
                 "SLURMD_NODENAME": "c001", **environment},
        )  # fmt: skip
        self.took = time.monotonic() - started
        return done

    @property
    def lines(self):
        return self.said.read_text().splitlines()


@pytest.fixture
def slurmd(tmp_path, rendered):
    return Slurmd(tmp_path, rendered)


def test_prolog_lets_a_well_node_start(slurmd):
    assert slurmd.run("prolog.sh").returncode == 0
    assert slurmd.lines == ["guard guard --for prolog --cluster /etc/kansoku/sakuraone-h100.toml"]


def test_prolog_refuses_a_node_with_the_guards_reason(slurmd):
    slurmd.guard("echo 'GPU 3: row remap failed'; exit 1")
    done = slurmd.run("prolog.sh")
    assert done.returncode == 1
    assert "row remap failed" in done.stderr
    assert "node refused: GPU 3: row remap failed" in slurmd.lines[-1]


@pytest.mark.parametrize("trouble", ["exit 2", "exit 3", "exit 70", "kill -9 $$"])
def test_prolog_lets_the_job_start_when_the_guard_breaks(slurmd, trouble):
    slurmd.guard(trouble)
    assert slurmd.run("prolog.sh").returncode == 0
    assert "job goes on" in slurmd.lines[-1]


def test_prolog_does_not_wait_for_a_guard_that_hangs(slurmd):
    slurmd.guard("exec sleep 60")
    assert slurmd.run("prolog.sh").returncode == 0
    assert slurmd.took < 10
    assert "guard ended with 124" in slurmd.lines[-1]


def test_prolog_without_kansoku_says_so_and_goes_on(slurmd):
    assert slurmd.run("prolog.sh", KANSOKU_GUARD="/nonexistent").returncode == 0
    assert "not checked" in slurmd.lines[-1]


def test_epilog_drains_with_the_reason_and_never_fails_itself(slurmd):
    slurmd.guard("printf 'GPU 2: Xid 79\\nGPU 4: Xid 48\\n'; exit 1")
    assert slurmd.run("epilog.sh").returncode == 0
    assert slurmd.lines[-1] == (
        "scontrol update nodename=c001 state=drain reason=kansoku: GPU 2: Xid 79 GPU 4: Xid 48"
    )


def test_epilog_frees_the_rings_of_its_job_only(slurmd):
    base = Path("/dev/shm/kansoku")  # the rings' documented home
    mine, other = base / "slurm-990417001-0-0", base / "slurm-990417002-0-0"
    for folder in (mine, other):
        folder.mkdir(parents=True)
        (folder / "c001-1.ring").write_bytes(b"x")
    try:
        slurmd.run("epilog.sh", SLURM_JOB_ID="990417001", KANSOKU_RING_GRACE_S="0")
        deadline = time.monotonic() + 10
        while mine.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not mine.exists()
        assert other.exists()
        slurmd.run("epilog.sh", SLURM_JOB_ID="*", KANSOKU_RING_GRACE_S="0")
        assert other.exists()
    finally:
        for folder in (mine, other):
            for file in folder.glob("*"):
                file.unlink()
            if folder.exists():
                folder.rmdir()


def test_health_check_drains_once_and_keeps_the_first_reason(slurmd):
    slurmd.guard("echo 'NIC mlx5_4 is down'; exit 1")
    slurmd.run("health_check.sh")
    assert slurmd.lines[-1].endswith("reason=kansoku: NIC mlx5_4 is down")
    slurmd.program("scontrol", 'echo "scontrol $*" >> "$SAID"; echo "State=DRAIN Reason=older"')
    slurmd.run("health_check.sh")
    assert not slurmd.lines[-1].startswith("scontrol update")


def exports(text):
    """Read a TaskProlog's output as slurmstepd does: ``export NAME=value``."""
    found = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        assert word == "export"
        name, _, value = rest.partition("=")
        found[name] = value
    return found


def test_task_prolog_puts_the_recorder_in_front(slurmd, rendered):
    done = slurmd.run("task_prolog.sh", SLURM_STEP_ID="0", PYTHONPATH="/mine")
    assert exports(done.stdout) == {
        "PYTHONPATH": f"{rendered}/capture:/mine",
        "KANSOKU_RUN_ID": "slurm-417-0-0",
    }
    again = slurmd.run("task_prolog.sh", SLURM_STEP_ID="1", SLURM_RESTART_COUNT="2")
    assert exports(again.stdout)["KANSOKU_RUN_ID"] == "slurm-417-1-2"


@pytest.mark.parametrize(
    "environment",
    [{"KANSOKU_DISABLE": "1"}, {"KANSOKU_RUN_ID": "r-1"}, {"SLURM_STEP_ID": "x;y"},
     {"SLURM_JOB_ID": ""}],
)  # fmt: skip
def test_task_prolog_stays_out(slurmd, environment):
    done = slurmd.run("task_prolog.sh", **{"SLURM_STEP_ID": "0", **environment})
    assert (done.returncode, done.stdout) == (0, "")


TRAIN = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_task_started_so_is_recorded_where_the_agent_looks(slurmd, tmp_path):
    """The user's program is unchanged; its steps come out of the agent's follower."""
    from kansoku.app.agent_rings import RingFollower

    done = slurmd.run("task_prolog.sh", SLURM_STEP_ID="0")
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    rings = tmp_path / "rings"
    subprocess.run(
        [sys.executable, program], check=True, timeout=120,
        env={**os.environ, **exports(done.stdout), "KANSOKU_RING_DIR": str(rings),
             "KANSOKU_NATIVE": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"},
    )  # fmt: skip
    steps = RingFollower(rings).read().tables["steps"]
    assert set(steps["run"]) == {"slurm-417-0-0"}
    assert len(steps) >= 4

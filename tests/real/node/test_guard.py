"""The guard as Slurm runs it: a process against a real NVML library, within its time, failing open."""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.labs.nvml import FakeNvml

from kansoku.catalog.xid import codes
from kansoku.model import Domain
from kansoku.node.edge.guard import Readings, run_checks
from kansoku.node.edge.machine import Machine
from kansoku.node.guard import GuardPolicy

pytestmark = pytest.mark.real


def run(*words, env=None):
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "guard", "--json", *words],
        capture_output=True, text=True, env=env, timeout=60, check=False,
    )  # fmt: skip
    return done, json.loads(done.stdout) if done.stdout.startswith("{") else None


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    return FakeNvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "guard.toml"
    path.write_text("gpus = 8\nxid_look_back_s = 0\n")
    return path


def test_eight_good_gpus_pass_and_a_lost_one_blocks_with_its_reason(nvml, policy):
    nvml.set(gpus=8)
    done, answer = run("--policy", str(policy), env=nvml.environment)
    assert (done.returncode, answer["blocked"]) == (0, False), answer
    nvml.set(gpus=8, lost={3: 1})
    done, answer = run("--policy", str(policy), env=nvml.environment)
    assert done.returncode == 1
    assert answer["reasons"] == ["7 of 8 GPUs answer"]
    assert "blocked: 7 of 8 GPUs answer" in done.stderr


def test_a_broken_policy_fails_open_before_a_job_and_is_refused_by_hand(tmp_path):
    bad = tmp_path / "guard.toml"
    bad.write_text("gpus = [")
    done, answer = run("--for", "prolog", "--policy", str(bad))
    assert done.returncode == 0
    assert "nothing is blocked" in done.stderr
    assert answer["broken"]
    assert run("--policy", str(bad))[0].returncode == 2


class Hanging(Readings):
    def gpus(self):
        time.sleep(1000)

    def hardware_codes(self):
        raise OSError("no table")


def test_what_hangs_or_breaks_is_said_and_never_blocks_or_waits():
    begin = time.monotonic()
    found = {c.name: c for c in run_checks(GuardPolicy(), budget_s=1.0, readings=Hanging())}
    assert time.monotonic() - begin < 10  # the driver would have taken a quarter of an hour
    assert {found[name].status for name in ("gpus", "ecc", "pcie")} == {"late"}
    assert found["xids"].status == "broken"
    assert found["memory"].status == "ok"
    assert not [c for c in found.values() if c.status == "block"]


class Dead(Machine):
    def space(self, path):
        if path == "/dead":
            time.sleep(1000)  # a file server that is gone
        return super().space(path)


def test_a_dead_mount_does_not_hold_the_others(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "mounts").write_text("s:/dead /dead nfs4 rw 0 0\n")
    host = Dead(root=tmp_path)
    policy = GuardPolicy(mounts=("/dead",), disks=())
    found = {c.name: c.status for c in run_checks(policy, budget_s=1.0, host=host)}
    assert found["mounts"] == "late"
    assert found["disk"] == "ok"


@pytest.fixture
def dead_mount(tmp_path):
    """A FUSE file system whose server never answers: whoever asks it hangs in the kernel."""
    folder = tmp_path / "dead"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"dead", bytes(folder), b"fuse.dead", 6, options):
        os.close(device)
        pytest.skip(f"no FUSE mount here: {os.strerror(ctypes.get_errno())}")
    yield folder
    os.close(device)  # lets go of everybody who hangs
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_mount_that_hangs_in_the_kernel_neither_holds_nor_blocks_the_prolog(dead_mount, tmp_path):
    """It would wait for good: that the process ends, with all else said, is the proof."""
    policy = tmp_path / "guard.toml"
    policy.write_text(f'gpus = 0\nxid_look_back_s = 0\nmounts = ["{dead_mount}"]\n')
    done, answer = run("--for", "prolog", "--budget", "10", "--policy", str(policy))
    assert done.returncode == 0, done.stderr
    found = {check["name"]: check["status"] for check in answer["checks"]}
    assert found["mounts"] == "late"
    assert found["memory"] == "ok"
    assert (answer["blocked"], answer["broken"]) == (False, None)


def test_a_policy_on_a_mount_that_hangs_fails_open(dead_mount):
    done, answer = run("--for", "prolog", "--budget", "8", "--policy", str(dead_mount / "g.toml"))
    assert (done.returncode, answer["blocked"]) == (0, False)
    assert "did not answer in time" in answer["broken"]


def test_the_codes_read_by_hand_are_those_of_the_catalogue():
    mine = {code for code in Readings().hardware_codes() if code[0] in {"xid", "sxid"}}
    wanted = {
        (kind, number)
        for (kind, number), code in codes().items()
        if kind in {"xid", "sxid"}
        and code.severity == "error"
        and code.domain is Domain.GPU_HARDWARE
    }
    assert mine == wanted


def test_the_prolog_needs_neither_the_command_line_library_nor_the_tables():
    """What makes it fit into 1.5 s on a busy node: no typer, polars, numpy or torch."""
    script = (
        "import sys; from kansoku.cli._guard import run; run(['--for', 'prolog']);"
        "print([m for m in ('typer', 'polars', 'numpy', 'rich', 'click') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )  # fmt: skip
    assert done.stdout.strip() == "[]"

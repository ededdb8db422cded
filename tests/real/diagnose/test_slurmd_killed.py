"""A slurmd killed alone on a real Slurm while a training runs: its node is well, and said to be."""

import json
import shutil
import subprocess
import sys

import pytest
from tests.labs import slurm_training
from tests.labs.slurm import lab_fixture, poll

pytestmark = pytest.mark.real


lab = lab_fixture("function", nodes=2, gpus=1)
"""A cluster for one try: what dies in it stays dead."""


def causes(bundle):
    """Return the hypotheses of the command's answer, and the whole answer."""
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "diagnose", str(bundle), "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    return answer["incidents"][0]["hypotheses"], answer


def first_cause(bundle):
    """Return the first of them, and the whole answer."""
    found, answer = causes(bundle)
    return found[0], answer


def test_the_daemon_is_blamed_and_its_node_is_not(lab, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    bad = lab.nodes[1]
    stamped = folder / "stamped.out"
    job = lab.sbatch(
        f"srun {sys.executable} {slurm_training.__file__} {folder} 2>&1 | while IFS= read -r line\n"
        f'do echo "$line"; echo "$(date +%Y-%m-%dT%H:%M:%S.%3N%:z) $line" >> {stamped}; done',
        "-N2", "--ntasks-per-node=1", "--mem=1500", "--no-requeue", f"--output={folder}/job.out",
    )  # fmt: skip
    output = folder / "job.out"
    poll(
        lambda: output.exists() and output.read_text().count("loss") > 25, timeout=240,
        message=lambda: output.read_text() if output.exists() else "",
    )  # fmt: skip

    lab.kill_slurmd(bad)
    lab.wait(job, "NODE_FAIL", timeout=240)
    lab.wait_accounted([job], timeout=120)
    slurmd = lab.folder / "log" / f"slurmd.{bad}.log"
    poll(
        lambda: f"[{job}.0] done with job" in slurmd.read_text(errors="replace"), timeout=120,
        message=lambda: slurmd.read_text(errors="replace")[-2000:],
    )  # fmt: skip

    # What an operator collects; the job's own lines bear no time.
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("slurmctld.log", *(f"slurmd.{node}.log" for node in lab.nodes)):
        shutil.copy(lab.folder / "log" / name, whole / name)
    shutil.copy(output, whole / f"slurm-{job}.out")
    (whole / "scontrol-node.txt").write_text(lab.scontrol("show", "node", "-o"))
    columns = "JobID,JobName,User,Partition,State,ExitCode,Start,End,NNodes,NodeList"
    (whole / "sacct.txt").write_text(lab.sacct("-D", "-j", str(job), "-P", "-o", columns))
    first, answer = first_cause(whole)
    assert (first["domain"], first["component"], first["subject"]) == (
        "scheduler", "node daemon", f"node:{bad}",
    ), answer  # fmt: skip
    assert "step daemon wrote" in first["evidence_for"][0]["sentence"]

    # With times on the job's lines, the controller's log beside them is enough.
    few = tmp_path / "few"
    few.mkdir()
    shutil.copy(lab.folder / "log" / "slurmctld.log", few / "slurmctld.log")
    shutil.copy(stamped, few / f"slurm-{job}.out")
    first, answer = first_cause(few)
    assert (first["domain"], first["component"], first["subject"]) == (
        "scheduler", "node daemon", f"node:{bad}",
    ), answer  # fmt: skip
    assert "the job went on" in first["evidence_for"][0]["sentence"]

    # Without times on the job's lines, and without slurmd's log: nothing tells which of both it is.
    undated = tmp_path / "undated"
    undated.mkdir()
    for name in ("slurmctld.log", f"slurm-{job}.out", "scontrol-node.txt", "sacct.txt"):
        shutil.copy(whole / name, undated / name)
    found, answer = causes(undated)
    said = {(one["domain"], one["component"].partition(":")[0]): one for one in found}
    dead, silent = said["host", "node lost"], said["scheduler", "node daemon"]
    assert found[0] == dead, answer
    assert dead["subject"] == silent["subject"] == f"node:{bad}", answer
    assert silent["confidence"] < dead["confidence"] < first["confidence"], answer

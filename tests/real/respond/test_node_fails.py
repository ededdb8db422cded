"""A node dies in the middle of a training on a real Slurm, and everybody who helps dies once too."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict

import pytest
from tests.labs import slurm_training
from tests.labs.slurm import lab_fixture, poll

from kansoku.app.diagnose import diagnose_folder, diagnosis_json
from kansoku.diagnose.edge.journal import Journal

pytestmark = pytest.mark.real


lab = lab_fixture("function", nodes=3, gpus=1)
"""A cluster for one try: what dies in it stays dead."""


def losses(folder):
    """Return attempt to step to loss."""
    found = defaultdict(dict)
    path = folder / "loss.csv"
    if path.exists():
        with path.open() as file:
            for row in csv.reader(file):
                if len(row) == 3:
                    found[int(row[0])][int(row[1])] = float(row[2])
    return found


def went_beyond(curves):
    """Say whether the last attempt has made steps that the first had not."""
    return len(curves) > 1 and max(curves[max(curves)]) > max(curves[0])


class Respond:
    """``kansoku respond`` as an operator starts it."""

    def __init__(self, lab, state, *words):
        self.state = state
        command = [sys.executable, "-m", "kansoku", "respond", "--state", str(state), "--json",
                   "--no-dry-run", *words]  # fmt: skip
        self.log = (state.parent / f"respond-{time.monotonic_ns()}.log").open("wb")
        self.process = subprocess.Popen(
            command, env=lab.env, stdout=self.log, stderr=self.log, cwd=lab.folder
        )

    def die_when(self, deed, outcome):
        """Kill it as soon as its audit log says so."""
        journal = Journal(self.state)

        def said():
            rows = [(r.get("deed"), r.get("outcome")) for r in journal.audits()]
            return (deed, outcome) in rows or self.process.poll() is not None

        poll(said, timeout=180, message=self.told, every=0.02)
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def end(self, timeout=120):
        code = self.process.wait(timeout)
        self.log.close()
        return code

    def told(self):
        with open(self.log.name) as file:
            return file.read()[-3000:]


def test_drained_replaced_resumed_and_the_loss_goes_on(lab, tmp_path):
    folder, state = tmp_path / "job", tmp_path / "state"
    folder.mkdir()
    _, bad, reserved = lab.nodes
    lab.scontrol("update", f"nodename={reserved}", "state=drain", "reason=reserved")
    job = lab.sbatch(
        f"srun {sys.executable} {slurm_training.__file__} {folder}",
        "-N2", "--ntasks-per-node=1", "--mem=1500", "--requeue", f"--output={folder}/job.out",
        "--open-mode=append",
    )  # fmt: skip
    poll(
        lambda: len(losses(folder)[0]) > 25, timeout=240,
        message=lambda: (folder / "job.out").read_text() if (folder / "job.out").exists() else "",
    )  # fmt: skip

    lab.kill_node(bad)
    poll(
        lambda: "DOWN" in lab.scontrol("show", "node", bad, "-o").partition("State=")[2][:20],
        timeout=240, message="Slurm did not notice the dead node", every=0.5,
    )  # fmt: skip

    # The incident: what Slurm's log and the job's own output say.
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for name in ("slurmctld.log",):
        (bundle / name).write_text((lab.folder / "log" / name).read_text(errors="replace"))
    (bundle / "job.out").write_text((folder / "job.out").read_text())
    answer = diagnosis_json(diagnose_folder(bundle))
    first = answer["incidents"][0]["hypotheses"][0]
    assert (first["domain"], first["subject"]) == ("host", f"node:{bad}"), answer
    incident = tmp_path / "incident.json"
    incident.write_text(json.dumps(answer))

    check = tmp_path / "guard.toml"
    check.write_text("xid_look_back_s = 0\n")
    policy = tmp_path / "limits.toml"
    policy.write_text("least_confidence = 0.3\nmost_drained_share = 0.5\nprogress_within_s = 100\n")
    last_good, torn = _tear_newest(folder)
    # No --progress: the job's own output shows its steps.
    common = (
        "--slurm-job", str(job), "--spare", reserved, "--checkpoints", str(folder),
        "--policy", str(policy), "--check", f"{sys.executable} -m kansoku guard --policy {check}",
    )  # fmt: skip
    Respond(lab, state, "--incident", str(incident), *common).die_when("drain", "done")
    _kill_controller(lab)
    Respond(lab, state, "--resume", *common).die_when("requeue", "begin")
    _kill_accounting(lab)
    last = Respond(lab, state, "--resume", *common)
    assert last.end() == 0, last.told()

    response = Journal(state).responses()[0]
    assert (response.state, response.spare) == ("recovered", reserved)
    assert response.resumes_from == last_good.name
    assert not torn.exists() or torn.stat().st_size > 1000, "the torn checkpoint is in the way"
    assert torn.with_name(f"{torn.name}.incomplete").exists()
    shown = lab.scontrol("show", "node", bad, "-o")
    assert "DRAIN" in shown
    assert "kansoku: host" in shown
    poll(
        lambda: went_beyond(losses(folder)), timeout=120,
        message=lambda: (folder / "job.out").read_text()[-2000:],
    )  # fmt: skip
    (folder / "enough").touch()
    lab.wait(job, "COMPLETED", timeout=180)
    # The accounting came back and was told of both attempts.
    poll(
        lambda: lab.sacct("-X", "-n", "-P", "-D", "-j", str(job), "-o", "State").count("COMPLETED"),
        timeout=180, message=lambda: lab.sacct("-X", "-n", "-P", "-D", "-j", str(job)), every=0.5,
    )  # fmt: skip

    curves = losses(folder)
    attempts = sorted(curves)
    assert len(attempts) == 2, attempts
    again = curves[attempts[1]]
    resumed_at = min(again)
    assert resumed_at == int(last_good.stem[5:]) > 0
    twice = sorted(set(curves[attempts[0]]) & set(again))
    assert all(curves[attempts[0]][s] == pytest.approx(again[s], rel=1e-4) for s in twice)
    assert max(again) > max(curves[attempts[0]])

    _bring_back(lab, state, bad, common)


def _bring_back(lab, state, bad, common):
    """Repair, check and return the node, as operators do it by the command."""
    lab.start_node(bad)

    def moved(stage):
        last = Respond(lab, state, "--node", bad, "--mark", stage, "--reason", "PSU", *common[2:])
        return last.end()

    assert moved("returned") == 1  # not before its check
    assert [moved(stage) for stage in ("repaired", "validated", "returned")] == [0, 0, 0]
    poll(
        lambda: "DRAIN" not in lab.scontrol("show", "node", bad, "-o"), timeout=180,
        message=lambda: lab.scontrol("show", "node", bad, "-o"), every=0.3,
    )  # fmt: skip
    events = [life["event"] for life in Journal(state).lives()]
    assert events == ["serviced_out", "repaired", "validated", "returned"]


def _tear_newest(folder):
    """Cut the newest checkpoint off, as a writer that died would; return the one before and it."""
    # Slurm has requeued the job, but its last rank may write for some seconds yet.
    written = folder / "loss.csv"
    poll(
        lambda: time.time() - written.stat().st_mtime > 3, timeout=180,
        message="the job's ranks go on",
    )  # fmt: skip
    kept = sorted(folder.glob("step_*.pt"), key=lambda path: int(path.stem[5:]))
    os.truncate(kept[-1], 700)
    return kept[-2], kept[-1]


def _kill_accounting(lab):
    """Kill slurmdbd the hard way and start it again: the controller keeps what it missed."""
    process = lab._processes.pop("slurmdbd")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    lab.start("slurmdbd", "slurmdbd", "-D")


def _kill_controller(lab):
    """Kill slurmctld the hard way and start it again on its saved state."""
    process = lab._processes.pop("slurmctld")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    lab.start("slurmctld", "slurmctld", "-D")
    poll(
        lambda: lab.run("sinfo", "-h", check=False, timeout=20).returncode == 0, timeout=180,
        message="slurmctld did not come back", every=0.3,
    )  # fmt: skip

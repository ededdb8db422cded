"""A slurmd killed alone, after what Slurm 22.05.8 wrote when it was done: the node is well."""

import pytest

from kansoku.app.diagnose import diagnose_folder
from kansoku.model import Domain

# Real lines of slurmctld: slurmd of node n01 was killed at 18:10:02, its job left alone.
SLURMCTLD = """\
[2026-11-30T18:09:54.202] error: Could not open job state file /var/spool/slurmctld/job_state: No such file or directory
[2026-11-30T18:09:54.973] _slurm_rpc_submit_batch_job: JobId=1 InitPrio=4294901759 usec=912
[2026-11-30T18:09:56.203] sched/backfill: _start_job: Started JobId=1 in train on kbfcdn01
[2026-11-30T18:10:31.535] requeue job JobId=1 due to failure of node kbfcdn01
[2026-11-30T18:10:31.536] Requeuing JobId=1
[2026-11-30T18:10:31.536] error: Nodes kbfcdn01 not responding, setting DOWN
[2026-11-30T18:10:31.552] _job_complete: JobId=1 WEXITSTATUS 0
"""
NODE = (
    "NodeName=kbfcdn01 Arch=x86_64 CoresPerSocket=28 CPUAlloc=0 CPUTot=112 CPULoad=0.96 "
    "Version=22.05.8 RealMemory=2000000 State=DOWN+NOT_RESPONDING "
    "Reason=Not responding [root@2026-11-30T18:10:31]\n"
)


@pytest.fixture
def bundle(tmp_path):
    def write(last_s):
        """Write the bundle; the job's last step is at ``last_s`` seconds after 18:10."""
        steps = [
            f"2026-11-30T18:{9 + (60 + at) // 60:02d}:{(60 + at) % 60:02d}.072+00:00 step {at + 60} "
            "loss 2.5 time 1.00 s"
            for at in range(-3, last_s + 1)
        ]  # fmt: skip
        (tmp_path / "train.log").write_text(
            "\n".join([*steps, "srun: error: Node failure on kbfcdn01", ""])
        )
        (tmp_path / "slurmctld.log").write_text(SLURMCTLD)
        (tmp_path / "scontrol-node.txt").write_text(NODE)
        return diagnose_folder(tmp_path)

    return write


def test_a_job_that_goes_on_acquits_the_node_of_a_silent_slurmd(bundle):
    (incident,) = bundle(31).incidents
    first = incident.hypotheses[0]
    assert (first.domain, str(first.subject)) == (Domain.SCHEDULER, "node:kbfcdn01")
    assert first.component == "node daemon"
    assert "the job went on" in first.evidence_for[0].sentence
    # The controller's first words, 37 s before, date nothing.
    assert incident.onset_ns >= 1_796_062_231_000_000_000


def test_a_node_whose_job_stopped_before_it_was_missed_is_lost(bundle):
    (incident,) = bundle(2).incidents
    first = incident.hypotheses[0]
    assert (first.domain, str(first.subject)) == (Domain.HOST, "node:kbfcdn01")
    assert not [h for h in incident.hypotheses if h.component == "node daemon"]


# Real lines of the node's own log: the step's daemon outlived its slurmd, and the scheduler's word.
STEP_DAEMON = """\
[2026-11-30T18:09:56.587] launch task StepId=1.0 request from UID:0 GID:0 HOST:127.0.0.1 PORT:41186
[2026-11-30T18:10:34.084] [1.0] error: Failed to send MESSAGE_TASK_EXIT: Connection refused
[2026-11-30T18:10:34.091] [1.0] done with job
"""
REBOOTED = """\
[2026-11-30T18:10:40.084] error: Domain socket directory /var/spool/slurmd: No such file or directory
[2026-11-30T18:10:40.114] slurmd version 22.05.8 started
"""
SACCT = """\
JobID|JobName|State|ExitCode|Start|End|NNodes|NodeList
1|train|NODE_FAIL|0:0|2026-11-30T18:09:56|2026-11-30T18:10:31|1|kbfcdn01
1.0|python|CANCELLED|0:15|2026-11-30T18:09:56|2026-11-30T18:10:34|1|kbfcdn01
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (STEP_DAEMON, (Domain.SCHEDULER, "node daemon")),
        # A node that was started anew writes too, and no step is there any more.
        (REBOOTED, (Domain.HOST, "node lost")),
    ],
    ids=["lives", "rebooted"],
)
def test_without_dated_steps_the_steps_own_daemon_acquits_its_node(bundle, tmp_path, log, cause):
    (tmp_path / "slurmd.kbfcdn01.log").write_text(log)
    (tmp_path / "sacct.txt").write_text(SACCT)
    (incident,) = bundle(2).incidents
    first = incident.hypotheses[0]
    assert str(first.subject) == "node:kbfcdn01"
    assert (first.domain, first.component.partition(":")[0]) == cause

"""A slurmd killed alone, after what Slurm 22.05.8 wrote when it was done: the node is well."""

from datetime import UTC, datetime, timedelta

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


# What a cluster of Slurm 22.05.8 wrote when slurmd of node n02 was killed alone; the job's output
# bears no times, and nobody kept slurmd's own log.
UNDATED_END = """\
srun: error: Node failure on k6ff5n02
slurmstepd-k6ff5n01: error: *** JOB 1 ON k6ff5n01 CANCELLED AT 2026-12-01T03:53:42 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***
slurmstepd-k6ff5n01: error: *** STEP 1.0 ON k6ff5n01 CANCELLED AT 2026-12-01T03:53:42 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***
srun: Job step aborted: Waiting up to 3 seconds for job step to finish.
"""
CONTROLLER = """\
[2026-12-01T03:53:08.627] _slurm_rpc_submit_batch_job: JobId=1 InitPrio=4294901759 usec=767
[2026-12-01T03:53:09.868] sched/backfill: _start_job: Started JobId=1 in train on k6ff5n[01-02]
[2026-12-01T03:53:42.099] Killing JobId=1 on failed node k6ff5n02
[2026-12-01T03:53:42.100] error: Nodes k6ff5n02 not responding, setting DOWN
"""
ACCOUNTED = """\
JobID|JobName|User|Partition|State|ExitCode|Start|End|NNodes|NodeList
1|train.sh|root|train|NODE_FAIL|0:0|2026-12-01T03:53:09|2026-12-01T03:53:42|2|k6ff5n[01-02]
1.batch|batch|||CANCELLED|0:15|2026-12-01T03:53:09|2026-12-01T03:53:43|1|k6ff5n01
1.0|python|||CANCELLED|0:15|2026-12-01T03:53:09|2026-12-01T03:53:44|2|k6ff5n[01-02]
"""
LOST_NODE = (Domain.HOST, "node lost")
SILENT_DAEMON = (Domain.SCHEDULER, "node daemon")


def record(booted, began, state="DOWN+NOT_RESPONDING"):
    """Return a node's record as scontrol prints it."""
    return (
        f"NodeName=k6ff5n02 Arch=x86_64 CoresPerSocket=28 Version=22.05.8 State={state} "
        f"ThreadsPerCore=2 Partitions=train BootTime={booted} SlurmdStartTime={began} "
        "LastBusyTime=2026-12-01T03:53:42 Reason=Not responding [root@2026-12-01T03:53:42]\n"
    )


def steps(first, last):
    return "".join(f"step {n} loss 0.6201\n" for n in range(first, last))


@pytest.fixture
def undated(tmp_path):
    def write(after="", **files):
        """Write the bundle; ``after`` follows in the job's output, ``files`` by their name."""
        (tmp_path / "slurm-1.out").write_text(steps(250, 278) + UNDATED_END + after)
        (tmp_path / "slurmctld.log").write_text(CONTROLLER)
        (tmp_path / "sacct.txt").write_text(ACCOUNTED)
        for name, text in files.items():
            (tmp_path / name.replace("__", "-").replace("_", ".")).write_text(text)
        (incident,) = diagnose_folder(tmp_path).incidents
        assert {str(one.subject) for one in incident.hypotheses[:1]} == {"node:k6ff5n02"}
        return incident.hypotheses

    return write


def causes(hypotheses):
    return [(one.domain, one.component.partition(":")[0]) for one in hypotheses]


PANIC = "2026-12-01T03:48:20.000001+00:00 k6ff5n02 kernel: Kernel panic - not syncing: Fatal exception\n"


def test_where_nothing_tells_a_dead_node_from_a_silent_slurmd_both_are_said(undated):
    first, *others = undated()
    assert causes([first]) == [LOST_NODE]
    (second,) = [one for one in others if causes([one]) == [SILENT_DAEMON]]
    assert str(second.subject) == "node:k6ff5n02"
    assert second.confidence < first.confidence
    for one in (first, second):
        assert "nothing that was read tells" in one.evidence_against[-1].sentence
    assert "look whether the node answers" in second.actions[0].sentence
    sure = undated(syslog_k6ff5n02_log=PANIC)
    assert sure[0].domain is Domain.HOST
    assert first.confidence < 0.8 * sure[0].confidence


@pytest.mark.parametrize(
    "files",
    [
        {"syslog_k6ff5n02_log": PANIC},
        # It booted after it was given up, and its daemon with it.
        {"scontrol__node_txt": record("2026-12-01T03:56:40", "2026-12-01T03:57:20", "IDLE")},
        # Its peer missed it five minutes before the scheduler did.
        {"slurm__1-rank0_err": "2026-12-01 03:48:31,012 RuntimeError: [../gloo/transport/tcp/pair.cc:525]"
         " Connection closed by peer k6ff5n02\n"},
    ],
    ids=["panic", "booted", "missed"],
)  # fmt: skip
def test_what_tells_of_its_death_leaves_no_choice(undated, files):
    assert SILENT_DAEMON not in causes(undated(**files))


@pytest.mark.parametrize(
    ("after", "files", "why"),
    [
        ("srun: error: k6ff5n02: task 1: Terminated\n", {}, "heard how its tasks there ended"),
        (
            "",
            {"scontrol__node_txt": record("2026-11-30T21:16:52", "2026-12-01T04:02:10", "IDLE")},
            "its daemon began anew 508 s later",
        ),
    ],
    ids=["task", "daemon"],
)
def test_other_signs_of_life_acquit_the_node(undated, after, files, why):
    hypotheses = undated(after, **files)
    assert causes(hypotheses[:1]) == [SILENT_DAEMON]
    assert LOST_NODE not in causes(hypotheses)
    assert why in hypotheses[0].evidence_for[0].sentence


def test_the_record_of_a_node_that_is_still_down_is_old_and_says_nothing(undated):
    old = record("2026-11-30T21:16:52", "2026-12-01T03:53:07")
    first, second = undated(scontrol__node_txt=old)[:2]
    assert causes([first]) == [LOST_NODE]
    assert SILENT_DAEMON in causes([second]) or "nothing" in first.evidence_against[-1].sentence


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        (steps(278, 290), SILENT_DAEMON),
        # As far as lines may be late.
        (steps(278, 280), LOST_NODE),
        # Started again from a checkpoint, without the node.
        (steps(270, 300), LOST_NODE),
    ],
    ids=["goes-on", "late", "again"],
)
def test_steps_after_the_word_of_the_loss_turn_the_order(undated, after, cause):
    first, *others = undated(after)
    assert causes([first]) == [cause]
    assert {LOST_NODE, SILENT_DAEMON} <= {cause, *causes(others)}


def numbers(last_s, pause_s=0):
    """Return CPU use of both nodes every 15 s from 03:40; of n02 until ``last_s``, with a pause."""
    start = datetime(2026, 12, 1, 3, 40, tzinfo=UTC)
    rows = ["timestamp,node,cpu_utilization_percent"]
    for at in range(0, 1000, 15):
        stamp = f"{start + timedelta(seconds=at):%Y-%m-%dT%H:%M:%SZ}"
        rows.append(f"{stamp},k6ff5n01,81")
        if at <= last_s and not 600 < at <= 600 + pause_s:
            rows.append(f"{stamp},k6ff5n02,80")
    return "\n".join(rows) + "\n"


# Given up at 03:53:42, which is 822 s after 03:40.
@pytest.mark.parametrize(
    ("table", "cause"),
    [
        (numbers(1000), SILENT_DAEMON),
        (numbers(600), LOST_NODE),
        # It was away long enough to boot.
        (numbers(1000, pause_s=150), LOST_NODE),
        # Fans turn in a node that is down.
        (numbers(1000).replace("cpu_utilization_percent", "psu_fan_rpm"), LOST_NODE),
    ],
    ids=["goes-on", "stops", "pauses", "controller"],
)
def test_numbers_of_the_node_that_come_on_acquit_it(undated, table, cause):
    assert causes(undated(metrics_csv=table)[:1]) == [cause]

"""Processes of a Slurm job."""

from kansoku.capture.attach.slurm import cgroup_job, parse_listpids

# scontrol listpids of Slurm 22.05.
LISTPIDS = """\
PID      JOBID    STEPID   LOCALID GLOBALID
-1       12       extern   0       0
4711     12       batch    0       0
4720     12       0        1       5
4721     12       0        -       -
4800     13       0        0       0
"""


def test_listpids():
    assert parse_listpids(LISTPIDS, "12") == [4711, 4720, 4721]
    assert parse_listpids(LISTPIDS, "99") == []
    assert parse_listpids("slurm_load: error\n", "12") == []


def test_cgroups_of_both_versions():
    assert cgroup_job("5:freezer:/slurm_n1/uid_0/job_12/step_0/task_0\n") == "12"
    assert cgroup_job("0::/system.slice/slurmstepd.scope/job_77/step_batch/user/task_0\n") == "77"
    assert cgroup_job("0::/user.slice\n") is None

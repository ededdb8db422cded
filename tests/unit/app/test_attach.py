"""Which processes of a Slurm job are watched."""

import os
import time

import pytest

from kansoku.app import attach
from kansoku.errors import InputError


def test_a_task_of_an_array_needs_its_own_job_id():
    with pytest.raises(InputError) as raised:
        attach.slurm_processes("6_1")
    assert "squeue -h -j 6_1 -o %A" in str(raised.value)


def test_a_job_is_asked_for_again(monkeypatch):
    """A step that starts later counts, a job that is gone has no process, we are none of it."""
    answers = [[101], [101, 102, os.getpid()], InputError("none here"), [103]]
    seen = []

    def processes(job):
        assert job == "7"
        if job_now:
            seen.append(job_now[0].pids)
        answer = answers.pop(0) if answers else [103]
        if isinstance(answer, Exception):
            raise answer
        return answer

    job_now = []
    monkeypatch.setattr(attach, "_ASK_SLURM_S", 0.02)
    monkeypatch.setattr(attach, "slurm_processes", processes)
    job_now.append(attach._Job("7"))
    deadline = time.monotonic() + 20
    while len(seen) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    job_now[0].close()
    assert seen[:5] == [(), (101,), (101, 102), (), (103,)]

"""Which processes are watched, and what is said where they may not be."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from kansoku.app import _attach_refusals, attach
from kansoku.errors import InputError, PlatformError


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


def status(capabilities):
    return f"Name:\tpython\nCapEff:\t{capabilities:016x}\nCapBnd:\t000001ffffffffff\n"


@pytest.mark.parametrize(
    ("capabilities", "told"),
    [
        (0, "run as root"),
        (1 << 39 | 1 << 38, "run as root"),  # without CAP_SYS_PTRACE
        (1 << 21, "run as root"),
        (1 << 19 | 1 << 38, "run as root"),
        (1 << 19 | 1 << 38 | 1 << 39, "namespace"),
        (1 << 19 | 1 << 21, "namespace"),  # CAP_SYS_ADMIN holds the other two
    ],
)
def test_the_remedy_is_none_that_we_have(monkeypatch, capabilities, told):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: status(capabilities))
    assert told in _attach_refusals.remedy()


def test_a_refusal_names_the_call_and_its_error():
    error = PermissionError(errno.EACCES, "Permission denied", "/proc/7/mem")
    said = _attach_refusals.refused(7, error)
    for needed in ("process 7 ", "/proc/7/mem", "EACCES", "Permission denied"):
        assert needed in said


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, PlatformError), (errno.EDQUOT, PlatformError), (errno.ENOTDIR, InputError)],
)
def test_a_full_disk_is_no_wrong_argument(number, kind):
    error = _attach_refusals.unwritable("a folder", OSError(number, "why"), Path("/some/where"))
    assert type(error) is kind
    for needed in ("/some/where", "why", "--out"):
        assert needed in str(error)


def test_a_thread_is_its_process():
    numbers = []
    stop = threading.Event()
    thread = threading.Thread(
        target=lambda: (numbers.append(threading.get_native_id()), stop.wait())
    )
    thread.start()
    while not numbers:
        time.sleep(0.001)
    try:
        assert numbers[0] != os.getpid()
        assert attach._process_of(numbers[0]) == os.getpid()
    finally:
        stop.set()
        thread.join()
    assert attach._process_of(os.getpid()) == os.getpid()
    assert attach._process_of(1 << 30) == 1 << 30  # none: who asks for it says so

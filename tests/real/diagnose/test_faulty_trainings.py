"""Real trainings that break in a known way: the right domain and the right rank or node first."""

import contextlib
import os
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from tests.labs.faulty_training import BAD, RANKS, Lab
from tests.labs.observed_training import Plan, train

from kansoku.app.diagnose import diagnose_folder, diagnosis_json
from kansoku.model import Domain

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("faults"))
    yield lab
    lab.close()


@pytest.fixture
def hanging(lab):
    """Start trainings that hang; their ranks are killed after the look."""
    yield lab.run
    lab.end()


def first(folder):
    """Return the incident and its first hypothesis."""
    answer = diagnose_folder(folder)
    assert answer.incidents, diagnosis_json(answer)
    incident = answer.incidents[0]
    assert incident.hypotheses, diagnosis_json(answer)
    return incident, incident.hypotheses[0]


def said(hypothesis):
    return " | ".join(e.sentence for e in hypothesis.evidence_for)


def test_a_healthy_training_is_quiet(lab):
    assert diagnose_folder(lab.run("none")).incidents == ()


def test_a_rank_killed_from_outside(lab):
    incident, cause = first(lab.run("kill"))
    assert (incident.kind, cause.domain) == ("stop", Domain.HOST)
    assert f"rank {BAD} ended without closing its record" in said(cause)


def test_a_segmentation_fault(lab):
    incident, cause = first(lab.run("segv"))
    assert (incident.kind, cause.domain) == ("stop", Domain.APPLICATION)
    assert str(cause.subject) == f"rank:{BAD}"


def test_an_exception_in_one_rank(lab):
    incident, cause = first(lab.run("exception"))
    assert (incident.kind, cause.domain) == ("stop", Domain.APPLICATION)
    assert str(cause.subject) == f"rank:{BAD}"
    assert "shapes cannot be multiplied" in said(cause)


def test_a_loss_that_is_no_number(lab):
    incident, cause = first(lab.run("nan"))
    assert (incident.kind, cause.domain, cause.component) == (
        "numerics", Domain.APPLICATION, "numerics",
    )  # fmt: skip


def test_unequal_numbers_of_batches(hanging):
    incident, cause = first(hanging("unequal"))
    assert (incident.kind, cause.domain) == ("hang", Domain.APPLICATION)
    assert str(cause.subject) == f"rank:{BAD}"


def test_collectives_in_another_order_on_two_groups(hanging):
    incident, cause = first(hanging("cycle"))
    assert (incident.kind, cause.domain) == ("hang", Domain.APPLICATION)
    assert cause.component == "divergent collectives"


def test_a_stopped_process(hanging):
    incident, cause = first(hanging("stop"))
    assert (incident.kind, cause.domain) == ("hang", Domain.HOST)
    assert f"rank {BAD} is stopped" in said(cause)


@pytest.fixture
def memory_cgroup():
    root = Path("/sys/fs/cgroup/memory")
    if not (root / "memory.limit_in_bytes").exists():
        pytest.skip("no memory controller of cgroup v1 is mounted at /sys/fs/cgroup/memory")
    folder = root / f"kansoku-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(400 << 20))
    yield folder
    for _ in range(50):
        with contextlib.suppress(OSError):
            folder.rmdir()
            break
        time.sleep(0.1)


def test_out_of_memory_by_its_cgroup(lab, memory_cgroup):
    """The kernel's own words, read from its log, tell a cgroup's limit from a full node."""
    folder = lab.run("oom", FAULT_CGROUP=memory_cgroup.name)
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout
    begin = log.find(memory_cgroup.name)
    if begin < 0:
        pytest.skip("the kernel wrote nothing of its OOM kill into the log that dmesg shows")
    begin = log.rfind("invoked oom-killer", 0, begin)
    lines = log[log.rfind("\n", 0, begin) + 1 :]
    (folder / "dmesg.txt").write_text(lines)
    incident, cause = first(folder)
    assert (incident.kind, cause.domain) == ("stop", Domain.APPLICATION)
    assert cause.component == "host memory limit"


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_at_the_checkpoint(lab, small_disk):
    incident, cause = first(lab.run("full", FAULT_DISK=str(small_disk)))
    assert (incident.kind, cause.domain) == ("stop", Domain.STORAGE)


@pytest.fixture
def slow(tmp_path, request):
    """Train one plan for one test, so that a test tried again trains again."""
    plan = Plan(**request.param)
    return train([plan], tmp_path)[plan.name]


def with_plan(**plan):
    return pytest.mark.parametrize("slow", [plan], indirect=True, ids=[plan["name"]])


@with_plan(name="starved", slow="contention", rank=2, steps=40)
def test_a_node_whose_cpu_others_take(slow):
    incident, cause = first(slow)
    assert (incident.kind, cause.domain) == ("slow", Domain.HOST)
    assert "rank 2" in said(cause)


@with_plan(name="loader", slow="data", rank=1, steps=40, extra_ms=60)
def test_a_slow_disk_under_the_loader(slow):
    incident, cause = first(slow)
    assert (incident.kind, cause.domain) == ("slow", Domain.STORAGE)
    assert "rank 1" in said(cause)


@with_plan(name="rotating", slow="rotating", steps=40)
def test_delays_that_move_from_rank_to_rank_are_nobodys_fault(slow):
    answer = diagnose_folder(slow)
    blamed = [h for i in answer.incidents for h in i.hypotheses if h.subject is not None]
    assert blamed == []


def test_the_lab_has_as_many_ranks_as_it_says(lab):
    """What the sentences above count on."""
    assert (RANKS, BAD) == (3, 1)
    assert os.cpu_count()

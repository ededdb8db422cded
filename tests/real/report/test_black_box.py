"""After a kill or in a hang the report says what every rank was in and whom the others wait for."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from tests.labs.observed_training import ROOT, Plan

from kansoku.app.report import report
from kansoku.capture import environment, write_payload

pytestmark = pytest.mark.real


def start(plan, folder):
    payload = write_payload(str(folder / "payload"))
    env = environment(os.environ, payload=payload, run="unset", out=None, node="lab")
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(ROOT)])
    env |= {"KANSOKU_RING_DIR": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "KANSOKU_RING_BYTES": str(1 << 20)}  # fmt: skip
    job = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/labs/observed_training.py"), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True,
    )  # fmt: skip
    job.stdin.write(json.dumps([asdict(plan)]) + "\n")
    job.stdin.flush()
    return job


def until(condition, seconds=90):
    """Poll; return the first true answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.2)
    raise AssertionError("did not happen in time")


def stuck(folder, plan):
    """Return the report once three ranks wait for the fourth."""
    run = folder / plan.name
    if len(list(run.glob("*.ring"))) < plan.ranks:
        return None
    answer = report(run)
    waiting = [b for b in answer.box.blocked if b.missing == (plan.rank,)]
    return answer if waiting and len(waiting[-1].waiting) == plan.ranks - 1 else None


@pytest.fixture(scope="module")
def hang(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hang")
    plan = Plan(name="hang", slow="hang", rank=2, steps=20)
    job = start(plan, folder)
    try:
        yield folder, plan, until(lambda: stuck(folder, plan))
    finally:
        job.communicate("go\n", timeout=60)


def test_in_a_hang_every_rank_is_described(hang):
    _, plan, answer = hang
    assert answer.box.stopped
    states = {rank.rank: rank for rank in answer.box.ranks}
    assert {rank.process for rank in states.values()} == {"running"}
    # The sleeper is in forward of step 15 (the fifth last), the others in the reduction after it.
    assert states[2].state.kind in {"forward", None}
    assert states[2].state.step == plan.steps - 5
    for rank in (0, 1, 3):
        assert states[rank].state.kind == "collective"
        assert states[rank].state.name == "all_reduce"
    assert all(0 < states[rank].duration_ns < 120e9 for rank in (0, 1, 3))
    sentence = next(f.sentence for f in answer.findings if f.id == "collective.blocked")
    assert "Ranks" in sentence
    assert "for rank 2 (" in sentence


def test_after_kill_9_of_all_ranks_it_still_says_so(hang):
    folder, plan, before = hang
    for rank in before.box.ranks:
        os.kill(rank.pid, signal.SIGKILL)
    answer = until(
        lambda: (
            (a := report(folder / plan.name)) and {r.process for r in a.box.ranks} == {"gone"} and a
        )
    )
    assert [r.rank for r in answer.box.ranks] == [0, 1, 2, 3]
    assert answer.box.blocked[0].missing == (2,)
    assert [f.id for f in answer.findings].count("rank.gone") == 4
    shown = answer.to_json()["job"]["last_states"]
    assert {state["process"] for state in shown} == {"gone"}
    titles = [getattr(block, "title", "") for block in answer.view().blocks]
    assert any("What every rank was in" in title for title in titles)


def test_after_kill_9_of_one_rank_the_others_wait_for_it(tmp_path):
    plan = Plan(name="kill", slow="kill", rank=1, steps=20)
    job = start(plan, tmp_path)
    errors = job.communicate("", timeout=120)[1]
    assert job.returncode == 0, errors
    answer = report(tmp_path / "kill")
    states = {rank.rank: rank.process for rank in answer.box.ranks}
    assert states[1] == "gone"
    gone = next(f for f in answer.findings if f.id == "rank.gone" and f.subject.name == "1")
    assert "step 15" in gone.sentence

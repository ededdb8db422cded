"""The Slurm collector on a real node of a real Slurm, with jobs that hold GPUs."""

import pytest
from tests.labs.slurm import slurm  # noqa: F401 - a fixture

from kansoku.node import CommandResult, Event
from kansoku.node.collectors.slurm import Slurm
from kansoku.node.edge.machine import Machine

pytestmark = pytest.mark.real


@pytest.fixture
def host(slurm):  # noqa: F811 - the fixture
    def programs(command, timeout_s):
        done = slurm.run(*command, check=False, timeout=timeout_s)
        return CommandResult(code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    return Machine(name=slurm.nodes[0], programs=programs)


def held(items, job):
    return sorted(
        dict(s.labels)["hw.name"]
        for s in items
        if not isinstance(s, Event)
        and s.metric == "kansoku.slurm.job.gpu"
        and ("slurm.job.id", str(job)) in s.labels
    )


def test_jobs_and_their_gpus(slurm, host):  # noqa: F811 - the fixture
    node = slurm.nodes[0]
    first = slurm.sbatch(
        "sleep 100", f"--nodelist={node}", "--gres=gpu:3", "--job-name=a JobState=x", user="games"
    )
    slurm.wait(first, "RUNNING")
    second = slurm.sbatch("sleep 100", f"--nodelist={node}", "--gres=gpu:2", user="news")
    slurm.wait(second, "RUNNING")
    collector = Slurm()
    assert collector.absent(host) is None
    items = list(collector.collect(host))
    mine, other = held(items, first), held(items, second)
    # What the job itself is told is the oracle: three and two different GPUs of this node.
    assert (len(mine), len(other)) == (3, 2)
    assert not set(mine) & set(other)
    states = {
        dict(s.labels)["slurm.state"]: dict(s.labels)
        for s in items
        if not isinstance(s, Event) and s.metric == "kansoku.slurm.job.state"
    }
    assert states["running"]["slurm.user"] in {"games", "news"}
    slurm.run("scancel", str(first))
    slurm.wait(first, "CANCELLED")
    slurm.scontrol("update", f"nodename={node}", "state=drain", "reason=planted fault")
    try:
        events = [e for e in collector.collect(host) if isinstance(e, Event)]
    finally:
        slurm.scontrol("update", f"nodename={node}", "state=resume")
        slurm.run("scancel", str(second))
    kinds = {(e.kind, e.subject): e for e in events}
    assert ("job_left", f"job:{first}") in kinds
    change = kinds["node_state", f"node:{node}"]
    assert change.severity == "warning"
    assert "planted fault" in change.body
    assert held(list(collector.collect(host)), first) == []


def test_a_node_slurm_does_not_know(host):
    reason = Slurm(slurm_node="nowhere").absent(host)
    assert reason.startswith("Slurm does not know this node")

"""The rendered scripts inside a real Slurm: prolog, TaskProlog, epilog, HealthCheckProgram."""

import time

import pytest
from tests.labs.slurm import missing, slurm_lab

from kansoku.app.deploy import DeployOptions, deploy_render

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(missing() is not None, reason=missing() or "never"),
]
# Stands in for the guard, whose own tests are elsewhere: ANSWER holds node, occasion, words.
GUARD = """#!/bin/sh
[ "$2" = --for ] || exit 2
occasion=$3
while read -r node when words; do
    if [ "$node" = "$SLURMD_NODENAME" ] && [ "$when" = "$occasion" ]; then
        echo "$words"
        exit 1
    fi
done < "{answer}"
exit 0
"""


@pytest.fixture(scope="module")
def cluster():
    with slurm_lab(nodes=2, gpus=1) as lab:
        prefix = lab.folder / "kansoku"
        deploy_render(
            "sakuraone-h100", prefix, options=DeployOptions(dashboards=False, prefix=str(prefix))
        )
        answer = lab.folder / "answer"
        answer.write_text("")
        (prefix / "bin").mkdir()
        guard = prefix / "bin" / "kansoku"
        guard.write_text(GUARD.format(answer=answer))
        guard.chmod(0o755)
        lines = (prefix / "slurm" / "slurm.conf.lines").read_text()
        # slurmd gives HealthCheckProgram no SLURM_CONF; the lab's is not where clients look.
        health = prefix / "slurm" / "health_check.sh"
        health.rename(health.with_name("inner.sh"))
        health.write_text(
            f"#!/bin/sh\nSLURM_CONF={lab.folder}/slurm.conf exec {health.parent}/inner.sh\n"
        )
        health.chmod(0o755)
        wanted = [
            line.replace("/etc/slurm/kansoku", str(prefix / "slurm")).replace("Interval=300", "Interval=2")
            for line in lines.splitlines()
            if line.startswith(("Prolog=", "Epilog=", "TaskProlog=", "HealthCheck"))
        ]  # fmt: skip
        conf = lab.folder / "slurm.conf"
        conf.write_text(conf.read_text() + "\n".join([*wanted, ""]))
        lab.scontrol("reconfigure")
        yield lab, answer, prefix


def until(what, seconds=40):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)
    return found


def test_a_jobs_tasks_start_with_the_recorder(cluster):
    lab, _, prefix = cluster
    text = "srun -N1 -n2 sh -c 'echo $SLURM_PROCID $KANSOKU_RUN_ID $PYTHONPATH'"
    out = lab.folder / "out"
    out.mkdir()
    out.chmod(0o777)
    job = lab.sbatch(text, "-N1", "-n2", f"--output={out}/said", user="games")
    lab.wait(job, "COMPLETED")
    ranks = sorted((out / "said").read_text().splitlines())
    assert ranks == [f"{rank} slurm-{job}-0-0 {prefix}/capture" for rank in range(2)]


def test_the_guard_refuses_drains_and_keeps_a_reason(cluster):
    lab, answer, _ = cluster
    bad, good = lab.nodes
    answer.write_text(f"{bad} prolog GPU 3: row remap failed\n")
    job = lab.sbatch("true", "-N1", f"--nodelist={bad}", user="games")
    until(lambda: "DRAIN" in lab.scontrol("show", "node", bad))
    answer.write_text("")
    lab.run("scancel", str(job))

    answer.write_text(f"{good} epilog GPU 0: Xid 79\n")
    job = lab.sbatch("true", "-N1", f"--nodelist={good}", user="games")
    shown = until(lambda: (s := lab.scontrol("show", "node", good)) and "Reason=" in s and s)
    assert "Reason=kansoku: GPU 0: Xid 79" in shown
    lab.wait(job, "COMPLETED")  # its epilog drains the node, and does not fail the job

    answer.write_text("")
    lab.scontrol("update", f"nodename={good}", "state=resume")
    answer.write_text(f"{good} health NIC mlx5_4 is down\n")
    shown = until(lambda: (s := lab.scontrol("show", "node", good)) and "Reason=" in s and s)
    assert "Reason=kansoku: NIC mlx5_4 is down" in shown

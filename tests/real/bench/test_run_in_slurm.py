"""``bench run --sbatch`` on a live Slurm: jobs of one and two nodes, scored by MLPerf's own code."""

import json
import subprocess
import sys

import pytest
from mlperf_logging.compliance_checker.mlp_parser import parse_file
from tests.labs.slurm import missing, slurm_lab

from kansoku.app.report import report

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(missing() is not None, reason=missing() or "never"),
]
STEPS, BATCH, RANKS_PER_NODE = 8, 8, 1
SHAPE = ["--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "16", "--vocab", "64",
         "--micro-batch", "2", "--steps", str(STEPS), "--eval-every", str(STEPS)]  # fmt: skip
# The nodes of the lab are one machine; on a cluster each has a name and a /dev/shm of its own.
TASK_PROLOG = """#!/bin/sh
echo "export KANSOKU_NODE=$SLURMD_NODENAME"
echo "export KANSOKU_RING_DIR={folder}/shm-$SLURMD_NODENAME"
"""


def kansoku(*words, env=None, fine=True):
    answer = subprocess.run(
        [sys.executable, "-m", "kansoku", *words], env=env, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert (answer.returncode == 0) is fine, answer.stdout + answer.stderr
    return answer


@pytest.fixture(scope="module")
def lab():
    with slurm_lab(nodes=2, gpus=1) as lab:
        prolog = lab.folder / "task_prolog.sh"
        prolog.write_text(TASK_PROLOG.format(folder=lab.folder))
        prolog.chmod(0o755)
        conf = lab.folder / "slurm.conf"
        conf.write_text(f"{conf.read_text()}TaskProlog={prolog}\n")
        lab.scontrol("reconfigure")
        yield lab


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory):
    """Run the bench once over one node and two; give its folder and what it said of each size."""
    out = tmp_path_factory.mktemp("bench") / "out of it"
    answer = kansoku(
        "bench", "run", "--out", str(out), "--nodes", "1,2", "--ranks", str(RANKS_PER_NODE),
        "--batch", str(BATCH), "--sbatch", "-p train -t 5", "--json", "--", *SHAPE, env=lab.env,
    )  # fmt: skip
    return out, json.loads(answer.stdout)["runs"]


def test_every_job_completed_on_the_nodes_it_asked_for(lab, bench):
    _, runs = bench
    assert [(run["nodes"], run["status"], run["exit_code"]) for run in runs] == [
        (1, "success", 0), (2, "success", 0),
    ]  # fmt: skip
    jobs = [int(run["slurm_job"]) for run in runs]
    lab.wait_accounted(jobs)
    words = ("-n", "-P", "-o", "JobID,State,ExitCode,NNodes,NTasks")
    for nodes, job in enumerate(jobs, 1):
        rows = [line.split("|") for line in lab.sacct(*words, "-j", str(job)).splitlines()]
        kept = {row[0]: row[1:] for row in rows}
        assert kept[str(job)][:3] == ["COMPLETED", "0:0", str(nodes)]
        assert kept[f"{job}.0"] == ["COMPLETED", "0:0", str(nodes), str(nodes)]  # a torchrun a node


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_run_was_observed_on_every_node(lab, bench, nodes):
    out, runs = bench
    folder = out / f"n{nodes}x{RANKS_PER_NODE}-b{BATCH}"
    loglines, failed = parse_file(f"{folder}.log", ruleset="5.1.0")
    assert failed == []
    trained = [line for line in loglines if line.key == "tracked_stats"]
    assert len(trained) == STEPS
    assert runs[nodes - 1]["hosts"] == lab.nodes[:nodes]
    seen = report(folder)
    assert seen.throughput.complete_steps == len(trained)
    facts = seen.run.facts
    assert facts.slurm_job == runs[nodes - 1]["slurm_job"]
    world = nodes * RANKS_PER_NODE
    # Ranks follow the order of the nodes.
    assert {(rank.rank, rank.node, rank.world_size) for rank in facts.ranks} == {
        (rank, lab.nodes[rank // RANKS_PER_NODE], world) for rank in range(world)
    }
    assert seen.run.layout.dp == world


def test_the_logs_say_to_mlperf_what_they_say_to_us(bench):
    """The oracle reads start, stop and status; ``bench score`` and ``scaling`` agree with it."""
    out, _ = bench
    logs = [out / f"n{nodes}x{RANKS_PER_NODE}-b{BATCH}.log" for nodes in (1, 2)]
    minutes = []
    for log in logs:
        loglines, _ = parse_file(str(log), ruleset="5.1.0")
        first = {line.key: line for line in reversed(loglines)}
        start, stop = first["run_start"], first["run_stop"]
        assert stop.value["metadata"]["status"] == "success"
        minutes.append((stop.timestamp - start.timestamp) / 60_000)
        scored = json.loads(kansoku("bench", "score", str(log), "--json").stdout)
        assert scored["benchmark"] == "kansoku_pretrain"
        (run,) = scored["runs"]
        assert run["minutes"] == pytest.approx(minutes[-1], rel=1e-9)
        assert run["status"] == "success"
        assert run["samples"] == STEPS * BATCH
    sizes = [f"{log}:{gpus}" for gpus, log in enumerate(logs, 1)]
    one, two = json.loads(kansoku("bench", "scaling", *sizes, "--json").stdout)["rows"]
    assert (one["gpus"], two["gpus"]) == (1, 2)
    assert two["speedup"] == pytest.approx(minutes[0] / minutes[1], rel=1e-6)


def test_what_slurm_refuses_is_said(lab, tmp_path):
    words = ("--out", str(tmp_path / "out"), "--sbatch", "-p nowhere")
    answer = kansoku("bench", "run", *words, env=lab.env, fine=False)
    assert answer.returncode == 3
    assert "invalid partition specified: nowhere" in answer.stderr

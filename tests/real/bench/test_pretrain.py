"""The reference pre-training for real over Gloo: layouts agree, it scores, it restarts."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kansoku.app.bench_run as bench
from kansoku.errors import InputError
from kansoku.formats.mllog import read_log

pytestmark = pytest.mark.real

SHAPE = ["--layers", "2", "--hidden", "64", "--heads", "2", "--seq", "32", "--vocab", "64"]


def train(tmp_path, ranks, *flags, steps="6"):
    """Train and return the evaluation losses by step, and the log."""
    log = tmp_path / f"log-{len(list(tmp_path.iterdir()))}.txt"
    answer = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
         str(bench._SCRIPT), *SHAPE, "--steps", steps, "--eval-every", "3", "--mllog", str(log), *flags],
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    pairs = re.findall(r"step (\d+) evaluation loss ([\d.]+)", answer.stderr)
    return {int(step): float(loss) for step, loss in pairs}, log


def test_sharded_and_plain_replicas_train_alike(tmp_path):
    """DDP and FSDP2 compute the same sums; only their order differs."""
    plain, _ = train(tmp_path, 2)
    sharded, _ = train(tmp_path, 2, "--strategy", "fsdp")
    assert plain.keys() == {3, 6}
    assert sharded == pytest.approx(plain, abs=2e-3)
    assert plain[6] < plain[3]


def test_three_dimensions_with_a_llama(tmp_path):
    losses, log = train(
        tmp_path, 4, "--family", "llama", "--kv-heads", "2", "--tp", "2", "--pp", "2"
    )
    assert losses[6] < losses[3] < 4.5
    keys = [event.key for event in read_log(log).events]
    assert keys.count("run_start") == 1
    assert keys.count("tracked_stats") == 6
    assert keys.index("init_stop") < keys.index("run_start") < keys.index("eval_accuracy")


def test_sequence_parallel(tmp_path):
    losses, _ = train(
        tmp_path, 2, "--family", "llama", "--kv-heads", "2", "--tp", "2", "--sequence-parallel"
    )
    assert losses[6] < losses[3]


def test_a_restart_goes_on_where_it_stopped(tmp_path):
    """Six steps in one go, and three plus three over a checkpoint, reach the same loss."""
    whole, _ = train(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    flags = ("--checkpoint", str(folder), "--checkpoint-every", "3")
    train(tmp_path, 2, *flags, steps="3")
    again, _ = train(tmp_path, 2, *flags)
    assert again.keys() == {6}
    assert again[6] == pytest.approx(whole[6], abs=1e-3)


def test_bench_run_observes_and_scores(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-m", "kansoku", "bench", "run", "--out", str(tmp_path / "out"), "--ranks",
         "2", "--batch", "16", "--json", "--", *SHAPE, "--steps", "12", "--eval-every", "4",
         "--target-loss", "9"],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    told = json.loads(answer.stdout)  # the training's own lines stay out of it
    (one,) = told["runs"]
    assert one["status"] == "success"
    # The first evaluation is below 9 (ln 64 is 4.2), so 4 steps of 16 sequences were trained.
    assert one["samples"] == 64
    assert one["tokens"] == 64 * 32
    assert told["label"] == "unverified"
    assert (tmp_path / "out" / "n1x2-b16" / "run.json").is_file()


def processes_of(folder):
    """Return the processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.fsencode(folder) in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def wait_for(condition):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_bench_run_leaves_no_training(tmp_path):
    """SIGKILL, as the kernel sends it when memory is short: torchrun and its ranks end too."""
    out = tmp_path / "out"
    command = subprocess.Popen(
        [sys.executable, "-m", "kansoku", "bench", "run", "--out", str(out), "--ranks", "2",
         "--batch", "16", "--", *SHAPE, "--steps", "1000000", "--eval-every", "10"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    log = out / "n1x2-b16.log"
    wait_for(lambda: log.exists() and "eval_accuracy" in log.read_text())
    assert len(processes_of(log)) == 3  # torchrun and two ranks
    command.kill()
    command.wait()
    wait_for(lambda: not processes_of(tmp_path))


def test_several_nodes_without_a_scheduler_are_refused(tmp_path):
    case = bench.PretrainCase(nodes=2, ranks_per_node=8, global_batch=64)
    with pytest.raises(InputError, match="need a scheduler"):
        bench.bench_run([case], out=tmp_path)
    text = bench.sbatch_script(case, tmp_path, ["-p gpu"])
    assert "#SBATCH --nodes=2" in text
    assert "#SBATCH -p gpu" in text
    assert "--nnodes=2 --nproc-per-node=8" in text

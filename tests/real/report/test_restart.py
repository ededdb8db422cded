"""Under torchrun a rank is killed and started again, then one exits: what the report says of both."""

import subprocess
import sys
import textwrap
from pathlib import Path

import polars as pl
import pytest
from tests.labs.training import ROOT, bare_environment
from tests.labs.victoria import free_port

from kansoku.app.report import report
from kansoku.trace.steps import process_of

pytestmark = pytest.mark.real

TRAINING = """
import os, signal, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
rank, life = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
again = life != "0"
# A store a life: Gloo may find addresses of the first one in torchrun's own.
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}/store-{life}", rank=rank, world_size=2
)
inner = torch.nn.Linear(64, 64)
model = torch.nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
killed = lambda gradient: os.kill(os.getpid(), signal.SIGKILL)
for number in range(20):
    loss = model(torch.ones(8, 64)).pow(2).mean()
    if rank == 1 and not again and number == 5:
        loss.register_hook(killed)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
if rank == 1:
    raise SystemExit(3)
while True:  # still at work when torchrun ends it
    inner(torch.ones(8, 64)).pow(2).mean().backward()
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restart")
    script = folder / "train.py"
    script.write_text(textwrap.dedent(TRAINING))
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "run", "--no-report", "--out", str(folder / "out"), "--",
         torchrun, "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d",
         "--rdzv-endpoint", f"localhost:{free_port()}", str(script), str(folder)],
        env=bare_environment(KANSOKU_RING_DIR=folder / "rings", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
        capture_output=True, text=True, check=False, timeout=200, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    return report(folder / "out")


def test_what_a_killed_process_left_open_ends_with_it(answer):
    again = answer.run.spans.filter(process_of("id") > 0)
    begun = dict(again.group_by("rank").agg(pl.col("start_ns").min()).iter_rows())
    assert sorted(begun) == [0, 1]
    left = answer.run.steps.filter(~pl.col("complete")).with_columns(
        end_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
    died = left.filter((pl.col("rank") == 1) & (pl.col("step") == 5))
    assert died["end_ns"].to_list() < [begun[1]]
    # Steps of the second processes are as those of the first: their phases and their sleep.
    spans = again.filter(pl.col("duration_ns").is_not_null())
    whole = answer.run.steps.filter(
        pl.col("complete") & (pl.col("start_ns") >= pl.col("rank").replace_strict(begun))
    )
    assert len(whole) >= 38
    for phase in ("forward", "backward"):
        booked = dict(whole.group_by("rank").agg(pl.col(f"{phase}_ns").sum()).iter_rows())
        inside = spans.join(whole.select("rank", "step"), on=["rank", "step"], how="semi")
        inside = inside.filter(pl.col("kind") == phase)
        lasted = dict(inside.group_by("rank").agg(pl.col("duration_ns").sum()).iter_rows())
        for rank in (0, 1):
            assert 0 < booked[rank] <= lasted[rank]


def test_who_exited_first_is_named_and_not_whom_torchrun_ended(answer):
    said = {f.id: f for f in answer.findings}
    assert str(said["rank.ended_first"].subject) == "rank:1"
    assert said["rank.ended_first"].sentence.startswith("The record of rank 1 (")
    assert str(said["rank.ended_after"].subject) == "rank:0"
    assert "rank.gone" not in said

"""Real data-parallel trainings under observation, many in one process: ranks forked after one import.

``train(plans, folder)`` starts one Python with the recorder's environment, which imports torch once
and then forks the ranks of each planned run over Gloo; every rank leaves its ring in
``folder/NAME``. What is slow, on which rank, is in the plan: see :class:`Plan`.
"""

import json
import mmap
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_READ_BYTES = 64 << 10
"""What a step reads with ``disk``; an aligned buffer, as direct reads ask for."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run."""

    name: str
    slow: str = "none"
    """none, forward, data, disk, optimizer, gc, rotating, contention, kill, hang"""
    rank: int = 0
    ranks: int = 4
    steps: int = 40
    extra_ms: float = 15.0
    seed: int = 0
    disk: str = ""
    """With ``disk``: the file that all ranks read their batches from, past the page cache."""
    cgroup: str = ""
    """With ``disk``: the cgroup of the rank whose disk is slow."""


def train(plans, folder, *, timeout=200):
    """Run the plans one after the other; return their ring folders by name."""
    from kansoku.capture import environment, write_payload

    folder = Path(folder)
    payload = write_payload(str(folder / "payload"))
    env = environment(os.environ, payload=payload, run="unset", out=None, node="lab")
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(ROOT)])
    env |= {"KANSOKU_RING_DIR": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "KANSOKU_RING_BYTES": str(2 << 20)}  # fmt: skip
    text = json.dumps([asdict(plan) for plan in plans])
    done = subprocess.run(
        [sys.executable, __file__, str(folder)], input=text, env=env, text=True,
        capture_output=True, timeout=timeout, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {plan.name: folder / plan.name for plan in plans}


# ---- inside the observed process --------------------------------------------------------------


def _spin(milliseconds):
    import time

    import torch

    end = time.thread_time() + milliseconds / 1000
    work = torch.ones(48, 48)
    while time.thread_time() < end:
        work = work @ work / 48


def _rank(plan, rank, rendezvous):
    import gc
    import time

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    here = rank == plan.rank
    step_now = 0

    if plan.slow == "disk":
        disk, buffer = os.open(plan.disk, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, _READ_BYTES)
        if here:
            (Path(plan.cgroup) / "cgroup.procs").write_text(str(os.getpid()))

    class Data(Dataset):
        def __len__(self):
            return 8 * plan.steps

        def __getitem__(self, index):
            if plan.slow == "disk" and index % 8 == 0:
                os.preadv(disk, [buffer], index // 8 * _READ_BYTES)
            if plan.slow == "data" and here:
                time.sleep(plan.extra_ms / 8000)  # a slow disk
            return torch.full((128,), float(index % 7)), index % 10

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(Layer() for _ in range(2)))
            self.head = nn.Linear(128, 10)

        def forward(self, x):
            if (plan.slow == "forward" and here) or (
                plan.slow == "rotating" and step_now % plan.ranks == rank
            ):
                _spin(plan.extra_ms * (2 if plan.slow == "rotating" else 1))
            return self.head(self.layers(x.repeat(16, 1)))

    class SGD(torch.optim.SGD):
        def step(self, closure=None):
            if plan.slow == "optimizer" and here:
                _spin(plan.extra_ms)
            return super().step(closure)

    if plan.slow == "contention":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[0] if here else cores[-1]})
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=plan.ranks
    )
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = SGD(model.parameters(), lr=0.01)
    gc.freeze()  # what was imported is not this training's garbage
    kept = [[n] for n in range(400_000)] if plan.slow == "gc" and here else []
    gc.disable()
    for step_now, (x, y) in enumerate(DataLoader(Data(), batch_size=8)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y.repeat(16))
        if step_now == plan.steps - 5 and here and plan.slow == "kill":
            os.kill(os.getpid(), 9)
        if step_now == plan.steps - 5 and here and plan.slow == "hang":
            time.sleep(1000)
        loss.backward()
        if plan.slow == "gc" and here and step_now % 4 == 3:
            gc.collect()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    del kept
    return model


def _run(plan, folder):
    import atexit
    import contextlib
    import signal
    import traceback

    os.environ["KANSOKU_RUN_ID"] = plan.name
    rendezvous = Path(folder) / f"{plan.name}.rendezvous"
    rendezvous.unlink(missing_ok=True)  # of a run before this one that hung
    pids, burners = [], []
    if plan.slow == "contention":
        core = min(os.sched_getaffinity(0))
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                os.sched_setaffinity(0, {core})
                os.nice(-10)  # whatever else the machine does, this rank's CPU is taken
                while True:
                    pass
            burners.append(pid)
    for rank in range(plan.ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(plan.ranks),
            }
            try:
                # Kept: torch's end of a reducer may hang, where Gloo's thread waits for the
                # interpreter's lock to drop its last work while that end waits for the thread.
                kept = _rank(plan, rank, rendezvous)  # noqa: F841
                code = 0
            except BaseException:
                traceback.print_exc()
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    failed = 0
    if plan.slow == "hang":
        # Say so and wait for the reader, who looks at the rings while the ranks hang.
        print("hang", flush=True)
        sys.stdin.readline()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    for rank, pid in enumerate(pids):
        status = os.waitpid(pid, 0)[1]
        if status and plan.slow not in {"kill", "hang"}:
            failed += 1
            print(f"{plan.name}: rank {rank} ended with status {status}", file=sys.stderr)
    for pid in burners:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with contextlib.suppress(FileNotFoundError):
        rendezvous.unlink()
    return failed


def main():
    # Once, before the ranks are forked: DDP and optimizers import these on first use.
    import torch._dynamo
    import torch.distributed.optim
    import torch.utils.data  # noqa: F401

    plans = [Plan(**plan) for plan in json.loads(sys.stdin.readline())]
    return sum(_run(plan, sys.argv[1]) for plan in plans)


if __name__ == "__main__":
    sys.exit(main())

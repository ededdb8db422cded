"""Small real trainings over Gloo that break in one known way, each rank under the recorder.

One Python imports torch once and forks the ranks of one training after the other (see
``observed_training``). ``Lab(folder)`` starts it; ``lab.run(fault)`` returns the folder of what a
job leaves: ``rank_N.log`` of every rank, ``launcher.log`` with what srun says of tasks that died,
and the rings in ``run``. A training that hangs is left hanging until ``lab.end()``, so that it can
be looked at from outside. The fault happens on rank ``BAD`` at step ``AT``.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.labs.parted import enter

ROOT = Path(__file__).parents[2]
BAD, AT, RANKS = 1, 12, 3
HANGS = {"unequal", "cycle", "stop", "cut"}


class Lab:
    """The process that forks trainings."""

    def __init__(self, folder):
        from kansoku.capture import environment, write_payload

        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        payload = write_payload(str(self.folder / "payload"))
        env = environment(os.environ, payload=payload, run="unset", out=None, node="lab")
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(ROOT)])
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                "KANSOKU_RING_DIR": str(self.folder), "KANSOKU_RING_BYTES": str(2 << 20)}  # fmt: skip
        with (self.folder / "lab.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, env=env, text=True, cwd=ROOT,
            )  # fmt: skip

    def _ask(self, **words):
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer, (self.folder / "lab.log").read_text()[-3000:]
        return answer

    def run(self, fault, **settings):
        """Run a training to its end, or until it hangs; return its folder."""
        name = settings.pop("name", fault)
        folder = self.folder / name
        folder.mkdir()
        self._ask(fault=fault, folder=str(folder), name=name, **settings)
        return folder

    def end(self):
        """Kill the ranks of a training that hangs."""
        self._ask(fault="end")

    def close(self):
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


# ---- the training ---------------------------------------------------------------------------


def _log(rank, text):
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} [rank{rank}] {text}", flush=True)


def _fault(name, rank, step, folder, device_lists):
    import torch

    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif name == "exception":
        batch = torch.zeros(4, 5)
        batch @ torch.zeros(4, 5)
    elif name == "oom":
        memory = Path("/sys/fs/cgroup/memory") / os.environ["FAULT_CGROUP"]
        (memory / "tasks").write_text(str(os.getpid()))
        while True:
            device_lists.append(torch.ones(4 << 20))
    elif name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif name in {"cut", "lose"}:
        # The switch is not ours: whoever watches this file does it.
        (folder / "now").touch()
        while not (folder / "done").exists():
            time.sleep(0.01)
    elif name == "full":
        state = {"weights": torch.ones(4 << 20)}
        torch.save(state, Path(os.environ["FAULT_DISK"]) / f"checkpoint-{step}.pt")


def _rank(name, folder, rank, world):
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    first, second = (dist.new_group(list(range(world))) for _ in range(2))
    layers = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 30
    if name == "unequal" and rank == BAD:
        steps = AT
    wanted = os.environ.get("FAULT_STEPS")
    steps = int(wanted) if wanted else steps
    kept = []
    beat = folder / f"beat.{rank}"
    for step in range(steps):
        if step == AT and rank == BAD:
            _fault(name, rank, step, folder, kept)
        optimizer.zero_grad()
        x = torch.randn(32, 64)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        if name == "nan" and step >= AT:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        if name == "cycle" and step == AT:
            one, two = (first, second) if rank != BAD else (second, first)
            for group in (one, two):
                dist.all_reduce(torch.ones(4), group=group)
        if step % 2 == 0:
            _log(rank, f"step {step} loss {loss.item():.4f}")
        if name == "nan" and not torch.isfinite(loss):
            raise FloatingPointError(f"loss is nan at step {step}")
        beat.write_text(str(step))
    if name == "unequal" and rank == BAD:
        time.sleep(1000)  # it has no more batches and waits for what will not come
    dist.barrier()
    _log(rank, "training completed")
    dist.destroy_process_group()


_SAID = {9: "Killed", 11: "Segmentation fault", 6: "Aborted"}


def _fork(plan):
    folder = Path(plan["folder"])
    os.environ["KANSOKU_RUN_ID"] = plan["name"] + "/run"
    os.environ |= {k: v for k, v in plan.items() if k.startswith("FAULT_")}
    pids = []
    for rank in range(RANKS):
        if "FAULT_NETNS" in os.environ:
            enter(f"{os.environ['FAULT_NETNS']}-n{rank}")  # the child is born in its network
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        import atexit
        import traceback

        log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        code = 1
        try:
            _rank(plan["fault"], folder, rank, RANKS)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)
    return pids


def _collect(pids, folder):
    """Wait for all; say of each that died what srun says."""
    with (folder / "launcher.log").open("a") as log:
        waiting = dict(zip(pids, range(RANKS), strict=True))
        while waiting:
            pid, status = os.wait()
            rank = waiting.pop(pid, None)
            if rank is None or status == 0:
                continue
            if os.WIFSIGNALED(status):
                what = _SAID.get(os.WTERMSIG(status), f"signal {os.WTERMSIG(status)}")
            else:
                what = f"Exited with exit code {os.WEXITSTATUS(status)}"
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"{stamp} srun: error: lab: task {rank}: {what}\n")
            log.flush()


def _hang(folder, *, seconds=3.0, timeout=150):
    """Wait until no rank has made a step for some seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        beats = list(folder.glob("beat.*"))
        if len(beats) == RANKS and time.time() - max(b.stat().st_mtime for b in beats) > seconds:
            return
        time.sleep(0.1)


def _stopped(pid, *, timeout=150):
    """Wait until the kernel holds a process stopped: on a busy machine 3 s pass without a step."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.1)


def main():
    # Once, before the ranks are forked: DDP and optimizers import these on first use.
    import torch._dynamo
    import torch.distributed.optim  # noqa: F401

    pids = []
    for line in sys.stdin:
        plan = json.loads(line)
        if plan["fault"] == "end":
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            pids = []
        else:
            pids = _fork(plan)
            if plan["fault"] == "stop":
                _stopped(pids[BAD])
            if plan["fault"] in HANGS:
                _hang(Path(plan["folder"]))
            else:
                _collect(pids, Path(plan["folder"]))
        print("done", flush=True)


if __name__ == "__main__":
    main()

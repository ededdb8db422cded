"""Many files over a Dask cluster: a real scheduler and two workers as separate processes."""

import json
import subprocess
import sys

import pytest
from tests.labs.kineto_files import Job, text, write

from kansoku.app.trace import breakdown


@pytest.mark.real
def test_over_a_dask_scheduler_with_two_worker_processes(tmp_path):
    for rank in range(4):
        write(tmp_path / f"rank{rank}.json", text(Job(rank=rank)))
    file = tmp_path / "scheduler.json"
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0",
         "--no-dashboard", "--scheduler-file", str(file)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(file), "--nthreads", "1",
             "--no-dashboard", "--no-nanny", "--host", "127.0.0.1", "--local-directory", str(tmp_path)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        from distributed import Client

        with Client(scheduler_file=str(file), timeout=120) as client:
            client.wait_for_workers(2, timeout=120)
            pids = client.run(lambda: __import__("os").getpid())
            assert set(pids.values()) == {worker.pid for worker in workers}
        address = json.loads(file.read_text())["address"]
        there = breakdown(
            [tmp_path / f"rank{n}.json" for n in range(4)], scheduler=address
        ).to_json()
        here = breakdown([tmp_path / f"rank{n}.json" for n in range(4)], processes=1).to_json()
        assert there == here
    finally:
        for process in (*workers, scheduler):
            process.kill()
        for process in (*workers, scheduler):
            process.wait()

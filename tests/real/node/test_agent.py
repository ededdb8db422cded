"""The agent process: rounds to a receiver, rings of a job, SIGTERM, a dead receiver."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import polars as pl
import pytest
from tests.labs.nvml import FakeNvml

from kansoku.model import ring
from kansoku.store import LocalStore
from kansoku.telemetry.batch import unpack_batch

pytestmark = pytest.mark.real


class Receiver(BaseHTTPRequestHandler):
    """Takes Arrow batches as the server's ``/v1/kansoku/batch`` does, and remembers them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        answer = orjson.dumps({"rows": {}, "rejected": {}, "duplicate": False})
        with self.server.lock:
            self.server.batches.append((self.headers["kansoku-sequence"], unpack_batch(body)))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def serve(port=0):
    server = ThreadingHTTPServer(("127.0.0.1", port), Receiver)
    server.batches, server.lock = [], threading.Lock()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def wait_for(what, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
    return found


def start(tmp_path, port, *more):
    command = [
        sys.executable, "-m", "kansoku", "agent", "--to", f"http://127.0.0.1:{port}", "--interval",
        "0.2", "--node", "c001", "--spool", str(tmp_path / "spool"), *more,
    ]  # fmt: skip
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def table(server, name):
    with server.lock:
        frames = [pl.from_arrow(t[name]) for _, (t, _, _) in server.batches if name in t]
    return (
        pl.concat(frames)
        if frames
        else pl.DataFrame(schema={"metric": pl.String, "value": pl.Float64})
    )


def metric(server, name):
    return table(server, "metrics").filter(pl.col("metric") == name)


def test_rounds_arrive_once_each_and_term_ends_it(tmp_path):
    server = serve()
    agent = start(tmp_path, server.server_port)
    try:
        wait_for(lambda: len(metric(server, "system.memory.limit")) >= 4)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(10) == 0
    finally:
        agent.kill()
        agent.stderr.close()
        server.shutdown()
        server.server_close()
    rows = metric(server, "system.memory.limit")
    assert rows["time_ns"].is_unique().all()
    assert orjson.loads(rows["labels"][0]) == {"host.name": "c001"}
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    total = int(next(line for line in meminfo if "MemTotal" in line).split()[1]) * 1024
    assert rows["value"].unique().to_list() == [total]
    sequences = [sequence for sequence, _ in server.batches]
    assert len(set(sequences)) == len(sequences)
    _, resource, described = server.batches[0][1]
    assert resource["service.name"] == "kansoku-agent"
    assert described["system.cpu.time"]["kind"] == "counter"
    assert described["system.memory.limit"]["unit"] == "By"
    assert len(metric(server, "kansoku.agent.cpu.time")) >= 4


def test_nothing_is_lost_while_the_receiver_is_away(tmp_path):
    server = serve()
    port = server.server_port
    server.shutdown()
    server.server_close()
    agent = start(tmp_path, port, "--only", "cpu")
    try:
        time.sleep(2.5)  # rounds pile up on disk: time itself is what is tested
        server = serve(port)
        wait_for(lambda: len(metric(server, "system.uptime")) >= 6, 40)
    finally:
        agent.kill()
        agent.wait()
        agent.stderr.close()
        server.shutdown()
        server.server_close()
    stamps = metric(server, "system.uptime")["time_ns"].sort()
    gaps = stamps.diff().drop_nulls()
    assert stamps.is_unique().all()
    # rounds are 0.2 s apart; a lost one would leave a gap of two rounds where the switch was
    assert gaps.median() == pytest.approx(0.2e9, rel=0.3)


def write_ring(folder, *durations_s):
    """Write the ring of a job whose process is this one: its steps begin now."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now = time.monotonic_ns()
    buffer = bytearray(1 << 18)
    ring.format_ring(
        buffer, pid=os.getpid(), process_start=start, anchor=(now, time.time_ns()), lane_shares=(1,)
    )
    writer = ring.RingWriter(buffer)
    writer.set_ranks(0, 0, 1)
    said = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "2,3"}
    writer.set_facts({"node": "c1.example", "run": "a", "device": "NVIDIA H100", "extra": said})
    for number, seconds in enumerate(durations_s, 1):
        span = writer.open(ring.pack_template(ring.KIND_CODES["step"]), now, number, 0)
        writer.close(span, now, now + round(seconds * 1e9), -1)
        now += round(seconds * 1e9)
    part = folder / "part"
    part.write_bytes(buffer)
    part.replace(folder / "n-1.ring")


def test_steps_of_a_job_arrive_with_what_they_used(tmp_path):
    """Slurm gave GPUs 2 and 3, so the job's GPU 0 is the node's 2, at 500 W: 150 J and 300 J."""
    nvml = FakeNvml(tmp_path / "nvml")
    nvml.set(
        gpus=4, energy_mj="unsupported", power_mw={0: 90_000, 1: 90_000, 2: 500_000, 3: 70_000}
    )
    rings, server = tmp_path / "rings" / "a", serve()
    rings.mkdir(parents=True)
    (tmp_path / "empty" / "proc").mkdir(parents=True)
    settings = {
        "only": [], "interval_s": 0.2, "node": "c001", "root": str(tmp_path / "empty"),
        "ring_folder": str(rings.parent), "switches_file": None, "samples_folder": None,
    }  # fmt: skip
    words = {
        "settings": settings, "to": f"http://127.0.0.1:{server.server_port}", "protocol": "arrow",
        "spool": str(tmp_path / "spool"),
    }  # fmt: skip
    command = [sys.executable, "-m", "kansoku.app._agent_process", json.dumps(words)]
    agent = subprocess.Popen(command, env=nvml.environment, stderr=subprocess.PIPE, text=True)

    def sampling():
        return metric(server, "kansoku.agent.sampling.interval").filter(pl.col("value") > 0)

    try:
        write_ring(rings)
        wait_for(lambda: len(sampling()))
        write_ring(rings, 0.3, 0.6)
        wait_for(lambda: len(table(server, "steps")) >= 2)
        (rings / "n-1.ring").unlink()
        # 0 again once the job is gone: it samples no more
        wait_for(lambda: metric(server, "kansoku.agent.sampling.interval")["value"][-1] == 0)
    finally:
        agent.terminate()
        agent.wait(10)
        agent.stderr.close()
        server.shutdown()
        server.server_close()
    rows = table(server, "steps")
    assert metric(server, "kansoku.agent.sampling.failures")["value"].max() == 0
    with LocalStore(tmp_path / "store") as store:
        store.append("steps", rows)
        kept = store.table("steps").sort("step")
    assert kept["energy_j"].to_list() == pytest.approx([150, 300])
    assert kept["sm_activity"].null_count() == 0
    assert kept["energy_error_j"].null_count() == 0

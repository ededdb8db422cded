"""The agent process: rounds to a receiver, rings of a job, SIGTERM, a dead receiver."""

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


def wait_for(what, seconds=20):
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


def metric(server, name):
    with server.lock:
        frames = [pl.from_arrow(t["metrics"]) for _, (t, _, _) in server.batches if "metrics" in t]
    rows = pl.concat(frames) if frames else pl.DataFrame(schema={"metric": pl.String})
    return rows.filter(pl.col("metric") == name)


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

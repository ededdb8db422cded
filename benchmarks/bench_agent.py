"""What the node agent costs: 8 GPUs, 10 NICs and RDMA ports, Lustre, all host collectors.

The GPUs are a compiled stand-in for NVML, the NICs a recorded tree (tests/labs): a real driver's
own time inside a call comes on top. Rounds run 50 times faster than in production so that the
figure is of many rounds; the cost is CPU seconds a round over the 10 s that a round lasts.
The peer is psutil reading only CPU, memory, disks and network, once a round.
"""

import json
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.table import Row, print_table

ROOT = Path(__file__).parents[1]
ROUNDS = 100
INTERVAL_S = 10.0
CHILD = """
import json, resource, sys, threading, time
from pathlib import Path
import kansoku.app._agent_process  # as the agent's own process starts
from kansoku.app.agent import Agent, AgentSettings
from tests.labs.node_tree import MLX5_COUNTERS

def resident(key):
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024

tree, spool, url, rounds = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
settings = AgentSettings(
    root=tree, node="c001", interval_s=0.2, ring_folder=None,
    collector_settings={"ethtool_statistics": lambda _: MLX5_COUNTERS, "kmsg": lambda: ([], 0)},
)
agent = Agent(settings)
for _ in range(3):
    agent.round()
collectors_only = resident("VmRSS:")
from kansoku.telemetry import Exporter
exporter = Exporter(url, spool=spool, resource={"host.name": "c001"})
stop, seen = threading.Event(), []

def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

def after(agent):
    seen.append(cpu())
    if len(seen) >= rounds:
        stop.set()

agent.run(exporter, stop, after_round=after)
exporter.flush(10)
warm = 10  # facts are learned and series made in the first rounds
per_round = (cpu() - seen[warm]) / (len(seen) - warm)
collectors = {s.name: s.duration_ns for s in agent.statuses if s.absent is None}
whole, anonymous = resident("VmRSS:"), resident("RssAnon:")
result, _ = agent.round()
print(json.dumps({"cpu_s": per_round, "resident": whole, "collectors_only": collectors_only,
                  "anonymous": anonymous,
                  "samples": len(result.samples), "collectors": collectors,
                  "delivered": exporter.counts.rows_delivered}))
exporter.close()
"""
PEER = """
import json, resource, psutil
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
def read():
    return (psutil.cpu_times(), psutil.virtual_memory(), psutil.swap_memory(),
            psutil.disk_io_counters(perdisk=True), psutil.net_io_counters(pernic=True))
read()
start = cpu()
for _ in range(200):
    read()
print(json.dumps((cpu() - start) / 200))
"""


class _Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        answer = b'{"rows":{},"rejected":{},"duplicate":false}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def _child(code, *arguments, env=None):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=env, capture_output=True, text=True,
        check=True, timeout=150,
    )  # fmt: skip
    return json.loads(done.stdout)


def run() -> list[Row]:
    """Measure; return the rows."""
    sys.path.insert(0, str(ROOT))
    from tests.labs.node_tree import make_node
    from tests.labs.nvml import FakeNvml

    from kansoku.app._agent_process import LEAN

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        tree = make_node(Path(folder) / "tree", lustre_targets=64)
        nvml = FakeNvml(Path(folder) / "nvml")
        env = {**LEAN, **nvml.environment, "PYTHONPATH": str(ROOT)}
        url = f"http://127.0.0.1:{server.server_port}"
        got = _child(CHILD, str(tree), str(Path(folder) / "spool"), url, str(ROUNDS), env=env)
    peer = _child(PEER)
    server.shutdown()
    server.server_close()
    share = got["cpu_s"] / INTERVAL_S
    rows = [
        Row(
            what=f"CPU of one core at 10 s ({got['samples']} samples a round, sent)",
            measured=share * 100,
            unit="%",
            target="< 2",
            peer=f"psutil, host only: {peer / INTERVAL_S * 100:.3g} %",
            met=share < 0.02,
        ),
        Row(
            what="resident memory, collectors without a transport",
            measured=got["collectors_only"] / 1e6,
            unit="MB",
            target="< 120",
            met=got["collectors_only"] < 120e6,
        ),
        Row(
            what="resident memory, whole agent while it sends Arrow batches",
            measured=got["resident"] / 1e6,
            unit="MB",
            target="< 120",
            met=got["resident"] < 120e6,
            peer=f"of it not shared: {got['anonymous'] / 1e6:.0f} MB",
        ),
        Row(what="CPU a round", measured=got["cpu_s"] * 1e3, unit="ms", target=""),
    ]
    slowest = sorted(got["collectors"].items(), key=lambda item: -item[1])[:4]
    rows += [
        Row(what=f"  collector {name}", measured=ns / 1e6, unit="ms", target="")
        for name, ns in slowest
    ]
    return rows


def main() -> None:
    """Print the table."""
    print_table("node agent, 8 GPUs and 10 NICs", run())


if __name__ == "__main__":
    main()

"""Real parts of this machine: ethtool ioctl on veth, the kernel log, py-spy to a Pyroscope sink."""

import os
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kansoku.node.collectors.kernel_log import KernelLog
from kansoku.node.edge.ethtool import EthtoolSocket
from kansoku.node.edge.machine import Machine
from kansoku.node.edge.profiles import profile_process, push_profile

pytestmark = pytest.mark.real

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def veth():
    name = f"knod{os.getpid() % 10000}"
    subprocess.run(["ip", "link", "add", name, "type", "veth", "peer", f"{name}p"], check=True)
    yield name
    subprocess.run(["ip", "link", "del", name], check=True)


@needs_root
def test_ethtool_ioctl_says_what_ethtool_says(veth):
    shown = subprocess.run(["ethtool", "-S", veth], capture_output=True, text=True, check=True)
    expected = {}
    for line in shown.stdout.splitlines()[1:]:
        name, _, number = line.strip().rpartition(": ")
        expected[name] = int(number)
    socket = EthtoolSocket()
    found = socket.statistics(veth)
    assert dict(found) == expected
    assert found, "veth has statistics"
    assert socket.statistics("does-not-exist") is None
    assert socket.statistics("lo") is None
    socket.close()


@needs_root
def test_the_kernel_log_is_followed():
    """A line written to /dev/kmsg comes back as an event, with the catalogue's meaning."""
    host = Machine(name="c001")
    collector = KernelLog()
    assert collector.absent(host) is None
    list(collector.collect(host))
    mark = f"kansoku-test-{os.getpid()}"
    with open("/dev/kmsg", "w") as log:
        log.write(
            f"<4>NVRM: Xid (PCI:0000:3b:00): 94, pid=4242, name={mark}, Contained ECC error\n"
        )
    deadline = time.monotonic() + 5
    found = []
    while not found and time.monotonic() < deadline:
        found = [e for e in collector.collect(host) if mark in e.body]
        time.sleep(0.01)
    collector.close()
    (event,) = found
    assert (event.kind, event.attributes["code"], event.attributes["process.pid"]) == (
        "xid",
        "94",
        "4242",
    )
    assert abs(event.time_ns - time.time_ns()) < 5e9


class Sink(BaseHTTPRequestHandler):
    def do_POST(self):
        length = int(self.headers["content-length"])
        self.server.seen.append((self.path, self.rfile.read(length).decode()))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@needs_root
def test_a_profile_reaches_pyroscopes_ingest():
    """A process that spins in ``burn`` is sampled while it runs; most stacks end there."""
    server = HTTPServer(("127.0.0.1", 0), Sink)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = "def burn():\n    print('up', flush=True)\n    while True:\n        sum(range(1000))\nburn()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "up\n"
        profile = profile_process(child.pid, start_ns=time.time_ns(), seconds=1, rate_hz=50)
        url = f"http://127.0.0.1:{server.server_port}"
        push_profile(url, profile, {"run": "r-1", "rank": "3", "host": "c001 {odd}"})
        assert child.poll() is None, "the process lives on"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        server.shutdown()
        server.server_close()
    ((path, body),) = server.seen
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
    assert urllib.parse.urlsplit(path).path == "/ingest"
    assert query["format"] == ["folded"]
    assert query["name"] == ["kansoku.training{host=c001__odd_,rank=3,run=r-1}"]
    assert int(query["until"][0]) > int(query["from"][0])
    counts = [(line.rpartition(" ")[0], int(line.rpartition(" ")[2])) for line in body.splitlines()]
    burning = sum(count for stack, count in counts if "burn" in stack)
    assert burning > 0.8 * sum(count for _, count in counts)

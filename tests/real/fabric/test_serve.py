"""The fabric controller inside `kansoku serve`: real server, real agents, one process in all.

Three hosts under one ToR, each an address of the loopback interface. Agents come with a client
certificate, the reader with a token.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest
from tests.labs.certificates import make_certificates
from tests.labs.slurm import free_ports

from kansoku.telemetry import Tls

pytestmark = pytest.mark.real
KANSOKU = [sys.executable, "-m", "kansoku"]
HOSTS = {"h0": "127.0.0.11", "h1": "127.0.0.12", "h2": "127.0.0.13"}
CLUSTER = """
name = "desk"
source = "three addresses of one host"
[node_kind.host]
[[node_kind.host.nic]]
device = "nic0"
role = "fabric"
[[nodes]]
names = "h[0-2]"
kind = "host"
pod = "pod0"
[fabric]
protocol = "rocev2"
rail_optimised = false
[[fabric.switch]]
names = "tor0"
tier = "leaf"
pod = "pod0"
"""
SETTINGS = """
[settings]
window_s = 2.0
timeout_s = 0.5
hold_s = 1.0
grace_s = 1.0
silent_s = 2.0
refresh_s = 0.5
clear_after = 1
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`kansoku serve` with mTLS and three agents; yields how to ask it, and the agents."""
    folder = tmp_path_factory.mktemp("fabric-serve")
    make_certificates(folder)
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / "fabric.toml").write_text(SETTINGS)
    digest = hashlib.sha256(b"see all").hexdigest()
    (folder / "principals.toml").write_text(
        '[[principal]]\nname = "agents"\nrole = "agent"\ncertificate = "node-agent"\n'
        f'[[principal]]\nname = "op"\nrole = "operator"\ntoken_sha256 = "{digest}"\n'
    )
    port, probes = free_ports(2)
    command = [
        "serve", "--store", "store", "--cluster", "cluster.toml", "--fabric", "fabric.toml",
        "--port", str(port), "--otlp-port", "0", "--grpc-port", "-1", "--principals",
        "principals.toml", "--certificate", "server.pem", "--key", "server.key", "--client-ca",
        "ca.pem",
    ]  # fmt: skip
    url = f"https://127.0.0.1:{port}"
    environment = os.environ | {"KANSOKU_FABRIC_CA": "ca.pem"}
    agent = environment | {
        "KANSOKU_FABRIC_CERTIFICATE": "client.pem",
        "KANSOKU_FABRIC_KEY": "client.key",
    }
    reader = Tls(
        authority=folder / "ca.pem", certificate=folder / "odd.pem", key=folder / "odd.key"
    )
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))

        def start(words, env):
            process = subprocess.Popen([*KANSOKU, *words], cwd=folder, env=env, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start(command, environment)
        agents = {
            host: start(
                ["fabric", "agent", "--node", host, "--controller", url, "--rnic",
                 f"nic0={address}", "--port", str(probes)],
                agent,
            )
            for host, address in HOSTS.items()
        }  # fmt: skip
        client = stack.enter_context(
            httpx.Client(base_url=url, verify=reader.context(), timeout=30,
                         headers={"authorization": "Bearer see all"})
        )  # fmt: skip
        yield client, agents, folder


def until(client, check):
    """Return the first status that satisfies ``check``."""
    deadline, status = time.monotonic() + 90, None
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            answer = client.get("/fabric/status")
            assert answer.status_code == 200, answer.text
            status = answer.json()
            if check(status):
                return status
        time.sleep(0.1)
    raise AssertionError(f"never: {json.dumps(status, indent=1)}")


def shown(client, text):
    """Wait until the page says it: it reads the store, where a window comes after its verdict."""
    deadline = time.monotonic() + 30
    while text not in (page := client.get("/fabric").text):
        assert time.monotonic() < deadline, page
        time.sleep(0.2)


def findings(client):
    """Return subject and verdict of the findings in the store, where they come after the status."""
    rows = client.get("/api/v1/tables/findings", params={"source": "fabric"}).json()
    at = {one["name"]: n for n, one in enumerate(rows["columns"])}
    return {(row[at["subject"]], row[at["verdict"]]) for row in rows["rows"]}


def test_one_process_is_controller_analyser_and_pages(served):
    client, agents, folder = served
    clear = until(
        client,
        lambda s: s["verdict"] == "clear" and s["fabric"]["coverage"].get("rnics") == len(HOSTS),
    )
    assert clear["fabric"]["registered"] == len(HOSTS)
    assert clear["window"]["probes"] > 0
    shown(client, "no open finding")
    agents["h2"].send_signal(signal.SIGSTOP)
    try:
        # A busy machine may be late with the report of a host that is well: not for long.
        until(client, lambda s: {a["subject"] for a in s["anomalies"]} == {"node:h2"})
        asked = subprocess.run(
            [*KANSOKU, "fabric", "status", "--controller", str(client.base_url), "--json"],
            capture_output=True, text=True, cwd=folder, check=False,
            env=os.environ | {
                "KANSOKU_TOKEN": "see all", "KANSOKU_FABRIC_CA": "ca.pem",
                "KANSOKU_FABRIC_CERTIFICATE": "odd.pem", "KANSOKU_FABRIC_KEY": "odd.key",
            },
        )  # fmt: skip
        assert asked.returncode == 1, asked.stderr
        assert json.loads(asked.stdout)["verdict"] == "host"
        shown(client, "node:h2")
    finally:
        agents["h2"].send_signal(signal.SIGCONT)
    until(client, lambda s: s["verdict"] == "clear" and not s["anomalies"])
    counts = client.get("/api/v1/statistics").json()["fabric"]
    assert (counts["rnics"], counts["registered"], counts["failures"]) == (3, 3, 0)
    deadline = time.monotonic() + 30
    while not {("node:h2", "found"), ("node:h2", "none")} <= (states := findings(client)):
        assert time.monotonic() < deadline, states
        time.sleep(0.2)

"""Processes killed without warning, full disks, a foreign collector between: count at the sink."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import polars as pl
import pytest
from tests.labs.certificates import make_certificates
from tests.labs.victoria import free_port

from kansoku.app.serve import Server, ServeSettings
from kansoku.errors import StoreError
from kansoku.store import LocalStore, StoreLimits
from kansoku.telemetry import Exporter, Tls

pytestmark = pytest.mark.real
BIN = Path(sys.executable).parent


def numbered(first, count, metric="n"):
    """Rows whose values are distinct numbers, each at a time of its own."""
    now = time.time_ns() - 600 * 10**9
    return pl.DataFrame(
        {"metric": metric, "labels": "{}", "time_ns": [now + first + i for i in range(count)],
         "value": [float(first + i) for i in range(count)]}
    )  # fmt: skip


@contextlib.contextmanager
def served(folder, port):
    """Run ``kansoku serve`` as users do; yield the process once it answers."""
    process = subprocess.Popen(
        [BIN / "kansoku", "serve", "--store", folder, "--port", str(port), "--otlp-port", "0",
         "--grpc-port", "-1"],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while True:
            assert process.poll() is None
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/api/health").status_code == 200:
                    break
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_server_killed_while_committing_loses_and_doubles_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("kansoku.telemetry.exporter._LONGEST_WAIT_S", 0.2)
    port = free_port()
    exporter = Exporter(f"http://127.0.0.1:{port}", spool=tmp_path / "spool", sync=False)
    put = 0

    def feed():
        nonlocal put
        exporter.put("metrics", numbered(put, 2000))
        put += 2000

    for _ in range(2):
        with served(tmp_path / "store", port) as process:
            seen = exporter.counts.rows_delivered
            while exporter.counts.rows_delivered < seen + 20_000:
                if exporter.counts.batches_pending < 8:
                    feed()
            feed()
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            feed()
    with served(tmp_path / "store", port):
        assert exporter.flush(60), exporter.counts
    counts = exporter.counts
    exporter.close()
    assert counts.rows_delivered == put
    assert counts.retries > 0
    with LocalStore(tmp_path / "store") as store:
        values = store.table("metrics")["value"]
        assert len(values) == put
        assert values.n_unique() == put


PRODUCER = """
import sys, polars as pl
from pathlib import Path
from kansoku.telemetry import Exporter
first = int(sys.argv[3])
exporter = Exporter(sys.argv[1], spool=Path(sys.argv[2]))
for i in range(first, 10**9):
    exporter.put("metrics", pl.DataFrame({"metric": "n", "labels": "{}", "time_ns": [10**18 + i],
                                          "value": [float(i)]}))
    print(i, flush=True)
"""


def test_a_producer_killed_loses_nothing_it_was_told_is_kept(tmp_path):
    """What put() acknowledged arrives once, though its process died and the receiver was away."""
    acknowledged = []
    port = free_port()
    for _ in range(2):
        first = acknowledged[-1] + 1 if acknowledged else 0
        with subprocess.Popen(
            [sys.executable, "-c", PRODUCER, f"http://127.0.0.1:{port}", str(tmp_path / "spool"),
             str(first)],
            stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            acknowledged.extend(int(process.stdout.readline()) for _ in range(30))
            process.kill()
            # Lines written before the kill were acknowledged too.
            acknowledged += [int(line) for line in process.stdout.read().split()]
    settings = ServeSettings(folder=tmp_path / "store", port=port, otlp_port=0, grpc_port=None)
    with Server(settings) as server:
        exporter = Exporter(f"http://127.0.0.1:{port}", spool=tmp_path / "spool")
        assert exporter.flush(30)
        exporter.close()
        values = server.store.table("metrics")["value"].cast(pl.Int64).to_list()
    # A batch may be on disk though the kill came before put() returned: at most one a kill.
    assert len(values) == len(set(values))
    assert set(acknowledged) <= set(values)
    assert len(values) - len(acknowledged) <= 2


def test_a_full_disk_refuses_and_recovers(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "kansoku-full", folder], check=True)
    try:
        kept = 0
        with LocalStore(folder / "store", limits=StoreLimits(memory_bytes=1 << 30)) as store:
            ballast = folder / "ballast"
            ballast.write_bytes(bytes(30 << 20))
            refused = False
            for number in range(200):
                try:
                    store.append("metrics", random_rows(number))
                    kept += 20_000
                except StoreError:
                    refused = True
                    break
            assert refused
            ballast.unlink()
            for number in range(200, 203):
                store.append("metrics", random_rows(number))
                kept += 20_000
            assert store.statistics()["failures"] == 1
            assert len(store.table("metrics")) == kept
        with LocalStore(folder / "store") as store:
            assert len(store.table("metrics")) == kept
    finally:
        subprocess.run(["umount", folder], check=True)


def random_rows(seed):
    import numpy as np

    generator = np.random.default_rng(seed)
    start = time.time_ns() - 3600 * 10**9
    times = start + seed * 10**9 + generator.integers(0, 10**9, 20_000)
    return pl.DataFrame(
        {"metric": "r", "labels": "{}", "time_ns": times, "value": generator.random(20_000)}
    )


@contextlib.contextmanager
def rotel(folder, receiver_http, exporter_endpoint, protocol):
    import rotel as package

    agent = Path(package.__file__).parent / "rotel-agent"
    grpc = free_port()
    command = [agent, "start", "--otlp-http-endpoint", f"127.0.0.1:{receiver_http}",
               "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--exporter", "otlp",
               "--otlp-exporter-endpoint", exporter_endpoint,
               "--otlp-exporter-protocol", protocol, "--pid-file", folder / "pid",
               "--log-file", folder / "log"]  # fmt: skip
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        for _ in range(500):
            assert process.poll() is None, (folder / "out").read_text()
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{receiver_http}/")
                break
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_rows_pass_through_a_foreign_collector(tmp_path, protocol):
    """Our exporter to rotel (its receiver), rotel to our server (its sender): once each."""
    receiver = free_port()
    settings = ServeSettings(folder=tmp_path / "store", port=0, otlp_port=0, grpc_port=0)
    with Server(settings) as server:
        port = server.grpc_port if protocol == "grpc" else server.otlp_port
        with rotel(tmp_path, receiver, f"http://127.0.0.1:{port}", protocol):
            exporter = Exporter(
                f"http://127.0.0.1:{receiver}", spool=tmp_path / "spool", protocol="http",
                resource={"host.name": "c1", "service.name": "t"},
            )  # fmt: skip
            now = time.time_ns()
            spans = pl.DataFrame(
                {"run": "r", "rank": [i % 4 for i in range(500)], "kind": "forward",
                 "name": "f", "start_ns": [now + i for i in range(500)], "duration_ns": 10,
                 "id": range(500), "cpu_ns": range(500)}
            )  # fmt: skip
            steps = pl.DataFrame(
                {"run": "r", "rank": 1, "step": range(50), "start_ns": now, "duration_ns": 5,
                 "tokens": 512.5}
            )  # fmt: skip
            exporter.put_tables({"metrics": numbered(0, 300), "spans": spans, "steps": steps})
            assert exporter.flush(20), exporter.counts
            exporter.close()
            wanted = {"metrics": 300, "spans": 500, "steps": 50}
            end = time.monotonic() + 90
            while time.monotonic() < end:
                found = {name: len(server.store.table(name)) for name in wanted}
                if found == wanted:
                    break
                time.sleep(0.05)
        assert {name: len(server.store.table(name)) for name in wanted} == wanted
        back = server.store.table("spans").select(spans.columns)
        assert back.sort("id").cast(spans.schema).equals(spans)
        assert server.store.table("steps")["tokens"].to_list() == [512.5] * 50


def test_client_certificates_say_who_sends(tmp_path):
    make_certificates(tmp_path)
    (tmp_path / "principals.toml").write_text(
        '[[principal]]\nname = "agent"\nrole = "agent"\ncertificate = "node-agent"\n'
    )
    settings = ServeSettings(
        folder=tmp_path / "store", port=0, otlp_port=0, grpc_port=0,
        principals=tmp_path / "principals.toml", certificate=tmp_path / "server.pem",
        key=tmp_path / "server.key", client_authority=tmp_path / "ca.pem",
    )  # fmt: skip

    def tls(name):
        return Tls(
            authority=tmp_path / "ca.pem", certificate=tmp_path / f"{name}.pem",
            key=tmp_path / f"{name}.key",
        )  # fmt: skip

    from kansoku.telemetry import make_transport

    with Server(settings) as server:
        for protocol, port in (("arrow", server.otlp_port), ("grpc", server.grpc_port)):
            transport = make_transport(
                f"https://127.0.0.1:{port}", protocol=protocol, tls=tls("client")
            )
            exporter = Exporter(transport, spool=tmp_path / protocol)
            exporter.put("metrics", numbered(0, 5, metric=protocol))
            assert exporter.flush(20), exporter.counts
            exporter.close()
            assert len(server.store.latest(protocol)) == 1
        context = tls("odd").context()
        url = f"https://127.0.0.1:{server.otlp_port}/v1/traces"
        kind = {"content-type": "application/x-protobuf"}
        assert httpx.post(url, verify=context, content=b"", headers=kind).status_code == 401
        with pytest.raises(httpx.HTTPError):
            httpx.post(url, verify=Tls(authority=tmp_path / "ca.pem").context(), headers=kind)

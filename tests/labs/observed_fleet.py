"""VictoriaMetrics and Prometheus filled by our agent through our exporter, with a moving fault."""

import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa
from tests.labs.nvml import FakeNvml
from tests.labs.otel_gateway import Gateway
from tests.labs.victoria import MetricServer, flush

from kansoku.store.fleet import Naming
from kansoku.store.fleet.remote_write import write_request

SECOND = 10**9
FAULTS = (
    {"name": "before", "node": "c001", "gpu": 2, "nic": 1, "ost": 1, "leaf": "leaf0", "port": 0,
     "drop": 0.01},
    {"name": "after", "node": "c002", "gpu": 3, "nic": 4, "ost": 3, "leaf": "leaf1", "port": 1,
     "drop": 0.04},
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What was observed, and where it can be asked."""

    servers: dict[str, MetricServer]
    gateway: Gateway
    windows: dict[str, dict]
    """Name to the window: its end and its fault."""


def observe(folder: Path, servers: dict[str, MetricServer]) -> Fleet:
    """Feed two windows of five minutes, the fault on another device in each."""
    end = time.time_ns() // (30 * SECOND) * 30 * SECOND
    plan = [
        {**fault, "end_ns": end - (len(FAULTS) - 1 - i) * 1500 * SECOND}
        for i, fault in enumerate(FAULTS)
    ]
    nvml = FakeNvml(folder / "nvml")
    gateway = Gateway()
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "fleet_feed.py", folder, gateway.url, nvml.values,
         json.dumps(plan)],
        env={**nvml.environment, "PYTHONPATH": str(Path(__file__).parents[2]),
             "PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [
        (
            dict(key)["__name__"],
            json.dumps({k: v for k, v in key if k != "__name__"}),
            ms * 10**6,
            v,
        )
        for key, samples in gateway.series.items()
        for ms, v in sorted(samples)
    ]
    schema = {"metric": pl.String, "labels": pl.String, "time_ns": pl.Int64, "value": pl.Float64}
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    naming = Naming(style="verbatim")  # the gateway has translated
    for name, server in servers.items():
        for part in frame.iter_slices(100_000):
            body = pa.compress(write_request(part, naming), codec="snappy", asbytes=True)
            request = urllib.request.Request(
                server.url + "/api/v1/write", data=body, method="POST",
                headers={"content-type": "application/x-protobuf", "content-encoding": "snappy",
                         "x-prometheus-remote-write-version": "0.1.0"},
            )  # fmt: skip
            urllib.request.urlopen(request, timeout=60).close()
        if name == "victoria-metrics":
            flush(server)
    return Fleet(servers=servers, gateway=gateway, windows={w["name"]: w for w in plan})


def promql(server: MetricServer, query: str, at_ns: int) -> list[tuple[dict, float]]:
    """Return labels and value of each series at a time."""
    body = urllib.parse.urlencode({"query": query, "time": f"{at_ns / 1e9:.3f}"}).encode()
    try:
        with urllib.request.urlopen(server.url + "/api/v1/query", body, timeout=30) as answer:
            data = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}\n{error.read().decode()[:500]}") from None
    if data["resultType"] == "scalar":
        return [({}, float(data["result"][1]))]
    return [(one["metric"], float(one["value"][1])) for one in data["result"]]

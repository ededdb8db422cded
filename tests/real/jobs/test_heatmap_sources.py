"""The same power, from our store and from a real VictoriaMetrics, makes the same heat map."""

import contextlib
import json
import shutil
import socket
import subprocess
import time

import httpx
import numpy as np
import polars as pl
import pytest

from kansoku.app import jobs as api
from kansoku.app.store import open_store
from kansoku.formats.slurm import JOB_SCHEMA
from kansoku.jobs.edge.history import ParquetHistory

pytestmark = pytest.mark.real

NS = 10**9
NODES, GPUS, MINUTES = 4, 8, 60


def watts(node, gpu, minute):
    """Node 2 works from minute 20 to 39, the others idle at 90 W."""
    return 600.0 + gpu if node == 2 and 20 <= minute < 40 else 90.0 + gpu


@pytest.fixture(scope="module")
def start():
    return (int(time.time()) // 60 - MINUTES - 5) * 60


@pytest.fixture
def victoria(tmp_path):
    binary = shutil.which("victoria-metrics")
    if binary is None:
        pytest.skip("victoria-metrics is not installed (Debian: victoria-metrics)")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    process = subprocess.Popen(
        [binary, f"-httpListenAddr=127.0.0.1:{port}", f"-storageDataPath={tmp_path / 'vm'}",
         "-search.latencyOffset=0s"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 20
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            assert time.monotonic() < end, "VictoriaMetrics did not start"
        yield url
    finally:
        process.terminate()
        process.wait(20)


def history(folder, start):
    row = {"cluster": "c", "raw_id": 7, "job_id": "7", "submit_ns": start * NS, "state": "COMPLETED",
           "start_ns": (start + 20 * 60) * NS, "end_ns": (start + 40 * 60) * NS, "node_list": "c2",
           "nodes": 1, "gpus": 8}  # fmt: skip
    frame = pl.DataFrame([row], schema=JOB_SCHEMA, orient="row")
    ParquetHistory(folder / "job-history").merge("jobs", frame)


def check(matrix):
    assert [row[0] for row in matrix.rows[:: len(matrix.rows) // NODES]] == ["c1", "c2", "c3", "c4"]
    assert len(matrix.rows) == NODES * GPUS
    expected = [[watts(int(n[1:]), int(g), m) for m in range(MINUTES)] for n, g in matrix.rows]
    got = matrix.values[:, :MINUTES]
    known = ~np.isnan(got)
    assert known.mean() > 0.95
    np.testing.assert_allclose(got[known], np.array(expected)[known], atol=0.5)
    (box,) = matrix.boxes
    assert (box.label, box.row_from, box.row_to) == ("7", 8, 15)
    assert (box.column_from, box.column_to) == (20, 39)


def window(start):
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(start))
    until = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(start + MINUTES * 60))
    return {"since": stamp, "until": until, "columns": MINUTES}


def test_from_the_store(tmp_path, start):
    rows = [
        {
            "metric": "hw.power",
            "labels": json.dumps({"host.name": f"c{n}", "hw.id": f"GPU-{n}-{g}",
                                  "hw.name": f"gpu{g}", "hw.type": "gpu"}, sort_keys=True),
            "time_ns": (start + m * 60 + 1) * NS,
            "value": watts(n, g, m),
        }
        for n in range(1, NODES + 1) for g in range(GPUS) for m in range(MINUTES)
    ]  # fmt: skip
    store = open_store(tmp_path)
    store.append("metrics", pl.DataFrame(rows))
    store.close()
    history(tmp_path, start)
    matrix = api.heatmap(store=tmp_path, **window(start))
    check(matrix)
    idle = api.idle(
        least=4, store=tmp_path, since=window(start)["since"], until=window(start)["until"],
        nodes_file=_saved(tmp_path, "nodes"), queue_file=_saved(tmp_path, "queue", start),
    )  # fmt: skip
    assert [(w.from_ns // NS - start) // 60 for w in idle.power] == [0, 40]
    (found,) = idle.allocations
    assert (found.job_id, found.user, found.gpus, found.allocated) == ("9", "ann", 8, 8)


def _saved(folder, name, start=0):
    """A node and queue as Slurm 22.05 writes them: one job holds c3 and does nothing."""
    path = folder / f"{name}.json"
    if name == "nodes":
        tres = "cpu=1,mem=1M,billing=1,gres/gpu=8"
        nodes = [{"name": f"c{n}", "state": "idle", "state_flags": [], "tres": tres}
                 for n in range(1, NODES + 1)]  # fmt: skip
        path.write_text(json.dumps({"nodes": nodes}))
    else:
        job = {"job_id": 9, "job_state": "RUNNING", "user_name": "ann", "nodes": "c3",
               "submit_time": start, "start_time": start + 60, "end_time": start + 9999,
               "tres_alloc_str": "cpu=1,node=1,gres/gpu=8", "time_limit": 100}  # fmt: skip
        path.write_text(json.dumps({"jobs": [job]}))
    return path


def test_from_promql(victoria, tmp_path, start):
    """DCGM exporter's name and labels, imported as text and asked back by PromQL."""
    lines = [
        f'DCGM_FI_DEV_POWER_USAGE{{Hostname="c{n}",gpu="{g}",UUID="GPU-{n}-{g}"}} '
        f"{watts(n, g, m)} {(start + m * 60) * 1000}"
        for n in range(1, NODES + 1) for g in range(GPUS) for m in range(MINUTES)
    ]  # fmt: skip
    httpx.post(f"{victoria}/api/v1/import/prometheus", content="\n".join(lines)).raise_for_status()
    httpx.get(f"{victoria}/internal/force_flush")
    history(tmp_path, start)
    check(api.heatmap(store=tmp_path, promql=victoria, **window(start)))

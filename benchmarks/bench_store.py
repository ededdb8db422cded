"""Telemetry into the store and out again, beside VictoriaMetrics and rotel in the same run.

``KANSOKU_BENCH_SAMPLES`` sets the samples of the query part (default 100 million), and
``KANSOKU_BENCH_STORE`` a folder that keeps them for the next run.
"""

import contextlib
import json
import os
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pyarrow as pa
from tests.labs.victoria import flush, free_port, victoria_metrics

from benchmarks.table import Row as TableRow
from benchmarks.table import print_table
from kansoku.store import LocalStore
from kansoku.store.fleet import Naming
from kansoku.store.fleet.remote_write import write_request
from kansoku.telemetry.batch import pack_batch, unpack_batch
from kansoku.telemetry.decode import REQUESTS, decode
from kansoku.telemetry.receive import Intake

SECOND = 10**9
HOUR = 3600 * SECOND
GPU_METRICS = (
    "hw.gpu.power", "hw.gpu.utilization", "hw.gpu.memory.usage", "hw.gpu.temperature",
    "hw.gpu.energy", "hw.gpu.clock", "hw.gpu.io", "hw.errors",
)  # fmt: skip


def row(what, measured, unit, target="", peer="", met=None):
    return TableRow(what=what, measured=measured, unit=unit, target=target, peer=peer, met=met)


def put(target, key, value):
    pair = target.add(key=key)
    if isinstance(value, str):
        pair.value.string_value = value
    else:
        pair.value.int_value = value


def span_request(count, first):
    request = REQUESTS["traces"]()
    group = request.resource_spans.add()
    put(group.resource.attributes, "host.name", "c001")
    scope = group.scope_spans.add()
    now = time.time_ns() - HOUR
    for i in range(first, first + count):
        span = scope.spans.add(name="all_reduce", trace_id=b"\1" * 16)
        span.span_id = struct.pack(">Q", i)
        span.start_time_unix_nano = now + i
        span.end_time_unix_nano = now + i + 1000
        for key, value in (("run", "r1"), ("rank", i % 8), ("step", i // 800),
                           ("kind", "collective"), ("id", i), ("group", "dp"),
                           ("sequence", i // 8), ("bytes", 1 << 20)):  # fmt: skip
            put(span.attributes, f"kansoku.{key}", value)
    return request.SerializeToString()


def point_request(count, first, hosts=10):
    request = REQUESTS["metrics"]()
    now = time.time_ns() - HOUR
    generator = np.random.default_rng(first)
    per_host = count // hosts
    for host in range(hosts):
        group = request.resource_metrics.add()
        put(group.resource.attributes, "host.name", f"c{host:03}")
        scope = group.scope_metrics.add()
        for name in GPU_METRICS:
            metric = scope.metrics.add(name=name, unit="1")
            for i in range(per_host // len(GPU_METRICS)):
                point = metric.gauge.data_points.add(as_double=round(generator.random(), 3))
                point.time_unix_nano = now + (first + i) * 10**6
                put(point.attributes, "gpu", str(i % 8))
    return request.SerializeToString()


def into_store(signal, bodies, items):
    """Return items per CPU second from OTLP bytes to committed rows, the same bodies throughout."""
    with tempfile.TemporaryDirectory() as folder, LocalStore(Path(folder)) as store:
        intake = Intake(store, clock_ns=time.time_ns)
        for answer in [intake.otlp(signal, bodies[0])]:
            answer.result()
        started, cpu = time.perf_counter(), cpu_seconds()
        answers = [intake.otlp(signal, body) for body in bodies[1:]]
        for answer in answers:
            answer.result()
        cpu, wall = cpu_seconds() - cpu, time.perf_counter() - started
        table = "spans" if signal == "traces" else "metrics"
        with store._snapshot() as (cursor, _):
            name = "samples" if table == "metrics" else table
            (kept,) = cursor.execute(f"SELECT count(*) FROM {name}").fetchone()
        assert kept == items * len(bodies), (kept, items * len(bodies))
        total = items * (len(bodies) - 1)
        return total / cpu, total / wall


def cpu_seconds(process=None):
    times = (process or psutil.Process()).cpu_times()
    return times.user + times.system


def victoria_ingest(folder, count, batches):
    """Return samples per server CPU second by remote write of the same shape."""
    import polars as pl

    bodies = []
    now_ms = time.time_ns() // 10**6 - 3_600_000
    for batch in range(batches):
        series = [(m, h, g) for m in GPU_METRICS for h in range(10) for g in range(8)]
        each = count // len(series)
        frame = pl.DataFrame(
            {
                "metric": [m for m, _, _ in series for _ in range(each)],
                "labels": [f'{{"gpu":"{g}","host.name":"c{h:03}"}}' for _, h, g in series
                           for _ in range(each)],
                "time_ns": [(now_ms + batch * each + i) * 10**6 for _ in series
                            for i in range(each)],
                "value": np.random.default_rng(batch).random(each * len(series)).round(3),
            }
        )  # fmt: skip
        bodies.append((len(frame), pa.compress(write_request(frame, Naming()), codec="snappy",
                                               asbytes=True)))  # fmt: skip
    with victoria_metrics(folder) as server, httpx.Client() as client:
        process = psutil.Process(server.process.pid)
        cpu = cpu_seconds(process)
        started = time.perf_counter()
        for _, body in bodies:
            client.post(server.url + "/api/v1/write", content=body, timeout=60,
                        headers={"content-encoding": "snappy"}).raise_for_status()  # fmt: skip
        flush(server)
        wall = time.perf_counter() - started
        total = sum(size for size, _ in bodies)
        return total / (cpu_seconds(process) - cpu), total / wall


@contextlib.contextmanager
def rotel_blackhole(folder):
    import rotel

    agent = Path(rotel.__file__).parent / "rotel-agent"
    http = free_port()
    command = [agent, "start", "--otlp-http-endpoint", f"127.0.0.1:{http}", "--otlp-grpc-endpoint",
               f"127.0.0.1:{free_port()}", "--exporter", "blackhole", "--pid-file",
               f"{folder}/pid", "--log-file", f"{folder}/log"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(500):
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{http}/")
                break
            time.sleep(0.02)
        yield process, http
    finally:
        process.terminate()
        process.wait(20)


def rotel_receive(bodies, path, items):
    """Return items per CPU second that rotel takes and throws away: no store behind it."""
    with tempfile.TemporaryDirectory() as folder, rotel_blackhole(folder) as (process, port):
        watched = psutil.Process(process.pid)
        headers = {"content-type": "application/x-protobuf"}
        with httpx.Client(timeout=60) as client:
            url = f"http://127.0.0.1:{port}{path}"
            client.post(url, content=bodies[0], headers=headers).raise_for_status()
            cpu = cpu_seconds(watched)
            for body in bodies[1:]:
                client.post(url, content=body, headers=headers).raise_for_status()
            time.sleep(0.5)
            return items * (len(bodies) - 1) / (cpu_seconds(watched) - cpu)


def fill(store, clock, samples, series=10_000):
    """Fill 10,000 series at 10 s, 100 nodes of 8 GPUs; seal as time goes."""
    names = [f"hw.gpu.{i}" for i in range(12)] + ["hw.gpu.energy"]
    pairs = [(m, f'{{"gpu":"{g}","host.name":"c{h:03}"}}') for m in names for h in range(100)
             for g in range(8)][:series]  # fmt: skip
    metrics, labels = (pa.array(column) for column in zip(*pairs, strict=True))
    steps = samples // series
    start = clock.now // HOUR * HOUR
    generator = np.random.default_rng(1)
    level = np.round(generator.random(series) * 500, 1)
    counters = np.array([m == "hw.gpu.energy" for m, _ in pairs])
    info = [(m, "1", "counter" if m == "hw.gpu.energy" else "gauge", None) for m in names]
    chunk = 60
    for first in range(0, steps, chunk):
        n = min(chunk, steps - first)
        times = start + (first + np.arange(n)) * 10 * SECOND
        wander = np.round(level + generator.normal(0, 5, (n, series)), 1)
        wander[:, counters] = (first + np.arange(n))[:, None] * 4000.0
        rows = pa.table(
            [pa.DictionaryArray.from_arrays(pa.array(np.tile(np.arange(series, dtype=np.int32), n)),
                                            metrics),
             pa.DictionaryArray.from_arrays(pa.array(np.tile(np.arange(series, dtype=np.int32), n)),
                                            labels),
             pa.array(np.repeat(times, series)), pa.array(wander.ravel())],
            names=["metric", "labels", "time_ns", "value"],
        )  # fmt: skip
        clock.now = int(times[-1]) + SECOND
        store.submit({"metrics": rows}, info=info).result()
        if (first + chunk) % 360 == 0:  # hourly, to spare the bench the growing of files
            store.keeper.maintain()
    store.keeper.maintain()
    return start, clock.now


def queries(store, start, now):
    """Return name to function: what dashboards and our own pages ask."""
    day, six, hour = now - 24 * HOUR, now - 6 * HOUR, now - HOUR
    day = max(day, start)

    def ranged(metric, matchers, since, step_s, **more):
        return lambda: store.metric_range(metric, matchers, start_ns=since, end_ns=now,
                                          step_ns=step_s * SECOND, **more)  # fmt: skip

    one = {"host.name": "c042", "gpu": "3"}
    node = {"host.name": "c042"}
    return {
        "latest of 800 GPUs": lambda: store.latest("hw.gpu.0"),
        "one GPU, 1 h at 10 s": ranged("hw.gpu.1", one, hour, 10),
        "one node, 6 h at 60 s": ranged("hw.gpu.1", node, six, 60),
        "one node, 24 h at 5 min": ranged("hw.gpu.2", node, day, 300),
        "heat map 100 nodes, 24 h at 10 min": ranged(
            "hw.gpu.0", None, day, 600, by=["host.name"], across="sum"),
        "heat map 100 nodes, 6 h at 5 min": ranged(
            "hw.gpu.0", None, six, 300, by=["host.name"], across="sum"),
        "heat map 800 GPUs, 1 h at 60 s": ranged("hw.gpu.0", None, hour, 60),
        "cluster mean, 24 h at 1 h": ranged("hw.gpu.3", None, day, 3600, by=[]),
        "max of all GPUs, 6 h at 5 min": ranged("hw.gpu.3", None, six, 300, aggregate="max",
                                                by=[], across="max"),
        "counter rate of a node, 24 h at 5 min": ranged("hw.gpu.energy", node, day, 300,
                                                        aggregate="rate"),
        "counter rate of 400 GPUs, 6 h at 5 min": ranged("hw.gpu.energy", None, six, 300,
                                                         aggregate="rate"),
        "series of a metric": lambda: store.series("hw.gpu.4"),
    }  # fmt: skip


class Clock:
    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


def filled(folder, samples):
    """Fill a store once; return the bounds of its time, which a kept folder remembers."""
    mark = folder / "filled.json"
    if mark.exists():
        kept = json.loads(mark.read_text())
        assert kept["samples"] == samples, f"{folder} holds {kept['samples']:,} samples"
        return kept["start"], kept["now"]
    hours = samples / 10_000 * 10 / 3600
    clock = Clock(int(time.time_ns() - (hours + 1) * HOUR))
    with LocalStore(folder, clock_ns=clock) as store:
        started = time.perf_counter()
        start, now = fill(store, clock, samples)
        print(f"filled {samples:,} samples in {time.perf_counter() - started:.0f} s")
    mark.write_text(json.dumps({"samples": samples, "start": start, "now": now}))
    return start, now


def query_part(rows):
    samples = int(os.environ.get("KANSOKU_BENCH_SAMPLES", "100000000"))
    with contextlib.ExitStack() as stack:
        kept = os.environ.get("KANSOKU_BENCH_STORE")
        folder = Path(kept or stack.enter_context(tempfile.TemporaryDirectory()))
        start, now = filled(folder, samples)
        store = stack.enter_context(LocalStore(folder, clock_ns=Clock(now)))
        for name, ask in queries(store, start, now).items():
            ask()
            times = []
            for _ in range(20):
                begun = time.perf_counter()
                ask()
                times.append(time.perf_counter() - begun)
            p95 = sorted(times)[18] * 1e3
            middle = f"median {sorted(times)[10] * 1e3:.1f} ms"
            rows.append(row(f"query p95: {name}", p95, "ms", "≤ 100", middle, p95 <= 100))
        sizes = store.keeper.disk_bytes()
        sealed = sum(p.stat().st_size for p in folder.glob("sealed/*/*"))
        return samples, sealed / samples, sizes / samples


def disk_part(rows):
    """The same 5 M samples in both: 1,000 series at 10 s with one decimal."""
    import polars as pl

    series, steps = 1000, 5000
    start = (time.time_ns() - steps * 10 * SECOND) // HOUR * HOUR
    generator = np.random.default_rng(2)
    level = np.round(generator.random(series) * 500, 1)
    parts = []
    for first in range(0, steps, 500):
        times = start + (first + np.arange(500)) * 10 * SECOND
        values = np.round(level + generator.normal(0, 5, (500, series)), 1)
        parts.append(
            pl.DataFrame(
                {"metric": "hw.gpu.power",
                 "labels": np.tile([f'{{"gpu":"{i % 8}","host.name":"c{i // 8:03}"}}'
                                    for i in range(series)], 500),
                 "time_ns": np.repeat(times, series), "value": values.ravel()}
            )
        )  # fmt: skip
    total = series * steps
    with tempfile.TemporaryDirectory() as folder:
        with LocalStore(Path(folder) / "ours") as store:
            for part in parts:
                store.submit(
                    {"metrics": part}, info=[("hw.gpu.power", "W", "gauge", None)]
                ).result()
            store.keeper.seal_all()
            store.close()
            sealed = sum(p.stat().st_size for p in Path(folder).glob("ours/sealed/*/*"))
            database = (Path(folder) / "ours" / "hot.duckdb").stat().st_size
        with victoria_metrics(Path(folder) / "vm") as server, httpx.Client() as client:
            for part in parts:
                for piece in part.iter_slices(100_000):
                    body = pa.compress(write_request(piece, Naming()), codec="snappy", asbytes=True)
                    client.post(
                        server.url + "/api/v1/write",
                        content=body,
                        timeout=60,
                        headers={"content-encoding": "snappy"},
                    ).raise_for_status()
            flush(server)
            client.get(server.url + "/internal/force_merge", timeout=120)
            time.sleep(3)
            theirs = sum(p.stat().st_size for p in Path(folder).glob("vm/data/data/**/*")
                         if p.is_file())  # fmt: skip
    peer = f"VictoriaMetrics {theirs / total:.2f}"
    rows.append(row("5 M samples on disk, sealed", sealed / total, "B/sample", "", peer))
    whole = (sealed + database) / total
    rows.append(row("… with roll-ups and database", whole, "B/sample", "", peer))


def main():
    """Print the table."""
    rows = []
    spans = [span_request(50_000, 50_000 * n) for n in range(9)]
    points = [point_request(80_000, 80_000 * n) for n in range(13)]
    cpu, wall = into_store("traces", spans, 50_000)
    peer = f"rotel, receive only: {rotel_receive(spans, '/v1/traces', 50_000) / 1e3:.0f} k/s"
    rows.append(row("OTLP spans in to store, per core", cpu / 1e3, "k/s", "≥ 500", peer,
                    cpu >= 5e5))  # fmt: skip
    rows.append(row("… by the clock, two cores", wall / 1e3, "k/s"))
    cpu, wall = into_store("metrics", points, 80_000)
    with tempfile.TemporaryDirectory() as folder:
        theirs, _ = victoria_ingest(Path(folder), 80_000, 12)
    peer = f"VictoriaMetrics, remote write: {theirs / 1e6:.2f} M/s"
    rows.append(row("OTLP points in to store, per core", cpu / 1e6, "M/s", "≥ 2", peer, cpu >= 2e6))
    other = rotel_receive(points, "/v1/metrics", 80_000)
    peer = f"rotel, receive only: {other / 1e6:.2f} M/s"
    rows.append(row("… by the clock, two cores", wall / 1e6, "M/s", "", peer))
    decoded = decode("traces", spans[0], received_ns=1).tables
    packed = pack_batch(decoded)
    begun = time.process_time()
    for _ in range(10):
        unpack_batch(packed)
    rate = 500_000 / (time.process_time() - begun)
    peer = f"{len(packed) / len(spans[0]):.2f} of OTLP's {len(spans[0]) / 50_000:.0f} B/span"
    rows.append(row("our Arrow batch unpacked, per core", rate / 1e6, "M spans/s", "", peer))
    disk_part(rows)
    samples, sealed, whole = query_part(rows)
    peer = f"{whole:.2f} with roll-ups and database"
    rows.append(row(f"{samples:,} samples on disk, sealed", sealed, "B/sample", "", peer))
    print_table("Telemetry and store", rows)


if __name__ == "__main__":
    main()

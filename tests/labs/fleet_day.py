"""A made-up day of a fleet in a store: samples, jobs, probes, bursts, events, incidents.

Everything follows from the arguments and a fixed seed, so that a test can say by hand what a page
must show: which node fell silent, which link lost probes, which GPU idled under a job.
"""

import json
from dataclasses import dataclass, field

import numpy as np
import polars as pl

S = 1_000_000_000
DAY_END_NS = 1_767_312_000 * S  # 2026-01-02T00:00:00Z


@dataclass(frozen=True, kw_only=True)
class FleetDay:
    """What was written, for tests to compare with."""

    nodes: list[str]
    gpus: int
    since_ns: int
    end_ns: int
    silent: str
    """A node whose samples stop two hours before the end."""
    idle_job: str
    """A job of which one node's GPUs do nothing."""
    bad_link: tuple[str, str]
    """ToR and spine: probes over it are lost."""
    jobs: list[dict] = field(default_factory=list)


def node_names(count):
    return [f"c{n + 1:03d}" for n in range(count)]


def job_rows(nodes, gpus, since_ns, end_ns, seed):
    """Place jobs on free rectangles of nodes × time, as a backfilling scheduler would."""
    rng = np.random.default_rng(seed)
    count = len(nodes)
    busy_until = np.full(count, since_ns)
    rows, number = [], 41_000
    sizes = [1, 1, 2, 4, 4, 8, 8, 16, 24, 32, 48]
    while busy_until.min() < end_ns and number < 42_000:
        first = int(np.argmin(busy_until))
        width = int(min(rng.choice([s for s in sizes if s <= count] or [1]), count))
        low = min(first, count - width)
        start = int(busy_until[low : low + width].max()) + int(rng.integers(60, 2400)) * S
        length = int(rng.lognormal(8.9, 0.9)) * S
        length = min(max(length, 900 * S), 11 * 3600 * S)
        if start >= end_ns:
            busy_until[first] = end_ns
            continue
        stop = start + length
        failed = rng.random() < 0.08
        names = nodes[low : low + width]
        rows.append(
            {
                "cluster": "fleetlab", "raw_id": number, "job_id": str(number),
                "name": f"llm-{rng.choice(['7b', '13b', '70b', '175b'])}",
                "user": f"user{rng.integers(0, 9)}", "account": f"team{rng.integers(0, 4)}",
                "partition": "train", "submit_ns": start - int(rng.integers(60, 3600)) * S,
                "eligible_ns": None, "start_ns": start, "end_ns": stop if stop < end_ns else None,
                "state": ("FAILED" if failed else "COMPLETED") if stop < end_ns else "RUNNING",
                "exit_code": 1 if failed and stop < end_ns else 0, "nodes": width,
                "node_list": ",".join(names), "gpus": width * gpus, "gpu_kind": "h100",
                "cpus": width * 112, "time_limit_s": (length // S // 3600 + 2) * 3600,
                "low": low, "width": width, "stop": min(stop, end_ns),
            }
        )  # fmt: skip
        busy_until[low : low + width] = stop
        number += 1
    return rows + [
            {
                "cluster": "fleetlab", "raw_id": 43_000 + extra, "job_id": str(43_000 + extra),
                "name": "waiting", "user": "user1", "account": "team1", "partition": "train",
                "submit_ns": end_ns - 1800 * S, "eligible_ns": None, "start_ns": None,
                "end_ns": None, "state": "PENDING", "reason": "Resources", "exit_code": None,
                "nodes": 16, "node_list": None, "gpus": 16 * gpus, "gpu_kind": "h100",
                "cpus": 16 * 112, "time_limit_s": 7200, "low": 0, "width": 0, "stop": 0,
            }
            for extra in range(3)
    ]  # fmt: skip


def _matrix(rows, nodes, gpus, times, rng, *, idle, high, spread, dip):
    """Return (nodes * gpus, times) of a gauge: idle, high under a job, dips at checkpoints."""
    base = rng.normal(idle, spread / 8, (len(nodes) * gpus, len(times))).astype(np.float32)
    for row in rows:
        if row["start_ns"] is None:
            continue
        inside = (times >= row["start_ns"]) & (times < row["stop"])
        columns = np.flatnonzero(inside)
        if not len(columns):
            continue
        level = high * (0.78 + 0.22 * ((row["raw_id"] * 7919) % 97) / 97)
        block = rng.normal(level, spread, (row["width"] * gpus, len(columns)))
        block[:, (columns - columns[0]) % 60 == 59] = dip
        base[row["low"] * gpus : (row["low"] + row["width"]) * gpus, columns] = block
    return base


def _series(store, metric, labels, times, values, keep=None):
    """Append one metric: ``labels`` one text a row of ``values`` (rows, times)."""
    count = len(times)
    frame = pl.DataFrame(
        {
            "labels": np.repeat(np.array(labels, dtype=object), count).tolist(),
            "time_ns": np.tile(times, len(labels)),
            "value": values.reshape(-1).astype(np.float64),
        },
        schema={"labels": pl.String, "time_ns": pl.Int64, "value": pl.Float64},
    ).with_columns(metric=pl.lit(metric))
    if keep is not None:
        frame = frame.filter(keep(frame))
    store.append("metrics", frame.select("metric", "labels", "time_ns", "value"))


def _label(**texts):
    return json.dumps({k.replace("__", "."): v for k, v in texts.items()}, sort_keys=True,
                      separators=(",", ":"))  # fmt: skip


def write_day(
    store,
    *,
    nodes=100,
    gpus=8,
    minutes=1440,
    step_s=60,
    end_ns=DAY_END_NS,
    seed=11,
    gauges=("power", "utilisation", "memory", "temperature"),
    network=True,
    fabric=True,
):
    """Write the day; return what a test needs to know about it."""
    rng = np.random.default_rng(seed)
    names = node_names(nodes)
    since = end_ns - minutes * 60 * S
    times = since + np.arange(minutes * 60 // step_s, dtype=np.int64) * step_s * S
    rows = job_rows(names, gpus, since, end_ns, seed)
    big = max(
        (r for r in rows if r["width"] > 1), key=lambda r: r["width"] * (r["stop"] - r["start_ns"])
    )
    silent = names[min(2, nodes - 1)]
    store.append(
        "jobs",
        pl.DataFrame(
            [{k: v for k, v in r.items() if k not in {"low", "width", "stop"}} for r in rows],
            infer_schema_length=None,
        ),
    )
    gpu = [
        (
            node,
            _label(host__name=node, hw__id=f"GPU-{node}-{g}", hw__name=f"gpu{g}", hw__type="gpu"),
        )
        for node in names
        for g in range(gpus)
    ]
    labels = [text for _, text in gpu]
    quiet = f'"host.name":"{silent}"'
    stop = end_ns - 2 * 3600 * S

    def heard(frame):
        return ~(pl.col("labels").str.contains(quiet, literal=True) & (pl.col("time_ns") >= stop))

    idle_rows = slice(big["low"] * gpus, (big["low"] + 1) * gpus)
    idle_columns = (times >= big["start_ns"]) & (times < big["stop"])
    for name, metric, idle, high, spread, dip in (
        ("power", "hw.power", 72.0, 690.0, 14.0, 180.0),
        ("utilisation", "hw.gpu.utilization", 0.0, 0.99, 0.01, 0.05),
        ("memory", "hw.gpu.memory.utilization", 0.01, 0.93, 0.004, 0.9),
        ("temperature", "hw.temperature", 31.0, 72.0, 1.2, 55.0),
    ):
        if name not in gauges:
            continue
        values = _matrix(
            rows, names, gpus, times, rng, idle=idle, high=high, spread=spread, dip=dip
        )
        values[idle_rows, idle_columns] = idle
        if name in {"utilisation", "memory"}:
            values = values.clip(0, 1)
        _series(store, metric, labels, times, values, heard)
    if network:
        _network(store, rows, names, gpus, times, rng, heard)
    _agents(store, names, times, end_ns, heard)
    bad = ("leaf1", "spine0")
    if fabric:
        _probes(store, names, gpus, end_ns, rng, bad)
        _bursts(store, names, gpus, end_ns, rng)
    _events(store, names, end_ns, silent, big, bad)
    return FleetDay(
        nodes=names, gpus=gpus, since_ns=since, end_ns=end_ns, silent=silent,
        idle_job=big["job_id"], bad_link=bad, jobs=rows,
    )  # fmt: skip


def _network(store, rows, names, gpus, times, rng, heard):
    """Counters of two NICs a node: bytes each way, pause frames."""
    step_s = (times[1] - times[0]) / S
    rate = _matrix(rows, names, 2, times, rng, idle=2e6, high=3.2e10, spread=2e9, dip=4e9).clip(0)
    total = np.cumsum(rate * step_s, axis=1)
    for way in ("receive", "transmit"):
        labels = [
            _label(host__name=node, hw__id=f"mlx5_{n}", hw__name=f"mlx5_{n}", hw__type="network",
                   network__io__direction=way)
            for node in names
            for n in range(2)
        ]  # fmt: skip
        _series(store, "hw.network.io", labels, times, total, heard)
    pauses = rng.poisson(0.2, rate.shape).astype(np.float64)
    pauses[: min(20, len(pauses)), len(times) // 2 : len(times) // 2 + 30] += 4000
    labels = [
        json.dumps({"host.name": node, "kansoku.priority": "3", "network.interface.name": f"rdma{n}",
                    "network.io.direction": "receive"}, sort_keys=True, separators=(",", ":"))
        for node in names
        for n in range(2)
    ]  # fmt: skip
    _series(store, "kansoku.nic.pause.frames", labels, times, np.cumsum(pauses, axis=1), heard)


def _agents(store, names, times, end_ns, heard):
    late = times[-min(180, len(times)) :]
    each = np.tile((np.arange(len(late)) * 5200.0)[None, :], (len(names), 1))
    _series(
        store, "kansoku.agent.samples", [_label(host__name=n) for n in names], late, each, heard
    )
    zero = np.zeros_like(each)
    zero[1 % len(names), -40:] = np.arange(min(40, len(late)))[: zero[:, -40:].shape[1]]
    labels = [
        json.dumps(
            {"host.name": n, "kansoku.cause": "queue"}, sort_keys=True, separators=(",", ":")
        )
        for n in names
    ]
    _series(store, "kansoku.agent.dropped", labels, late, zero, heard)
    memory = np.full_like(each, 61e6)
    _series(
        store,
        "kansoku.agent.memory.usage",
        [_label(host__name=n) for n in names],
        late,
        memory,
        heard,
    )
    cpu = np.tile((np.arange(len(late)) * 0.6)[None, :], (len(names), 1))
    _series(
        store, "kansoku.agent.cpu.time", [_label(host__name=n) for n in names], late, cpu, heard
    )
    for collector in ("nvml", "rdma", "kmsg"):
        labels = [
            json.dumps({"host.name": n, "kansoku.collector": collector}, sort_keys=True,
                       separators=(",", ":"))
            for n in names
        ]  # fmt: skip
        last = np.tile((late / 1e9)[None, :], (len(names), 1))
        if collector == "rdma":
            last[0] = late[0] / 1e9
        _series(store, "kansoku.agent.collector.last_success", labels, late, last, heard)


def fabric_of(names, gpus, per_leaf=16):
    """Return RNIC names and each one's leaf: eight rails a node, one leaf a rail and pod."""
    rnics, leaves = [], []
    for number, node in enumerate(names):
        for g in range(gpus):
            rnics.append(f"{node}/mlx5_{g}")
            leaves.append(f"leaf{(number // per_leaf) * gpus + g}")
    return rnics, leaves


def _probes(store, names, gpus, end_ns, rng, bad, windows=15):
    """One-minute windows: every RNIC probes its ToR neighbours and RNICs of other ToRs."""
    rnics, leaves = fabric_of(names, gpus)
    count = len(rnics)
    frames = []
    for window in range(windows):
        start = end_ns - (windows - window) * 60 * S
        source = np.repeat(np.arange(count), 6)
        near = rng.random(len(source)) < 0.4
        target = np.where(near, (source + gpus) % count, rng.integers(0, count, len(source)))
        target = np.where(target == source, (target + 1) % count, target)
        spine = rng.integers(0, 4, len(source))
        paths, lost, kinds = [], [], []
        for s, t, p in zip(source.tolist(), target.tolist(), spine.tolist(), strict=True):
            a, b = leaves[s], leaves[t]
            if a == b:
                paths.append(f"{rnics[s]}>{a}>{rnics[t]}")
                kinds.append("tor_mesh")
                lost.append(0)
                continue
            paths.append(f"{rnics[s]}>{a}>spine{p}>{b}>{rnics[t]}")
            kinds.append("inter_tor")
            hit = bad[0] in {a, b} and f"spine{p}" == bad[1] and window >= windows - 6
            lost.append(int(rng.integers(10, 25)) if hit else int(rng.random() < 0.002))
        p50 = np.where(np.array(kinds) == "tor_mesh", 9_000, 17_000) + rng.normal(
            0, 700, len(source)
        )
        frames.append(
            pl.DataFrame(
                {
                    "time_ns": start, "window_ns": 60 * S,
                    "source": [rnics[s] for s in source], "target": [rnics[t] for t in target],
                    "kind": kinds, "path": paths,
                    "source_port": (49_152 + spine * 7).astype(np.int32), "probes": 60,
                    "lost": lost, "rtt_p50_ns": p50.astype(np.int64),
                    "rtt_p99_ns": (p50 * 2.4).astype(np.int64),
                    "responder_delay_p50_ns": (p50 * 0.2).astype(np.int64),
                    "responder_delay_p99_ns": (p50 * 0.6).astype(np.int64),
                    "prober_delay_p99_ns": (p50 * 0.5).astype(np.int64),
                    "stamp_source": "hardware",
                    "outcome": ["partial" if n else "ok" for n in lost],
                }
            )
        )  # fmt: skip
    frame = pl.concat(frames)
    store.append("probes", frame.cast({"source_port": pl.Int32, "window_ns": pl.Int64,
                                       "probes": pl.Int64, "lost": pl.Int64, "time_ns": pl.Int64}))  # fmt: skip


def _bursts(store, names, gpus, end_ns, rng, count=4000):
    node = rng.integers(0, min(len(names), 24), count)
    start = end_ns - rng.integers(0, 3600 * S, count)
    peak = rng.uniform(0.5, 1.0, count)
    length = rng.lognormal(15.2, 0.7, count).astype(np.int64)
    store.append(
        "bursts",
        pl.DataFrame(
            {
                "node": [names[n] for n in node],
                "port": [f"mlx5_{n}" for n in rng.integers(0, min(gpus, 4), count)],
                "direction": rng.choice(["receive", "transmit"], count).tolist(),
                "start_ns": start.astype(np.int64), "duration_ns": length, "peak_ratio": peak,
                "mean_ratio": peak * 0.8, "bytes": (peak * length / 1e9 * 5e10).astype(np.int64),
                "samples": np.maximum(length // 1_000_000, 1).astype(np.int32),
                "sampling_ns": 1_000_000,
                "attributes": [
                    json.dumps({"raw_us": [-1000.0, 0.0, 1000.0, 2000.0],
                                "raw_ratio": [0.1, float(one), float(one) / 2, 0.05],
                                "beside": {"tx_prio3_pause": 12}})
                    for one in peak
                ],
            }
        ).cast({"sampling_ns": pl.Int64}),
    )  # fmt: skip


def _events(store, names, end_ns, silent, big, bad):
    onset = end_ns - 2 * 3600 * S
    gpu = f"gpu:{silent}/5"
    store.append(
        "events",
        pl.DataFrame(
            {
                "time_ns": [onset - 30 * S, onset, onset + 20 * S, end_ns - 360 * S],
                "source": ["kernel", "kernel", "slurm", "fabric"],
                "subject": [gpu, gpu, f"node:{silent}", f"link:{bad[0]}-{bad[1]}"],
                "severity": ["warning", "critical", "critical", "warning"],
                "kind": ["xid", "xid", "node.down", "fabric.open"],
                "body": ["NVRM: Xid 63: row remapping event", "NVRM: Xid 79: GPU has fallen off the bus",
                         "Not responding", "probes over the link are lost"],
                "attributes": ["{}"] * 4,
            }
        ),
    )  # fmt: skip
    evidence = [
        {"sentence": f"Xid 79 on {gpu}", "source": "kernel log", "time_ns": onset},
        {
            "sentence": f"node:{silent} stopped answering 20 s later",
            "source": "slurm",
            "time_ns": onset + 20 * S,
        },
    ]
    hypotheses = [
        {"domain": "gpu_hardware", "component": "gpu", "subject": gpu, "confidence": 0.91,
         "evidence_for": evidence,
         "evidence_against": [{"sentence": "no ECC error was counted before", "source": "nvml", "time_ns": None}],
         "actions": [{"sentence": f"Drain the node and replace {gpu}", "command": f"kansoku respond --node {silent}"}]},
        {"domain": "host", "component": "power", "subject": f"node:{silent}", "confidence": 0.2,
         "evidence_for": evidence[1:], "evidence_against": [], "actions": []},
    ]  # fmt: skip
    lossy = f"link:{bad[0]}-{bad[1]}"
    rows = [
        ("inc-1", onset, onset + 60 * S, "stop", gpu, "gpu_hardware", "found", 0.91, hypotheses,
         evidence, hypotheses[0]["actions"], "open"),
        ("inc-2", end_ns - 360 * S, end_ns - 300 * S, "slow", lossy, "network", "found", 0.8,
         [{"domain": "network", "component": "link", "subject": lossy, "confidence": 0.8,
           "evidence_for": [{"sentence": "28 % of the probes over it are lost", "source": "fabric probes",
                             "time_ns": end_ns - 360 * S}],
           "evidence_against": [], "actions": []}], [], [], "open"),
        ("inc-0", end_ns - 20 * 3600 * S, end_ns - 19 * 3600 * S, "hang", f"job:{big['job_id']}",
         "application", "found", 0.7, [], [], [], "closed"),
    ]  # fmt: skip
    columns = ["id", "onset_ns", "time_ns", "kind", "subject", "domain", "verdict", "confidence",
               "hypotheses", "evidence", "actions", "state"]  # fmt: skip
    store.append(
        "incidents",
        pl.DataFrame(
            [[json.dumps(v) if isinstance(v, list) else v for v in row] for row in rows],
            schema=columns, orient="row",
        ),
    )  # fmt: skip
    store.append(
        "findings",
        pl.DataFrame(
            {
                "id": ["fabric.link"], "subject": [lossy], "domain": ["network"],
                "onset_ns": [end_ns - 360 * S], "time_ns": [end_ns - 300 * S],
                "verdict": ["found"], "severity": ["critical"], "confidence": [0.8],
                "sentence": [f"{lossy} at fault: 28 % of probes lost (P0)"],
                "evidence": [json.dumps([{"sentence": "14 tuples over it lose probes", "source": "fabric probes",
                                          "time_ns": end_ns - 300 * S}])],
                "source": ["fabric"],
            }
        ),
    )  # fmt: skip

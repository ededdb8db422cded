"""Kineto traces written to order: what every row is was decided here, to the nanosecond."""

import json
from dataclasses import dataclass
from pathlib import Path

BASE_NS = 1_711_964_646_000_000_000
START_US = 4_458_676_000_000.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """Kernels every 20 µs; every tenth is a 30 µs all-reduce on a second stream."""

    rank: int = 0
    world: int = 8
    steps: int = 3
    kernels: int = 40
    base: bool = True
    info: bool = True
    late_us: float = 0.0
    """This rank's arrivals at collectives."""


def events(job: Job) -> list[dict]:
    """Return the events of a rank in Kineto's order of keys."""
    out, correlation, seq = [], 100, 0
    now = START_US
    for step in range(job.steps):
        begin = now
        for number in range(job.kernels):
            correlation += 1
            out.append(
                row(
                    "cpu_op",
                    f"aten::op{number % 7}",
                    4000,
                    4001,
                    now,
                    15.25,
                    {"External id": correlation, "Input Dims": [[8, 8], []]},
                )
            )
            out.append(
                row(
                    "cuda_runtime",
                    "cudaLaunchKernel",
                    4000,
                    4001,
                    now + 2,
                    4.125,
                    {"cbid": 211, "correlation": correlation},
                )
            )
            out.append(
                {
                    "ph": "s",
                    "id": correlation,
                    "pid": 4000,
                    "tid": 4001,
                    "ts": now + 2,
                    "cat": "ac2g",
                    "name": "ac2g",
                }
            )
            if number % 10 == 9:
                arguments = {
                    "device": job.rank,
                    "stream": 40,
                    "correlation": correlation,
                    "Collective name": "allreduce",
                    "In msg nelems": 1 << 20,
                    "Out msg nelems": 1 << 20,
                    "Group size": job.world,
                    "dtype": "BFloat16",
                    "Process Group Name": "0",
                    "Process Group Description": "default_pg",
                    "Process Group Ranks": str(list(range(job.world))),
                    "Seq": seq,
                }
                seq += 1
                late = job.late_us
                out.append(
                    row(
                        "kernel",
                        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                        job.rank,
                        40,
                        now + 6 + late,
                        30.5 - late,
                        arguments,
                    )
                )
            else:
                arguments = {"device": job.rank, "stream": 7, "correlation": correlation}
                out.append(
                    row(
                        "kernel",
                        f"void at::native::kernel_{number % 5}<float, 4>(int)",
                        job.rank,
                        7,
                        now + 6,
                        10.001,
                        arguments,
                    )
                )
            now += 20
        out.append(
            row(
                "gpu_memcpy",
                "Memcpy HtoD (Pinned -> Device)",
                job.rank,
                7,
                now,
                5.0,
                {
                    "device": job.rank,
                    "stream": 7,
                    "correlation": correlation + 100000,
                    "bytes": 1 << 20,
                },
            )
        )
        now += 10
        out.append(
            row(
                "user_annotation",
                f"ProfilerStep#{step + 5}",
                4000,
                4001,
                begin,
                now - begin,
                {"External id": correlation},
            )
        )
    out.append(
        {
            "name": "process_name",
            "ph": "M",
            "ts": START_US,
            "pid": 4000,
            "tid": 0,
            "args": {"name": "python"},
        }
    )
    out.append({"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": now})
    return out


def row(cat, name, pid, tid, ts, dur, args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": round(ts, 3),
        "dur": round(dur, 3),
        "args": args,
    }


def document(job: Job, rows: list[dict] | None = None, **more) -> dict:
    out = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
    if job.info:
        out["distributedInfo"] = {"backend": "nccl", "rank": job.rank, "world_size": job.world}
    if job.base:
        out["baseTimeNanoseconds"] = BASE_NS
    return {
        **out,
        **more,
        "traceEvents": events(job) if rows is None else rows,
        "traceName": "x.json",
    }


def text(job: Job, rows: list[dict] | None = None, *, indent: int | None = 2) -> str:
    return json.dumps(document(job, rows), indent=indent)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path

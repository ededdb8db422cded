"""10,000 Flight Recorder dumps to a verdict: generated, pickled as torch does, read from disk."""

import pickle
import tempfile
import time
from pathlib import Path

from benchmarks.table import Row, print_table
from kansoku.app.trace_hang import hang

RANKS = 10_000
TENSOR = 8
ENTRIES = 12
LATE = 4_242


def status(enqueued: int, completed: int) -> dict:
    """Return one group's counters as torch writes them."""
    return {
        "last_enqueued_collective": enqueued,
        "last_started_collective": -1,
        "last_completed_collective": completed,
    }


def dump(rank: int) -> dict:
    """Return a dump like those of a tensor- and data-parallel job; one rank is behind."""
    tp = rank // TENSOR
    dp = rank % TENSOR
    groups = {
        "0": ("default_pg", range(0)),
        str(1 + tp): ("tp", range(tp * TENSOR, (tp + 1) * TENSOR)),
        str(2000 + dp): ("dp", range(dp, RANKS, TENSOR)),
    }
    behind = rank == LATE
    entries = [
        {
            "record_id": i, "pg_id": 1, "process_group": [str(1 + tp), "tp"],
            "collective_seq_id": 900 + i, "p2p_seq_id": 0, "op_id": i,
            "profiling_name": "nccl:all_reduce", "time_created_ns": 1_758_580_155_793_872_443 + i,
            "input_sizes": [[2048, 1, 5120]], "input_dtypes": ["BFloat16"],
            "output_sizes": [[2048, 1, 5120]], "output_dtypes": ["BFloat16"],
            "state": "scheduled", "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None, "retired": False, "timeout_ms": 180_000,
            "is_p2p": False,
        }
        for i in range(ENTRIES - 2 * behind)
    ]  # fmt: skip
    last = 900 + ENTRIES - 1 - 2 * behind
    return {
        "version": "2.9",
        "pg_config": {
            name: {"name": name, "desc": text, "ranks": str(list(ranks))}
            for name, (text, ranks) in groups.items()
        },
        "pg_status": {"0": status(50, 50), "1": status(last, 899), "2": status(77, 77)},
        "entries": entries,
    }  # fmt: skip


def main() -> None:
    """Write the dumps, time the verdict."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(RANKS):
            (Path(folder) / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(rank)))
        started = time.perf_counter()
        report = hang([Path(folder)])
        seconds = time.perf_counter() - started
    right = report.verdict.culprits == (LATE,)
    print_table(
        "Hang of 10,000 ranks",
        [
            Row(
                what="dumps to verdict", measured=seconds, unit="s", target="< 10", met=seconds < 10
            ),
            Row(
                what="the late rank is named (1 = yes)",
                measured=right,
                unit="",
                target="1",
                met=right,
            ),
        ],
    )


if __name__ == "__main__":
    main()

"""What-if replays: an operation trace of a large job to its verdict, cold, with its peak memory.

``KANSOKU_CORPUS`` adds the published trace of a 128-GPU job and what its authors say of it.
"""

import os
import sys
import tempfile
from pathlib import Path

from tests.labs.operation_traces import pipeline_rows

from benchmarks.bench_kineto import measure
from benchmarks.table import Row, print_table

DP, STAGES, MICRO_BATCHES, STEPS = 64, 8, 16, 5
SLOW = (37, 3)

_CODE = """
import sys, time
wall = time.perf_counter()
from kansoku.app.trace_whatif import whatif
answer = whatif([sys.argv[1]]).to_json()
print(answer["verdict"], answer["culprit"]["kind"], answer["slowdown"])
print(time.perf_counter() - wall, 1)
"""


def _rows(title: str, path: Path) -> list[Row]:
    wall, cpu, peak, _ = measure([sys.executable, "-c", _CODE, str(path)])
    return [
        Row(what=f"{title}: file to verdict, imports included", measured=wall, unit="s", target=""),
        Row(what=f"{title}: CPU", measured=cpu, unit="s", target=""),
        Row(what=f"{title}: peak memory", measured=peak / 1e6, unit="MB", target=""),
    ]


def main() -> None:
    """Write a job of 512 workers with one slow one, and time the answer."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace-generated.parquet"
        frame = pipeline_rows(
            dp_size=DP,
            stages=STAGES,
            micro_batches=MICRO_BATCHES,
            steps=STEPS,
            forward=lambda dp, stage, _step, _mb: 1.5 if (dp, stage) == SLOW else 1.0,
        )
        frame.write_parquet(path)
        Path(folder, "meta-generated.yaml").write_text("name: generated\n")
        rows += _rows(f"{DP * STAGES} workers, {len(frame):,} operations", path)
    if corpus := os.environ.get("KANSOKU_CORPUS"):
        rows += _rows("published job SE, 128 GPUs", Path(corpus) / "straggler" / "trace-SE.parquet")
    print_table("What-if: operation trace to verdict", rows)


if __name__ == "__main__":
    main()

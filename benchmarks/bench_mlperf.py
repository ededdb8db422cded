"""126 MLPerf logs in the form of real submissions, most lines not log lines, to scores."""

import json
import tempfile
import time
from pathlib import Path

from benchmarks.table import Row, print_table
from kansoku.app.bench_mfu import Hardware, mfu_of_run
from kansoku.app.bench_score import score

FOLDERS, RUNS, NOISE = 42, 3, 20_000


def line(key: str, time_ms: int, value: object = None, **metadata: object) -> str:
    """Return one log line."""
    body = {"key": key, "time_ms": time_ms, "value": value, "metadata": metadata}
    return f"3: :::MLLOG {json.dumps(body)}\n"


def write(folder: Path, number: int) -> None:
    """Write one run of 24 evaluations of 12 steps, among what else a job prints."""
    noise = "".join(f"3: iteration {i}/ {NOISE} | loss 2.71 | 18.4 s\n" for i in range(NOISE))
    parts = [
        line("submission_benchmark", 1, "gpt3"),
        line("global_batch_size", 1, 2048),
        line("max_sequence_length", 1, 2048),
        line("run_start", 1_000),
        line("block_start", 1_000, first_epoch_num=0),
        noise,
    ]
    for step in range(1, 289):
        at = 1_000 + step * 18_400
        parts.append(line("tracked_stats", at, {"train_step_timing in s": 18.4}, step=step))
        if step % 12 == 0:
            parts.append(line("eval_accuracy", at + 1, 2.7, epoch_num=step * 4_194_304))
    parts.append(line("run_stop", 6_000_000 + number * 60_000, status="success"))
    (folder / f"result_{number}.txt").write_text("".join(parts), encoding="utf-8")


def main() -> None:
    """Generate, score, print."""
    with tempfile.TemporaryDirectory() as name:
        for at in range(FOLDERS):
            folder = Path(name) / f"system{at}"
            folder.mkdir()
            for number in range(RUNS):
                write(folder, number)
        started = time.perf_counter()
        results = score([Path(name)], mfu=mfu_of_run(Hardware(gpu="h100", gpus=256)))
        seconds = time.perf_counter() - started
    middle = (6_060_000 - 1_000) / 60_000
    right = sum(abs((r.score_minutes or 0) - middle) < 1e-9 for r in results)
    print_table(
        "MLPerf logs",
        [
            Row(
                what="126 logs scored", measured=seconds, unit="s", target="< 10",
                met=seconds < 10,
            ),
            Row(
                what="folders with the score made", measured=right, unit="of 42", target="42",
                met=right == FOLDERS,
            ),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()

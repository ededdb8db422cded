"""The planner: a full search timed, and every published step time beside the prediction.

The peer for speed is the search of Calculon, which needs more than nine minutes for GPT-3 175B on
256 GPUs (its users' report; it is not run here), and our own evaluation called layout by layout.
"""

import time
from statistics import median

from scripts.fit_calibration import fit, mean_error, points

from benchmarks.table import Row, print_table
from kansoku.app.plan import PlanRequest, search
from kansoku.catalog.calibration import calibration
from kansoku.catalog.models import model_shape
from kansoku.plan.hardware import generic_hardware
from kansoku.plan.layout import LayoutColumns, Training
from kansoku.plan.search import Space, evaluate, layouts

ROUNDS = 5


def run() -> list[Row]:
    """Return the figures."""
    return _speed() + _accuracy()


def _speed() -> list[Row]:
    times = []
    for _ in range(ROUNDS):
        request = PlanRequest(
            model="gpt3-175b", cluster="sakuraone-h100", gpus=768, global_batch=1536
        )
        start = time.perf_counter()
        answer = search(request)
        times.append(time.perf_counter() - start)
    tried = answer.result.tried
    shape = model_shape("gpt3-175b")
    training = Training(global_batch=1536, seq=2048, precision="bf16")
    hardware = generic_hardware("h100", 768)
    columns = layouts(shape, training, hardware, Space(zero=[1]))
    sample = [columns.row(i) for i in range(0, len(columns), max(len(columns) // 200, 1))]
    start = time.perf_counter()
    for layout in sample:
        evaluate(shape, training, LayoutColumns.of([layout]), hardware)
    each = (time.perf_counter() - start) / len(sample)
    start = time.perf_counter()
    evaluate(shape, training, columns, hardware)
    together = (time.perf_counter() - start) / len(columns)
    return [
        Row(
            what=f"search GPT-3 175B on 768 H100, {tried:,} layouts",
            measured=median(times),
            unit="s",
            target="< 2",
            peer="Calculon, 256 GPUs: > 540 s (reported, not run)",
            met=median(times) < 2,
        ),
        Row(
            what="one layout, evaluated in columns",
            measured=1e6 * together,
            unit="µs",
            target="",
            peer=f"one by one: {1e6 * each:,.0f} µs, ratio {each / together:,.0f}",
        ),
    ]


def _accuracy() -> list[Row]:
    every = points()
    rows = []
    for gpu, table, target in (
        ("a100-80gb", "korthikanti", 10),
        ("h100", "dgxc", 10),
        ("gb200", "dgxc", 10),
        ("a100-80gb", "sc21", 15),
        ("h100", "megatron_core", 15),
    ):
        inside = [e for e in every if e.gpu == gpu and e.table == table]
        error = 100 * mean_error(inside, calibration(gpu).constants())
        rows.append(_row(f"{table} on {gpu}: mean error of {len(inside)} steps", error, target))
        others = [e for e in every if e.gpu == gpu and e.table != table]
        if others:
            left_out = 100 * mean_error(inside, fit(others))
            rows.append(_row(f"{table} on {gpu}: left out of the fit", left_out, 20))
    return rows


def _row(what: str, error: float, target: int) -> Row:
    return Row(what=what, measured=error, unit="%", target=f"≤ {target}", met=error <= target)


def main() -> None:
    """Print the table."""
    print_table("Planner: speed of the search, accuracy against published step times", run())


if __name__ == "__main__":
    main()

"""Fit the planner's calibration to published step times and print every error.

    python scripts/fit_calibration.py            print the fit and leave-one-table-out errors
    python scripts/fit_calibration.py --write    also write catalog/data/calibration.toml

Eight constants a GPU, found by least squares on log(predicted / published) with a weak pull
towards the starting values below, so that a constant which no row constrains stays where general
knowledge puts it. Micro-batch and interleave, where a table omits them, are searched over.
"""

import argparse
import csv
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from kansoku.catalog.accelerators import accelerator
from kansoku.catalog.calibration import Calibration
from kansoku.catalog.models import ModelShape
from kansoku.plan.flops import step_flops
from kansoku.plan.hardware import Hardware, generic_hardware
from kansoku.plan.layout import LayoutColumns, Training
from kansoku.plan.memory import memory_columns
from kansoku.plan.search import Space, layouts
from kansoku.plan.timing import step_time

Row = dict[str, str]
ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "plan"

TARGET = ROOT / "src" / "kansoku" / "catalog" / "data" / "calibration.toml"
SOURCES = {
    "dgxc": "NVIDIA/dgxc-benchmarking tables",
    "korthikanti": "arXiv 2205.05198 Table 5",
    "megatron_core": "NVIDIA/Megatron-LM README (Megatron-Core r0.8.0)",
    "sc21": "arXiv 2104.04473 Table 1",
}
HEAD = """\
# Written by scripts/fit_calibration.py --write: eight constants a GPU, fitted to published step
# times (tests/data/plan). same_as: constants of another GPU of that generation, since no measured
# point is at hand; peaks and bandwidths are still the GPU's own.
"""
TAIL = """
[h200-sxm]
same_as = "h100-sxm"
source = "constants of h100-sxm, the same SM; no measured point of an H200 is at hand"

[b200]
same_as = "gb200"
source = "constants of gb200, the same SM; no measured point of a B200 is at hand"
"""

# Starting values: cuBLAS and cuDNN reach 70-75 % of the dense peak on large products and 45-60 %
# in causal flash attention; streaming kernels 80-85 % of HBM; nccl-tests 75-85 % of NVLink and 90 %
# of a 200 or 400 Gb/s NIC in large messages; a few microseconds between kernels, and a few per hop.
START = {
    "gemm_efficiency": 0.75,
    "gemm_fp8_efficiency": 0.70,
    "attention_efficiency": 0.50,
    "memory_efficiency": 0.80,
    "scale_up_efficiency": 0.80,
    "scale_out_efficiency": 0.80,
    "kernel_gap_s": 4e-6,
    "hop_latency_s": 8e-6,
}
SPREAD = {  # relative width of the pull
    "gemm_efficiency": 0.10,
    "gemm_fp8_efficiency": 0.15,
    "attention_efficiency": 0.30,
    "memory_efficiency": 0.15,
    "scale_up_efficiency": 0.25,
    "scale_out_efficiency": 0.25,
    "kernel_gap_s": 0.7,
    "hop_latency_s": 0.7,
}
PULL = 0.05
"""An error of this ratio in one row weighs as much as one width of the pull."""


@dataclass(frozen=True)
class Point:
    """One published step time."""

    table: str
    label: str
    gpu: str
    shape: ModelShape
    training: Training
    columns: LayoutColumns
    hardware: Hardware
    step_s: float


def shape(row: Row, *, kv: int | None = None, ffn: int | None = None) -> ModelShape:
    """Return the shape of a table's row; four times the width and no groups make it a GPT."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    ffn = ffn or 4 * hidden
    gpt = ffn == 4 * hidden and kv is None
    return ModelShape(
        name=row.get("model", "row"), title="", layers=int(row["layers"]), hidden=hidden,
        heads=heads, kv_heads=kv or heads, head_dim=hidden // heads, ffn=ffn,
        vocab=int(row["vocab"]), seq=int(row["seq"]),
        gated=ffn != 4 * hidden,
        tied=gpt, positions=int(row["seq"]) if gpt else 0, bias=gpt, norm_bias=gpt, dropout=gpt,
    )  # fmt: skip


def point(  # noqa: PLR0913 - a row has that many facts
    table: str,
    label: str,
    gpu: str,
    model: ModelShape,
    *,
    gpus: int,
    batch: int,
    step_s: float,
    precision: str,
    space: Space,
    attention: str,
) -> Point:
    """Build a point from a row; layouts that do not fit in memory are left out."""
    training = Training(
        global_batch=batch,
        seq=model.seq,
        precision=precision,
        attention=attention,
        grad_bytes=4 if precision == "fp16" else 2,
    )
    hardware = generic_hardware(gpu, gpus)
    columns = layouts(model, training, hardware, space)
    memory = memory_columns(model, training, columns).total
    fits = memory <= hardware.memory_bytes
    if not fits.any():
        print(f"{table} {label}: needs {memory.min() / 2**30:.1f} GiB", file=sys.stderr)
    keep = fits if fits.any() else memory == memory.min()
    return Point(table, label, gpu, model, training, columns.take(keep), hardware, step_s)


def rows(name: str) -> list[Row]:
    """Read a published table."""
    with (DATA / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def whole(row: Row, key: str) -> list[int] | None:
    """Return a column's value as the only one to try, or None where it is empty."""
    return [int(row[key])] if row.get(key) else None


def _korthikanti() -> list[Point]:
    found = []
    columns = (("full", "iter_full_recompute_s"), ("selective", "iter_seqpar_selective_s"))
    for row in rows("korthikanti2022_table5.csv"):
        for recompute, key in columns:
            if not row[key]:
                continue
            space = Space(
                tp=[int(row["tp"])], pp=[int(row["pp"])], dp=[int(row["dp"])], cp=[1], ep=[1],
                vp=[int(row["interleave_m"])], micro_batch=[int(row["mbs"])],
                recompute=[recompute], zero=[1 if int(row["dp"]) > 1 else 0],
            )  # fmt: skip
            found.append(
                point(
                    "korthikanti",
                    f"{row['model']} {recompute} {row['gpus']}",
                    "a100-80gb",
                    shape(row),
                    gpus=int(row["gpus"]),
                    batch=int(row["gbs"]),
                    step_s=float(row[key]),
                    precision="fp16",
                    space=space,
                    attention="unfused",
                ),
            )
    return found


def _sc21() -> list[Point]:
    found = []
    for row in rows("sc21_megatron_table1.csv"):
        space = Space(
            tp=[int(row["tp"])], pp=[int(row["pp"])], dp=[int(row["dp"])], cp=[1], ep=[1],
            recompute=["full"], zero=[1],
        )  # fmt: skip
        found.append(
            point(
                "sc21",
                row["params_b"] + "B",
                "a100-80gb",
                shape(row),
                gpus=int(row["gpus"]),
                batch=int(row["gbs"]),
                step_s=float(row["derived_iter_s"]),
                precision="fp16",
                space=space,
                attention="unfused",
            )
        )
    return found


def _dgxc() -> list[Point]:
    found = []
    for row in rows("dgxc_pretrain_perf.csv"):
        space = Space(
            tp=[int(row["tp"])], pp=[int(row["pp"])], dp=[int(row["dp"])], cp=[int(row["cp"])],
            ep=[1], vp=whole(row, "vp") or [1], micro_batch=[int(row["mbs"])], recompute=["none"],
            zero=[1],
        )  # fmt: skip
        gpu = {"H100": "h100", "GB200": "gb200"}[row["gpu"]]
        grouped = row["kv_groups"] != row["heads"]
        model = shape(row, kv=int(row["kv_groups"]) if grouped else None, ffn=int(row["ffn"]))
        found.append(
            point(
                "dgxc",
                f"{row['model']} {row['precision']} {row['gpus']}",
                gpu,
                model,
                gpus=int(row["gpus"]),
                batch=int(row["gbs"]),
                step_s=float(row["step_s"]),
                precision=row["precision"].lower(),
                space=space,
                attention="flash",
            )
        )
    return found


def _megatron_core() -> list[Point]:
    found = []
    for row in rows("megatron_core_h100.csv"):
        model = shape(row)
        space = Space(
            tp=[int(row["tp"])], pp=[int(row["pp"])], dp=[int(row["dp"])], cp=[1], ep=[1], zero=[1]
        )
        flops = step_flops(model, global_batch=int(row["gbs"])).conventions["full_attention"]
        rate = int(row["gpus"]) * float(row["tflops_per_gpu"]) * 1e12
        found.append(
            point(
                "megatron_core",
                row["model"],
                "h100",
                model,
                gpus=int(row["gpus"]),
                batch=int(row["gbs"]),
                step_s=flops / rate,
                precision="bf16",
                space=space,
                attention="flash",
            )
        )
    return found


def points() -> list[Point]:
    """Return every published step time the fit uses."""
    return _korthikanti() + _sc21() + _dgxc() + _megatron_core()


def predict(entry: Point, constants: dict[str, float]) -> float:
    """Return the fastest step of a point's layouts, seconds."""
    calibration = Calibration.from_constants(
        entry.gpu, constants, attention=entry.training.attention, source="fit"
    )
    time, _ = step_time(
        entry.shape, entry.training, entry.columns, replace(entry.hardware, calibration=calibration)
    )
    return float(time.total.min())


def fit(entries: list[Point]) -> dict[str, float]:
    """Return the constants that fit the points, in START's order."""
    names = list(START)
    tables = {e.table for e in entries}
    # Tables weigh by the square root of their length: 62 near-identical rows are not 62 facts.
    sizes = {t: sum(e.table == t for e in entries) for t in tables}
    weight = np.array([sizes[e.table] ** -0.25 for e in entries])

    def constants(x: np.ndarray) -> dict[str, float]:
        return {n: START[n] * np.exp(v * SPREAD[n]) for n, v in zip(names, x, strict=True)}

    def residuals(x: np.ndarray) -> np.ndarray:
        values = constants(x)
        errors = [np.log(predict(e, values) / e.step_s) for e in entries]
        return np.concatenate([np.array(errors) / PULL * weight, x])

    top = [np.log(0.98 / START[n]) / SPREAD[n] if n.endswith("efficiency") else 6 for n in names]
    answer = least_squares(
        residuals, np.zeros(len(names)), bounds=([-8] * len(names), top), diff_step=1e-3
    )
    return constants(answer.x)


def errors(entries: list[Point], constants: dict[str, float]) -> dict[str, float]:
    """Return predicted over published less one, by row."""
    return {e.label: predict(e, constants) / e.step_s - 1 for e in entries}


def mean_error(entries: list[Point], constants: dict[str, float]) -> float:
    """Return the mean absolute error of the rows."""
    return float(np.mean([abs(v) for v in errors(entries, constants).values()]))


def main() -> None:
    """Fit, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rows", action="store_true", help="print every row")
    options = parser.parse_args()
    every = points()
    fitted, tables_of, error_of, counts = {}, {}, {}, {}
    for gpu in ("a100-80gb", "h100", "gb200"):
        entries = [e for e in every if e.gpu == gpu]
        tables = sorted({e.table for e in entries})
        fitted[gpu] = values = fit(entries)
        print(f"\n{gpu}: {len(entries)} points of {', '.join(tables)}")
        tables_of[gpu], counts[gpu] = tables, len(entries)
        error_of[gpu] = mean_error(entries, values)
        for name, value in values.items():
            print(f"  {name:22} {value:.4g}")
        for table in tables:
            inside = [e for e in entries if e.table == table]
            others = [e for e in entries if e.table != table]
            text = f"  {table:14} mean error {100 * mean_error(inside, values):5.1f} %"
            if others:
                left_out = mean_error(inside, fit(others))
                text += f", left out {100 * left_out:5.1f} %"
            print(text)
            if options.rows:
                for e in inside:
                    p = predict(e, values)
                    print(
                        f"      {e.label:32} {e.step_s:8.3f} s, predicted {p:8.3f} s, "
                        f"{100 * (p / e.step_s - 1):+6.1f} %"
                    )
    if options.write:
        text = HEAD
        for gpu, values in fitted.items():
            text += f"\n[{accelerator(gpu).name}]\n"
            text += "".join(f"{name} = {value:.4g}\n" for name, value in values.items())
            names = ", ".join(SOURCES[t] for t in tables_of[gpu])
            text += f'attention = "{"unfused" if gpu.startswith("a100") else "flash"}"\n'
            text += f"overlap = {'false' if gpu.startswith('a100') else 'true'}\n"
            text += f"measured = {counts[gpu]}\nmean_error_ratio = {error_of[gpu]:.3f}\n"
            text += f'source = "fitted by scripts/fit_calibration.py to {names}"\n'
        TARGET.write_text(text + TAIL, encoding="utf-8")
        print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()

"""A quantity of every node × GPU over time, with jobs drawn over it, and its picture as PNG."""

import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.errors import InputError
from kansoku.formats.slurm import expand_nodes

__all__ = [
    "QUANTITIES",
    "HeatMatrix",
    "JobBox",
    "Quantity",
    "Sample",
    "job_boxes",
    "matrix_from_samples",
    "synthetic_month",
    "to_png",
]

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Something a heat map shows."""

    name: str
    title: str
    unit: str
    metrics: tuple[str, ...]
    """Names in our store (OpenTelemetry), then what other exporters call it in PromQL."""
    promql: str
    """Query for a PromQL endpoint; ``$step`` is the width of a column."""
    idle_below: float
    """An allocated GPU below this does nothing."""
    per_nic: bool = False


QUANTITIES: Mapping[str, Quantity] = {
    q.name: q
    for q in (
        Quantity(
            name="power", title="GPU power", unit="W", metrics=("hw.power",),
            promql='{__name__=~"hw.power|hw_power_watts|DCGM_FI_DEV_POWER_USAGE"}',
            idle_below=150.0,
        ),
        Quantity(
            name="utilisation", title="GPU utilisation", unit="ratio",
            metrics=("hw.gpu.utilization",),
            promql='{__name__=~"hw.gpu.utilization|hw_gpu_utilization_ratio"} '
            "or DCGM_FI_DEV_GPU_UTIL / 100",
            idle_below=0.05,
        ),
        Quantity(
            name="memory", title="GPU memory", unit="ratio",
            metrics=("hw.gpu.memory.utilization",),
            promql='{__name__=~"hw.gpu.memory.utilization|hw_gpu_memory_utilization_ratio"} or '
            "DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE)",
            idle_below=0.02,
        ),
        Quantity(
            name="nic", title="NIC traffic", unit="B/s", metrics=("hw.network.io",),
            promql='rate({__name__=~"hw.network.io|hw_network_io_bytes_total"}[$step])',
            idle_below=1e6, per_nic=True,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBox:
    """One job on one run of neighbouring rows, ends included."""

    label: str
    row_from: int
    row_to: int
    column_from: int
    column_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMatrix:
    """Values ``(rows, columns)``; NaN is no data."""

    quantity: Quantity
    rows: tuple[tuple[str, str], ...]
    """Node and GPU (or NIC) of each row."""
    times_ns: npt.NDArray[np.int64]
    step_ns: int
    values: FloatArray
    boxes: tuple[JobBox, ...] = field(default=())


Sample = tuple[str, str, npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Node, device, times and values of one series."""


def _natural(text: str) -> tuple[object, ...]:
    return tuple(int(p) if p.isdigit() else p for p in re.split(r"(\d+)", text))


def matrix_from_samples(
    series: Iterable[Sample],
    *,
    quantity: Quantity,
    since_ns: int,
    until_ns: int,
    columns: int,
    nodes: Sequence[str] = (),
) -> HeatMatrix:
    """Average series into cells; nodes listed without any series get an empty row."""
    if columns < 1 or until_ns <= since_ns:
        raise InputError("a heat map needs at least one column and a window")
    step = -(-(until_ns - since_ns) // columns)
    sums: dict[tuple[str, str], FloatArray] = {}
    counts: dict[tuple[str, str], FloatArray] = {}
    for node, device, times, values in series:
        inside = (times >= since_ns) & (times < until_ns) & ~np.isnan(values)
        place = (times[inside] - since_ns) // step
        key = (node, device)
        total = np.bincount(place, weights=values[inside], minlength=columns).astype(np.float32)
        count = np.bincount(place, minlength=columns).astype(np.float32)
        sums[key] = sums.get(key, np.float32(0)) + total
        counts[key] = counts.get(key, np.float32(0)) + count
    seen = {node for node, _ in sums}
    for node in nodes:
        if node not in seen:
            sums[(node, "")] = np.zeros(columns, np.float32)
            counts[(node, "")] = np.zeros(columns, np.float32)
    rows = tuple(sorted(sums, key=lambda k: (_natural(k[0]), _natural(k[1]))))
    table = np.full((len(rows), columns), np.nan, dtype=np.float32)
    for i, key in enumerate(rows):
        known = counts[key] > 0
        table[i, known] = sums[key][known] / counts[key][known]
    return HeatMatrix(
        quantity=quantity,
        rows=rows,
        times_ns=since_ns + np.arange(columns, dtype=np.int64) * step,
        step_ns=step,
        values=table,
    )


def job_boxes(matrix: HeatMatrix, jobs: pl.DataFrame, *, most: int = 400) -> tuple[JobBox, ...]:
    """Return frames of the jobs that held whole nodes of the map, the largest first.

    ``jobs`` has job_id, node_list, start_ns, end_ns (null: still running), gpus.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, (node, _) in enumerate(matrix.rows):
        first.setdefault(node, i)
        last[node] = i
    since = int(matrix.times_ns[0])
    until = since + matrix.step_ns * len(matrix.times_ns)
    wanted = jobs.filter(
        pl.col("node_list").is_not_null()
        & (pl.col("start_ns") < until)
        & (pl.col("end_ns").fill_null(until) > since)
        & (pl.col("gpus").fill_null(0) > 0)
    ).with_columns(
        area=pl.col("gpus")
        * (
            pl.min_horizontal(pl.col("end_ns").fill_null(until), pl.lit(until))
            - pl.max_horizontal(pl.col("start_ns"), pl.lit(since))
        )
    )
    boxes: list[JobBox] = []
    columns = ("job_id", "node_list", "start_ns", "end_ns")
    for job_id, node_list, start, end in (
        wanted.sort("area", descending=True).head(most).select(columns).iter_rows()
    ):
        try:
            names = [n for n in expand_nodes(node_list) if n in first]
        except ValueError:
            continue
        left = max((start - since) // matrix.step_ns, 0)
        right = min((min(end or until, until) - 1 - since) // matrix.step_ns,
                    len(matrix.times_ns) - 1)  # fmt: skip
        spans = sorted((first[n], last[n]) for n in names)
        for row_from, row_to in _joined(spans):
            boxes.append(
                JobBox(
                    label=str(job_id),
                    row_from=row_from,
                    row_to=row_to,
                    column_from=int(left),
                    column_to=int(max(right, left)),
                )
            )
    return tuple(boxes)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for low, high in spans:
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def synthetic_month(
    *, nodes: int = 100, gpus: int = 8, days: int = 30, minutes: int = 10, seed: int = 3
) -> HeatMatrix:
    """Return a made-up month of GPU power, for benchmarks and pictures of the documents."""
    rng = np.random.default_rng(seed)
    columns = days * 24 * 60 // minutes
    values = rng.normal(95, 4, (nodes * gpus, columns)).astype(np.float32)
    rows = tuple((f"c{n + 1:03d}", str(g)) for n in range(nodes) for g in range(gpus))
    step = minutes * 60 * 1_000_000_000
    start = 1_764_547_200_000_000_000
    boxes = []
    for job in range(160):
        width = min(int(rng.choice([1, 2, 4, 8, 16, 32])), nodes)
        low = int(rng.integers(0, nodes - width + 1))
        begin = int(rng.integers(0, max(columns - 20, 1)))
        end = min(begin + int(rng.integers(12, 700)), columns - 1)
        block = values[low * gpus : (low + width) * gpus, begin : end + 1]
        block[:] = rng.normal(620, 30, block.shape)
        boxes.append(
            JobBox(
                label=str(1000 + job),
                row_from=low * gpus,
                row_to=(low + width) * gpus - 1,
                column_from=begin,
                column_to=end,
            )
        )
    return HeatMatrix(
        quantity=QUANTITIES["power"],
        rows=rows,
        times_ns=start + np.arange(columns, dtype=np.int64) * step,
        step_ns=step,
        values=values,
        boxes=tuple(boxes),
    )


# -- picture --------------------------------------------------------------------------------------

# Dark blue over green to yellow: order survives grey print and colour blindness.
_ANCHORS = np.array(
    [[12, 8, 48], [59, 28, 109], [126, 39, 107], [190, 55, 81], [233, 97, 44], [252, 165, 31],
     [250, 226, 110]], dtype=np.float64,
)  # fmt: skip
_NO_DATA = (205, 205, 205)
_PAPER = (255, 255, 255)
_INK = (40, 40, 40)
_FRAME = (120, 220, 255)
# Three columns by five rows a character, top left first.
_FONT = {
    "0": 0o75557, "1": 0o26227, "2": 0o71747, "3": 0o71717, "4": 0o55711, "5": 0o74717,
    "6": 0o74757, "7": 0o71111, "8": 0o75757, "9": 0o75717, "-": 0o00700, ":": 0o02020,
    ".": 0o00002, "/": 0o11244, "_": 0o00007, " ": 0o00000, "a": 0o25755, "b": 0o65656,
    "c": 0o34443, "d": 0o65556, "e": 0o74647, "f": 0o74644, "g": 0o34553, "h": 0o55755,
    "i": 0o72227, "j": 0o11152, "k": 0o55655, "l": 0o44447, "m": 0o57755, "n": 0o65555,
    "o": 0o25552, "p": 0o65644, "q": 0o25563, "r": 0o65655, "s": 0o34216, "t": 0o72222,
    "u": 0o55557, "v": 0o55552, "w": 0o55775, "x": 0o55255, "y": 0o55222, "z": 0o71247,
    "+": 0o02720, "%": 0o51245, "(": 0o24442, ")": 0o21112,
}  # fmt: skip


def to_png(matrix: HeatMatrix, *, width: int = 1800, title: str = "") -> bytes:
    """Return the map as a PNG: nodes down, time across, frames of jobs, a scale below.

    Written with zlib alone. Columns are averaged down to the width; rows are at least one pixel.
    """
    values = matrix.values
    height_each = max(1, min(16, 1600 // max(len(matrix.rows), 1)))
    label_width = max((len(node) for node, _ in matrix.rows), default=1) * 8 + 12
    across = max(min(width - label_width, values.shape[1] * 16), 1)
    grid, place = _resample(values, across)
    low, high = _limits(values)
    body = np.repeat(_colours(grid, low, high), height_each, axis=0)
    top, bottom = 26, 56
    canvas = np.full((top + body.shape[0] + bottom, label_width + across + 8, 3), _PAPER, np.uint8)
    canvas[top : top + body.shape[0], label_width : label_width + across] = body
    for box in matrix.boxes:
        x0, x1 = place[box.column_from], max(place[box.column_to + 1] - 1, place[box.column_from])
        y0, y1 = box.row_from * height_each, (box.row_to + 1) * height_each - 1
        _frame(canvas, label_width + x0, top + y0, label_width + x1, top + y1)
    text = title or f"{matrix.quantity.title} ({matrix.quantity.unit})"
    _write(canvas, 6, 6, text.lower())
    _node_labels(canvas, matrix, top, height_each)
    _time_labels(canvas, matrix, place, label_width, top + body.shape[0] + 6)
    _scale(canvas, low, high, label_width, top + body.shape[0] + 30, matrix.quantity.unit)
    return _encode(canvas)


def _limits(values: FloatArray) -> tuple[float, float]:
    known = values[~np.isnan(values)]
    if known.size == 0:
        return 0.0, 1.0
    # A few wild samples must not wash the colours out; a sample of the cells suffices.
    step = max(known.size // 200_000, 1)
    low, high = np.percentile(known[::step], [0.5, 99.5])
    return float(min(low, 0) if low < 0 else 0), float(high if high > 0 else 1)


def _resample(values: FloatArray, across: int) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Return cells for ``across`` pixels and, per column of the data, its first pixel."""
    columns = values.shape[1]
    edges = np.round(np.linspace(0, across, columns + 1)).astype(np.int64)
    if across >= columns:
        return np.repeat(values, np.diff(edges), axis=1), edges
    starts = np.floor(np.arange(across) * columns / across).astype(np.int64)
    known = ~np.isnan(values)
    total = np.add.reduceat(np.where(known, values, 0), starts, axis=1)
    count = np.add.reduceat(known, starts, axis=1, dtype=np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total / count).astype(np.float32), edges


def _colours(grid: FloatArray, low: float, high: float) -> npt.NDArray[np.uint8]:
    steps = np.linspace(0, len(_ANCHORS) - 1, 256)
    table = np.stack(
        [np.interp(steps, np.arange(len(_ANCHORS)), _ANCHORS[:, c]) for c in range(3)], axis=1
    ).astype(np.uint8)
    table = np.vstack([table, np.array([_NO_DATA], np.uint8)])
    missing = np.isnan(grid)
    level = np.clip((np.where(missing, low, grid) - low) / max(high - low, 1e-12), 0, 1)
    index = (level * 255).astype(np.int64)
    index[missing] = 256
    return table[index]


def _frame(canvas: npt.NDArray[np.uint8], x0: int, y0: int, x1: int, y1: int) -> None:
    canvas[y0, x0 : x1 + 1] = canvas[y1, x0 : x1 + 1] = _FRAME
    canvas[y0 : y1 + 1, x0] = canvas[y0 : y1 + 1, x1] = _FRAME


def _write(canvas: npt.NDArray[np.uint8], x: int, y: int, text: str, size: int = 2) -> None:
    for character in text:
        bits = _FONT.get(character, _FONT["-"])
        glyph = np.array([[bits >> (14 - r * 3 - c) & 1 for c in range(3)] for r in range(5)])
        big = np.kron(glyph, np.ones((size, size), dtype=np.int64)).astype(bool)
        part = canvas[y : y + 5 * size, x : x + 3 * size]
        if part.shape[:2] != big.shape:
            return
        part[big] = _INK
        x += 4 * size


def _node_labels(
    canvas: npt.NDArray[np.uint8], matrix: HeatMatrix, top: int, height_each: int
) -> None:
    free_from = 0
    seen: set[str] = set()
    for i, (node, _) in enumerate(matrix.rows):
        y = top + i * height_each
        if node not in seen and y >= free_from:
            _write(canvas, 4, y, node.lower())
            free_from = y + 14
        seen.add(node)


def _time_labels(
    canvas: npt.NDArray[np.uint8],
    matrix: HeatMatrix,
    place: npt.NDArray[np.int64],
    left: int,
    y: int,
) -> None:
    free_from = 0
    stamps = np.datetime_as_string(matrix.times_ns.astype("datetime64[ns]"), unit="m")
    span = matrix.step_ns * len(matrix.times_ns)
    short = slice(5, 16) if span < 4 * 86_400_000_000_000 else slice(0, 10)
    last = ""
    for i, text in enumerate(stamps):
        x = left + int(place[i])
        word = str(text)[short].replace("T", " ")
        if x >= free_from and word != last:
            canvas[y - 5 : y - 1, x : x + 1] = _INK
            _write(canvas, x, y, word)
            free_from = x + (len(word) + 3) * 8
            last = word


def _scale(
    canvas: npt.NDArray[np.uint8], low: float, high: float, left: int, y: int, unit: str
) -> None:
    width = min(256, canvas.shape[1] - left - 8)
    ramp = np.linspace(low, high, width, dtype=np.float32)[None, :]
    canvas[y : y + 8, left : left + width] = np.repeat(_colours(ramp, low, high), 8, axis=0)
    _write(canvas, left, y + 11, f"{low:.4g}")
    end = f"{high:.4g} {unit.lower()}"
    _write(canvas, max(left + width - len(end) * 8, left + 64), y + 11, end)


def _encode(canvas: npt.NDArray[np.uint8]) -> bytes:
    """Return RGB pixels as PNG (RFC 2083): Up-filtered rows, one zlib stream."""
    height, width, _ = canvas.shape
    flat = canvas.reshape(height, width * 3)
    above = np.vstack([np.zeros((1, width * 3), np.uint8), flat[:-1]])
    rows = np.empty((height, width * 3 + 1), np.uint8)
    rows[:, 0] = 2
    rows[:, 1:] = flat - above

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 3))
        + chunk(b"IEND", b"")
    )

"""Columns for canvases: matrices and timelines as raw arrays, reduced where they are too big.

The wire format (``application/x-kansoku-columns``, version 1): the four bytes ``KCOL``, an
unsigned 32-bit little-endian length, a JSON header of that length padded with spaces to a multiple
of eight, then the arrays, each starting at a multiple of eight. The header's ``arrays`` lists
name, type (``f4``, ``f8``, ``i4``, ``u1`` …), shape and offset from the first byte after the
header; all little-endian. Floating NaN is no data. An array that ``codes`` names holds steps: a
value is ``from + step * code``, and code 65,535 is no data.
"""

import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import orjson

from kansoku.app.web_page import Columns
from kansoku.errors import InputError
from kansoku.view import Heatmap, Table, Timeline

__all__ = [
    "COLUMNS_TYPE",
    "MOST_CELLS",
    "coded",
    "columns_bytes",
    "heatmap_columns",
    "reduced",
    "span_columns",
    "timeline_columns",
]

COLUMNS_TYPE = "application/x-kansoku-columns"
MOST_CELLS = 2_000_000
"""A matrix with more cells is reduced, keeping each block's minimum and maximum."""
_MANY_CELLS = 100_000
"""A matrix of so many cells travels as codes where its values allow."""
_BLANK = 65_535
_MAGIC = b"KCOL"
_ALIGN = 8
Matrix = npt.NDArray[np.float32]


def columns_bytes(columns: Columns) -> bytes:
    """Return the wire form."""
    listed, parts, offset = [], [], 0
    for name, array in columns.arrays.items():
        flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        raw = flat.tobytes()
        pad = -len(raw) % _ALIGN
        listed.append(
            {
                "name": name,
                "type": f"{flat.dtype.kind}{flat.dtype.itemsize}",
                "shape": list(flat.shape),
                "offset": offset,
            }
        )
        parts += [raw, b"\0" * pad]
        offset += len(raw) + pad
    header = orjson.dumps(
        {"version": 1, "kind": columns.kind, **columns.header, "arrays": listed},
        option=orjson.OPT_SERIALIZE_NUMPY,
    )
    header += b" " * (-(len(header) + len(_MAGIC) + 4) % _ALIGN)
    return b"".join([_MAGIC, struct.pack("<I", len(header)), header, *parts])


def reduced(values: Matrix, *, most: int = MOST_CELLS) -> tuple[Matrix, Matrix, int, int]:
    """Return each block's minimum and maximum, and how many rows and columns a block has.

    ``values`` is ``(rows, columns)``; a block without data stays NaN. Columns are joined before
    rows, since a row is a device and a column one of many moments; below ``most`` cells both
    results are the values themselves and a block is one cell.
    """
    rows, columns = values.shape
    if rows * columns <= most:
        return values, values, 1, 1
    across = min(math.ceil(rows * columns / most), max(columns // 256, 1))
    down = math.ceil(rows * math.ceil(columns / across) / most)
    while math.ceil(rows / down) * math.ceil(columns / across) > most and down < rows:
        down += 1
    blank = np.float32(np.nan)
    padded = np.full(
        (math.ceil(rows / down) * down, math.ceil(columns / across) * across), blank, np.float32
    )
    padded[:rows, :columns] = values
    blocks = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // across, across)
    # fmin and fmax pass over NaN, unlike min and max, and do not warn.
    low = np.fmin.reduce(np.fmin.reduce(blocks, axis=3), axis=1)
    high = np.fmax.reduce(np.fmax.reduce(blocks, axis=3), axis=1)
    return low, high, down, across


def heatmap_columns(
    block: Heatmap,
    *,
    links: Mapping[str, str] | None = None,
    alternative: Table | None = None,
    summary: Sequence[str] = (),
    groups: Sequence[tuple[str, int, int]] = (),
    box_links: Sequence[str | None] = (),
    scheme: str = "heat",
) -> Columns:
    """Return a heat map's columns.

    ``links`` may hold ``row``, ``column`` and ``cell`` patterns in which ``{row}`` and
    ``{column}`` stand for the labels. ``summary`` and ``alternative`` say in words and as a table
    what the picture shows. ``groups`` names bands of rows (a node's GPUs): name, first, last.
    ``box_links`` are addresses of the boxes, in order. ``scheme`` is ``heat`` (dark to bright) or
    ``fault`` (nothing, then yellow to red: zero is well).
    """
    values = np.asarray(block.values, dtype=np.float32)
    if values.ndim != 2:
        values = values.reshape(len(block.row_labels), -1)
    known = values[np.isfinite(values)]
    low = block.low if block.low is not None else float(known.min()) if known.size else 0.0
    high = block.high if block.high is not None else float(known.max()) if known.size else 1.0
    least, most, down, across = reduced(values)
    times = block.column_times_ns
    span = (low, high if high > low else low + 1.0)
    arrays: dict[str, npt.NDArray[np.generic]] = {"high": most}
    if down * across > 1:
        arrays["low"] = least
    codes = {}
    for name in [name for name in arrays if arrays[name].size >= _MANY_CELLS]:
        found = coded(most if name == "high" else least, span)
        if found is not None:
            arrays[name], codes[name] = found
    if times is not None:
        arrays["times_ms"] = np.asarray(times, dtype=np.float64)[::across] / 1e6
    header: dict[str, object] = {
        "title": block.title,
        "rows": values.shape[0],
        "columns": values.shape[1],
        "rows_per_cell": down,
        "columns_per_cell": across,
        "row_labels": list(block.row_labels),
        "column_labels": list(block.column_labels),
        "step_ms": _step_ms(times),
        "row_title": block.row_title,
        "column_title": block.column_title,
        "unit": block.unit,
        "low": span[0],
        "high": span[1],
        "codes": codes,
        "known": int(known.size),
        "boxes": [
            [b.label, b.row_from, b.row_to, b.column_from, b.column_to, link]
            for b, link in zip(block.boxes, [*box_links, *[None] * len(block.boxes)], strict=False)
        ],
        "groups": [list(group) for group in groups],
        "links": dict(links or {}),
        "scheme": scheme,
        "summary": list(summary),
        "alternative": _table(alternative),
    }
    return Columns(kind="heatmap", header=header, arrays=arrays)


def coded(
    values: Matrix, span: tuple[float, float]
) -> tuple[npt.NDArray[np.uint16], dict[str, float]] | None:
    """Return values as codes of two bytes with their first value and step.

    None where a step would be more than a 4,000th of the colours' span: half of it is then at most
    a 30th of a colour. Half the bytes reach the reader in half the time.
    """
    known = np.isfinite(values)
    if not known.any():
        return None
    least, most = float(values[known].min()), float(values[known].max())
    step = (most - least) / (_BLANK - 1) or 1.0
    if step > (span[1] - span[0]) / 4000:
        return None
    with np.errstate(invalid="ignore"):
        codes = np.where(known, np.rint((values - np.float32(least)) / np.float32(step)), _BLANK)
    return codes.astype(np.uint16), {"from": least, "step": step}


def _step_ms(times: Sequence[int] | None) -> float | None:
    if times is None or len(times) < 2:
        return None
    return (int(times[1]) - int(times[0])) / 1e6


def _table(table: Table | None) -> dict[str, object] | None:
    if table is None:
        return None
    return {
        "title": table.title,
        "columns": [{"title": c.title, "numeric": c.numeric} for c in table.columns],
        "rows": [list(row) for row in table.rows],
    }


def timeline_columns(block: Timeline, *, more: Mapping[str, object] | None = None) -> Columns:
    """Return a timeline's columns from its spans; see :func:`span_columns` for big ones."""
    names, kinds, marks = {}, {}, {"": 0}  # type: dict[str, int], dict[str, int], dict[str, int]
    spans = block.spans
    return span_columns(
        title=block.title,
        lanes=block.lanes,
        lane=np.array([s.lane for s in spans], np.int32),
        depth=np.array([s.depth for s in spans], np.int32),
        start_ns=np.array([s.start_ns for s in spans], np.int64),
        duration_ns=np.array([s.duration_ns for s in spans], np.int64),
        name=np.array([names.setdefault(s.name, len(names)) for s in spans], np.int32),
        kind=np.array([kinds.setdefault(s.kind, len(kinds)) for s in spans], np.int32),
        mark=np.array([marks.setdefault(s.mark or "", len(marks)) for s in spans], np.int32),
        names=list(names),
        kinds=list(kinds),
        marks=list(marks),
        more=more,
    )


def span_columns(  # noqa: PLR0913 - one argument a column
    *,
    title: str,
    lanes: Sequence[str],
    lane: npt.NDArray[np.int32],
    depth: npt.NDArray[np.int32],
    start_ns: npt.NDArray[np.int64],
    duration_ns: npt.NDArray[np.int64],
    name: npt.NDArray[np.int32],
    kind: npt.NDArray[np.int32],
    mark: npt.NDArray[np.int32],
    names: Sequence[str],
    kinds: Sequence[str],
    marks: Sequence[str] = ("",),
    join: npt.NDArray[np.int32] | None = None,
    alternative: Table | None = None,
    more: Mapping[str, object] | None = None,
) -> Columns:
    """Return a timeline's columns; ``lane``, ``name``, ``kind`` and ``mark`` index the texts.

    Mark 0 is none. Spans with the same ``join`` (not -1) belong together, such as one collective
    on every rank. ``more`` goes into the header: ``summary`` (sentences), ``links`` (``span``: an
    address in which ``{lane}`` and ``{index}`` stand for the chosen span's).
    Raises InputError where the columns differ in length.
    """
    if len({len(c) for c in (lane, depth, start_ns, duration_ns, name, kind, mark)}) != 1:
        raise InputError("columns of a timeline differ in length")
    order = np.lexsort((start_ns, depth, lane))
    origin = int(start_ns.min()) if len(start_ns) else 0
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "lane": lane[order],
        "depth": depth[order],
        "start_ns": (start_ns[order] - origin).astype(np.float64),
        "duration_ns": duration_ns[order].astype(np.float64),
        "name": name[order],
        "kind": kind[order],
        "mark": mark[order],
    }
    if join is not None:
        arrays["join"] = join[order]
    header: dict[str, object] = {
        "title": title,
        "origin_ms": origin / 1e6,
        "lanes": list(lanes),
        "names": list(names),
        "kinds": list(kinds),
        "marks": list(marks),
        "alternative": _table(alternative),
        **(more or {}),
    }
    return Columns(kind="timeline", header=header, arrays=arrays)

"""Heat maps and timelines as compact columns for the script in the page."""

import base64

import numpy as np

from kansoku.view.blocks import Heatmap, Timeline

__all__ = ["heatmap_data", "timeline_data"]


def _packed(values: object, kind: str) -> str:
    """Return an array as base64 of little-endian numbers."""
    array = np.ascontiguousarray(np.asarray(values, dtype=np.dtype(kind).newbyteorder("<")))
    return base64.b64encode(array.tobytes()).decode("ascii")


def heatmap_data(block: Heatmap) -> dict[str, object]:
    """Return the cells as float32 and everything the labels need."""
    values = np.array(block.values, dtype=np.float32)
    if values.ndim != 2:
        values = values.reshape(len(block.row_labels), -1)
    known = values[np.isfinite(values)]
    low = float(known.min()) if block.low is None and known.size else block.low
    high = float(known.max()) if block.high is None and known.size else block.high
    return {
        "rows": values.shape[0],
        "columns": values.shape[1],
        "cells": _packed(values, "f4"),
        "rowLabels": list(block.row_labels),
        "columnLabels": list(block.column_labels),
        "columnTimes": None
        if block.column_times_ns is None
        else [time / 1e6 for time in block.column_times_ns],
        "unit": block.unit,
        "low": 0.0 if low is None else float(low),
        "high": 1.0 if high is None else float(high),
        "rowTitle": block.row_title,
        "columnTitle": block.column_title,
        "boxes": [
            [box.label, box.row_from, box.row_to, box.column_from, box.column_to]
            for box in block.boxes
        ],
    }


def timeline_data(block: Timeline) -> dict[str, object]:
    """Return the spans as columns, times in ns since the first."""
    origin = min((span.start_ns for span in block.spans), default=0)
    names: dict[str, int] = {}
    kinds: dict[str, int] = {}
    marks: dict[str, int] = {"": 0}
    ordered = sorted(block.spans, key=lambda span: (span.lane, span.depth, span.start_ns))
    return {
        "origin": origin / 1e6,
        "lanes": list(block.lanes),
        "lane": _packed([span.lane for span in ordered], "i4"),
        "depth": _packed([span.depth for span in ordered], "i4"),
        "start": _packed([span.start_ns - origin for span in ordered], "f8"),
        "duration": _packed([span.duration_ns for span in ordered], "f8"),
        "name": _packed([names.setdefault(span.name, len(names)) for span in ordered], "i4"),
        "kind": _packed([kinds.setdefault(span.kind, len(kinds)) for span in ordered], "i4"),
        "mark": _packed([marks.setdefault(span.mark or "", len(marks)) for span in ordered], "i4"),
        "names": list(names),
        "kinds": list(kinds),
        "marks": list(marks),
    }

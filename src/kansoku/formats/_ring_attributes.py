"""Flags, peer and attribute text of records as one column of JSON text."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.formats._ring_columns import same
from kansoku.model import ring

__all__ = ["attributes"]

_FLAG_NAMES = {
    ring.FLAG_INCOMPLETE: "incomplete",
    ring.FLAG_RECOMPUTE: "recompute",
    ring.FLAG_FAILED: "failed",
    ring.FLAG_ASYNC: "async",
    ring.FLAG_NO_TIMES: "no_times",
    ring.FLAG_EVALUATES: "evaluates",
}


class Columns(Protocol):
    """Records by field."""

    def __getitem__(self, name: str, /) -> npt.NDArray[Any]: ...


def attributes(records: Columns, strings: Sequence[str]) -> pl.Series:
    """Return the attributes as JSON text, null where there are none."""
    known = 0xFFFF & ~ring.FLAG_LATE
    flags = records["flags"] & known
    count = len(flags)
    if not (flags.any() or records["attributes"].any() or records["peer"].any()):
        return same(None, pl.String(), count)
    codes = records["attributes"].astype(np.int64) << 16 | flags
    codes |= records["peer"].astype(np.int64) << 32
    largest = int(codes.max())
    if largest < 1 << 24:  # few distinct values: mark them in a table rather than sorting
        present = np.zeros(largest + 1, np.bool_)
        present[codes] = True
        distinct = np.flatnonzero(present)
        place = np.zeros(largest + 1, np.uint32)
        place[distinct] = np.arange(len(distinct), dtype=np.uint32)
        index = place[codes]
    else:
        distinct, inverse = np.unique(codes, return_inverse=True)
        index = inverse.astype(np.uint32)
    texts = [_attribute_text(int(code), strings) for code in distinct]
    chosen: pl.Series = pl.Series(texts, dtype=pl.String)[index]
    return chosen


def _attribute_text(code: int, strings: Sequence[str]) -> str | None:
    index, flags, peer = code >> 16 & 0xFFFF, code & 0xFFFF, code >> 32
    value: dict[str, Any] = {}
    if 0 < index < len(strings):
        try:
            value = json.loads(strings[index])
        except (ValueError, RecursionError):
            value = {"text": strings[index]}
        if not isinstance(value, dict):
            value = {"text": strings[index]}
    value |= {name: True for flag, name in _FLAG_NAMES.items() if flags & flag}
    if peer:
        value["peer"] = peer - 1
    return json.dumps(value, separators=(",", ":")) if value else None

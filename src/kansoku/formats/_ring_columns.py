"""Columns of a ring's records, made without a query each: a small ring is read every second."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

__all__ = ["Strings", "nullable", "same"]


def nullable(values: npt.NDArray[Any]) -> pl.Series:
    """Return the column with every negative value as null."""
    if len(values) == 0 or int(values.min()) >= 0:
        return pl.Series(np.ascontiguousarray(values))
    return pl.Series(pa.array(values, mask=values < 0))


def same(value: object, kind: pl.DataType, count: int) -> pl.Series:
    """Return one value so often. Queries would do, at ten times the cost of a small ring."""
    return pl.Series([value], dtype=kind).new_from_index(0, count)


class Strings:
    """The string table as a column, index 0 being null."""

    def __init__(self, strings: Sequence[str]):
        self._table = pl.Series([None, *strings[1:]], dtype=pl.String)

    def take(self, index: npt.NDArray[np.uint16]) -> pl.Series:
        if len(index) == 0 or not index.any():
            return same(None, pl.String(), len(index))
        return self._table[np.where(index < len(self._table), index, 0).astype(np.uint32)]

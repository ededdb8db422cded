"""One read trace: columns, names, lanes, facts, and what was wrong with the file."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kansoku.catalog.kernels import RowKind
from kansoku.formats.kineto._columns import CollectiveArguments
from kansoku.formats.kineto._events import Damage
from kansoku.formats.kineto._header import Metadata

__all__ = ["DEVICE_WORK", "Detail", "KinetoTrace"]

DEVICE_WORK = (RowKind.COMPUTE, RowKind.COLLECTIVE, RowKind.MEMCPY, RowKind.MEMSET)
"""Kinds that keep a device busy."""


@dataclass(frozen=True, slots=True)
class Detail:
    """A value that few rows have."""

    rows: NDArray[np.int64]
    """Rows that have it, ascending."""
    values: NDArray[np.int64]

    def at(self, rows: NDArray[Any], *, absent: int) -> NDArray[np.int64]:
        """Return the values of some rows, ``absent`` where a row has none."""
        out = np.full(len(rows), absent, np.int64)
        if len(self.rows):
            place = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
            match = self.rows[place] == rows
            out[match] = self.values[place[match]]
        return out


@dataclass(slots=True, kw_only=True)
class KinetoTrace:
    """Rows of one Kineto file that analyses use, sorted by start, then lane and duration.

    Columns are NumPy arrays of one length: ``kind`` (RowKind), ``name`` (index into ``names``),
    ``lane`` (index into ``lanes``), ``start_ns`` and ``duration_ns`` (the file's own clock; Unix
    = ``base_ns`` + start) and ``correlation`` (-1 where absent), each as narrow as its values
    allow: widen before multiplying. Details, which few rows have, are ``bytes``, ``collective``
    (index into ``collectives``) and ``sequence``.
    """

    file: str
    rank: int | None
    rank_source: str | None
    """``distributedInfo``, ``file name`` or ``user``."""
    metadata: Metadata
    columns: dict[str, NDArray[Any]]
    details: dict[str, Detail]
    names: list[str]
    lanes: list[tuple[str, str, int | None]]
    """Process, thread or stream, device (None on the host)."""
    collectives: list[CollectiveArguments]
    operators: dict[str, tuple[int, int, float]]
    """Host operator to (calls, total ns, sum of squared ns)."""
    rows: int
    """Events read, of every type."""
    slices: int
    host_start_ns: int | None
    host_end_ns: int | None
    damage: Damage
    set_aside: Counter[str]
    """Reason to slices that were read but not used."""
    problems: list[str] = field(default_factory=list)
    """Sentences: why the trace is incomplete."""
    notes: list[str] = field(default_factory=list)
    """Sentences: what was repaired or unusual, with nothing missing."""

    @property
    def base_ns(self) -> int:
        """Unix time of the file's zero, ns; 0 where stamps are Unix already."""
        return self.metadata.base_ns or 0

    def of(self, *kinds: RowKind) -> NDArray[np.bool_]:
        """Return the mask of rows of some kinds."""
        chosen = np.zeros(256, bool)
        chosen[list(kinds)] = True
        found: NDArray[np.bool_] = chosen[self.columns["kind"]]
        return found

    @property
    def has_device_rows(self) -> bool:
        """Whether any row is work of a device."""
        return bool(self.of(*DEVICE_WORK).any())

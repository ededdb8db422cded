"""Operation traces of pipeline-parallel training: ``trace-NAME.parquet`` and ``meta-NAME.yaml``.

The format that came with *Understanding Stragglers in Large Model Training Using What-if Analysis*
(arXiv 2505.05713). One row is one operation of one worker in one step. Times are seconds of the
worker's clock from the start of its step.
"""

from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from kansoku.errors import InputError

__all__ = ["COLUMNS", "OperationTrace", "find_trace", "read_operation_trace"]

COLUMNS: dict[str, pl.DataType] = {
    "dp_rank": pl.Int32(),
    "stage": pl.Int32(),  # pipeline rank
    "rank": pl.Int32(),
    "step": pl.Int64(),
    "optype": pl.String(),
    "seq_id": pl.Int32(),  # number among the operations of its type, worker and step
    "mc": pl.Int32(),  # model chunk of the stage; -1: none
    "mb_id": pl.Int32(),  # micro-batch; -1: none
    "gmc": pl.Int32(),  # model chunk of the model; -1: none
}
_TIMES = ("start_ts", "duration")
_MAX_META_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTrace:
    """The operations of one job."""

    name: str
    operations: pl.DataFrame
    """COLUMNS, with ``start_ts`` and ``duration`` in seconds, in the file's own float type."""
    meta: dict[str, int | str] = field(default_factory=dict)
    """Sizes such as ``dp_size``, ``pp_size``, ``dsp_size``, ``tp_size``; empty without a file."""
    missing: tuple[str, ...] = ()
    """What could not be used, one sentence each."""


def find_trace(path: Path) -> Path | None:
    """Return the one trace that ``path`` names, None if it is not of this format.

    Raises InputError if a folder holds several.
    """
    if path.is_file():
        return path if path.suffix == ".parquet" else None
    found = sorted(path.glob("trace-*.parquet")) if path.is_dir() else []
    if len(found) > 1:
        raise InputError(
            f"{len(found)} traces in one folder: {', '.join(file.name for file in found[:6])}",
            where=str(path),
            remedy=f"give one of them, such as {found[0]}",
        )
    return found[0] if found else None


def read_operation_trace(path: Path) -> OperationTrace:
    """Read one trace and the meta file beside it.

    Rows without a usable time are set aside and counted in ``missing``. Raises InputError if the
    file is not Parquet, lacks a column, or has no rows.
    """
    try:
        raw = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"not readable as Parquet: {error}", where=str(path)) from error
    absent = [name for name in (*COLUMNS, *_TIMES) if name not in raw.columns]
    if absent:
        raise InputError(
            f"columns missing: {', '.join(absent)}",
            where=str(path),
            remedy="expected " + ", ".join((*COLUMNS, *_TIMES)),
        )
    try:
        table = raw.select(
            *(pl.col(name).cast(kind) for name, kind in COLUMNS.items()),
            *(pl.col(name) if raw[name].dtype.is_float() else pl.col(name).cast(pl.Float64)
              for name in _TIMES),
        )  # fmt: skip
    except pl.exceptions.PolarsError as error:
        raise InputError(f"a column has the wrong type: {error}", where=str(path)) from error
    table = table.with_columns(pl.col("mc", "mb_id", "gmc").fill_null(-1))
    good = (
        pl.col("start_ts").is_finite()
        & pl.col("duration").is_finite()
        & (pl.col("duration") >= 0)
        & pl.all_horizontal(pl.col(name) >= 0 for name in ("dp_rank", "stage", "seq_id"))
        & pl.col("step").is_not_null()
        & pl.col("optype").is_not_null()
    )
    kept = table.filter(good)
    missing = []
    if len(kept) < len(table):
        missing.append(f"{len(table) - len(kept)} of {len(table)} rows have no usable time or rank")
    if kept.is_empty():
        raise InputError("no operations in it", where=str(path))
    name = path.stem.removeprefix("trace-")
    meta: dict[str, int | str] = {}
    meta_file = next(
        (one for end in ("yaml", "yml") if (one := path.with_name(f"meta-{name}.{end}")).is_file()),
        None,
    )
    if meta_file is None:
        missing.append(f"no meta-{name}.yaml beside it: sizes are taken from the rows")
    else:
        meta = _flat_yaml(meta_file)
    return OperationTrace(name=name, operations=kept, meta=meta, missing=tuple(missing))


def _flat_yaml(path: Path) -> dict[str, int | str]:
    """Return the ``key: value`` lines; the format has no others, so no YAML reader is needed."""
    with path.open("rb") as file:
        text = file.read(_MAX_META_BYTES).decode("utf-8", "replace")
    values: dict[str, int | str] = {}
    for line in text.splitlines():
        key, separator, value = line.split("#", 1)[0].partition(":")
        if separator and key.strip():
            word = value.strip().strip("'\"")
            values[key.strip()] = int(word) if word.isascii() and word.isdigit() else word
    return values

"""Operations as arrays: one node a (type, sequence, stage), one column a (step, dp rank)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.errors import InputError

__all__ = ["Node", "Operations", "operations_of"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation of the step's program; all steps and data-parallel ranks share it."""

    kind: str
    """Operation type, such as ``forward-compute``."""
    sequence: int
    stage: int
    chunk: int
    """Model chunk of the stage; -1: none."""
    model_chunk: int
    """Model chunk of the model; -1: none."""
    micro_batch: int
    """-1: none."""
    start_s: float
    """In the step and data-parallel rank that serve as the model."""
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Every node's time in every column; column = step index × dp size + dp rank."""

    nodes: tuple[Node, ...]
    steps: tuple[int, ...]
    dp_size: int
    start_s: Floats
    """``(nodes, columns)``."""
    end_s: Floats
    """``(nodes, columns)``."""
    ranks: npt.NDArray[np.int64]
    """``(dp, stages)``; -1: unknown."""
    missing: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """Pipeline size."""
        return max(node.stage for node in self.nodes) + 1

    @property
    def duration_s(self) -> Floats:
        """``(nodes, columns)``."""
        return self.end_s - self.start_s

    @property
    def columns(self) -> int:
        """Steps × data-parallel ranks."""
        return len(self.steps) * self.dp_size


_KEY = ("optype", "seq_id", "stage")


def operations_of(table: pl.DataFrame, *, source: str) -> Operations:
    """Arrange rows (see ``formats.operation_trace``) as arrays.

    The program is that of dp rank 0 in the first whole step. Steps that lack an operation, or have
    one twice, are left out and said. Raises InputError if no step is whole.
    """
    # Ends are computed in the file's own precision, so that ties are the ties its writer saw.
    table = table.with_columns(end_ts=pl.col("start_ts") + pl.col("duration"))
    dp_size = int(table["dp_rank"].max()) + 1  # type: ignore[arg-type]
    keys = table.select(*_KEY).unique().sort(*_KEY).with_row_index("node")
    table = table.join(keys, on=list(_KEY))
    # A program step holds every node that at least half of all cells hold.
    cells = table["step"].n_unique() * dp_size
    common = table.group_by("node").len().filter(pl.col("len") * 2 >= cells)["node"]
    rare = len(keys) - len(common)
    table = table.filter(pl.col("node").is_in(common.implode()))
    counts = (
        table.group_by("step")
        .agg(pl.len(), unique=pl.struct("node", "dp_rank").n_unique())
        .filter((pl.col("len") == len(common) * dp_size) & (pl.col("unique") == pl.col("len")))
    )
    steps = sorted(counts["step"].to_list())
    total = table["step"].n_unique()
    if not steps:
        raise InputError(
            "no step has the same operations on all data-parallel ranks",
            where=source,
            remedy="every worker's operations of a step are needed",
        )
    missing = []
    if len(steps) < total:
        missing.append(f"{total - len(steps)} of {total} steps lack operations and were left out")
    if rare:
        missing.append(f"{rare} operations occur in less than half of the steps and were left out")
    table = table.filter(pl.col("step").is_in(steps)).sort("node", "step", "dp_rank")
    shape = (len(common), len(steps) * dp_size)
    model = table.filter((pl.col("step") == steps[0]) & (pl.col("dp_rank") == 0)).sort("node")
    nodes = tuple(
        Node(
            kind=row["optype"],
            sequence=row["seq_id"],
            stage=row["stage"],
            chunk=row["mc"],
            model_chunk=row["gmc"],
            micro_batch=row["mb_id"],
            start_s=row["start_ts"],
            end_s=row["end_ts"],
        )
        for row in model.iter_rows(named=True)
    )
    ranks = np.full((dp_size, max(node.stage for node in nodes) + 1), -1, np.int64)
    for dp, stage, rank in table.select("dp_rank", "stage", "rank").unique().iter_rows():
        ranks[dp, stage] = -1 if rank is None else rank
    return Operations(
        nodes=nodes,
        steps=tuple(steps),
        dp_size=dp_size,
        start_s=table["start_ts"].to_numpy().astype(np.float64).reshape(shape),
        end_s=table["end_ts"].to_numpy().astype(np.float64).reshape(shape),
        ranks=ranks,
        missing=tuple(missing),
    )

"""Layouts: how a job is split over its GPUs, singly and as columns."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kansoku.errors import InputError

__all__ = ["RECOMPUTE", "SCHEDULES", "Layout", "LayoutColumns", "Training"]

RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "zero_bubble")
PRECISIONS = ("bf16", "fp16", "fp8")
ATTENTION = ("flash", "unfused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to split a job."""

    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data-parallel replicas."""
    cp: int = 1
    """Context-parallel size."""
    ep: int = 1
    """Expert-parallel size, a divisor of dp x cp."""
    vp: int = 1
    """Interleaved model chunks a stage."""
    micro_batch: int = 1
    """Sequences of a micro-batch."""
    recompute: str = "none"
    """``none``, ``selective`` (attention core) or ``full`` (whole layers)."""
    zero: int = 0
    """0 plain, 1 optimizer states sharded (distributed optimizer), 2 gradients too, 3 weights
    too (FSDP)."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "vp", "micro_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1")
        if self.recompute not in RECOMPUTE:
            raise InputError(
                f"unknown recomputation {self.recompute!r}", remedy=f"{', '.join(RECOMPUTE)}"
            )
        if self.zero not in {0, 1, 2, 3}:
            raise InputError(f"--zero must be 0 to 3, not {self.zero}")

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.tp * self.pp * self.dp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What all layouts of one comparison share."""

    global_batch: int
    """Sequences of a step."""
    seq: int
    precision: str
    """Of the matrix products: ``bf16``, ``fp16`` or ``fp8``."""
    attention: str = "flash"
    sequence_parallel: bool = True
    """Norms and dropout are split over the tensor-parallel group."""
    schedule: str = "1f1b"
    grad_bytes: int = 4
    """Bytes of a gradient in the accumulation buffer: 4 or 2."""

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.seq < 1:
            raise InputError("global batch and sequence length must be at least 1")
        for name, value, known in (
            ("precision", self.precision, PRECISIONS),
            ("attention", self.attention, ATTENTION),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise InputError(f"unknown {name} {value!r}", remedy=f"one of {', '.join(known)}")
        if self.grad_bytes not in {2, 4}:
            raise InputError(f"gradients take 2 or 4 bytes, not {self.grad_bytes}")

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq


Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutColumns:
    """Many layouts, one integer column a field, all of one length; recompute as its index."""

    tp: Column
    pp: Column
    dp: Column
    cp: Column
    ep: Column
    vp: Column
    micro_batch: Column
    recompute: Column
    zero: Column

    def __len__(self) -> int:
        return len(self.tp)

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Self:
        """Turn layouts into columns."""
        columns = {
            f.name: np.array([getattr(x, f.name) for x in layouts])
            for f in fields(Layout)
            if f.name != "recompute"
        }
        columns["recompute"] = np.array([RECOMPUTE.index(x.recompute) for x in layouts])
        return cls(**{name: column.astype(np.int64) for name, column in columns.items()})

    def take(self, keep: NDArray[np.bool_] | NDArray[np.int64]) -> Self:
        """Return the rows of a mask or an index."""
        return type(self)(**{f.name: getattr(self, f.name)[keep] for f in fields(self)})

    def row(self, index: int) -> Layout:
        """Return one row as a record."""
        values = {f.name: int(getattr(self, f.name)[index]) for f in fields(self)}
        recompute = RECOMPUTE[values.pop("recompute")]
        return Layout(recompute=recompute, **values)

    def micro_batches(self, global_batch: int) -> Column:
        """Micro-batches that one replica runs in a step."""
        return global_batch // (self.dp * self.micro_batch)

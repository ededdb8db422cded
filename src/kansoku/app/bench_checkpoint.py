"""Write and read training checkpoints: bandwidth, the stall a step sees, the work at risk."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kansoku.bench.edge.launch import launch_ranks, need_memory
from kansoku.errors import InputError, PlatformError
from kansoku.view import Block, Column, Facts, Sentence, Table, Tone, View

__all__ = ["METHODS", "CheckpointMethod", "CheckpointReport", "bench_checkpoint"]

SCHEMA = "kansoku.bench.checkpoint/1"
METHODS = ("dcp", "plain")
_MODULE = "kansoku.bench.edge.checkpoint_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMethod:
    """One way to write, medians over its repetitions."""

    method: str
    """``dcp`` (torch.distributed.checkpoint) or ``plain`` (torch.save, a file a rank)."""
    bytes: int
    stall_s: float
    """How long the step waits: until the save call returns on every rank."""
    durable_s: float
    """Until the storage has it."""
    read_s: float
    wrong_tensors: int

    @property
    def write_bytes_per_s(self) -> float:
        """Bytes per second until durable."""
        return self.bytes / self.durable_s

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes per second read back."""
        return self.bytes / self.read_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """All methods on one path."""

    path: str
    ranks: int
    interval_s: float
    mttf_s: float | None
    methods: tuple[CheckpointMethod, ...]

    def overhead(self, method: CheckpointMethod) -> float:
        """Return the share of the time that stalls take at the given interval."""
        return method.stall_s / (self.interval_s + method.stall_s)

    def lost_s(self, method: CheckpointMethod) -> float:
        """Return the work lost by one failure on average: half an interval, then reading back."""
        return (self.interval_s + method.stall_s) / 2 + method.read_s

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer."""
        return {
            "schema": SCHEMA,
            "path": self.path,
            "ranks": self.ranks,
            "interval_s": self.interval_s,
            "methods": [
                {
                    "method": m.method,
                    "bytes": m.bytes,
                    "stall_s": m.stall_s,
                    "durable_s": m.durable_s,
                    "read_s": m.read_s,
                    "write_bytes_per_s": m.write_bytes_per_s,
                    "read_bytes_per_s": m.read_bytes_per_s,
                    "overhead_ratio": self.overhead(m),
                    "lost_work_s": self.lost_s(m),
                    "best_interval_s": self.best_interval_s(m),
                    "wrong_tensors": m.wrong_tensors,
                }
                for m in self.methods
            ],
        }

    def best_interval_s(self, method: CheckpointMethod) -> float | None:
        """Return Young's interval √(2 × stall × MTTF); None without a mean time to failure."""
        return None if self.mttf_s is None else (2 * method.stall_s * self.mttf_s) ** 0.5

    def view(self) -> View:
        """Return what a person reads."""
        names = (
            "GiB", "stall s", "durable s", "write MB/s", "read MB/s", "overhead %", "lost work s",
            "best interval s",
        )  # fmt: skip
        blocks: list[Block] = [
            Facts(
                items=[
                    ("path", self.path),
                    ("ranks", str(self.ranks)),
                    ("interval", f"{self.interval_s:g} s"),
                ]
            ),
            Table(
                title="Checkpoints",
                columns=[
                    Column(title="method"), *(Column(title=n, numeric=True) for n in names)
                ],
                rows=[
                    (
                        m.method, f"{m.bytes / 2**30:.3f}", f"{m.stall_s:.3f}",
                        f"{m.durable_s:.3f}", f"{m.write_bytes_per_s / 1e6:,.1f}",
                        f"{m.read_bytes_per_s / 1e6:,.1f}", f"{100 * self.overhead(m):.2f}",
                        f"{self.lost_s(m):,.1f}",
                        None if self.mttf_s is None else f"{self.best_interval_s(m):,.0f}",
                    )
                    for m in self.methods
                ],
                note="Reads come after the page cache was asked to forget the files; what the "
                "storage itself caches stays.",
            ),
        ]  # fmt: skip
        blocks += [
            Sentence(text=f"{m.method}: {m.wrong_tensors} tensors came back changed", tone=Tone.BAD)
            for m in self.methods
            if m.wrong_tensors
        ]
        return View(title="Checkpoint storage", blocks=blocks)


def bench_checkpoint(
    path: Path,
    *,
    nbytes: int,
    ranks: int = 2,
    methods: Sequence[str] = METHODS,
    repetitions: int = 3,
    interval_s: float = 1800.0,
    mttf_s: float | None = None,
) -> CheckpointReport:
    """Write ``nbytes`` from ``ranks`` ranks below ``path``, read them back, compare.

    Raises InputError for a path that cannot be written or too little free space: the benchmark
    never fills a file system. It writes into one new folder ``kansoku-checkpoint-…`` and removes
    it, however it ends; only SIGKILL leaves it.
    """
    if unknown := set(methods) - set(METHODS):
        raise InputError(f"unknown method {', '.join(unknown)}", remedy=f"of {', '.join(METHODS)}")
    if not path.is_dir():
        raise InputError(
            "no such folder", where=str(path), remedy="name a folder on the storage to measure"
        )
    free = shutil.disk_usage(path).free
    if free < 2 * nbytes:
        raise InputError(
            f"{free / 2**30:,.3f} GiB free, {2 * nbytes / 2**30:,.3f} GiB wanted",
            where=str(path),
            remedy="a smaller --size or another path",
        )
    # A rank holds its tensors, what it reads back, and one tensor on its way.
    need_memory(2.2 * nbytes, f"a checkpoint of {nbytes / 2**30:,.3f} GiB")
    try:
        folder = Path(tempfile.mkdtemp(prefix="kansoku-checkpoint-", dir=path))
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="another path, or another user",
        ) from None
    try:
        result = launch_ranks(
            _MODULE,
            [
                "--path", str(folder), "--bytes", str(nbytes), "--methods", ",".join(methods),
                "--repetitions", str(repetitions),
            ],
            ranks=ranks, timeout_s=3600,
        )  # fmt: skip
    except PlatformError as error:
        # torch speaks of stream positions where the disk is full.
        left = shutil.disk_usage(path).free
        if left >= nbytes:
            raise
        raise PlatformError(
            f"the file system filled up ({left / 2**20:,.1f} MiB are left): {error.message}",
            where=str(path),
            remedy="free space, a smaller --size or another path",
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = []
    for method in methods:
        rows = [row for row in result["rows"] if row["method"] == method]
        found.append(
            CheckpointMethod(
                method=method,
                bytes=rows[0]["bytes"],
                stall_s=median(row["stall_s"] for row in rows),
                durable_s=median(row["durable_s"] for row in rows),
                read_s=median(row["read_s"] for row in rows),
                wrong_tensors=sum(row["wrong_tensors"] for row in rows),
            )
        )
    return CheckpointReport(
        path=str(path), ranks=ranks, interval_s=interval_s, mttf_s=mttf_s, methods=tuple(found)
    )

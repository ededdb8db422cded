"""Sweep collectives over sizes, fit α and β, write what the planner reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kansoku.bench.collectives import (
    OPERATIONS,
    CollectivePoint,
    LinkFit,
    bus_factor,
    fit_link,
)
from kansoku.bench.edge.launch import launch_ranks, need_memory
from kansoku.errors import InputError
from kansoku.view import Block, Column, Facts, Line, Sentence, Series, Table, Tone, View

__all__ = ["CollectiveSweep", "collectives", "parse_size", "parse_sizes", "write_links"]

SCHEMA = "kansoku.bench.collectives/1"
_MODULE = "kansoku.bench.edge.collectives_worker"
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_MOST_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSweep:
    """Everything measured, with its environment."""

    backend: str
    device: str
    torch_version: str
    nodes: int
    points: tuple[CollectivePoint, ...]
    fits: tuple[LinkFit, ...]
    unfitted: tuple[str, ...]
    """``operation: why``."""

    def links(self) -> dict[str, Any]:
        """Return the file that ``kansoku plan --links`` reads: one link, from the all-reduce."""
        fit = next((f for f in self.fits if f.operation == "all_reduce"), None)
        fit = fit or next(iter(self.fits), None)
        if fit is None:
            raise InputError("no operation could be fitted", remedy="sweep three sizes at least")
        link = {"alpha_s": fit.alpha_s, "beta_bytes_per_s": fit.beta_bytes_per_s}
        where = f"{self.backend}, {fit.ranks} ranks, {self.device}"
        return {
            "links": {"scale_out" if self.nodes > 1 else "scale_up": link},
            "source": f"kansoku bench collectives: {where}",
        }

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer."""
        return {
            "schema": SCHEMA,
            "backend": self.backend,
            "device": self.device,
            "torch": self.torch_version,
            "nodes": self.nodes,
            "points": [
                {
                    "operation": p.operation,
                    "ranks": p.ranks,
                    "bytes": p.bytes,
                    "median_us": p.seconds * 1e6,
                    "p95_us": p.p95_seconds * 1e6,
                    "algbw_bytes_per_s": p.algbw,
                    "busbw_bytes_per_s": p.busbw,
                }
                for p in self.points
            ],
            "fits": [
                {
                    "operation": f.operation,
                    "ranks": f.ranks,
                    "alpha_s": f.alpha_s,
                    "beta_bytes_per_s": f.beta_bytes_per_s,
                    "relative_error": f.relative_error,
                }
                for f in self.fits
            ],
            "unfitted": list(self.unfitted),
        }

    def view(self) -> View:
        """Return tables and curves."""
        blocks: list[Block] = [
            Facts(
                items=[
                    ("backend", f"{self.backend}, torch {self.torch_version}"),
                    ("device", self.device),
                    ("ranks", f"{self.points[0].ranks} on {self.nodes} node(s)"),
                ]
            ),
            Table(
                title="Sweep",
                columns=[
                    Column(title="operation"),
                    *(
                        Column(title=t, numeric=True)
                        for t in ("bytes", "median µs", "p95 µs", "alg. MB/s", "bus MB/s")
                    ),
                ],
                rows=[
                    (
                        p.operation, f"{p.bytes:,}", f"{p.seconds * 1e6:,.1f}",
                        f"{p.p95_seconds * 1e6:,.1f}", f"{p.algbw / 1e6:,.1f}",
                        f"{p.busbw / 1e6:,.1f}",
                    )
                    for p in self.points
                ],
                note="Bandwidths as nccl-tests defines them; the slowest rank's time counts.",
            ),
            Table(
                title="Fit: time = steps × α + bytes / β",
                columns=[
                    Column(title="operation"),
                    *(Column(title=t, numeric=True) for t in ("α µs", "β MB/s", "median error %")),
                ],
                rows=[
                    (
                        f.operation, f"{f.alpha_s * 1e6:.2f}", f"{f.beta_bytes_per_s / 1e6:,.1f}",
                        f"{100 * f.relative_error:.1f}",
                    )
                    for f in self.fits
                ],
            ),
            Series(
                title="Bus bandwidth",
                x_title="bytes",
                y_title="MB/s",
                log_x=True,
                lines=[
                    Line(
                        name=operation,
                        x=[float(p.bytes) for p in self.points if p.operation == operation],
                        y=[p.busbw / 1e6 for p in self.points if p.operation == operation],
                    )
                    for operation in dict.fromkeys(p.operation for p in self.points)
                ],
            ),
        ]  # fmt: skip
        blocks += [Sentence(text=text, tone=Tone.NOTICE) for text in self.unfitted]
        return View(title="Collectives", blocks=blocks)


def parse_sizes(text: str) -> list[int]:
    """Read ``4k,1m`` or ``4k-64m`` (doubling); raise InputError for anything else."""

    def one(part: str) -> int:
        body, unit = part.strip().lower().removesuffix("b"), ""
        if body and body[-1] in "kmg":
            body, unit = body[:-1], body[-1]
        if not (body.isascii() and body.isdigit()) or int(body) == 0:
            raise InputError(
                f"{part!r} in {text!r} is no size", remedy="such as 4k, 1m, 256m or 4k-64m"
            )
        size = int(body) * _UNITS[unit]
        if size > _MOST_BYTES:
            raise InputError(f"{part!r} is above an exbibyte", remedy="a smaller size")
        return size

    sizes: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not dash:
            sizes.append(one(part))
            continue
        size, last = one(low), one(high)
        if size > last:
            raise InputError(f"{part!r} goes down", remedy=f"{high.strip()}-{low.strip()}")
        while size <= last:
            sizes.append(size)
            size *= 2
    return sorted(set(sizes))


def parse_size(text: str) -> int:
    """Read one size such as ``256m``."""
    if not {",", "-"}.isdisjoint(text):
        raise InputError(f"{text!r} is not one size", remedy="such as 256m or 4g")
    return parse_sizes(text)[0]


def collectives(
    *,
    ranks: int,
    sizes: Sequence[int],
    operations: Sequence[str] = OPERATIONS,
    repetitions: int = 20,
    launcher: Sequence[str] = (),
    timeout_s: float = 600.0,
) -> CollectiveSweep:
    """Measure collectives between ``ranks`` local ranks (or those that ``launcher`` starts)."""
    for operation in operations:
        bus_factor(operation, max(ranks, 2))
    if ranks < 2:
        raise InputError(f"collectives need two ranks at least, not {ranks}")
    if not launcher:
        # Input and output of the full size on every rank.
        need_memory(2.2 * ranks * max(sizes), f"{max(sizes):,} bytes on {ranks} ranks")
    result = launch_ranks(
        _MODULE,
        [
            "--operations", ",".join(operations), "--sizes", ",".join(map(str, sizes)),
            "--repetitions", str(repetitions),
        ],
        ranks=ranks, launcher=launcher, timeout_s=timeout_s,
    )  # fmt: skip
    points = tuple(CollectivePoint(**row) for row in result["points"])
    fits, unfitted = [], []
    for operation in dict.fromkeys(p.operation for p in points):
        try:
            fits.append(fit_link([p for p in points if p.operation == operation]))
        except InputError as error:
            unfitted.append(f"{operation}: {error}")
    return CollectiveSweep(
        backend=result["backend"],
        device=result["device"],
        torch_version=result["torch"],
        nodes=result["nodes"],
        points=points,
        fits=tuple(fits),
        unfitted=tuple(unfitted),
    )


def write_links(sweep: CollectiveSweep, path: Path) -> None:
    """Write the planner's link file."""
    text = json.dumps(sweep.links(), indent=1) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="another --links",
        ) from None

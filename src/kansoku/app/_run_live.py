"""The line that says how the running job does, read from the rings' headers and newest records."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from kansoku.app._late_rank import late_rank
from kansoku.catalog.accelerators import accelerators
from kansoku.formats.run_directory import RECORD, open_ring
from kansoku.model import ring
from kansoku.model.mfu import live_mfu
from kansoku.trace.throughput import whole_steps

__all__ = ["LiveLine", "RankNow"]

_WINDOW_NS = 10_000_000_000
_BLOCK = 1024
_MOST_TRAININGS = 8
_COUNT = np.uint64((1 << ring.LANE_SHIFT) - 1)
_STEP, _WAIT = ring.KIND_CODES["step"], ring.KIND_CODES["collective_wait"]
_STEPS = {"rank": pl.Int32, "step": pl.Int32, "start_ns": pl.Int64, "duration_ns": pl.Int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNow:
    """One rank within the window."""

    rank: int
    step: int
    steps: tuple[tuple[int, int, int], ...]
    """Number, start (monotonic) and duration, ns, of the steps that ended within the window."""
    wait_ratio: float
    """Part of the window in which its main thread waited for collectives."""
    tokens: float | None
    flops: float | None
    device: str | None


class LiveLine:
    """Reads the rings of one node again and again."""

    def __init__(self, ring_dir: Path, peak: Mapping[str, Any] | None):
        self._ring_dir = ring_dir
        self._peak = peak or {}

    def read(self, now_ns: int) -> str | None:
        """Return the line, None before the first step has ended."""
        try:
            files = sorted(self._ring_dir.glob("*.ring"))
        except OSError:
            return None
        ranks = [found for file in files if (found := _rank_now(file, now_ns)) is not None]
        return describe(ranks, self._peak)


def describe(ranks: list[RankNow], peak: Mapping[str, Any]) -> str | None:
    """Return the line for these ranks; None where no step has ended in the window."""
    timed = [rank for rank in ranks if rank.steps]
    if len({rank.rank for rank in timed}) < len(timed):  # no step is common to them
        steps = ", ".join(str(rank.step) for rank in timed[:_MOST_TRAININGS])
        more = " …" if len(timed) > _MOST_TRAININGS else ""
        return f"{len(timed)} trainings at once · steps {steps}{more}"
    step_s = _step_s(timed)
    if step_s is None:
        return None
    parts = [f"step {max(rank.step for rank in ranks)}", f"{step_s * 1e3:.1f} ms"]
    tokens = [rank.tokens for rank in timed if rank.tokens]
    if tokens:
        parts.append(f"{sum(tokens) / step_s:,.0f} tokens/s on this node")
    flops = sum(rank.flops or 0.0 for rank in timed)
    total = _peak_of(timed, peak)
    if flops and total:
        mfu = live_mfu(flops, step_s, total)
        parts.append("no MFU: the peak is too low" if mfu is None else f"MFU {100 * mfu:.1f} %")
    slowest = late_rank({rank.rank: rank.wait_ratio for rank in timed})
    parts.append(f"slowest rank {slowest}" if slowest is not None else "no rank stands out")
    return " · ".join(parts)


def _step_s(ranks: list[RankNow]) -> float | None:
    """Return what a step of the job takes on average: the ranks of a node share one clock."""
    rows = [(rank.rank, *step) for rank in ranks for step in rank.steps]
    steps = pl.DataFrame(rows, schema=_STEPS, orient="row").with_columns(
        complete=pl.lit(value=True)
    )
    if len(later := steps.filter(pl.col("step") > 0)):
        steps = later  # the first one holds what is done once
    # While they are read some ranks have ended one more: its last end is not known yet.
    mean = whole_steps(steps)["duration_ns"].mean()
    if not isinstance(mean, int | float) or mean <= 0:
        mean = steps["duration_ns"].mean()
    return mean / 1e9 if isinstance(mean, int | float) and mean > 0 else None


def _peak_of(ranks: list[RankNow], peak: Mapping[str, Any]) -> float | None:
    """Return the peak of the devices seen; None where one is unknown."""
    if all(rank.device == "cpu" for rank in ranks):
        value = peak.get("flops")
        return float(value) if isinstance(value, float) else None
    total = 0.0
    for rank in ranks:
        name = (rank.device or "").lower()
        found = next(
            (a for a in accelerators().values() if any(alias in name for alias in a.aliases)), None
        )
        if found is None or "bf16" not in found.peak_flops:
            return None
        total += found.peak("bf16")
    return total


def _rank_now(file: Path, now_ns: int) -> RankNow | None:
    try:
        buffer, header = open_ring(file)
        with buffer:
            return _from_buffer(buffer, header, now_ns)
    except (OSError, ValueError, ring.RingError):
        return None


def _since(
    buffer: mmap.mmap, lane: ring.Lane, since_ns: int
) -> tuple[np.ndarray[Any, Any], int | None]:
    """Return the steps and waits that started after a time, and when the first of all records did.

    They are looked for from the newest back, and only they are copied whole: the window is a small
    part of a lane, and the caches are the job's.
    """
    raw = np.frombuffer(buffer, f"V{ring.RECORD_BYTES}", lane.capacity, lane.offset)
    records = raw.view(RECORD)
    newest = _newest(records, lane.head)
    found, first = [raw[:0]], None
    for block in range(-(-lane.capacity // _BLOCK)):
        length = min(_BLOCK, lane.capacity - block * _BLOCK)
        last = newest - block * _BLOCK
        places = np.arange(last - length, last) % lane.capacity
        starts = records["start_ns"][places]  # take would copy the whole column first
        fresh = starts > since_ns
        if fresh.any():
            first = int(starts[fresh].min())
        kinds = records["kind"][places]
        found.append(raw[places[fresh & ((kinds == _STEP) | (kinds == _WAIT))]])
        if fresh.sum() < length // 2:
            break
    rows = np.concatenate(found).view(RECORD)
    del raw, records, found  # the map closes when no array looks at it
    return rows[(rows["start_ns"] > since_ns) & (rows["id"] == rows["id_again"])], first


def _newest(records: np.ndarray[Any, Any], head: int) -> int:
    """Return the newest n: the writer notes it now and then, and goes on in order."""
    count = _BLOCK // 4
    while True:
        count = min(count, len(records))
        places = np.arange(head, head + count)
        ids = records["id"][places % len(records)]
        follows = ids & _COUNT == (places + 1).view(np.uint64)
        if not follows.all():
            return head + int(follows.argmin())
        if count == len(records):
            return head + count
        count *= 4


def _from_buffer(buffer: mmap.mmap, header: ring.Header, now_ns: int) -> RankNow:
    facts = ring.read_facts(buffer, header)
    since = now_ns - _WINDOW_NS
    waited = 0
    steps: list[tuple[int, int, int]] = []
    first = now_ns
    for lane in header.lanes:
        fresh, begun = _since(buffer, lane, since)
        first = first if begun is None else min(first, begun)
        closed = fresh[fresh["duration_ns"] >= 0]
        waits = closed[closed["kind"] == _WAIT]
        waited += int(waits["duration_ns"].sum())
        ended = closed[closed["kind"] == _STEP]
        ended = ended[(ended["flags"] & ring.FLAG_INCOMPLETE) == 0]
        steps += ended[["step", "start_ns", "duration_ns"]].tolist()
    tokens, flops = facts.get("tokens_per_step"), facts.get("model_flops_per_step")
    device = facts.get("device")
    return RankNow(
        rank=header.rank or 0,
        step=header.step or 0,
        steps=tuple(steps),
        wait_ratio=waited / max(now_ns - first, 1),
        tokens=tokens if isinstance(tokens, float) else None,
        flops=flops if isinstance(flops, float) else None,
        device=device if isinstance(device, str) else None,
    )

"""The lines of a run's ranks, and its rate, from step rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.app._late_rank import late_rank
from kansoku.model import PHASES, Phase
from kansoku.model.mfu import live_mfu
from kansoku.trace.throughput import whole_steps

__all__ = [
    "RECENT_STEPS",
    "RankLine",
    "lines_of",
    "medians_of",
    "mfu_of",
    "middle_ms",
    "rank_lines",
    "slowest_s",
    "tokens_per_s",
]

Ints: TypeAlias = npt.NDArray[np.int64]
RECENT_STEPS = 60
"""A rank is summed up over that many of its newest steps at most."""
_NEWEST_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """One rank over its newest steps."""

    rank: int
    node: str
    step: int
    step_ms: float
    """Median of the newest steps."""
    phases: dict[Phase, float]
    """Share of each phase in the newest steps; they sum to 1."""
    trend: Sequence[float]
    """Duration of the newest steps, ms, oldest first."""
    late: bool = False
    """The others wait for it."""


def rank_lines(steps: pl.DataFrame, nodes: dict[int, str]) -> tuple[RankLine, ...]:
    """Sum up each rank's newest complete steps; ``steps`` follow the steps table."""
    done = steps.filter(pl.col("complete") & pl.col("rank").is_not_null())
    if done.is_empty():
        return ()
    # By hand: sorting and listing a hundred thousand rows by queries costs four times as much.
    rank, step = done["rank"].to_numpy().astype(np.int64), done["step"].to_numpy().astype(np.int64)
    # One key and a stable sort: rows come nearly in order, which a merge finds.
    order = np.argsort((rank << 32) + step, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(rank[order])) + 1, len(order))
    firsts = np.maximum(np.append(0, ends[:-1]), ends - RECENT_STEPS)
    sizes = ends - firsts
    starts = np.cumsum(sizes) - sizes
    taken = order[np.repeat(firsts - starts, sizes) + np.arange(sizes.sum())]
    took_ns = done["duration_ns"].to_numpy()[taken]
    names = [f"{phase.value}_ns" for phase in PHASES]
    columns = (took_ns, *(done[name].fill_null(0).to_numpy()[taken] for name in names))
    sums = np.stack([np.add.reduceat(column, starts) for column in columns])
    table = np.full((len(starts), RECENT_STEPS), np.inf)
    row = np.repeat(np.arange(len(starts)), sizes)
    table[row, np.arange(len(took_ns)) - starts[row]] = took_ns
    last = order[ends - 1]
    return lines_of(rank[last], step[last], sizes, took_ns, sums, medians_of(table, sizes), nodes)


def lines_of(
    ranks: Ints,
    steps: Ints,
    sizes: Ints,
    took_ns: npt.NDArray[Any],
    sums_ns: npt.NDArray[Any],
    middle_ns: npt.NDArray[np.float64],
    nodes: dict[int, str],
    /,
) -> tuple[RankLine, ...]:
    """Return a line a rank.

    ``ranks``, ``steps`` (its newest), ``sizes`` (how many steps are summed up) and ``middle_ns``
    (their median) have an entry a rank; ``took_ns`` holds the steps' durations, rank by rank;
    ``sums_ns`` is ``(1 + phases, ranks)``, the durations' first.
    """
    numbers = ranks.tolist()
    shares = (sums_ns[1:] / np.maximum(sums_ns[0], 1)).T.tolist()
    ends = np.cumsum(sizes)
    # Views: a thousand ranks' trends as numbers of their own cost more than all else here.
    trend_ms: memoryview[Any] = np.asarray(took_ns / 1e6, np.float64).data
    lines = zip(
        numbers, steps.tolist(), (middle_ns / 1e6).tolist(), shares,
        (ends - sizes).tolist(), ends.tolist(), strict=True,
    )  # fmt: skip
    wait = PHASES.index(Phase.COLLECTIVE)
    late = late_rank(
        {rank: share[wait] for rank, share in zip(ranks.tolist(), shares, strict=True)}
    )
    return tuple(
        RankLine(
            rank=rank,
            node=nodes.get(rank, ""),
            step=step,
            step_ms=step_ms,
            phases=dict(zip(PHASES, share, strict=True)),
            trend=trend_ms[first:end],
            late=rank == late,
        )
        for rank, step, step_ms, share, first, end in lines
    )


def medians_of(table: npt.NDArray[np.float64], sizes: Ints) -> npt.NDArray[np.float64]:
    """Return the median of each row, which holds that many numbers and infinity else."""
    table.sort(axis=1)
    each = np.arange(len(table))
    middle: npt.NDArray[np.float64] = (table[each, (sizes - 1) // 2] + table[each, sizes // 2]) / 2
    return middle


def _last_of_ranks(steps: pl.DataFrame, name: str) -> pl.Series:
    """Return each rank's newest known value of a column."""
    known = steps.filter(pl.col(name).is_not_null())
    last = known["step"].max()
    if isinstance(last, int):
        # A thirtieth of the rows tells the same, unless a rank is that far behind.
        newest = known.filter(pl.col("step") > last - _NEWEST_STEPS)
        if newest["rank"].n_unique() == known["rank"].n_unique():
            known = newest
    return known.group_by("rank").agg(pl.col(name).get(pl.col("step").arg_max()))[name]


def tokens_per_s(steps: pl.DataFrame, lines: tuple[RankLine, ...]) -> float | None:
    """Return the tokens of all ranks' newest steps over a step of the job; None if unknown."""
    newest = _last_of_ranks(steps, "tokens")
    if newest.is_empty() or not lines:
        return None
    step_s = _step_s(steps, lines)
    return float(newest.sum()) / step_s if step_s else None


def mfu_of(steps: pl.DataFrame, lines: tuple[RankLine, ...], peak: float | None) -> float | None:
    """Return the FLOPs of all ranks' newest steps over those of a step at peak, 0-1, or None."""
    newest = _last_of_ranks(steps, "flops")
    # A sum over some of the ranks only would be too low.
    if not lines or not peak or len(newest) < len(lines):
        return None
    return live_mfu(float(newest.sum()), _step_s(steps, lines), peak)


def _step_s(steps: pl.DataFrame, lines: tuple[RankLine, ...]) -> float:
    """Return what a step of the job takes, over its newest ones; the slowest rank's without any."""
    timed = steps.filter(pl.col("complete") & pl.col("rank").is_not_null())
    mean = whole_steps(timed).tail(RECENT_STEPS)["duration_ns"].mean()
    if isinstance(mean, int | float):
        return mean / 1e9
    return slowest_s(lines)


def slowest_s(lines: tuple[RankLine, ...]) -> float:
    """Return the slowest rank's step; seconds."""
    return max(line.step_ms for line in lines) / 1e3


def middle_ms(lines: tuple[RankLine, ...]) -> float | None:
    """Return the ranks' median step; None without any."""
    times = sorted(line.step_ms for line in lines)
    return times[len(times) // 2] if times else None

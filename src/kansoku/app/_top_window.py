"""The newest minute of a run's steps, kept between pictures: a second adds to it what is new.

Ranks go down, steps across, one matrix a column. Sums and medians over it cost a tenth of sorting
the minute's rows anew. Where rows do not fit such a matrix (a step done twice after a restart, an
unfinished one, step numbers far apart), the rows themselves are kept and summed up as ever.
"""

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from kansoku.app._top_ranks import (
    RECENT_STEPS,
    Ints,
    RankLine,
    lines_of,
    medians_of,
    rank_lines,
    slowest_s,
    tokens_per_s,
)
from kansoku.model import PHASES

__all__ = ["STEP_COLUMNS", "RankWindow", "RecentSteps"]

STEP_COLUMNS = ("rank", "step", "start_ns", "duration_ns", "complete", "tokens",
                *(f"{phase.value}_ns" for phase in PHASES))  # fmt: skip
_ALWAYS_KNOWN = ("rank", "step", "start_ns", "duration_ns")
_MOST_CELLS = 1 << 20
"""100 MB of matrices: 4,096 ranks of steps of a quarter of a second."""
_SPARE_STEPS = 64


class RankWindow:
    """Steps by rank and number, each done once and to its end."""

    def __init__(self, ranks: Ints, first_step: int, room: int) -> None:
        """Make room for some steps of these ranks, whose numbers ascend."""
        shape = (len(ranks), room)
        self._ranks = ranks
        self._first_step = first_step
        self._used = 0
        self._known = np.zeros(shape, np.bool_)
        # Where nothing is known these are zero, so that sums need no mask.
        self._start_ns = np.zeros(shape, np.int64)
        self._took_ns = np.zeros((1 + len(PHASES), *shape), np.int64)
        self._tokens = np.full(shape, np.nan)

    @classmethod
    def of(cls, steps: pl.DataFrame) -> "RankWindow | None":
        """Return the rows as a window, with room for half as many again; None if they don't fit."""
        if steps.is_empty() or not _plain(steps):
            return None
        ranks, numbers = np.unique(_ints(steps, "rank")), _ints(steps, "step")
        first = int(numbers.min())
        span = int(numbers.max()) - first + 1
        room = span + span // 2 + _SPARE_STEPS
        if len(ranks) * span > 4 * len(steps) or len(ranks) * room > _MOST_CELLS:
            return None
        window = cls(ranks, first, room)
        return window if window.add(steps) else None

    def add(self, steps: pl.DataFrame) -> bool:
        """Take rows, known ones among them; False where they don't fit: the window is void then."""
        if steps.is_empty():
            return True
        if not _plain(steps):
            return False
        rank, column = _ints(steps, "rank"), _ints(steps, "step") - self._first_step
        row = np.searchsorted(self._ranks, rank)
        room = self._known.shape[1]
        if int(column.min()) < 0 or int(column.max()) >= room or int(row.max()) >= len(self._ranks):
            return False
        if (self._ranks[row] != rank).any():
            return False
        at = row * room + column
        if len(np.unique(at)) < len(at):
            return False
        start_ns = _ints(steps, "start_ns")
        if (self._known.flat[at] & (self._start_ns.flat[at] != start_ns)).any():
            return False  # done twice: the rank was started again
        self._known.flat[at] = True
        self._start_ns.flat[at] = start_ns
        self._tokens.flat[at] = steps["tokens"].fill_null(np.nan).to_numpy()
        names = ("duration_ns", *(f"{phase.value}_ns" for phase in PHASES))
        for matrix, name in zip(self._took_ns, names, strict=True):
            matrix.flat[at] = _ints(steps, name)
        self._used = max(self._used, int(column.max()) + 1)
        return True

    def forget(self, before_ns: int) -> None:
        """Let go of steps that began before then."""
        gone = self._known & (self._start_ns < before_ns)
        if gone.any():
            self._known[gone] = False
            self._start_ns[gone] = 0
            self._took_ns[:, gone] = 0
            self._tokens[gone] = np.nan

    def missing_from_ns(self, late_ns: int) -> int | None:
        """Return when the first step began, at the earliest, that may still arrive.

        Each rank's steps arrive in order, so none is missing up to the newest of the rank that is
        furthest behind, a rank silent for ``late_ns`` aside. None where a rank lacks a step
        between its others: they came out of order.
        """
        known = self._known[:, : self._used]
        seen = known.any(axis=1)
        if not seen.any():
            return None
        known = known[seen]
        first, last = known.argmax(axis=1), self._used - known[:, ::-1].argmax(axis=1)
        if (known.sum(axis=1) < last - first).any():
            return None
        newest: Ints = self._start_ns[seen].max(axis=1)
        return int(newest[newest >= newest.max() - late_ns].min()) + 1

    def newest_ns(self) -> int | None:
        """Return when the newest step began; None without any."""
        return int(self._start_ns.max()) or None

    def lines(self, nodes: dict[int, str]) -> tuple[RankLine, ...]:
        """Return what :func:`rank_lines` returns of the same rows."""
        known, took_ns = self._known[:, : self._used], self._took_ns[:, :, : self._used]
        counts = known.sum(axis=1)
        if not counts.all():
            seen = counts > 0
            known, took_ns, counts = known[seen], took_ns[:, seen], counts[seen]
            ranks = self._ranks[seen]
        else:
            ranks = self._ranks
        if not len(ranks):
            return ()
        steps = self._first_step + self._used - 1 - known[:, ::-1].argmax(axis=1)
        if counts.max() > RECENT_STEPS:
            newest = known[:, ::-1].cumsum(axis=1)[:, ::-1] <= RECENT_STEPS
            known = known & newest
            took_ns = np.where(known, took_ns, 0)
            counts = np.minimum(counts, RECENT_STEPS)
        return lines_of(
            ranks, steps, counts, took_ns[0][known], took_ns.sum(axis=2),
            medians_of(np.where(known, took_ns[0], np.inf), counts), nodes,
        )  # fmt: skip

    def tokens_per_s(self, lines: tuple[RankLine, ...]) -> float | None:
        """Return what :func:`tokens_per_s` returns of the same rows."""
        tokens = self._tokens[:, : self._used]
        told = ~np.isnan(tokens)
        rows = np.flatnonzero(told.any(axis=1))
        if not len(rows) or not lines:
            return None
        last = self._used - 1 - told[rows, ::-1].argmax(axis=1)
        step_s = self._step_s() or slowest_s(lines)
        return float(tokens[rows, last].sum()) / step_s if step_s else None

    def _step_s(self) -> float | None:
        """Return what a step of the job takes: from last end to last end, as ``job_steps`` does."""
        known = self._known[:, : self._used]
        ranks = int(known.any(axis=1).sum())
        whole = np.flatnonzero(known.sum(axis=0) == ranks)[-RECENT_STEPS:]
        if not ranks or not len(whole):
            return None
        start_ns = self._start_ns[:, whole]
        ends = (start_ns + self._took_ns[0][:, whole]).max(axis=0)
        return float((ends - start_ns.max(axis=0)).mean()) / 1e9


def _plain(steps: pl.DataFrame) -> bool:
    """Return whether every row is a rank's finished step."""
    known = all(not steps[name].null_count() for name in _ALWAYS_KNOWN)
    return known and not steps["complete"].null_count() and bool(steps["complete"].all())


def _ints(steps: pl.DataFrame, name: str) -> Ints:
    column = steps[name]
    if column.null_count():
        column = column.fill_null(0)
    return column.to_numpy().astype(np.int64, copy=False)


@dataclass(kw_only=True)
class RecentSteps:
    """The steps of one run since some moment, as rows and, where they fit, as a window."""

    _parts: list[tuple[int, pl.DataFrame]] = field(default_factory=list)
    """Rows as they were read, and from when on: they replace all older ones from then on."""
    _window: RankWindow | None = None

    def replace(self, steps: pl.DataFrame, since_ns: int) -> None:
        """Hold these rows instead."""
        self._parts = [(since_ns, steps)]
        self._window = RankWindow.of(steps)

    def add(self, steps: pl.DataFrame, since_ns: int, *, from_ns: int) -> bool:
        """Take all rows that began at ``since_ns`` or later; let go of those before ``from_ns``.

        False where they did not fit what was known, by a new rank for instance.
        """
        self._parts.append((since_ns, steps))
        if self._window is not None:
            self._window.forget(from_ns)
            if self._window.add(steps):
                return True
        self.replace(self._rows(from_ns), from_ns)
        return False

    def newest_ns(self) -> int | None:
        """Return when the newest step began; None without any."""
        if self._window is not None:
            return self._window.newest_ns()
        starts = [rows["start_ns"].max() for _, rows in self._parts]
        return max((one for one in starts if isinstance(one, int)), default=None)

    def missing_from_ns(self, late_ns: int) -> int | None:
        """Return what :meth:`RankWindow.missing_from_ns` returns; None without a window."""
        return None if self._window is None else self._window.missing_from_ns(late_ns)

    def lines(self, nodes: dict[int, str]) -> tuple[RankLine, ...]:
        """Return a line a rank."""
        if self._window is not None:
            return self._window.lines(nodes)
        return rank_lines(self._all(), nodes)

    def tokens_per_s(self, lines: tuple[RankLine, ...]) -> float | None:
        """Return the tokens of all ranks' newest steps over a step of the job; None if unknown."""
        if self._window is not None:
            return self._window.tokens_per_s(lines)
        return tokens_per_s(self._all(), lines)

    def _all(self) -> pl.DataFrame:
        # Without a window the rows are one part.
        return self._parts[0][1]

    def _rows(self, from_ns: int) -> pl.DataFrame:
        """Return the rows that began at ``from_ns`` or later."""
        kept = [
            rows.filter((pl.col("start_ns") >= from_ns) & (pl.col("start_ns") < until_ns))
            for (_, rows), until_ns in zip(self._parts, self._untils(), strict=True)
        ]
        return pl.concat(kept)

    def _untils(self) -> list[int]:
        """Return of each part up to when no later part replaces it."""
        untils, until_ns = [], 2**63 - 1
        for since_ns, _ in reversed(self._parts):
            untils.append(until_ns)
            until_ns = min(until_ns, since_ns)
        return untils[::-1]

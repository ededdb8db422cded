"""Is each process still there, and what was it in: the black box's last word."""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from kansoku.app._processes import still_runs
from kansoku.app.report._load import LoadedRun
from kansoku.formats.run_directory import ProcessState
from kansoku.model import ProcessEnd, RankFacts
from kansoku.trace.blackbox import (
    BlockedCollective,
    LastState,
    blocked_collectives,
    last_states,
)
from kansoku.trace.steps import cut_steps, process_of

__all__ = ["BlackBox", "RankState", "read_black_box"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank's process and the innermost thing it had begun and not ended."""

    rank: int
    node: str | None
    pid: int | None
    process: str
    """``ended``, ``running``, ``gone`` (it ended without a word) or ``unknown``."""
    state: LastState
    alive_ns: int | None
    """Unix time of its last sign of life."""
    duration_ns: int | None
    """How long it had been in it: until now if it runs, else until its end, or that of the run."""
    end: ProcessEnd | None = None
    """None where nobody watched the process."""
    closed_ns: int | None = None
    """Unix time at which it closed its record in order; None where that is not known."""

    @property
    def failed(self) -> bool:
        """Say whether it is known to have ended by a signal or with another code than 0."""
        return self.end is not None and self.end.ended_ns is not None and self.end.exit_code != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlackBox:
    """What is known about the end of the run."""

    ranks: tuple[RankState, ...]
    blocked: tuple[BlockedCollective, ...]
    stopped: bool
    """Something did not end in order: show the states."""


def _process(state: ProcessState | None, end: ProcessEnd | None) -> str:
    if state is None:
        return "unknown"
    if state.state == "closed":
        return "ended"
    if end is not None and end.ended_ns is not None:
        return "gone"
    if state.node != os.uname().nodename:
        return "unknown"
    return "running" if still_runs(state.pid, state.process_start) else "gone"


def _last_lives(rows: pl.DataFrame, processes: Sequence[ProcessState]) -> pl.DataFrame:
    """Leave out what a rank's earlier processes had begun: it was started again."""
    life = process_of("id")
    started = Counter(process.rank for process in processes)
    again = {rank: count - 1 for rank, count in started.items() if count > 1}
    if again:  # the last one may have recorded nothing
        last = pl.col("rank").replace_strict(again, default=None, return_dtype=pl.Int64)
        rows = rows.filter(last.is_null() | (life == last))
    if rows.select(life.max()).item() in {0, None}:
        return rows
    return rows.filter(life == life.max().over("rank"))


def _silent(process: ProcessState) -> LastState:
    """Return the state of a process that recorded nothing."""
    return LastState(
        rank=process.rank,
        step=None,
        kind=None,
        name=None,
        group=None,
        sequence=None,
        since_ns=None,
        last_record_ns=process.alive_ns or 0,
        path=(),
    )


def _closings(spans: pl.DataFrame) -> dict[int, int]:
    """Return when ranks closed their record: it cut off the step that they were in."""
    end = pl.col("start_ns") + pl.col("duration_ns")
    return dict(cut_steps(spans).group_by("rank").agg(end.max()).iter_rows())


def read_black_box(run: LoadedRun, *, now: Callable[[], int] = time.time_ns) -> BlackBox:
    """Return every rank's last state and the collectives that members are missing from."""
    facts: dict[int | None, RankFacts] = {rank.rank: rank for rank in run.facts.ranks}
    processes = {process.rank: process for process in run.processes}
    ends = {(end.node, end.pid): end for end in run.facts.ends}
    spans = _last_lives(run.spans, run.processes)
    closings = _closings(spans)
    states = last_states(spans)
    seen = {state.rank for state in states}
    again = {process.rank for process in run.processes if process is not processes[process.rank]}
    silent = [_silent(processes[rank]) for rank in sorted(again - seen)]
    states = tuple(sorted([*states, *silent], key=lambda state: state.rank))
    ranks = []
    for state in states:
        process = processes.get(state.rank)
        rank = facts.get(state.rank)
        end = ends.get((rank.node, rank.pid)) if rank else None
        status = _process(process, end)
        alive = max(
            [t for t in (process.alive_ns if process else None, state.last_record_ns) if t],
            default=None,
        )
        seen_end = None if end is None else end.ended_ns
        until = now() if status == "running" else seen_end or run.facts.end_ns or alive
        since = state.since_ns
        ranks.append(
            RankState(
                rank=state.rank,
                node=rank.node if rank else None,
                pid=rank.pid if rank else None,
                process=status,
                state=state,
                alive_ns=alive,
                duration_ns=None if since is None or until is None else max(until - since, 0),
                end=end,
                closed_ns=closings.get(state.rank) if status == "ended" else None,
            )
        )
    blocked = blocked_collectives(
        _last_lives(run.collectives, run.processes), run.facts, states, run.clocks
    )
    opened = any(state.kind is not None for state in states)
    failed = run.facts.exit_code not in (0, None) or any(rank.failed for rank in ranks)
    ended = all(rank.process == "ended" for rank in ranks)
    gone = any(rank.process == "gone" for rank in ranks)
    return BlackBox(
        ranks=tuple(ranks),
        blocked=blocked,
        stopped=bool(ranks) and (failed or gone or (opened and not ended)),
    )

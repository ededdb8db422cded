"""Is each process still there, and what was it in: the black box's last word."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from kansoku.app._processes import still_runs
from kansoku.app.report._load import LoadedRun
from kansoku.formats.run_directory import ProcessState
from kansoku.model import RankFacts
from kansoku.trace.blackbox import (
    BlockedCollective,
    LastState,
    blocked_collectives,
    last_states,
)
from kansoku.trace.steps import process_of

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
    """How long it had been in it: until now if it runs, until its last sign of life otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlackBox:
    """What is known about the end of the run."""

    ranks: tuple[RankState, ...]
    blocked: tuple[BlockedCollective, ...]
    stopped: bool
    """Something did not end in order: show the states."""


def _process(state: ProcessState | None) -> str:
    if state is None:
        return "unknown"
    if state.state == "closed":
        return "ended"
    if state.node != os.uname().nodename:
        return "unknown"
    return "running" if still_runs(state.pid, state.process_start) else "gone"


def _last_lives(rows: pl.DataFrame) -> pl.DataFrame:
    """Leave out what a rank's earlier processes had begun: it was started again."""
    life = process_of("id")
    if rows.select(life.max()).item() in {0, None}:
        return rows
    return rows.filter(life == life.max().over("rank"))


def read_black_box(run: LoadedRun, *, now: Callable[[], int] = time.time_ns) -> BlackBox:
    """Return every rank's last state and the collectives that members are missing from."""
    facts: dict[int | None, RankFacts] = {rank.rank: rank for rank in run.facts.ranks}
    processes = {process.rank: process for process in run.processes}
    states = last_states(_last_lives(run.spans))
    ranks = []
    for state in states:
        process = processes.get(state.rank)
        status = _process(process)
        rank = facts.get(state.rank)
        alive = max(
            [t for t in (process.alive_ns if process else None, state.last_record_ns) if t],
            default=None,
        )
        until = now() if status == "running" else run.facts.end_ns or alive
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
            )
        )
    blocked = blocked_collectives(_last_lives(run.collectives), run.facts, states, run.clocks)
    opened = any(state.kind is not None for state in states)
    failed = run.facts.exit_code not in (0, None)
    ended = all(rank.process == "ended" for rank in ranks)
    gone = any(rank.process == "gone" for rank in ranks)
    return BlackBox(
        ranks=tuple(ranks),
        blocked=blocked,
        stopped=bool(ranks) and (failed or gone or (opened and not ended)),
    )

"""Which checkpoint a job can resume from: from its folder, or from the save spans of its record."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.app.report import LoadedRun
from kansoku.diagnose.checkpoints import (
    Checkpoint,
    CheckpointState,
    checkpoint_sentences,
    checkpoint_state,
)
from kansoku.diagnose.edge.checkpoints import find_checkpoints

__all__ = ["checkpoint_json", "checkpoints_of_folder", "checkpoints_of_run"]

_SAVES = r"\.(?:save|save_file|async_save)$"


def checkpoints_of_folder(
    path: Path, *, until_ns: int | None, step: int | None = None
) -> CheckpointState:
    """Return what a job could resume from in a folder (or one file)."""
    return checkpoint_state(
        find_checkpoints(path), source=f"folder {path}", until_ns=until_ns, step=step
    )


def checkpoints_of_run(run: LoadedRun) -> CheckpointState | None:
    """Return what the run's record says of its saves; None where it saved nothing.

    A step's save counts as complete when every rank that began it ended it. Work is lost from the
    save's begin on: that is the state that it holds.
    """
    saves = run.spans.filter(
        (pl.col("kind") == "checkpoint") & pl.col("name").str.contains(_SAVES)
    ).with_columns(failed=pl.col("attributes").fill_null("").str.contains('"failed"'))
    if saves.is_empty():
        return None
    found = []
    for (step,), rows in saves.group_by("step", maintain_order=True):
        still = rows.filter(pl.col("duration_ns").is_null())["rank"].to_list()
        failed = rows.filter("failed")["rank"].to_list()
        problem = None
        if failed:
            problem = f"the save failed on rank {failed[0]}"
        elif still:
            problem = f"rank {still[0]} began the save and did not end it"
        found.append(
            Checkpoint(
                name=str(rows["name"][0]),
                kind="span",
                step=None if step is None else int(str(step)),
                size_bytes=None,
                saved_ns=int(rows["start_ns"].min()),  # type: ignore[arg-type]
                problem=problem,
            )
        )
    ends = run.steps.drop_nulls("duration_ns").group_by("step").agg(
        (pl.col("start_ns") + pl.col("duration_ns")).max()
    )  # fmt: skip
    times = sorted(ends["start_ns"].to_list())
    return checkpoint_state(
        found,
        source="save spans of the run",
        until_ns=times[-1] if times else None,
        step_ends=times,
    )


def checkpoint_json(state: CheckpointState | None) -> dict[str, Any] | None:
    """Return the state as plain data."""
    if state is None:
        return None
    return {
        "last": None if state.last is None else asdict(state.last),
        "incomplete": [asdict(one) for one in state.incomplete],
        "lost_s": None if state.lost_ns is None else round(state.lost_ns / 1e9, 1),
        "lost_steps": state.lost_steps,
        "source": state.source,
        "sentences": checkpoint_sentences(state),
    }

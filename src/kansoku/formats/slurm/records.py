"""Columns that every reader of Slurm accounting gives, whatever the version or form.

Times are Unix nanoseconds. A job row is one incarnation of one allocation; a step row is one step.
The first columns of a job are those of the shared table ``jobs``.
"""

from dataclasses import dataclass, field

import polars as pl

from kansoku.model import table_schema

__all__ = [
    "FINAL_STATES",
    "JOB_SCHEMA",
    "STEP_SCHEMA",
    "Parsed",
    "Quarantined",
    "empty_jobs",
    "empty_steps",
]

_TEXT, _I32, _I64 = pl.String(), pl.Int32(), pl.Int64()

JOB_SCHEMA: dict[str, pl.DataType] = {
    **table_schema("jobs"),
    "qos": _TEXT,
    "uid": _I64,
    "array_job_id": _I64,  # null outside arrays
    "array_task_id": _I64,
    "het_job_id": _I64,  # null outside heterogeneous jobs
    "het_offset": _I32,
    "elapsed_s": _I64,  # running time without suspension, as Slurm counts it
    "suspended_s": _I64,
    "derived_exit_code": _I32,  # highest exit code of the steps
    "derived_exit_signal": _I32,
    "cancelled_by": _TEXT,  # user id or name after "CANCELLED by"
    "state_flags": _TEXT,  # joined by commas
    "requested_gpus": _I32,
    "requested_nodes": _I32,
    "memory_bytes": _I64,
    "energy_j": _I64,
    "failed_node": _TEXT,
    "restarts": _I32,
    "reservation": _TEXT,
    "comment": _TEXT,
    "admin_comment": _TEXT,
    "submit_line": _TEXT,
    "sluid": _TEXT,
    "scheduling": _TEXT,  # what started it: submit, main or backfill
}

STEP_SCHEMA: dict[str, pl.DataType] = {
    "cluster": _TEXT,
    "raw_id": _I64,
    "job_id": _TEXT,
    "step": _TEXT,
    "start_ns": _I64,
    "end_ns": _I64,
    "name": _TEXT,
    "state": _TEXT,
    "exit_code": _I32,
    "exit_signal": _I32,
    "nodes": _I32,
    "node_list": _TEXT,
    "tasks": _I32,
    "gpus": _I32,
    "cpus": _I32,
    "elapsed_s": _I64,
    "cpu_s": pl.Float64(),  # user and system time of all tasks
    "max_rss_bytes": _I64,
    "max_rss_node": _TEXT,
    "gpu_util_ratio": pl.Float64(),  # mean of gres/gpuutil where Slurm gathers it
    "gpu_memory_bytes": _I64,
}

FINAL_STATES = frozenset({
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
    "DEADLINE", "OUT_OF_MEMORY", "REVOKED", "REQUEUED", "LAUNCH_FAILED", "SPECIAL_EXIT",
})  # fmt: skip
"""States after which this incarnation does not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """One row that could not be taken."""

    file: str
    row: int
    """Line of the file (text) or index in its list (JSON), from 1."""
    reason: str
    text: str
    """The first characters of the row."""

    def to_json(self) -> dict[str, object]:
        """Return file, row, reason and the start of the row."""
        return {"file": self.file, "row": self.row, "reason": self.reason, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a reader found."""

    jobs: pl.DataFrame
    """JOB_SCHEMA."""
    steps: pl.DataFrame
    """STEP_SCHEMA."""
    quarantined: tuple[Quarantined, ...] = ()
    repaired: int = 0
    """Rows put together again: newlines and delimiters inside names."""
    notes: tuple[str, ...] = field(default=())


def empty_jobs() -> pl.DataFrame:
    """Return no jobs."""
    return pl.DataFrame(schema=JOB_SCHEMA)


def empty_steps() -> pl.DataFrame:
    """Return no steps."""
    return pl.DataFrame(schema=STEP_SCHEMA)

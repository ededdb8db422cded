"""The bulk tables: what one row is, and the columns every part agrees on.

Unknown is null. ``attributes`` is a JSON object as text. Other columns may follow these.
"""

from dataclasses import dataclass

import polars as pl

from kansoku.errors import InputError

__all__ = ["PROCESS_SHIFT", "TABLES", "Table", "table_schema"]

Schema = dict[str, pl.DataType]

PROCESS_SHIFT = 48
"""A span's id holds, from this bit to that of the lane (``ring.LANE_SHIFT``), which process of its
rank it is from: 0, or more where the rank was started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One bulk table."""

    name: str
    row: str
    """What one row is."""
    columns: Schema
    """Column name to Polars type, in order."""
    time_column: str
    """The column that retention and time windows go by."""


_TEXT = pl.String()
_I32 = pl.Int32()
_I64 = pl.Int64()
_F64 = pl.Float64()

_PHASE_COLUMNS: Schema = {
    f"{phase}_ns": _I64
    for phase in (
        "data_wait",
        "forward",
        "backward",
        "optimizer",
        "collective",
        "checkpoint",
        "other",
    )
}

_SPANS: Schema = {
    "run": _TEXT,
    "rank": _I32,
    "step": _I32,  # null outside any step
    # step, data_wait, forward, backward, optimizer, collective, checkpoint, evaluation, gc,
    # compile, or a finer kind of a foreign trace
    "kind": _TEXT,
    "name": _TEXT,
    "start_ns": _I64,  # Unix clock of the rank's own node; correct with the estimated offsets
    "duration_ns": _I64,  # null while open
    "id": _I64,  # unique in one (run, rank)
    "parent": _I64,  # id of the enclosing span on the same thread
    "group": _TEXT,  # process group name of a collective
    "sequence": _I64,  # position of the collective in its group, the same on every member
    "bytes": _I64,
    "dtype": _TEXT,
    "device": _TEXT,
    "thread": _I64,
    "cpu_ns": _I64,  # CPU time of the thread inside the span
    "attributes": _TEXT,
}

_STEPS: Schema = {
    "run": _TEXT,
    "rank": _I32,
    "step": _I32,
    "start_ns": _I64,
    "duration_ns": _I64,
    **_PHASE_COLUMNS,  # exposed time of each phase; they sum to duration_ns
    "complete": pl.Boolean(),
    "tokens": _F64,
    "flops": _F64,
    "energy_j": _F64,
    "nic_bytes": _I64,
    "cpu_ns": _I64,
    "peak_rss_bytes": _I64,
    # joined by time from fast samples, as energy_j and nic_bytes; null where there are none
    "energy_error_j": _F64,  # upper limit, from the time between samples
    "nic_error_bytes": _I64,
    "nvlink_bytes": _I64,
    "sm_activity": _F64,  # mean over the step, 0-1
    "memory_activity": _F64,
}

_METRICS: Schema = {
    "metric": _TEXT,
    "labels": _TEXT,  # canonical JSON object, keys sorted
    "time_ns": _I64,
    "value": _F64,
}

_EVENTS: Schema = {
    "time_ns": _I64,
    "source": _TEXT,
    "subject": _TEXT,
    "severity": _TEXT,
    "kind": _TEXT,
    "body": _TEXT,
    "attributes": _TEXT,
}

_PROFILES: Schema = {
    "run": _TEXT,
    "rank": _I32,
    "start_ns": _I64,
    "end_ns": _I64,
    "stack": _TEXT,  # frames joined by ';', root first
    "value": _I64,
    "unit": _TEXT,
}

_JOBS: Schema = {
    "cluster": _TEXT,
    "raw_id": _I64,
    "submit_ns": _I64,
    "job_id": _TEXT,  # as people write it: 12, 12_3, 12+1
    "name": _TEXT,
    "user": _TEXT,
    "account": _TEXT,
    "partition": _TEXT,
    "eligible_ns": _I64,
    "start_ns": _I64,
    "end_ns": _I64,
    "state": _TEXT,
    "reason": _TEXT,
    "exit_code": _I32,
    "exit_signal": _I32,
    "nodes": _I32,
    "node_list": _TEXT,
    "gpus": _I32,
    "gpu_kind": _TEXT,
    "cpus": _I32,
    "time_limit_s": _I64,  # null: unlimited or the partition's limit
    "requeue_of_ns": _I64,  # submit_ns of the incarnation before
    "attributes": _TEXT,
}

_PROBES: Schema = {
    "time_ns": _I64,  # Unix time of the probe or of the window's start
    "window_ns": _I64,  # null for a single probe
    "source": _TEXT,  # nic subject name NODE/DEV
    "target": _TEXT,
    "kind": _TEXT,  # tor_mesh, inter_tor, service
    "path": _TEXT,  # hops joined by '>'
    "source_port": _I32,
    "probes": _I64,
    "lost": _I64,
    "rtt_p50_ns": _I64,
    "rtt_p99_ns": _I64,
    "responder_delay_p50_ns": _I64,
    "responder_delay_p99_ns": _I64,
    "prober_delay_p99_ns": _I64,
    "t1_ns": _I64,  # six stamps of a single probe; each pair on one clock
    "t2_ns": _I64,
    "t3_ns": _I64,
    "t4_ns": _I64,
    "t5_ns": _I64,
    "t6_ns": _I64,
    "stamp_source": _TEXT,  # hardware, kernel, application
    "outcome": _TEXT,
}

_BURSTS: Schema = {
    "node": _TEXT,
    "port": _TEXT,
    "direction": _TEXT,  # receive, transmit
    "start_ns": _I64,
    "duration_ns": _I64,
    "peak_ratio": _F64,  # of line rate
    "mean_ratio": _F64,
    "bytes": _I64,
    "samples": _I32,
    "sampling_ns": _I64,
    "attributes": _TEXT,  # raw_us and raw_ratio around it, beside: growth of other counters
}

_FINDINGS: Schema = {
    "id": _TEXT,
    "subject": _TEXT,
    "domain": _TEXT,
    "onset_ns": _I64,
    "time_ns": _I64,  # when it was found
    "verdict": _TEXT,
    "severity": _TEXT,
    "confidence": _F64,
    "sentence": _TEXT,
    "evidence": _TEXT,  # JSON list
    "source": _TEXT,
}

_INCIDENTS: Schema = {
    "id": _TEXT,
    "onset_ns": _I64,
    "time_ns": _I64,  # of this version
    "kind": _TEXT,
    "subject": _TEXT,
    "domain": _TEXT,
    "verdict": _TEXT,
    "confidence": _F64,
    "hypotheses": _TEXT,  # JSON list
    "evidence": _TEXT,
    "actions": _TEXT,
    "state": _TEXT,
}

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table(name="spans", row="one timed thing", columns=_SPANS, time_column="start_ns"),
        Table(name="steps", row="one rank's step", columns=_STEPS, time_column="start_ns"),
        Table(name="metrics", row="one sample", columns=_METRICS, time_column="time_ns"),
        Table(
            name="events",
            row="one log line or state change",
            columns=_EVENTS,
            time_column="time_ns",
        ),
        Table(
            name="profiles", row="one stack sample set", columns=_PROFILES, time_column="start_ns"
        ),
        Table(
            name="jobs",
            row="one incarnation of a Slurm job",
            columns=_JOBS,
            time_column="submit_ns",
        ),
        Table(
            name="probes",
            row="one probe, or a path's window summary",
            columns=_PROBES,
            time_column="time_ns",
        ),
        Table(name="bursts", row="one microburst", columns=_BURSTS, time_column="start_ns"),
        Table(name="findings", row="one finding", columns=_FINDINGS, time_column="time_ns"),
        Table(
            name="incidents",
            row="one version of an incident",
            columns=_INCIDENTS,
            time_column="time_ns",
        ),
    )
}


def table_schema(name: str) -> Schema:
    """Return the columns of a table; raise InputError with the known names otherwise."""
    try:
        return dict(TABLES[name].columns)
    except KeyError:
        raise InputError(f"no table {name!r}; the tables are {', '.join(TABLES)}") from None

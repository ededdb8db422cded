"""Slurm's accounting and state: sacct JSON and text of any version, queue, nodes, events."""

from kansoku.formats.slurm.cluster_state import (
    NODE_EVENT_SCHEMA,
    NodeState,
    QueuedJob,
    read_node_events,
    read_scontrol,
    read_scontrol_nodes,
    read_sinfo_json,
    read_squeue_json,
)
from kansoku.formats.slurm.records import (
    FINAL_STATES,
    JOB_SCHEMA,
    STEP_SCHEMA,
    Parsed,
    Quarantined,
)
from kansoku.formats.slurm.sacct_json import read_sacct_json
from kansoku.formats.slurm.sacct_text import Layout, detect_layout, read_sacct_text
from kansoku.formats.slurm.values import (
    JobId,
    State,
    Tres,
    expand_nodes,
    fold_nodes,
    parse_duration_s,
    parse_exit,
    parse_job_id,
    parse_size_bytes,
    parse_state,
    parse_time_limit_s,
    parse_tres,
)

__all__ = [
    "FINAL_STATES",
    "JOB_SCHEMA",
    "NODE_EVENT_SCHEMA",
    "STEP_SCHEMA",
    "JobId",
    "Layout",
    "NodeState",
    "Parsed",
    "Quarantined",
    "QueuedJob",
    "State",
    "Tres",
    "detect_layout",
    "expand_nodes",
    "fold_nodes",
    "parse_duration_s",
    "parse_exit",
    "parse_job_id",
    "parse_size_bytes",
    "parse_state",
    "parse_time_limit_s",
    "parse_tres",
    "read_node_events",
    "read_sacct_json",
    "read_sacct_text",
    "read_scontrol",
    "read_scontrol_nodes",
    "read_sinfo_json",
    "read_squeue_json",
]

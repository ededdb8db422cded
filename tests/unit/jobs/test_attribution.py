"""Whose fault it was: the ladder, its windows, and labelled failures with planted noise."""

import numpy as np
import polars as pl
import pytest

from kansoku.app.jobs._evidence import HARDWARE_EVENT_SCHEMA
from kansoku.formats.slurm import NODE_EVENT_SCHEMA
from kansoku.jobs.attribution import attribute, broke, confusion

S = 10**9


def frame(*rows):
    base = {
        "raw_id": 1, "submit_ns": 0, "start_ns": 1000 * S, "end_ns": 5000 * S, "node_list": "c[1-2]",
        "outcome": "FAILED", "exit_code": 1, "exit_signal": None, "user": "ann", "uid": 7,
        "cancelled_by": None, "failed_node": None,
    }  # fmt: skip
    kinds = {"exit_signal": pl.Int32, "cancelled_by": pl.String, "failed_node": pl.String,
             "node_list": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64}  # fmt: skip
    return pl.DataFrame([{**base, **r} for r in rows], schema_overrides=kinds)


def event(at, node="c2", kind="xid", xid=79, domain="gpu_hardware"):
    row = {"node": node, "time_ns": at * S, "kind": kind, "body": "b", "xid": xid, "domain": domain}
    return pl.DataFrame([row], schema=HARDWARE_EVENT_SCHEMA, orient="row")


def one(row, **options):
    return attribute(frame(row), **options)[0]


@pytest.mark.parametrize(
    ("row", "cause", "infrastructure"),
    [
        ({}, "user_program", False),
        ({"outcome": "COMPLETED"}, "none", False),
        ({"outcome": "NODE_FAIL"}, "node_fail", True),
        ({"outcome": "BOOT_FAIL"}, "node_fail", True),
        ({"outcome": "PREEMPTED"}, "preempted", False),
        ({"outcome": "REQUEUED"}, "requeued", False),
        ({"outcome": "TIMEOUT"}, "time_limit", False),
        ({"outcome": "DEADLINE"}, "deadline", False),
        ({"outcome": "OUT_OF_MEMORY"}, "out_of_memory", False),
        ({"exit_signal": 53, "exit_code": 0}, "launch_failure", True),
        ({"outcome": "CANCELLED", "cancelled_by": "ann"}, "cancelled_by_user", False),
        ({"outcome": "CANCELLED", "cancelled_by": "7"}, "cancelled_by_user", False),
        ({"outcome": "CANCELLED", "cancelled_by": "root"}, "cancelled_by_other", False),
        ({"outcome": "RUNNING", "end_ns": None}, "none", False),
    ],
)
def test_slurms_own_word(row, cause, infrastructure):
    answer = one(row)
    assert answer.cause == cause
    assert broke(answer) is infrastructure


@pytest.mark.parametrize(
    ("at", "node", "cause"),
    [
        (4990, "c2", "hardware_event"),
        (4401, "c1", "hardware_event"),
        (4399, "c2", "user_program"),
        (5299, "c2", "hardware_event"),
        (5301, "c2", "user_program"),
        (4990, "c3", "user_program"),
    ],
)
def test_events_count_inside_the_window_on_allocated_nodes(at, node, cause):
    """Ten minutes before the end to five after."""
    assert one({}, events=event(at, node)).cause == cause


def test_xids_that_programs_raise_blame_no_hardware():
    assert one({}, events=event(4990, xid=31)).cause == "user_program"
    assert (
        one({}, events=event(4990, xid=None, kind="link_down", domain="network")).domain
        == "network"
    )


def test_a_success_beside_an_event_stays_a_success():
    assert one({"outcome": "COMPLETED"}, events=event(4990)).cause == "none"
    assert one({"outcome": "CANCELLED"}, events=event(4990)).cause == "cancelled_by_user"


@pytest.mark.parametrize(
    ("reason", "domain"),
    [
        ("Xid 79: GPU has fallen off the bus", "gpu_hardware"), ("ECC DBE GPU5", "gpu_hardware"),
        ("Not responding", "host"), ("mlx5_3 link down", "network"), ("lustre mount gone", "storage"),
        ("maintenance", None), ("kernel upgrade and reboot", None),
    ],
)  # fmt: skip
def test_reasons_of_drained_nodes(reason, domain):
    row = {"cluster": "c", "node": "c1", "start_ns": 5001 * S, "end_ns": None, "state": "DRAIN",
           "reason": reason, "user": "root"}  # fmt: skip
    events = pl.DataFrame([row], schema=NODE_EVENT_SCHEMA, orient="row")
    answer = one({}, node_events=events)
    assert answer.cause == ("node_drained" if domain else "user_program")
    assert (answer.domain == domain) if domain else (answer.domain == "application")


def test_labelled_failures_with_noise(capsys):
    """600 labelled ends on 40 nodes, hardware events strewn at random: the matrix is printed.

    One event a node-day at random falls into the 15-minute window of 2-node jobs in about 2 % of
    user failures; that error is the window's, and is what the matrix shows.
    """
    rng = np.random.default_rng(5)
    rows, labels, events = [], [], []
    for n in range(600):
        kind = ["user", "hardware", "node_fail", "limit", "cancel"][int(rng.integers(5))]
        end = int(rng.integers(100_000, 8_000_000))
        node = int(rng.integers(1, 40))
        row = {"raw_id": n, "start_ns": (end - 50_000) * S, "end_ns": end * S,
               "node_list": f"c[{node}-{node + 1}]"}  # fmt: skip
        labels.append({"user": "user_program", "hardware": "hardware_event", "limit": "time_limit",
                       "node_fail": "node_fail", "cancel": "cancelled_by_user"}[kind])  # fmt: skip
        row["outcome"] = {"node_fail": "NODE_FAIL", "limit": "TIMEOUT", "cancel": "CANCELLED"}.get(
            kind, "FAILED"
        )
        if kind == "hardware":
            events.append(event(end - int(rng.integers(-60, 500)), f"c{node}"))
        rows.append(row)
    events += [
        event(int(rng.integers(0, 8_000_000)), f"c{int(rng.integers(1, 41))}")
        for _ in range(40 * 90)
    ]
    answers = attribute(frame(*rows), events=pl.concat(events))
    matrix = confusion(labels, [a.cause for a in answers])
    with capsys.disabled():
        print(f"\nattribution of labelled failures with noise, accuracy {matrix.accuracy:.3f}:")
        print(matrix)
    assert matrix.accuracy > 0.97

"""Operations out of spans whose every nanosecond was chosen."""

import polars as pl
import pytest

from kansoku.model import table_schema
from kansoku.trace.whatif.run_spans import RunOperations, span_operations

PIPELINES = [(0, 1), (2, 3)]
GROUPS = {
    (rank, name): members
    for rank in range(4)
    for name, members in (
        ("pp", PIPELINES[rank // 2]),
        ("dp", (rank % 2, rank % 2 + 2)),
        ("all", (0, 1, 2, 3)),
    )
}
SECOND = 10**9


def row(rank, kind, start, end, name="", *, group=None, attributes=None, thread=1, step=7):
    return {
        "run": "r", "rank": rank, "step": step, "kind": kind, "name": name,
        "start_ns": start * SECOND, "duration_ns": (end - start) * SECOND, "group": group,
        "attributes": attributes, "thread": thread,
    }  # fmt: skip


def worker(rank, *more):
    """One micro-batch: first stage 10 to 20 and 40 to 60, last stage 22 to 32 and 32 to 38."""
    peer = 1 - rank % 2
    text = f'{{"async":true,"peer":{peer}}}'
    first = rank % 2 == 0
    rows = [row(rank, "step", 0, 100)]
    rows += [
        row(rank, "forward", *((10, 20) if first else (22, 32))),
        row(rank, "collective", *((20, 23) if first else (1, 22)), "send" if first else "recv",
            group="pp", attributes=text),
        row(rank, "backward", *((40, 60) if first else (32, 38))),
        row(rank, "collective", *((33, 40) if first else (38, 41)), "recv" if first else "send",
            group="pp", attributes=text),
        row(rank, "optimizer", 80, 90),
    ]  # fmt: skip
    return rows + list(more)


def operations(*workers) -> RunOperations | str:
    rows = [one for rows in workers for one in rows]
    spans = pl.DataFrame(rows, schema_overrides=dict(table_schema("spans")))
    return span_operations(
        spans.with_columns(pl.col("attributes").cast(pl.String), pl.col("group").cast(pl.String)),
        pipelines=PIPELINES,
        groups=GROUPS,
    )


def times(found, rank):
    rows = found.table.filter(pl.col("rank") == rank)
    return {
        kind: (round(start, 9), round(length, 9))
        for kind, start, length in rows.select("optype", "start_ts", "duration").iter_rows()
    }


def test_transfers_end_when_the_receiver_has_the_data():
    found = operations(*(worker(rank) for rank in range(4)))
    assert times(found, 0) == {
        "forward-compute": (10, 10),
        "backward-compute": (40, 20),
        "forward-send": (20, 2),  # seen to end at 23, but the receiver had it at 22
        "backward-recv": (33, 7),
        "optimizer": (60, 10),  # as it would be without host delays
    }
    assert times(found, 3)["forward-recv"] == (1, 21)
    assert times(found, 3)["backward-send"] == (38, 2)


def test_work_is_without_the_time_blocked_in_collectives_and_the_least_of_it_is_transfer():
    def reduced(rank, start, end):
        return row(rank, "collective", start, end, "all_reduce", group="dp")

    found = operations(
        # Two buckets inside the backward: rank 0 comes last to the first, rank 2 to the second.
        worker(0, reduced(0, 45, 46), reduced(0, 50, 58)),
        worker(1),
        worker(2, reduced(2, 41, 46), reduced(2, 55, 58)),
        worker(3),
    )
    assert times(found, 0)["backward-compute"] == (40, 11)
    assert times(found, 2)["backward-compute"] == (40, 12)
    # Transfers of 1 s and 3 s, after the last work of the stage.
    assert times(found, 0)["grads-reduce-scatter"] == (52, 4)
    assert times(found, 2)["grads-reduce-scatter"] == (52, 4)
    assert "grads-reduce-scatter" not in times(found, 1)
    assert any("after the last backward" in line for line in found.missing)


def test_waits_belong_to_what_ended_with_them():
    def finish(rank, start):
        return (
            row(rank, "collective", 50, 70, "all_reduce", group="dp",
                attributes='{"async":true}', thread=9),
            row(rank, "collective_wait", start, 70, "wait"),
        )  # fmt: skip

    found = operations(
        worker(0, *finish(0, 62)), worker(1, row(1, "collective_wait", 38, 41, "wait")),
        worker(2, *finish(2, 66)), worker(3, row(3, "collective_wait", 38, 41, "wait")),
    )  # fmt: skip
    assert times(found, 0)["grads-reduce-scatter"] == (60, 4)
    assert "grads-reduce-scatter" not in times(found, 1)  # that wait was for its send


def test_gathers_before_the_forward_and_clipping_of_all():
    found = operations(
        *(
            worker(
                rank,
                row(rank, "collective", 2, 3 + rank, "all_gather", group="dp"),
                row(rank, "collective", 70 - rank, 72, "all_reduce", group="all"),
                row(rank, "data_wait", 0, 1),
            )
            for rank in range(4)
        )
    )
    assert times(found, 2)["params-all-gather"] == (0, 1)
    assert times(found, 3)["params-all-gather"] == (0, 2)
    assert times(found, 1)["optimizer-clip-main-grad"] == (60, 2)
    assert times(found, 1)["data-wait"] == (0, 1)


def test_an_end_that_was_not_seen_is_a_transfer_of_nothing():
    rows = [
        {**one, "attributes": one["attributes"].replace("}", ',"no_times":true}')}
        if one["name"] in ("send", "recv")
        else one
        for one in worker(0)
    ]
    other = [
        {**one, "attributes": one["attributes"].replace("}", ',"no_times":true}')}
        if one["name"] in ("send", "recv")
        else one
        for one in worker(1)
    ]
    found = operations(rows, other, worker(2), worker(3))
    assert times(found, 0)["forward-send"] == (20, 0)
    assert times(found, 1)["forward-recv"] == (1, 19)
    assert any("not seen" in line for line in found.missing)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda rows: [one for one in rows if one["rank"] != 3], "no step of all ranks"),
        # A backward in two parts, as zero-bubble schedules have it.
        (lambda rows: [*rows, row(0, "backward", 61, 62)], "split backwards"),
        (lambda rows: [one for one in rows if one["name"] != "recv"], "not recorded"),
    ],
)
def test_what_spans_do_not_tell_has_a_reason(spoil, reason):
    rows = [one for rank in range(4) for one in worker(rank)]
    assert reason in operations(spoil(rows))

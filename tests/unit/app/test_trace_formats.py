"""NCCL Inspector's files and execution traces through the trace commands; figures by hand."""

import json

import pytest
from tests.labs.kineto_files import Job, text, write

from kansoku.app.trace import breakdown, stragglers
from kansoku.errors import InputError

# The sizes and bandwidths are those of the plugin's README, for eight ranks.
README = {
    "ReduceScatter": (2147483648, 41057, 418.439467, 366.134533),
    "AllReduce": (17179869184, 61974, 277.210914, 485.119099),
}


def record(rank, sequence, *, name="AllReduce", us=None, group="0xaa", ranks=8):
    size, took, algorithm, bus = README[name]
    return {
        "header": {"id": group, "rank": rank, "n_ranks": ranks, "nnodes": 1},
        "metadata": {
            "dump_timestamp_us": 1748030377748202 + sequence * 100_000 + rank * 7,
            "hostname": "n1",
            "pid": 100 + rank,
        },
        "coll_perf": {
            "coll": name,
            "coll_sn": sequence,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": took if us is None else us,
            "coll_algobw_gbs": algorithm,
            "coll_busbw_gbs": bus,
        },
    }


def write_job(folder, duration, *, ranks=4, collectives=12, **more):
    for rank in range(ranks):
        lines = [
            json.dumps(record(rank, number, us=duration(rank, number), ranks=ranks, **more))
            for number in range(collectives)
        ]
        write(folder / f"n1-pid{100 + rank}.log", "\n".join(lines))
    return folder


def test_inspector_collectives_with_the_bandwidths_of_the_readme(tmp_path):
    lines = [json.dumps(record(2, 7, name=name)) for name in README]
    path = write(tmp_path / "a.log", "\n".join(lines) + "\n{broken\n")
    answer = breakdown([path]).to_json()
    rows = {row["op"]: row for row in answer["collectives"]}
    # nccl-tests counts the whole buffer of a reduce-scatter: eight parts of 2 GiB.
    assert rows["reduce_scatter"]["bytes"] == 8 * 2147483648
    assert rows["all_reduce"]["bytes"] == 17179869184
    for op, algorithm, bus in (
        ("reduce_scatter", 418.439467, 366.134533),
        ("all_reduce", 277.210914, 485.119099),
    ):
        row = rows[op]
        assert row["rank"] == 2
        assert row["group_size"] == 8
        assert row["algbw_gb_per_s"] == pytest.approx(algorithm)
        assert row["busbw_gb_per_s"] == pytest.approx(bus)
        assert row["bytes"] / row["duration_us"] / 1e3 == pytest.approx(algorithm, rel=1e-4)
    (rank,) = answer["ranks"]
    assert rank["span_us"] is None
    assert rank["comm_us"] is None
    assert any("collectives and nothing else" in why for why in rank["incomplete"])
    assert any("1 damaged" in why for why in rank["incomplete"])
    assert answer["missing_ranks"] == [0, 1, 3, 4, 5, 6, 7]


def test_the_rank_that_waits_least_in_inspector_files_is_the_late_one(tmp_path):
    # All wait 5 ms for rank 2, which is inside for 1 ms only.
    folder = write_job(tmp_path, lambda rank, _: 1000 if rank == 2 else 6000)
    answer = stragglers([folder]).to_json()
    assert answer["verdict"] == "found"
    (found,) = answer["stragglers"]
    assert (found["rank"], found["lateness_us"], found["share"]) == (2, 5000.0, 1.0)
    assert len(answer["collectives"]) == 12
    assert {row["spread_us"] for row in answer["collectives"]} == {5000.0}


def test_nobody_is_late_where_all_wait_alike_in_inspector_files(tmp_path):
    folder = write_job(tmp_path, lambda rank, number: 1000 + (rank * 7 + number * 3) % 5)
    assert stragglers([folder]).report.verdict == "none"


def test_inspector_files_of_different_jobs_have_no_ranks(tmp_path):
    write(tmp_path / "a.log", json.dumps(record(0, 1, group="0xa")))
    write(tmp_path / "b.log", json.dumps(record(0, 1, group="0xb")))
    with pytest.raises(InputError, match="no communicator is in all files"):
        stragglers([tmp_path])
    answer = breakdown([tmp_path]).to_json()
    assert [row["rank"] for row in answer["ranks"]] == [None, None]


def test_an_execution_trace_says_what_ran_and_that_it_has_no_times(tmp_path):
    nodes = [
        {"id": 1, "name": "ProfilerStep#4", "ctrl_deps": 0},
        {"id": 2, "name": "aten::mm", "ctrl_deps": 1},
        {"id": 3, "name": "aten::mm", "ctrl_deps": 1},
        {
            "id": 4,
            "name": "record_param_comms",
            "ctrl_deps": 1,
            "inputs": {"values": [], "shapes": [[[16]]], "types": ["GenericList[Tensor(float)]"]},
            "attrs": [
                {"name": "collective_name", "value": "allreduce"},
                {"name": "pg_name", "value": "1"},
            ],
        },
    ]
    path = write(
        tmp_path / "et_rank3.json", json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes})
    )
    result = breakdown([path])
    answer = result.to_json()
    (rank,) = answer["ranks"]
    assert rank["rank"] == 3
    assert rank["busy_us"] is None
    assert any("no times" in why for why in rank["incomplete"])
    assert {"rank": 3, "name": "aten::mm", "calls": 2, "host_us": None} in answer["operators"]
    assert [note["note"] for note in answer["notes"]] == [
        "most frequent: 2 × aten::mm, 1 × ProfilerStep#4, 1 × allreduce",
        "1 × allreduce in group 1, 64 bytes",
    ]
    assert result.view().blocks


def test_a_kineto_file_beside_inspector_files_stays_one(tmp_path):
    kineto = write(tmp_path / "rank0.json", text(Job()))
    inspector = write(tmp_path / "a.log", json.dumps(record(0, 1)))
    assert breakdown([kineto]).to_json()["kernels"]
    with pytest.raises(InputError, match="no trace events"):
        breakdown([kineto, inspector])

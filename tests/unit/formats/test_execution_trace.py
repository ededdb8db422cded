"""Execution traces: one that torch writes here, and nodes of the older schema."""

import json

import pytest

from kansoku.errors import InputError
from kansoku.formats.execution_trace import read_execution_trace

OLD = {
    "schema": "1.0.1",
    "pid": 1,
    "nodes": [
        {"id": 1, "name": "[pytorch|profiler|execution_graph|process]", "parent": 1},
        {
            "id": 7,
            "name": "ProfilerStep#4",
            "parent": 1,
            "tid": 1,
        },
        {
            "id": 9,
            "name": "aten::mm",
            "parent": 7,
            "tid": 1,
            "input_shapes": [[4, 8], [8, 2]],
            "input_types": ["Tensor(float)", "Tensor(float)"],
        },
        {"name": "without an id"},
    ],
}


def test_what_torch_writes(tmp_path):
    import torch
    from torch.profiler import ExecutionTraceObserver

    path = tmp_path / "et_rank3.json"
    observer = ExecutionTraceObserver()
    observer.register_callback(str(path))
    observer.start()
    torch.nn.Linear(8, 4)(torch.randn(2, 8)).sum().backward()
    observer.stop()
    observer.unregister_callback()
    trace = read_execution_trace(path)
    assert trace.rank == 3
    assert trace.set_aside == 0
    rows = {row["name"]: row for row in trace.spans.iter_rows(named=True)}
    linear = rows["aten::linear"]
    assert (linear["kind"], linear["bytes"], linear["dtype"]) == ("operator", 2 * 8 * 4, "float")
    assert linear["id"] < rows["aten::sum"]["id"]
    assert rows["aten::addmm"]["parent"] == linear["id"]
    assert trace.spans["start_ns"].null_count() == len(trace.spans)


def test_the_older_schema_and_steps(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(OLD))
    trace = read_execution_trace(path)
    assert trace.set_aside == 1
    row = trace.spans.filter(trace.spans["name"] == "aten::mm").row(0, named=True)
    assert (row["step"], row["parent"], row["bytes"], row["thread"]) == (4, 7, 4 * 8 * 4, 1)


def node(number, name, **attributes):
    return {
        "id": number,
        "name": name,
        "ctrl_deps": 1,
        "inputs": {"values": [], "shapes": [[[16]]], "types": ["GenericList[Tensor(float)]"]},
        "attrs": [{"name": k, "type": "string", "value": v} for k, v in attributes.items()],
    }


def test_collectives_and_groups(tmp_path):
    groups = json.dumps(
        [{"pg_name": "1", "pg_desc": "mesh_dp", "ranks": [0, 2], "backend_config": "cuda:nccl"}]
    )
    document = {
        "schema": "1.1.1-chakra.0.0.4",
        "nodes": [
            node(3, "## process_group:init ##")
            | {"inputs": {"values": [groups], "shapes": [[]], "types": ["String"]}},
            node(4, "record_param_comms", collective_name="allreduce", pg_name="1", tid=5),
            node(5, "c10d::allreduce_"),
        ],
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    trace = read_execution_trace(path)
    assert [(g.name, g.description, g.ranks) for g in trace.groups] == [("1", "mesh_dp", (0, 2))]
    assert trace.spans["kind"].to_list() == ["collective", "collective"]
    assert trace.spans["name"].to_list() == ["allreduce", "allreduce"]
    assert trace.spans["group"].to_list() == ["1", None]
    assert trace.spans["bytes"].to_list() == [64, 64]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema": "1", "nodes": 3}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(InputError, match="not an execution trace"):
        read_execution_trace(path)

"""NCCL Inspector's files: the README's objects, whole and damaged."""

import json

import pytest

from kansoku.errors import InputError
from kansoku.formats.nccl_inspector import read_inspector

# From the plugin's README.
PLAIN = {
    "header": {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1},
    "metadata": {
        "inspector_output_format_version": "v4.0",
        "git_rev": "",
        "rec_mechanism": "profiler_plugin",
        "dump_timestamp_us": 1748030377748202,
        "hostname": "example-hostname",
        "pid": 1639453,
    },
    "coll_perf": {
        "coll": "AllReduce",
        "coll_sn": 1407,
        "coll_msg_size_bytes": 17179869184,
        "coll_exec_time_us": 61974,
        "coll_algobw_gbs": 277.210914,
        "coll_busbw_gbs": 485.119099,
    },
}
TRACED = {
    **PLAIN,
    "coll_perf": {
        "coll": "ReduceScatter",
        "coll_sn": 1231,
        "coll_msg_size_bytes": 2147483648,
        "coll_exec_time_us": 41057,
        "coll_timing_source": "kernel_gpu",
        "event_trace_ts": {"coll_start_ts": 1752867229235059, "coll_stop_ts": 1752867229235064},
    },
}


def test_a_plain_object(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(json.dumps(PLAIN, indent=2))
    row = read_inspector(path).spans.row(0, named=True)
    assert (row["rank"], row["group"], row["sequence"]) == (2, "0x7f8c496ae9f661", 1407)
    assert (row["kind"], row["name"], row["bytes"]) == ("collective", "all_reduce", 17179869184)
    assert row["duration_ns"] == 61_974_000
    assert row["start_ns"] == 1748030377748202000 - 61_974_000
    assert json.loads(row["attributes"])["bus_bytes_per_s"] == pytest.approx(485.119099e9)


def test_traced_events_tell_the_start(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(json.dumps(PLAIN) + "\n" + json.dumps(TRACED) + "\n")
    found = read_inspector(path)
    assert found.damaged == 0
    assert found.spans["name"].to_list() == ["all_reduce", "reduce_scatter"]
    assert found.spans["start_ns"][1] == 1752867229235059000


def test_a_send(tmp_path):
    sent = {key: PLAIN[key] for key in ("header", "metadata")} | {
        "p2p_perf": {
            "p2p": "Send",
            "p2p_sn": 4,
            "p2p_peer": 5,
            "p2p_msg_size_bytes": 512,
            "p2p_exec_time_us": 10,
        }
    }
    path = tmp_path / "a.log"
    path.write_text(json.dumps(sent))
    row = read_inspector(path).spans.row(0, named=True)
    assert (row["name"], row["sequence"], row["bytes"], row["duration_ns"]) == (
        "send",
        4,
        512,
        10_000,
    )
    assert json.loads(row["attributes"])["peer"] == 5


def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path):
    path = tmp_path / "a.log"
    lines = [json.dumps(PLAIN), json.dumps(PLAIN)[:90], json.dumps(TRACED), '{"other": 1}']
    path.write_text("\n".join(lines))
    found = read_inspector(path)
    assert len(found.spans) >= 2
    assert found.damaged == 2


def test_many_objects_across_chunks(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("\n".join(json.dumps(PLAIN) for _ in range(6000)))
    assert len(read_inspector(path).spans) == 6000


@pytest.mark.parametrize("content", ["", "no json", "{}", "[1, 2]", '{"header": 3}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "a.log"
    path.write_text(content)
    with pytest.raises(InputError, match="no collective"):
        read_inspector(path)

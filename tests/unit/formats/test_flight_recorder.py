"""Flight Recorder dumps: real pickles of hostile and broken kinds, names, versions."""

import json
import os
import pickle
from pathlib import Path

import pytest

from kansoku.errors import InputError
from kansoku.formats.flight_recorder import rank_in_name, read_dump
from kansoku.trace.hang.flight_recorder import state_of_dump


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/kansoku-was-here",))


def test_a_pickle_with_code_is_refused(tmp_path):
    path = tmp_path / "dump_0"
    path.write_bytes(pickle.dumps({"entries": [Evil()]}))
    with pytest.raises(InputError, match="refused the global"):
        read_dump(path)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("keep", [0, 1, 10, -3])
def test_cut_off_pickles_are_named(tmp_path, protocol, keep):
    path = tmp_path / "dump_0"
    path.write_bytes(pickle.dumps({"entries": [], "pg_status": {}}, protocol=protocol)[:keep])
    with pytest.raises(InputError, match="dump_0"):
        read_dump(path)


@pytest.mark.parametrize("content", [b"[1, 2]", b"{}", b"\x80\x04N.", b"hello"])
def test_what_is_no_dump_is_said(tmp_path, content):
    path = tmp_path / "dump_0"
    path.write_bytes(content)
    with pytest.raises(InputError):
        read_dump(path)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_17", 17), ("_dump_3", 3), ("rank_0.json", 0), ("trace_12", 12),
        ("nccl_trace_rank_5.pickle", 5), ("notes", None),
    ],
)  # fmt: skip
def test_rank_in_the_name(name, rank):
    assert rank_in_name(Path(name)) == rank


OLD = {  # the form of torch 2.3: no pg_config ranks, seq_id, a bare group number
    "version": "1.0",
    "entries": [
        {"pg_id": 0, "seq_id": 4, "profiling_name": "nccl:all_reduce", "input_sizes": [[8]],
         "state": "completed"},
        {"pg_id": 0, "seq_id": 5, "profiling_name": "nccl:all_reduce", "input_sizes": [[8]],
         "state": "scheduled"},
    ],
}  # fmt: skip


def test_old_versions_have_their_progress_in_the_entries():
    state = state_of_dump(OLD, rank=0, file="x")
    (status,) = state.status.values()
    assert (status.enqueued, status.completed) == (5, 4)


def test_json_form(tmp_path):
    path = tmp_path / "rank_3.json"
    path.write_text(json.dumps(OLD))
    assert read_dump(path)["version"] == "1.0"


def test_odd_entries_are_counted_not_fatal():
    state = state_of_dump({"entries": [3, None, *OLD["entries"]]}, rank=0, file="x")
    assert state.notes == ("2 entries were not understood",)
    assert len(state.operations) == 2


def test_a_list_nested_in_itself_is_never_written_out(tmp_path):
    """Forty doublings in a few hundred bytes: its text would have 2**40 elements."""
    nested: list[object] = [0]
    for _ in range(40):
        nested = [nested, nested]
    entry = {
        "process_group": ("0", nested), "pg_id": nested, "collective_seq_id": 1,
        "profiling_name": nested, "state": nested, "input_sizes": [nested],
        "output_sizes": [[8], nested], "input_dtypes": [nested],
    }  # fmt: skip
    path = tmp_path / "dump_0"
    group = {"name": nested, "desc": nested, "ranks": nested}
    path.write_bytes(pickle.dumps({"pg_config": {"0": group}, "entries": [entry]}))
    state = state_of_dump(read_dump(path), rank=0, file="dump_0")
    assert state.operations[0].name == ""
    assert state.operations[0].output_sizes == ((8,), ())


def test_numbers_too_long_to_write_are_nothing(tmp_path):
    path = tmp_path / "dump_0"
    name = f"nccl:send 0->{'9' * 5000}"
    entry = {"process_group": ("0", "x"), "pg_id": 1 << 99999, "profiling_name": name}
    path.write_bytes(pickle.dumps({"pg_config": {}, "entries": [entry]}))
    state = state_of_dump(read_dump(path), rank=0, file="dump_0")
    assert state.operations[0].peer is None

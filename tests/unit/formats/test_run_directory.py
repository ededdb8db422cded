"""Run directories: columns, merging of ring and copy, and every kind of damage."""

import json
import struct

import polars as pl
import pytest

from kansoku.errors import InputError
from kansoku.formats.run_directory import read_run
from kansoku.model import ring, table_schema

ANCHOR = (1_000, 1_700_000_000_000_000_000)
UNIX = ANCHOR[1] - ANCHOR[0]


class Ring:
    """A ring being written, and its file."""

    def __init__(self, path, rank=0, size=1 << 17, node="n1", pid=5):
        self.path = path
        self.buffer = bytearray(size)
        ring.format_ring(self.buffer, pid=pid, process_start=9, anchor=ANCHOR, lane_shares=(1,))
        self.writer = ring.RingWriter(self.buffer)
        self.writer.set_ranks(rank, rank, 2)
        self.writer.set_facts(
            {"node": node, "run": "r", "groups": [{"name": "0", "ranks": [0, 1]}]}
        )

    def span(self, kind, start, end=None, **fields):
        step, parent = fields.pop("step", 0), fields.pop("parent", 0)
        template = ring.pack_template(ring.KIND_CODES[kind], **fields)
        span = self.writer.open(template, start, step, parent)
        if end is not None:
            self.writer.close(span, start, end, -1)
        return span

    def save(self, data=None):
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_bytes(self.buffer if data is None else data)


@pytest.fixture
def one(tmp_path):
    return Ring(tmp_path / "n1-5.ring")


def test_columns_are_the_spans_table(one, tmp_path):
    step = one.span("step", 2_000, 9_000, value_a=64.0, value_b=1e6, peak_rss_bytes=4096)
    one.span("forward", 2_000, 3_000, name=one.writer.intern("GPT"), parent=step, thread=8)
    one.span(
        "collective", 3_000, name=one.writer.intern("all_reduce"), group=one.writer.intern("0"),
        dtype=one.writer.intern("bfloat16"), sequence=0, bytes_=0, step=-1,
        flags=ring.FLAG_ASYNC, peer=2, attributes=one.writer.intern('{"x":1}'),
    )  # fmt: skip
    one.save()
    data = read_run(tmp_path)
    assert dict(data.spans.schema) == table_schema("spans")
    rows = data.spans.to_dicts()
    assert [row["kind"] for row in rows] == ["step", "forward", "collective"]
    assert rows[0]["start_ns"] == UNIX + 2_000
    assert rows[1]["parent"] == rows[0]["id"]
    assert (rows[1]["name"], rows[1]["duration_ns"], rows[1]["cpu_ns"]) == ("GPT", 1_000, None)
    assert (rows[2]["duration_ns"], rows[2]["step"], rows[2]["group"]) == (None, None, "0")
    assert (rows[2]["sequence"], rows[2]["bytes"], rows[2]["dtype"]) == (0, 0, "bfloat16")
    assert json.loads(rows[2]["attributes"]) == {"x": 1, "async": True, "peer": 1}
    resources = data.resources.to_dicts()[0]
    assert (resources["tokens"], resources["flops"]) == (64.0, 1e6)
    assert resources["peak_rss_bytes"] == 4096
    assert data.facts.ranks[0].groups[0].ranks == (0, 1)


def as_copy(one, records=None):
    """Return the bytes of a drained copy."""
    header = ring.read_header(one.buffer)
    head = bytearray(one.buffer[: header.records_offset])
    struct.pack_into("<I", head, 28, 1)
    lane = header.lanes[0]
    count = one.writer._newest() if records is None else records
    return bytes(head) + bytes(one.buffer[lane.offset : lane.offset + count * 128])


def test_ring_and_copy_are_one(one, tmp_path):
    one.span("forward", 1, 2)
    hanging = one.span("backward", 3)
    one.path = tmp_path / "n1" / "n1-5.ring"
    one.save(as_copy(one))
    one.writer.close(hanging, 3, 50, -1)
    one.span("optimizer", 60, 70)
    one.path = tmp_path / "n1-5.ring"
    one.save()
    spans = read_run(tmp_path).spans
    assert spans["kind"].to_list() == ["forward", "backward", "optimizer"]
    assert spans["duration_ns"].to_list() == [1, 47, 10]


def test_a_late_completion_replaces_the_open_record(one, tmp_path):
    template = ring.pack_template(1)
    span = one.writer.open(template, 5, 0, 0)
    one.writer.remember(span, template, 0, 0)
    capacity = ring.read_header(one.buffer).lanes[0].capacity
    for number in range(capacity):
        one.span("forward", number, number + 1)
    one.writer.close(span, 5, 1_000_005, -1)
    one.save()
    data = read_run(tmp_path)
    steps = data.spans.filter(pl.col("kind") == "step")
    assert steps["duration_ns"].to_list() == [1_000_000]
    assert steps["id"].to_list() == [span]
    assert data.processes[0].lost == 1  # the first forward made room for the completion
    assert any("1 records were overwritten" in text for text in data.missing)


@pytest.mark.parametrize(
    ("spoil", "says", "left"),
    [
        (lambda b, at: b[: at + 300], "truncated", 2),
        (lambda b, at: b[:2_000], "cannot be read", 0),
        (lambda b, at: b"", "empty", 0),
        (lambda b, at: b[: at + 128] + b"\xff" * 8 + b[at + 136 :], "torn", 2),
        (lambda b, at: b[:8] + struct.pack("<I", 9) + b[12:], "ring format 9", 0),
    ],
)
def test_damage_is_said_and_nothing_is_invented(one, tmp_path, spoil, says, left):
    for number in range(3):
        one.span("forward", number, number + 1)
    at = ring.read_header(one.buffer).lanes[0].offset
    one.save(spoil(bytes(one.buffer), at))
    (tmp_path / "run.json").write_text('{"schema": "kansoku.run/1", "run": "r"}')
    data = read_run(tmp_path)
    assert any(says in text for text in data.missing), data.missing
    assert len(data.spans) == left


def test_a_copy_cut_in_its_last_record(one, tmp_path):
    for number in range(3):
        one.span("forward", number, number + 1)
    one.save(as_copy(one)[:-28])
    data = read_run(tmp_path)
    assert len(data.spans) == 2
    assert any("last record was cut" in text for text in data.missing)


def test_a_rank_that_started_twice_keeps_its_ids_apart(tmp_path):
    for pid in (5, 6):
        part = Ring(tmp_path / f"n1-{pid}.ring", pid=pid)
        part.span("forward", pid, pid + 1)
        part.save()
    data = read_run(tmp_path)
    assert data.spans["id"].n_unique() == 2
    assert any("started 2 times" in text for text in data.missing)


def test_nothing_there_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(InputError, match="no run here: neither run"):
        read_run(tmp_path)


def test_files_that_are_no_rings_are_named(tmp_path):
    (tmp_path / "n1-5.ring").write_bytes(b"x" * 10_000)
    with pytest.raises(
        InputError, match=r"no run here: n1-5\.ring cannot be read: not a ring file"
    ):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other/9"}', "\xff"])
def test_a_spoiled_run_json_costs_only_itself(one, tmp_path, text):
    one.span("forward", 1, 2)
    one.save()
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    data = read_run(tmp_path)
    assert len(data.spans) == 1
    assert any("run.json" in said for said in data.missing)


def test_run_json_gives_the_facts(one, tmp_path):
    one.save()
    facts = {
        "schema": "kansoku.run/1", "run": "a", "command": ["python", "x"], "start_ns": 4,
        "end_ns": 9, "exit_code": 137, "slurm_job": "12", "nodes": ["n1"], "missing": ["m"],
        "peak": {"flops": 1e9, "source": "measured", "precision": "float32"},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(facts))
    data = read_run(tmp_path)
    assert (data.facts.run, data.facts.exit_code, data.facts.slurm_job) == ("a", 137, "12")
    assert data.facts.command == ("python", "x")
    assert data.peak["flops"] == 1e9
    assert "m" in data.missing


def test_a_phase_without_peak_memory_keeps_its_run_queue_wait(one, tmp_path):
    """Peak memory is noted every eighth step, the wait for the CPU in every phase."""
    one.span("forward", 1_000, 2_000, value_a=500.0, peak_rss_bytes=4096, step=0)
    one.span("forward", 3_000, 4_000, value_a=700.0, step=1)
    one.save()
    waits = read_run(tmp_path).resources.sort("step")["queued_ns"].to_list()
    assert waits == [500, 700]


def test_the_newest_records_of_a_ring_that_wrapped_are_found_without_its_others(one, tmp_path):
    capacity = ring.read_header(one.buffer).lanes[0].capacity
    for number in range(capacity + 40):
        one.span("forward", number, number + 1, step=number)
    one.save()
    data = read_run(tmp_path, newest=100)
    assert data.spans["step"].to_list() == list(range(capacity - 60, capacity + 40))
    assert not [text for text in data.missing if "overwritten" in text]
    assert len(read_run(tmp_path, newest=10 * capacity).spans) == capacity
    assert read_run(tmp_path, newest=10 * capacity).spans.equals(read_run(tmp_path).spans)
